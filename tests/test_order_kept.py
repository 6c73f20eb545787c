"""`order="any"` where the order does mean something: epochs do not mix, pairs stay, and what is cut short stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from restless import Restless  # noqa: E402
from test_order import ROWS, Rows, numbers  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402


class Endless(DataLoader):
    """One running iterator for all epochs, over a sampler that begins anew by itself, as that of Ultralytics."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Again:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


def test_the_epochs_of_a_sampler_without_an_end_do_not_mix() -> None:
    loader = Endless(Rows(slow=ROWS - 4), batch_size=4, num_workers=2)
    pipeline: Any = find(loader, order="any").pipeline
    for epoch in range(3):
        got = []
        for place, batch in enumerate(pipeline.adopt(iter(loader))):
            if place == 2:
                pipeline.resize({"load": 3 + epoch, "load.window": 12})
            got += numbers(batch)
        assert sorted(got) == list(range(ROWS))
    pipeline.close()


def test_the_error_of_a_sampler_comes_behind_what_it_gave() -> None:
    def broken() -> Iterator[int]:
        yield from range(10)
        raise OSError("the list of rows ends here")

    class Broken(torch.utils.data.Sampler):
        def __iter__(self) -> Iterator[int]:
            return broken()

        def __len__(self) -> int:
            return ROWS

    loader = DataLoader(Rows(slow=6), batch_size=1, sampler=Broken(), num_workers=1)
    pipeline: Any = find(loader, order="any", workers_kind="thread").pipeline
    pipeline.prepare()
    iterator, got = iter(loader), []
    got.append(next(iterator)[0].item())
    pipeline.resize({"load": 3, "load.window": 12})
    with pytest.raises(OSError, match="the list of rows ends here"):
        got.extend(batch[0].item() for batch in iterator)
    assert sorted(got) == list(range(10))
    pipeline.close()


class Uneven(IterableDataset):
    """The first worker has nothing, the others have a share each."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(24 if info.id else 0):
            time.sleep(0.001)
            yield torch.tensor([100 * info.id + i]), torch.zeros(1)


@pytest.mark.parametrize("order", ["same", "any"])
@pytest.mark.parametrize("release", [0, 3])
def test_a_narrower_window_loses_nothing_of_workers_that_go_on(order: str, release: int) -> None:
    """What was asked of a worker beyond its end is in flight no longer, and nobody would answer."""
    loader = DataLoader(Uneven(), batch_size=2, num_workers=2, persistent_workers=True)
    expected = [numbers(batch) for batch in loader]
    loader = DataLoader(Uneven(), batch_size=2, num_workers=2, persistent_workers=True)
    pipeline: Any = find(loader, order=order).pipeline
    pipeline.prepare()
    pipeline.resize({"load.window": 24})
    for epoch in range(2):
        got = []
        for place, batch in enumerate(loader):
            got.append(numbers(batch))
            if not epoch and place + 1 == release:
                pipeline.release()
            elif place == 3:
                pipeline.resize({"load.window": 1})
        assert got == expected if order == "same" else sorted(got) == sorted(expected)
        pipeline.resize({"load.window": 24})
    pipeline.close()
    assert not {"_try_put_index", "_next_data"} & vars(loader._iterator).keys()


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments with which every look changes the numbers."""
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", Restless)
    looks = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 1, "cpus": 8, "trainer_cpus": 0}
    return {"order": "any", "show_card": False, **looks}


def in_turn() -> Any:
    return DataLoader(Rows(slow=20), batch_size=1, num_workers=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["whole", "paired", "cut", "overfit"])
def test_what_is_paired_or_cut_short_by_lightning_keeps_its_order(case: str, restless: dict[str, Any]) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    seen: list[Any] = []

    class Model(lightning.LightningModule):
        def training_step(self, batch: Any, place: int) -> None:
            seen.append([int(part[0]) for part in (batch.values() if case == "paired" else [batch])])

        def configure_optimizers(self) -> None: ...

    options = {"cut": {"limit_train_batches": 40}, "overfit": {"overfit_batches": 40}}.get(case, {})
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[InTuneCallback(**restless)], **quiet, **options
    )
    trainer.fit(Model(), {"left": in_turn(), "right": in_turn()} if case == "paired" else in_turn())
    expected = [[i] * (1 + (case == "paired")) for i in range(40 if options else ROWS)]
    assert sorted(seen) == expected and (seen == expected) == (case != "whole")


def test_the_loaders_of_one_loop_stay_paired(restless: dict[str, Any]) -> None:
    one, two = live(in_turn(), in_turn(), **restless)
    assert [(int(left[0]), int(right[0])) for left, right in zip(one, two, strict=True)] == [
        (i, i) for i in range(ROWS)
    ]


@pytest.mark.parametrize("steps", [7, 15])
def test_a_pydataset_of_which_an_epoch_takes_a_part_keeps_its_order(steps: int) -> None:
    pytest.importorskip("keras")
    from pydataset_runs import Counting, epochs, stock_of

    from intune_callbacks.pipelines.pydataset.enqueuer import LiveEnqueuer
    from intune_callbacks.pipelines.pydataset.pydataset import PyDatasetPipeline

    class Slow(Counting):
        def __getitem__(self, number: int) -> Any:
            time.sleep(0.1 if number % 5 == 1 else 0.001)
            return number

    stock = stock_of(Slow(15), 4)
    pipeline = PyDatasetPipeline(Slow(15), workers=4, window=4, kind="thread", clock=Clock(), in_order=False)
    takes = [7, 7, 1, 7] if steps == 7 else [15, 15]
    expected = epochs(stock_of(Slow(15), 4), takes)
    taken = epochs(LiveEnqueuer(stock, pipeline, steps), takes)
    assert sorted(taken) == sorted(expected) and (taken == expected) == (steps == 7)
    pipeline.close()


def test_a_graph_of_nodes_is_not_told_of_an_order_it_keeps() -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def slow(i: int) -> int:
        time.sleep(0.1 if i % 8 == 0 else 0.001)
        return i

    mapped = nodes.ParallelMapper(nodes.IterableWrapper(range(32)), slow, num_workers=2, method="thread")
    loader = nodes.Loader(mapped)
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    assert list(pipeline.adopt(iter(loader))) == list(range(32))
    assert all(stage.items == 32 and stage.held_s == 0.0 for stage in pipeline.stats().stages.values())
    pipeline.close()
