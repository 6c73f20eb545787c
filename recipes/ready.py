"""Whether a run can begin: its folder can be written, its files can be read, and they hold rows enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dlrm_examples.criteo.blocks import Content, Split, row_offsets
from dlrm_examples.criteo.compressed import compression
from dlrm_examples.criteo.formats import Reader, parse_selected, scan
from dlrm_examples.criteo.tsv import Rows
from intune_callbacks.errors import BadData, ConfigError
from intune_callbacks.record.files import unwritable

from .data import files
from .schema import Config

__all__ = ["check_ready"]

# Whether a compressed file is whole is seen at its end only; of larger ones no more than the beginning is read.
WHOLE_BYTES = 64 << 20


def check_ready(config: Config) -> None:
    """Raise an error if the run could not end well.

    Args:
        config: what is to be trained; without `data` its files are generated.

    Raises:
        ConfigError: with every problem of the folder and the files at once.
        MissingPackage: what reads a file is not installed.
    """
    why = unwritable(config.run_dir)
    if why is not None:
        raise ConfigError([f"run_dir={config.run_dir}: {why}; give a folder that can be written: run_dir=PATH"])
    paths = files(config)
    split = Split("train", config.test_frac, config.seed)
    rows = {"train": 0, "test": 0}
    problems: list[str] = []
    for path in paths:
        try:
            for trained, tested in _rows(path, config, split):
                rows["train"] += trained
                rows["test"] += tested
                if min(rows["train"] // config.batch_size, rows["test"]) and not _is_read_whole(path):
                    break
        except ConfigError as error:
            problems += error.problems
        except (BadData, OSError) as error:
            problems.append(f"data={config.data}: {error}")
    if not problems and rows["train"] < config.batch_size:
        problems.append(
            f"batch_size={config.batch_size}: the training rows do not fill one batch: {len(paths)} files hold "
            f"{rows['train']}, and {rows['test']} that are held out; give more rows, or a smaller batch_size"
        )
    if not problems and not rows["test"]:
        problems.append(
            f"test_frac={config.test_frac:g}: none of {rows['train']} rows is held out for the test; give more rows or "
            "a larger test_frac"
        )
    if problems:
        raise ConfigError(problems)


def _rows(path: Path, config: Config, split: Split) -> Iterator[tuple[int, int]]:
    """Yield how many rows each part of a file has for training and for the test; the first part is parsed as well."""
    read = Reader()
    for number, ref in enumerate(scan([path], config.pipeline.block_bytes)):
        content = read(ref)
        if number == 0 and not len(_parsed(content, config, config.pipeline.on_bad_row)):
            _parsed(content, config, "error")  # rows are left out, but not all of them
        chosen = split.select(str(path), row_offsets(content))
        yield int(chosen.sum()), int((~chosen).sum())


def _parsed(content: Content, config: Config, on_bad_row: str) -> Rows:
    # By numpy: numba would first be compiled.
    return parse_selected(content, config.model.table_rows, on_bad_row=on_bad_row, kernel="numpy")


def _is_read_whole(path: Path) -> bool:
    return compression(str(path)) is not None and path.stat().st_size <= WHOLE_BYTES
