"""The tf.data pipelines: `blocks` gives the batches of the torchdata one, `plain` the same rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from dlrm_examples.convert import convert  # noqa: E402
from dlrm_examples.criteo import stages_tf  # noqa: E402
from dlrm_examples.criteo.blocks import read_block, scan_blocks  # noqa: E402
from dlrm_examples.criteo.parse import parse_block  # noqa: E402
from dlrm_examples.criteo.pipeline_tf import STAGES, STYLES, build  # noqa: E402
from dlrm_examples.criteo.reading import Reading  # noqa: E402
from dlrm_examples.criteo.stages_tf import Skipped  # noqa: E402
from intune_callbacks.errors import ConfigError  # noqa: E402
from tests.dlrm_rows import rows_text  # noqa: E402

ROWS, TABLE_ROWS = 600, 1_000_003  # more table rows than rows: category C1 tells which row it is
BLOCK_BYTES = 4_000  # about 15 rows: batches of 64 span several blocks


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("rows")
    lines = rows_text(ROWS).splitlines(keepends=True)
    for name, part in (("a", lines[:350]), ("b", lines[350:])):
        (folder / f"{name}.tsv").write_bytes(b"".join(part))
    return [folder / "a.tsv", folder / "b.tsv"]


def dataset(files: list[Path], batch_size: int = 64, *, style: str = "blocks", skipped=None, sized=False, **changes):
    given = {"table_rows": TABLE_ROWS, "block_bytes": BLOCK_BYTES, "seed": 7, **changes}
    return build(Reading(files, batch_size, **given), style=style, skipped=skipped, sized=sized)


def epoch(batches) -> list[tuple[np.ndarray, ...]]:
    return [(x["dense"], x["categories"], y) for x, y in batches.as_numpy_iterator()]


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def identities(batches: list) -> list[int]:
    return np.concatenate([categories[:, 0] for _, categories, _ in batches]).tolist()


@pytest.mark.parametrize("split", ["train", "test"])
def test_blocks_are_the_batches_of_the_torchdata_pipeline(files: list[Path], split: str) -> None:
    pytest.importorskip("torchdata.nodes")
    from dlrm_examples.criteo import pipeline

    reading = Reading(files, 64, table_rows=TABLE_ROWS, block_bytes=BLOCK_BYTES, seed=7, split=split)
    mine, other = build(reading), pipeline.build(reading)
    for _ in range(2):
        expected = [tuple(b[k].numpy() for k in ("dense", "categories", "labels")) for b in other]
        got = epoch(mine)
        assert same(got, expected)
        assert [[a.dtype for a in batch] for batch in got] == [[a.dtype for a in batch] for batch in expected]


@pytest.mark.parametrize("split", ["train", "test"])
def test_plain_gives_the_same_rows(files: list[Path], split: str) -> None:
    sides = []
    for style in STYLES:
        batches = epoch(dataset(files, style=style, split=split, drop_last=False))
        parts = [np.concatenate(part) for part in zip(*batches, strict=True)]
        order = np.argsort(parts[1][:, 0])
        sides.append([part[order] for part in parts])
    (dense, *exact), (plain_dense, *plain_exact) = sides
    assert all(np.array_equal(a, b) for a, b in zip(exact, plain_exact, strict=True))
    np.testing.assert_allclose(plain_dense, dense, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("style", STYLES)
def test_every_row_once_in_train_or_test(files: list[Path], style: str) -> None:
    train = identities(epoch(dataset(files, style=style, drop_last=False)))
    test = identities(epoch(dataset(files, style=style, split="test")))
    assert sorted(train + test) == list(range(ROWS))
    assert train != sorted(train)


@pytest.mark.parametrize("style", STYLES)
def test_content_is_the_files(files: list[Path], style: str) -> None:
    got = epoch(dataset(files, style=style, test_fraction=0.0, shuffle=False, drop_last=False))
    rows = [parse_block(read_block(ref), (TABLE_ROWS,) * 26) for ref in scan_blocks(files, 1 << 30)]
    order = np.argsort(identities(got))  # `plain` takes lines from both files in turn
    for position, name in enumerate(("dense", "categories", "labels")):
        expected = np.concatenate([getattr(part, name) for part in rows])
        values = np.concatenate([batch[position] for batch in got])
        np.testing.assert_allclose((values[order] if style == "plain" else values), expected, rtol=3e-7, atol=1e-7)
    assert [len(labels) for *_, labels in got] == [64] * 9 + [24]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 3, -1])
def test_workers_do_not_change_the_batches(files: list[Path], style: str, workers: int) -> None:
    one = dataset(files, style=style)
    other = dataset(files, style=style, workers=dict.fromkeys(STAGES[style], workers), prefetch=abs(workers))
    first = epoch(one)
    assert same(first, epoch(other))
    assert same(second := epoch(one), epoch(other))
    assert not same(first, second), "each epoch has its own order"


@pytest.mark.parametrize("style", STYLES)
def test_stages_are_named_after_their_functions(files: list[Path], style: str) -> None:
    node, named = dataset(files, style=style), set()
    while True:
        named |= {function._func.__name__ for function in node._functions()}
        if not node._inputs():
            break
        (node,) = node._inputs()
    assert named >= set(STAGES[style])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("drop_last", [True, False])
def test_length(files: list[Path], style: str, drop_last: bool) -> None:
    sized = dataset(files, style=style, drop_last=drop_last, sized=True)
    assert int(sized.cardinality()) == len(epoch(sized))
    assert int(dataset(files, style=style).cardinality()) < 0, "counting is on request"
    shape = sized.element_spec[1].shape
    assert shape.as_list() == [64 if drop_last else None]


@pytest.mark.parametrize("style", STYLES)
def test_latency_is_paid_once_per_block(files: list[Path], style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stages_tf, "time", SimpleNamespace(sleep=slept.append))
    epoch(dataset(files, style=style, read_latency_ms=250))
    assert slept == [0.25] * len(scan_blocks(files, BLOCK_BYTES))
    epoch(dataset(files, style=style))
    assert len(slept) == len(scan_blocks(files, BLOCK_BYTES))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("spoil", [b"\t, ", b"\t,x\t", b"\n,g\n"])
def test_a_bad_row_surfaces(tmp_path: Path, style: str, spoil: bytes) -> None:
    lines = rows_text(50).splitlines(keepends=True)
    old, new = spoil.split(b",")
    lines[20] = lines[20][::-1].replace(old[::-1], new[::-1], 1)[::-1]
    (tmp_path / "f.tsv").write_bytes(b"".join(lines))
    options = {"style": style, "test_fraction": 0.0, "drop_last": False}
    with pytest.raises(tf.errors.OpError) as caught:
        epoch(dataset([tmp_path / "f.tsv"], **options))
    if style == "blocks":
        assert f"line at byte {sum(map(len, lines[:20]))}" in str(caught.value)
    kept = identities(epoch(dataset([tmp_path / "f.tsv"], on_bad_row="skip", **options)))
    assert sorted(kept) == [row for row in range(50) if row != 20]


def test_all_problems_at_once(files: list[Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset([*files, "nowhere.tsv"], 0, style="blocs", workers={"reed": 1, "parse": -2}, prefetch=-2)
    message = str(caught.value)
    assert len(caught.value.problems) == 6, message
    for word in ("nowhere.tsv", "did you mean 'blocks'", "did you mean 'read'", "workers['parse']=-2", "prefetch=-2"):
        assert word in message
    with pytest.raises(ConfigError, match="there is no stage 'collate'"):
        dataset(files, 1, workers={"collate": 1})


def test_paths_may_be_a_generator(files: list[Path]) -> None:
    reading = Reading(iter(files), 1)
    assert reading.files == reading.files == tuple(map(str, files))
    build(reading)


@pytest.mark.parametrize("target", ["gzip", "zstd", "parquet", "packed"])
def test_every_format_in_blocks(files: list[Path], tmp_path: Path, target: str) -> None:
    pytest.importorskip({"gzip": "gzip", "zstd": "zstandard", "parquet": "pyarrow", "packed": "xxhash"}[target])
    others = [convert(path, tmp_path, target, group_rows=20) for path in files]
    options = {"test_fraction": 0.0, "drop_last": False}
    assert same(epoch(dataset(others, shuffle=False, **options)), epoch(dataset(files, shuffle=False, **options)))
    one = dataset(others, sized=True, **options)
    other = dataset(others, workers=dict.fromkeys(STAGES["blocks"], 3), **options)
    first = epoch(one)
    assert same(first, epoch(other))
    assert sorted(identities(first)) == list(range(ROWS))
    assert int(one.cardinality()) == len(first)
    with pytest.raises(ConfigError, match="use style='blocks'"):
        dataset(others, style="plain")


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    lines = rows_text(50).splitlines(keepends=True)
    for row in (3, 20, 49):
        lines[row] = b"x" + lines[row]
    (tmp_path / "f.tsv").write_bytes(b"".join(lines))
    skipped, options = Skipped(), {"test_fraction": 0.0, "drop_last": False, "on_bad_row": "skip"}
    rows = dataset([tmp_path / "f.tsv"], skipped=skipped, workers=dict.fromkeys(STAGES["blocks"], 2), **options)
    for passes in (1, 2):
        assert len(identities(epoch(rows))) == 47
        assert skipped.rows == 3 * passes
    with pytest.raises(ConfigError, match="skipped: style='plain' does not count"):
        dataset([tmp_path / "f.tsv"], style="plain", skipped=skipped)
