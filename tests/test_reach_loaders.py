"""Whoever makes the batches of a DataLoader, they are delivered by us and are the stock ones; or the report says so."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning_runs as runs  # noqa: E402
import reach_classes as classes  # noqa: E402
from reach_classes import EPOCH  # noqa: E402
from reach_patterns import PATTERNS, of_class  # noqa: E402
from reach_runs import EPOCHS, MOMENTS, Training, compared  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_batches_and_random_numbers_are_the_stock_ones(name: str, moment: str) -> None:
    compared(PATTERNS[name], "process", MOMENTS[moment], num_workers=2)


@pytest.mark.parametrize("name", ["generated", "infinite", "itself", "prepared", "moved"])
def test_what_was_met_late_is_live(name: str) -> None:
    """More workers than the user's are in force in the same epoch."""
    loader = PATTERNS[name](num_workers=1)
    iterator = iter(loader)
    next(iterator)
    pipeline = find(loader).pipeline
    assert pipeline.adopt(iterator) is iterator
    pipeline.resize({"load": 3, "load.window": 9})
    for _ in range(6):
        next(iterator)
    assert pipeline._iterator().engine.workers == 3
    pipeline.close()


@pytest.mark.parametrize("name", ["renamed", "unsaid"])
def test_what_a_loader_does_not_say_is_no_reason_to_stay(name: str) -> None:
    """Neither which dataset it was made with, nor how many batches there will be."""
    loader = PATTERNS[name](num_workers=1)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    pipeline.resize({"load": 3, "load.window": 9})
    rest = [batch for batch in iterator]  # noqa: C416  # `list` asks for the length
    assert (pipeline.why_not, pipeline._iterator().engine.workers) == ("", 3)
    assert len(rest) == EPOCH - 1
    pipeline.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_fit_on_a_loader_without_an_end(workers: int) -> None:
    def run(kind: str | None) -> list[Any]:
        torch.manual_seed(0)
        loader, seen = PATTERNS["infinite"](num_workers=workers), []
        for _ in range(2):
            training = Training(loader, kind, (0, 0), whole=False)
            assert kind is None or training.delivered == training.taken > 0
            seen += training.seen
        assert type(loader.iterator).__module__ == "torch.utils.data.dataloader"
        assert "_next_data" not in vars(loader.iterator)
        return seen

    assert run("thread") == run(None)


@pytest.mark.parametrize("name", ["stock", "infinite", "moved, infinite"])
def test_an_iterator_without_an_end_is_not_started_anew(name: str) -> None:
    loader = PATTERNS[name](num_workers=1)
    pipeline = find(loader).pipeline
    assert (pipeline.stages()[0].startup_s > 0.0) == (name == "stock")
    pipeline.close()


def test_validation_on_the_same_loader_leaves_the_numbers_with_the_training() -> None:
    loader = PATTERNS["generated"](num_workers=1)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    training = pipeline.adopt(iter(loader))
    seen = [next(training) for _ in range(4)]
    assert len(list(loader)) == EPOCH
    pipeline.resize({"load": 3, "load.window": 9})
    assert pipeline._iterator().engine.window == 9
    seen += list(training)
    assert sorted(torch.cat(seen)[:, 0].tolist()) == list(range(classes.ROWS))
    pipeline.close()


def test_an_iterator_of_another_loader_is_left_alone() -> None:
    """Same dataset, other sampler: what the outer loader hands out is not its own."""
    inner = of_class(DataLoader)(num_workers=1)

    class Outer(DataLoader):
        def __iter__(self):
            return iter(inner)

    outer = Outer(inner.dataset, batch_size=2, num_workers=1)
    pipeline, iterator = find(outer).pipeline, iter(outer)
    assert pipeline.adopt(iterator) is iterator
    pipeline.resize({"load": 3})
    assert len(list(iterator)) == EPOCH
    assert pipeline.stats().delivered == 0
    pipeline.close()


def test_batches_as_they_come_are_met_at_their_start_only() -> None:
    loader = PATTERNS["generated"](num_workers=2, in_order=False)
    pipeline, iterator = find(loader).pipeline, iter(loader)
    next(iterator)
    pipeline.adopt(iterator)
    pipeline.resize({"load": 4})
    next(iterator)
    assert pipeline.stats().delivered == 0
    assert len(list(iterator)) == EPOCH - 2
    assert len(list(loader)) == EPOCH
    assert pipeline.stats().delivered == EPOCH
    pipeline.close()


# -- what is no DataLoader, and what has none behind it ----------------------------------------------------------------


@pytest.mark.parametrize("loader", [classes.Answers(), classes.Hollow()], ids=["answers", "hollow"])
def test_what_only_says_so_is_no_loader(loader: Any) -> None:
    found = find(loader)
    assert found.pipeline is None
    assert "is not a loader InTune knows" in found.why


class Mixed:
    """As Lightning's CombinedLoader: what holds the loaders, and the iterator over them."""

    def __init__(self, **loaders: Any) -> None:
        self.loaders = loaders

    def __iter__(self) -> Mixed:
        self._each = zip(*self.loaders.values(), strict=True)
        return self

    def __next__(self) -> Any:
        return next(self._each)


