"""Loaders with an iterator of their own under Keras: tuned exactly as they are, or named in the report."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("keras")

import keras_runs as runs  # noqa: E402
import reach_classes as classes  # noqa: E402
from keras_cases import exact  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info  # noqa: E402

from intune_callbacks.keras import InTuneCallback  # noqa: E402


def loader(kind: type, **options: Any) -> Any:
    """The rows of `keras_runs.loader`, from a loader of a class."""
    torch.manual_seed(5)
    index = torch.arange(runs.ROWS, dtype=torch.float32)[:, None]
    return kind(TensorDataset(index.repeat(1, 2), index), batch_size=runs.BATCH, shuffle=True, **options)


KINDS = {
    "generated": lambda **options: loader(classes.Generated, **options),
    "infinite": lambda **options: loader(classes.Infinite, **options),
    "own": lambda **options: loader(classes.OwnGenerated, **options),
    "prepared": lambda **options: classes.Prepared(loader(DataLoader, **options)),
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_fit(name: str, persistent: bool) -> None:
    made = exact(lambda: KINDS[name](num_workers=1, persistent_workers=persistent), shuffle=False)
    for what in ("seen", "history", "weights"):
        assert made["tuned"][what] == made["plain"][what]
    assert made["frozen"] is None and made["resizes"] > 20
    assert runs.RestlessTuner.made[0].pipeline.stats().delivered >= len(made["plain"]["seen"]) - 2


@pytest.mark.parametrize("warmup_batches", [2, 1000])
def test_a_loader_that_is_not_reached_is_named(warmup_batches: int) -> None:
    kept: list[Any] = []

    def make() -> Any:
        kept.append(loader(classes.Unreachable, num_workers=1))
        return kept[-1]

    stock = runs.trained(make, [InTuneCallback(mode="off")], shuffle=False)
    callback = InTuneCallback(**runs.EAGER | {"warmup_batches": warmup_batches})
    tuned = runs.trained(make, [callback], shuffle=False)
    for what in ("seen", "history", "weights"):
        assert tuned[what] == stock[what]
    report = callback.report
    assert "behind this loader, a Unreachable, no iterator of DataLoader was found" in report["next"]
    assert not any("CPUs" in report[key] for key in ("next", "why", "cause"))
    assert report["stages"] == [] and report["changes"] == 0 and report["advice"] is None
    assert report["frozen"] is None
    assert "_get_iterator" not in vars(kept[-1])


class OneShard(IterableDataset):
    num_shards = 1

    def __iter__(self) -> Any:
        rows = runs.ROWS if get_worker_info().id == 0 else 0
        return ((torch.full((2,), float(row)), torch.zeros(1)) for row in range(rows))


@pytest.mark.filterwarnings(
    "ignore:Your input ran out of data:UserWarning"
)  # at the end of each epoch without a length
def test_workers_that_deliver_nothing_are_in_the_logs_and_the_report() -> None:
    callback = InTuneCallback(**runs.EAGER)
    made = runs.trained(lambda: DataLoader(OneShard(), runs.BATCH, num_workers=2), [callback], shuffle=False)
    assert set(made["logged"]["intune/delivering/load"]) == {1.0}
    told = [cause["sentence"] for cause in callback.report["causes"] if cause["kind"] == "shards"]
    assert told == ["worker 0 of 2 delivered everything: 1 shard for 2 workers; num_workers=1 is enough, or reshard"]
