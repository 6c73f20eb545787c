"""The ranks' batches put together are the batches of one process, also after a resume."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

from dlrm_examples.convert import convert  # noqa: E402
from dlrm_examples.criteo import arrays, formats, pipeline, shards  # noqa: E402
from dlrm_examples.criteo.reading import Reading  # noqa: E402
from dlrm_examples.generate import generate  # noqa: E402
from intune_callbacks.errors import ConfigError  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

ROWS = 700


@pytest.fixture(scope="module", params=["text", "parquet", "packed"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("rows")
    text = generate(folder, rows=ROWS, shards=2, seed=3)
    if request.param == "text":
        return text
    pytest.importorskip({"parquet": "pyarrow", "packed": "xxhash"}[request.param])
    # Row groups smaller and larger than the batches below.
    return [convert(path, folder / request.param, request.param, group_rows=200) for path in text]


def joined(batches: tuple[Any, ...]) -> dict[str, Any]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in ("dense", "categories", "labels"))


@pytest.mark.parametrize(
    ("world", "share", "block_bytes", "split", "workers"),
    [
        (1, 64, 20_000, "train", 1),
        (2, 7, 2_000, "train", 0),
        (2, 32, 1 << 20, "train", 2),
        (3, 20, 5_000, "test", 2),
        (4, 50, 900, "test", 3),
        (5, 9, 30_000, "test", 0),
    ],
)
def test_the_union_of_the_shares_is_the_batch(files, world, share, block_bytes, split, workers) -> None:
    options = {"split": split, "test_fraction": 0.3, "seed": 2, "block_bytes": block_bytes}
    batch_size = world * share
    whole = pipeline.build(Reading(files, batch_size, **options))
    reading = Reading(files, batch_size, workers=dict.fromkeys(shards.STAGES, workers), **options)
    ranks = [shards.build(reading, rank, world) for rank in range(world)]
    assert {len(loader) for loader in ranks} == {len(whole)}
    for _ in range(2):  # epochs
        parts = list(zip(*ranks, strict=True))
        assert len(parts) == len(whole)
        for batches, batch in zip(parts, whole, strict=True):
            assert same(joined(batches), batch)
            rows = len(batch["labels"])
            assert [len(b["labels"]) for b in batches] == [min(max(rows - r * share, 0), share) for r in range(world)]


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_resume_goes_on_at_the_exact_batch_with_any_number_of_ranks(files: list[Path], stop: int) -> None:
    reading = Reading(files, 60, block_bytes=5000, seed=5)
    whole = list(pipeline.build(reading))
    before = [shards.build(reading, rank, 2) for rank in range(2)]
    states = []
    for loader in before:
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        states.append(loader.state_dict())
    for world in (1, 2, 3):
        after = [shards.build(reading, rank, world) for rank in range(world)]
        for rank, loader in enumerate(after):
            loader.load_state_dict(states[rank % 2])
        rest = list(zip(*after, strict=True))
        assert len(rest) == len(whole) - stop
        assert all(same(joined(parts), batch) for parts, batch in zip(rest, whole[stop:], strict=True))


def test_a_rank_parses_its_own_rows_only(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def count(module: Any, name: str, rows: Callable[[Any], int]) -> None:
        original = getattr(module, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            parsed.append(rows(result))
            return result

        monkeypatch.setattr(module, name, counting)

    count(formats, "parse_block", len)
    if any(formats.is_parquet(str(path)) for path in files):
        # Of the integers' columns, [13, rows]: what is converted, not what is left of it.
        count(importlib.import_module("dlrm_examples.criteo.parquet"), "logarithms", lambda dense: dense.shape[1])
    count(arrays, "_reduced", len)
    batches = list(shards.build(Reading(files, 40, test_fraction=0.0), 1, 4))
    own = sum(len(batch["labels"]) for batch in batches)
    assert own == ROWS // 40 * 10
    # Those of the last, smaller batch are parsed before it is known to be one.
    assert own <= sum(parsed) <= own + 10


def test_its_stages_can_be_tuned(files: list[Path]) -> None:
    pipeline = find(shards.build(Reading(files, 40), 0, 2)).pipeline
    assert pipeline is not None
    try:
        assert {stage.name for stage in pipeline.stages() if stage.unit == "workers"} == set(shards.STAGES)
    finally:
        pipeline.close()


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        shards.build(Reading(["nowhere"], 10, seed=-1, on_bad_row="skip"), 0, 3)
    assert len(caught.value.problems) == 4
    for rank, world in ((3, 3), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="world" if world == 0 else "rank"):
            shards.build(Reading([__file__], 12), rank, world)