def test_who_gives_what_mixes_loaders_is_told_to_give_the_loaders() -> None:
    one, other = (DataLoader(range(12), batch_size=4, num_workers=1) for _ in range(2))
    for given in (Mixed(a=one, b=other), [one, other], {"a": one, "b": other}):
        why = f"{type(given).__name__} hands on the batches of 2 DataLoaders: give these to `live` instead"
        assert why in find(given).why
    stock = [[batch.tolist() for batch in step] for step in Mixed(a=one, b=other)]
    mine, others = live(one, other, show_card=False)
    assert [[batch.tolist() for batch in step] for step in Mixed(a=mine, b=others)] == stock
    assert mine.close()["samples"] == 12
    assert "is not a loader InTune knows" in find([one, 1]).why


def losses(make: Any, *callbacks: Any, **options: Any) -> tuple[list[Any], list[float], Any]:
    """Train under Lightning, with dropout; return batches, losses and the loader."""
    namespace, told = runs.NAMESPACES["lightning.pytorch"], []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append(runs.plain(batch))
        loss = self.layer(torch.nn.functional.dropout(batch)).mean()
        told.append(float(loss))
        return loss

    torch.manual_seed(0)
    loader, model = make(**options), runs.make_model(namespace, training_step=training_step)
    runs.make_trainer(namespace, *callbacks, max_epochs=EPOCHS).fit(model, loader)
    return model.seen, told, loader


quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@quiet
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"unsaid"}))  # of which Lightning itself asks the length
def test_a_fit_under_lightning(name: str, persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num_workers": 1, "persistent_workers": persistent}
    stock = losses(PATTERNS[name], **options)[:2]
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", runs.RestlessTuner)
    runs.RestlessTuner.made.clear()
    callback = InTuneCallback(decide_every_s=0.0)
    assert losses(PATTERNS[name], callback, **options)[:2] == stock
    (tuner,) = runs.RestlessTuner.made
    assert tuner.resizes > len(stock[0]) and tuner.rebinds == 0
    assert tuner.pipeline.stats().delivered >= len(stock[0]) - 1


def left(report: Any, loader: Any) -> None:
    """Check what the report says of a loader that was not reached, and that it was left alone."""
    assert "behind this loader, a Unreachable, no iterator of DataLoader was found" in report["next"]
    assert "super().__iter__()" in report["next"]
    assert not any("CPUs" in report[key] for key in ("next", "why", "cause"))
    assert report["stages"] == [] and report["changes"] == 0 and report["advice"] is None
    assert report["frozen"] is None
    assert "_get_iterator" not in vars(loader)


@quiet
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_that_is_not_reached_is_named_under_lightning(workers: int) -> None:
    make = of_class(classes.Unreachable)
    stock = losses(make, num_workers=workers)[:2]
    before = runs.running()
    callback = InTuneCallback(show_card=False, decide_every_s=0.0, decide_every_batches=2, warmup_batches=2)
    seen, told, loader = losses(make, callback, num_workers=workers)
    assert (seen, told) == stock
    assert runs.only(before)
    left(callback.report, loader)


@quiet
def test_a_loader_is_let_go_after_the_warm_up_and_not_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[bool] = []
    make = of_class(classes.Unreachable)

    class Looks(runs.NAMESPACES["lightning.pytorch"].Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            patched.append("_get_iterator" in vars(trainer.train_dataloader))

    losses(make, InTuneCallback(show_card=False, decide_every_s=0.0, warmup_batches=4), Looks(), num_workers=1)
    assert patched[0] and not patched[-1]
    assert 4 <= patched.index(False) <= 8


@quiet
def test_a_fit_too_short_for_a_warm_up_says_so_too() -> None:
    callback = InTuneCallback(show_card=False, warmup_batches=1000)
    *_, loader = losses(of_class(classes.Unreachable), callback, num_workers=1)
    left(callback.report, loader)


@quiet
@pytest.mark.parametrize("workers", [0, 1])
def test_one_of_two_loaders_is_let_go(workers: int) -> None:
    def make(**options: Any) -> Any:
        return {"one": of_class(classes.Unreachable)(**options), "other": of_class(DataLoader)(**options)}

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch["one"]).mean()

    namespace = runs.NAMESPACES["lightning.pytorch"]
    callback = InTuneCallback(
        show_card=False, decide_every_s=0.0, decide_every_batches=2, warmup_batches=2, workers_kind="thread"
    )
    model = runs.make_model(namespace, training_step=training_step)
    runs.make_trainer(namespace, callback).fit(model, make(num_workers=workers))
    assert "behind this loader, a Unreachable" in callback.report["next"]
    assert {row["name"] for row in callback.report["stages"]} == {"load", "load.window"}
    assert callback.report["frozen"] is None


class TfmdDL:
    """As fastai's: no DataLoader, but made of its iterators."""

    def __init__(self, workers: int) -> None:
        self.fake_l = SimpleNamespace(num_workers=workers)

    def __iter__(self) -> Iterator[Any]:
        for index in range(150):
            time.sleep(0.01)
            yield torch.tensor([index])


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_loader_of_fastai_it_says_what_is_the_users_to_set(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastai.data.load", SimpleNamespace(DataLoader=TfmdDL))
    loader = live(TfmdDL(workers), show_card=False)
    for _ in loader:
        time.sleep(0.01)
    report = loader.close()
    assert report["frozen"] is None
    if workers:
        assert "fastai's TfmdDL starts workers of its own" in report["next"]
    else:
        (cause,) = [one for one in report["causes"] if one["kind"] == "loader"]
        assert cause["line"].startswith("num_workers=")
