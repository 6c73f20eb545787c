"""The same batches whatever the workers; every state resumes exactly; every row once."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.nodes")

from test_dlrm_batcher import Numbered  # noqa: E402

from dlrm_examples.convert import convert  # noqa: E402
from dlrm_examples.criteo import stages  # noqa: E402
from dlrm_examples.criteo.blocks import Split, read_block, scan_blocks  # noqa: E402
from dlrm_examples.criteo.parse import KERNELS, chosen_kernel, parse_block  # noqa: E402
from dlrm_examples.criteo.pipeline import STAGES, build  # noqa: E402
from dlrm_examples.criteo.reading import Reading  # noqa: E402
from dlrm_examples.criteo.stages import Parse, Read, Shuffle, Task, collate  # noqa: E402
from dlrm_examples.criteo.tsv import BadRow  # noqa: E402
from intune_callbacks.errors import ConfigError  # noqa: E402
from tests.dlrm_rows import rows_text  # noqa: E402

ROWS, TABLE_ROWS = 600, 1_000_003  # more table rows than rows: category C1 tells which row it is
BLOCK_BYTES = 4_000  # about 15 rows: batches of 64 span several blocks, batches of 4 divide them


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("rows")
    lines = rows_text(ROWS).splitlines(keepends=True)
    for name, part in (("a", lines[:350]), ("b", lines[350:])):
        (folder / f"{name}.tsv").write_bytes(b"".join(part))
    return [folder / "a.tsv", folder / "b.tsv"]


def loader(files: list[Path], batch_size: int = 64, *, sized: bool = True, **changes):
    given = {"table_rows": TABLE_ROWS, "block_bytes": BLOCK_BYTES, "seed": 7, **changes}
    return build(Reading(files, batch_size, **given), sized=sized)


def epoch(batches) -> list[tuple[torch.Tensor, ...]]:
    return [(b["dense"], b["categories"], b["labels"]) for b in batches]


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def identities(batches: list) -> list[int]:
    return torch.cat([categories[:, 0] for _, categories, _ in batches]).tolist()


def test_every_row_once_in_train_or_test(files: list[Path]) -> None:
    train = identities(epoch(loader(files, drop_last=False)))
    test = identities(epoch(loader(files, split="test")))
    assert sorted(train + test) == list(range(ROWS))
    assert 30 < len(test) < 90
    assert train != sorted(train)
    assert test == sorted(test)


def test_content_is_the_files(files: list[Path]) -> None:
    got = epoch(loader(files, test_fraction=0.0, shuffle=False, drop_last=False))
    blocks = [read_block(ref) for ref in scan_blocks(files, 1 << 30)]
    rows = [parse_block(block, (TABLE_ROWS,) * 26) for block in blocks]
    for position, name in enumerate(("dense", "categories", "labels")):
        expected = np.concatenate([getattr(part, name) for part in rows])
        assert np.array_equal(torch.cat([batch[position] for batch in got]).numpy(), expected)
    assert [(t.dtype, tuple(t.shape)) for t in got[0]] == [
        (torch.float32, (64, 13)), (torch.int32, (64, 26)), (torch.float32, (64,)),
    ]  # fmt: skip
    assert [len(labels) for *_, labels in got] == [64] * 9 + [24]


@pytest.mark.parametrize("workers", [dict.fromkeys(STAGES, 0), dict.fromkeys(STAGES, 3), {"parse": 4, "shuffle": 0}])
def test_workers_do_not_change_the_batches(files: list[Path], workers: dict[str, int]) -> None:
    one, other = loader(files), loader(files, workers=workers, prefetch=5)
    first = epoch(one)
    assert same(first, epoch(other))
    second = epoch(one)
    assert same(second, epoch(other))
    assert not same(first, second)


@pytest.mark.parametrize("block_bytes", [300, 4_000, 1 << 20])
def test_epochs_differ_in_order_only(files: list[Path], block_bytes: int) -> None:
    batches = loader(files, drop_last=False, block_bytes=block_bytes)
    first, second = identities(epoch(batches)), identities(epoch(batches))
    assert sorted(first[:4]) != sorted(second[:4])
    assert sorted(first) == sorted(second)


def test_rows_of_a_block_are_permuted_by_seed_epoch_and_block() -> None:
    rows = next(Numbered([50]))
    orders = {
        tuple(Shuffle(seed)(Task(epoch, index, rows)).labels)
        for seed, epoch, index in [(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(orders) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_seed_decides_order_and_split(files: list[Path]) -> None:
    one, again, other = (identities(epoch(loader(files, seed=seed))) for seed in (1, 1, 2))
    assert one == again
    assert set(one) != set(other)


def test_block_size_does_not_decide_the_split(files: list[Path]) -> None:
    kept = [identities(epoch(loader(files, split="test", block_bytes=size))) for size in (300, 4_000, 1 << 20)]
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("batch_size", [4, 64, 10_000])
def test_length(files: list[Path], batch_size: int, drop_last: bool) -> None:
    for split in ("train", "test"):
        batches = loader(files, batch_size, split=split, drop_last=drop_last)
        assert len(batches) == len(epoch(batches))


def test_no_length_where_it_is_not_known(files: list[Path]) -> None:
    for unsized in (loader(files, sized=False), loader(files, on_bad_row="skip")):
        with pytest.raises(TypeError, match="no length"):
            len(unsized)


@pytest.mark.parametrize("batch_size", [4, 64, 500])
@pytest.mark.parametrize("workers", [{}, {"read": 3, "parse": 2, "shuffle": 0, "collate": 2}])
def test_resume_at_any_batch(files: list[Path], batch_size: int, workers: dict[str, int]) -> None:
    options = {"workers": workers, "drop_last": False}
    straight = loader(files, batch_size, **options)
    whole, following = epoch(straight), epoch(straight)
    for taken in {0, 1, len(whole) // 2, len(whole) - 1}:
        stopped = loader(files, batch_size, **options)
        head = epoch(itertools.islice(stopped, taken))
        state = stopped.state_dict()
        resumed = loader(files, batch_size, **options)
        resumed.load_state_dict(state)
        assert same(head + epoch(resumed), whole), f"after {taken} batches"
        assert same(epoch(resumed), following)


def test_resume_in_the_second_epoch(files: list[Path]) -> None:
    straight = loader(files)
    epoch(straight)
    second = epoch(straight)
    stopped = loader(files)
    epoch(stopped)
    head = epoch(itertools.islice(stopped, 3))
    resumed = loader(files, workers={"parse": 3})
    resumed.load_state_dict(stopped.state_dict())
    assert same(head + epoch(resumed), second)


def test_state_is_small(files: list[Path]) -> None:
    batches = loader(files)
    next(iter(batches))
    assert len(str(batches.state_dict())) < 3_000


def test_stage_names() -> None:
    functions = (Read(), Parse((1,) * 26, Split()), Shuffle(0), collate)
    assert tuple(function.__name__ for function in functions) == STAGES


def test_latency_is_paid_once_per_block(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stages, "time", SimpleNamespace(sleep=slept.append))
    epoch(loader(files, read_latency_ms=250))
    assert slept == [0.25] * len(scan_blocks(files, BLOCK_BYTES))
    epoch(loader(files))
    assert len(slept) == len(scan_blocks(files, BLOCK_BYTES))


def test_a_bad_row_surfaces(tmp_path: Path) -> None:
    lines = rows_text(50).splitlines(keepends=True)
    lines[20] = lines[20].replace(b"\t", b" ", 1)
    (tmp_path / "f.tsv").write_bytes(b"".join(lines))
    with pytest.raises(BadRow, match=f"byte {sum(map(len, lines[:20]))}, columns: found 39, expected 40"):
        epoch(loader([tmp_path / "f.tsv"], test_fraction=0.0))
    kept = identities(epoch(loader([tmp_path / "f.tsv"], test_fraction=0.0, on_bad_row="skip", drop_last=False)))
    assert sorted(kept) == [row for row in range(50) if row != 20]


def test_all_problems_at_once(files: list[Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        loader(
            [*files, "nowhere.tsv"], 0, split="trian", workers={"reed": 1, "parse": -1}, table_rows=[1, 2], seed=-1,
            prefetch=0, block_bytes=0, test_fraction=2, read_latency_ms=-1, on_bad_row="ignore",
        )  # fmt: skip
    message = str(caught.value)
    assert len(caught.value.problems) == 12, message
    for word in (
        "nowhere.tsv",
        "did you mean 'train'",
        "did you mean 'read'",
        "workers['parse']=-1",
        "expected one or 26",
    ):
        assert word in message
    with pytest.raises(ConfigError, match="none given"):
        loader([], 1)


@pytest.mark.parametrize("target", ["gzip", "zstd", "parquet", "packed"])
@pytest.mark.parametrize("workers", [dict.fromkeys(STAGES, 0), {"read": 3, "parse": 2}])
def test_every_format_whatever_the_workers(
    files: list[Path], tmp_path: Path, target: str, workers: dict[str, int]
) -> None:
    pytest.importorskip({"gzip": "gzip", "zstd": "zstandard", "parquet": "pyarrow", "packed": "xxhash"}[target])
    others = [convert(path, tmp_path, target, group_rows=20) for path in files]
    options = {"test_fraction": 0.0, "drop_last": False}
    assert same(epoch(loader(others, shuffle=False, **options)), epoch(loader(files, shuffle=False, **options)))
    straight = loader(others, workers=workers, **options)
    whole, following = epoch(straight), epoch(straight)
    assert len(straight) == len(whole)
    assert sorted(identities(whole)) == list(range(ROWS))
    assert identities(whole) != identities(following)
    for taken in (1, len(whole) - 2):
        stopped = loader(others, workers=workers, **options)
        head = epoch(itertools.islice(stopped, taken))
        resumed = loader(others, workers=workers, **options)
        resumed.load_state_dict(stopped.state_dict())
        assert same(head + epoch(resumed), whole)
        assert same(epoch(resumed), following)


@pytest.mark.parametrize("batch_size", [7, 64])
def test_skipped_rows_are_counted(tmp_path: Path, batch_size: int) -> None:
    lines = rows_text(90).splitlines(keepends=True)
    spoilt = {3, 20, 21, 22, 70, 89}
    for row in spoilt:
        lines[row] = b"x" + lines[row]
    (tmp_path / "f.tsv").write_bytes(b"".join(lines))
    options = {"test_fraction": 0.0, "drop_last": False, "on_bad_row": "skip", "block_bytes": 700}
    straight = loader([tmp_path / "f.tsv"], batch_size, **options)
    assert straight.skipped_rows == 0
    for _ in range(2):  # counted anew in each epoch
        assert len(identities(epoch(straight))) == 90 - len(spoilt)
        assert straight.skipped_rows == len(spoilt)
    stopped = loader([tmp_path / "f.tsv"], batch_size, **options)
    epoch(itertools.islice(stopped, 1))
    resumed = loader([tmp_path / "f.tsv"], batch_size, **options)
    resumed.load_state_dict(stopped.state_dict())
    epoch(resumed)
    assert resumed.skipped_rows == len(spoilt), "none twice, none forgotten"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_can_be_chosen(files: list[Path], kernel: str) -> None:
    if kernel != "numpy" and chosen_kernel() != kernel:
        pytest.skip(f"{kernel} is not installed")
    assert same(epoch(loader(files, kernel=kernel)), epoch(loader(files)))
    with pytest.raises(ConfigError, match="did you mean 'numba'"):
        loader(files, kernel="nubma")


def test_an_iterator_nobody_reads_takes_nothing_from_the_next(files: list[Path]) -> None:
    """Lightning makes one to see whether it can; torchdata waits half a second for its threads, a read takes more."""
    slow = loader(files, read_latency_ms=800.0, block_bytes=1 << 20, drop_last=False)
    iter(slow)
    found = identities(epoch(slow))
    assert sorted(found) == sorted(identities(epoch(loader(files, drop_last=False))))
