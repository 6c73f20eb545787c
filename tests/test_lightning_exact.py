"""The batches of a fit are those of the fit without the callback, however often the pipeline is re-sized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning_runs as runs
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader

from intune_callbacks.lightning import InTuneCallback
from intune_callbacks.session import lightning_fit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# The tuner has its turn at each batch, however short.
EACH: dict[str, Any] = {"decide_every_s": 0.0}


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> list[runs.RestlessTuner]:
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", runs.RestlessTuner)
    runs.RestlessTuner.made.clear()
    return runs.RestlessTuner.made


def combined(mode: str) -> Callable[[], Any]:
    return lambda: CombinedLoader({"a": runs.shuffled(num_workers=1), "b": runs.shuffled(40)}, mode)


def data_module(namespace: Any, make: Callable[[], Any]) -> Any:
    class Data(namespace.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return make()

    return Data()


def estimated(self: Any) -> Any:
    assert self.trainer.estimated_stepping_batches
    return torch.optim.SGD(self.parameters(), 1e-6)


def by_iterator(self: Any, dataloader_iter: Any) -> Any:
    batch, _, _ = next(dataloader_iter)
    self.seen.append(runs.plain(batch))
    return self.layer(batch).mean()


VALIDATE = {"val_check_interval": 5, "num_sanity_val_steps": 2}
# name -> (loaders, options of the Trainer, LightningModule methods)
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "map, no worker": (runs.shuffled, {}, {}),
    "map, two workers": (lambda: runs.shuffled(num_workers=2), {}, {}),
    "map, persistent workers": (lambda: runs.shuffled(num_workers=2, persistent_workers=True), {}, {}),
    "map, drop_last, own generator": (
        lambda: runs.shuffled(98, drop_last=True, num_workers=1, generator=torch.Generator().manual_seed(3)),
        {},
        {},
    ),
    "iterable, no worker": (lambda: torch.utils.data.DataLoader(runs.Stream(), runs.BATCH), {}, {}),
    "iterable, two workers": (
        lambda: torch.utils.data.DataLoader(runs.Stream(), runs.BATCH, num_workers=2),
        {},
        {},
    ),
    "stateful, no worker": (runs.stateful, {}, {}),
    "stateful, two workers": (lambda: runs.stateful(num_workers=2), {}, {}),
    "nodes, threads": (runs.graph, {}, {}),
    "nodes, processes": (lambda: runs.graph(process=True), {}, {}),
    "nodes with a length": (lambda: runs.graph(length=True), {}, {}),
    "no DataLoader at all": (runs.Batches, {}, {}),
    "dict, the shorter one cycled": (lambda: {"a": runs.shuffled(num_workers=1), "b": runs.shuffled(40)}, {}, {}),
    "list with a graph": (lambda: [runs.shuffled(40), runs.graph()], {}, {}),
    "CombinedLoader min_size": (combined("min_size"), {}, {}),
    "CombinedLoader max_size": (combined("max_size"), {}, {}),
    "gradient accumulation": (runs.shuffled, {"accumulate_grad_batches": 3}, {}),
    "limit_train_batches": (lambda: runs.shuffled(num_workers=1), {"limit_train_batches": 7}, {}),
    "max_steps": (runs.shuffled, {"max_steps": 31, "max_epochs": -1}, {}),
    "overfit_batches": (runs.shuffled, {"overfit_batches": 3}, {}),
    "validation inside the epoch": (lambda: runs.shuffled(num_workers=1), VALIDATE, {}),
    "estimated_stepping_batches": (
        runs.graph,
        {"max_steps": 31, "max_epochs": -1},
        {"configure_optimizers": estimated},
    ),
    "dataloader_iter": (runs.shuffled, {}, {"training_step": by_iterator}),
}
RELOADED = {
    "map, reloaded": lambda: runs.shuffled(num_workers=1),
    "nodes, reloaded": runs.graph,
    "stateful, reloaded": runs.stateful,
}


def batches(namespace: Any, make: Callable[[], Any], hooks: dict[str, Any], *callbacks: Any, **options: Any) -> Any:
    model = runs.make_model(namespace, **hooks)
    val = {"val_dataloaders": runs.shuffled(12)} if "val_check_interval" in options else {}
    torch.manual_seed(0)
    runs.make_trainer(namespace, *callbacks, **options).fit(model, make(), **val)
    return model.seen


@pytest.mark.parametrize("name", CASES)
def test_same_batches(name: str, restless: list[runs.RestlessTuner]) -> None:
    make, options, hooks = CASES[name]
    namespace = runs.NAMESPACES["lightning.pytorch"]
    expected = batches(namespace, make, hooks, **options)
    seen = batches(namespace, make, hooks, InTuneCallback(**EACH), **options)
    assert seen == expected
    assert len(expected) > 5
    (tuner,) = restless
    assert tuner.batches == len(expected)
    tunable = name not in ("iterable, no worker", "no DataLoader at all", "stateful, no worker")
    assert (tuner.resizes > 0) == tunable


@pytest.mark.parametrize("name", RELOADED)
def test_same_batches_from_a_reloading_data_module(name: str, restless: list[runs.RestlessTuner]) -> None:
    namespace, make = runs.NAMESPACES["lightning.pytorch"], RELOADED[name]
    seen = []
    for callbacks in ([], [InTuneCallback(**EACH)]):
        model = runs.make_model(namespace)
        torch.manual_seed(0)
        trainer = runs.make_trainer(namespace, *callbacks, max_epochs=3, reload_dataloaders_every_n_epochs=1)
        trainer.fit(model, datamodule=data_module(namespace, make))
        seen.append(model.seen)
    assert seen[0] == seen[1]
    assert restless[0].rebinds == 2


@pytest.mark.parametrize("namespace", runs.NAMESPACES.values(), ids=runs.NAMESPACES)
def test_same_batches_where_lightning_makes_the_loader_of_a_hook_again(
    namespace: Any, restless: list[runs.RestlessTuner]
) -> None:
    seen = []
    for callbacks in ([], [InTuneCallback(**EACH)]):
        model = runs.make_model(namespace)
        torch.manual_seed(0)
        # As for several ranks: with another sampler, in a loader that gets what was set on the one of the hook.
        trainer = runs.make_trainer(namespace, *callbacks, overfit_batches=6)
        trainer.fit(model, datamodule=data_module(namespace, lambda: runs.shuffled(num_workers=1)))
        seen.append(model.seen)
    assert seen[0] == seen[1]
    assert restless[0].resizes > 0


@pytest.mark.parametrize("make", [runs.shuffled, runs.graph], ids=["map", "nodes"])
def test_the_other_lightning(make: Callable[[], Any], restless: list[runs.RestlessTuner]) -> None:
    namespace = runs.NAMESPACES["pytorch_lightning"]
    expected = batches(namespace, make, {})
    assert batches(namespace, make, {}, InTuneCallback(**EACH)) == expected
    assert restless[0].resizes > 0


def test_a_graph_is_tuned_before_its_first_batch(restless: list[runs.RestlessTuner]) -> None:
    batches(
        runs.NAMESPACES["lightning.pytorch"],
        runs.graph,
        {},
        InTuneCallback(**EACH),
        limit_train_batches=3,
        max_epochs=1,
    )
    assert {stage.when for stage in restless[0].first} == {"now"}  # when the tuner was made, at on_train_start
    assert restless[0].resizes == 3 * len(restless[0].first)


def test_stage_names_carry_the_loader_when_there_are_several(restless: list[runs.RestlessTuner]) -> None:
    make = CASES["dict, the shorter one cycled"][0]
    batches(runs.NAMESPACES["lightning.pytorch"], make, {}, InTuneCallback(**EACH))
    assert {stage.name.split("/")[0] for stage in restless[0].first} == {"a", "b"}


def test_validation_loaders_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    found_in = lightning_fit.found_in
    monkeypatch.setattr(lightning_fit, "found_in", lambda x, *a, **k: looked_at.append(x) or found_in(x, *a, **k))
    train, val = runs.shuffled(), runs.shuffled(12, num_workers=1)
    before = dict(vars(val))
    namespace = runs.NAMESPACES["lightning.pytorch"]
    runs.make_trainer(namespace, InTuneCallback(**EACH), **VALIDATE).fit(runs.make_model(namespace), train, val)
    assert looked_at
    assert val not in looked_at
    before["_iterator"] = None
    assert vars(val) == before


RESUMED: dict[str, Callable[[], Any]] = {
    "stateful, no worker": runs.stateful,
    "stateful, two workers": lambda: runs.stateful(num_workers=2),
    "nodes with a length": lambda: runs.graph(length=True),
}


@pytest.mark.parametrize("after", ["with", "without"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_fit_resumed_inside_an_epoch_continues_exactly(name: str, after: str, tmp_path: Any) -> None:
    """The checkpoint is taken while the pipeline is being re-sized, and read with or without the callback."""
    namespace, make = runs.NAMESPACES["lightning.pytorch"], RESUMED[name]
    whole = batches(namespace, make, {}, max_epochs=2)

    class SaveAt(namespace.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 10:
                trainer.save_checkpoint(tmp_path / "at10.ckpt")

    first = batches(namespace, make, {}, InTuneCallback(**EACH), SaveAt(), max_epochs=2)
    assert first == whole
    model = runs.make_model(namespace)
    torch.manual_seed(0)
    callbacks = [InTuneCallback(**EACH)] if after == "with" else []
    trainer = runs.make_trainer(namespace, *callbacks, max_epochs=1)
    trainer.fit(model, make(), ckpt_path=tmp_path / "at10.ckpt", **runs.SAFE)
    assert model.seen == whole[10 : runs.ROWS // runs.BATCH]
