"""InTuneCallback in a real Trainer: arguments, modes, and what it leaves behind."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning_runs as runs
import pytest
import torch
from lightning_runs import EAGER, LIGHTNING, Memory, Spy, fit, slow_graph
from torch.utils.data import DataLoader

from intune_callbacks import ConfigError, TunerConfig
from intune_callbacks import lightning as ours
from intune_callbacks.errors import install_line
from intune_callbacks.lightning import InTuneCallback
from intune_callbacks.pipelines.torch.iterator import LoaderIterator

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_are_those_of_the_config_with_the_same_defaults() -> None:
    parameters = inspect.signature(InTuneCallback.__init__).parameters
    for name, field in TunerConfig.__dataclass_fields__.items():
        if name != "mode":
            assert parameters[name].default == field.default, name
            assert parameters[name].annotation == field.type, name
    given = InTuneCallback(decide_every_s=2.0, decide_every_batches=3, warmup_batches=4, memory_soft_limit=0.5, cpus=6)
    assert given.config == TunerConfig("tune", "dqn", 2.0, 3, 4, 0.5, 6)


def test_all_bad_arguments_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTUNE_MODE", "TUN")
    with pytest.raises(ConfigError) as caught:
        InTuneCallback(policy="model", warmup_batches=-1, run_dir=3, show_card="yes")  # type: ignore[arg-type]
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        "INTUNE_MODE",
        "policy",
        "warmup_batches",
        "run_dir",
        "show_card",
    ]
    assert "did you mean 'tune'?" in str(caught.value)


def test_the_environment_wins_over_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTUNE_MODE", "observe")
    callback = InTuneCallback(mode="tune")
    assert (callback.config.mode, callback.mode_source) == ("observe", "INTUNE_MODE")


def test_the_report_says_where_each_value_came_from() -> None:
    callback = InTuneCallback("observe", "dqn", cpus=3.0, show_card=False, warmup_batches=20, warm_start=None)
    fit(callback, max_epochs=1)
    settings = callback.report["settings"]
    assert settings["mode"] == {"value": "observe", "source": "argument"}
    assert settings["cpus"] == {"value": 3.0, "source": "argument"}
    # A default that was given is an argument like any other.
    given = {"mode", "policy", "cpus", "warmup_batches", "warm_start"}
    assert settings["warmup_batches"] == {"value": 20, "source": "argument"}
    assert {name for name, entry in settings.items() if entry["source"] == "argument"} == given
    rest = set(TunerConfig.__dataclass_fields__) - given
    assert {name for name, entry in settings.items() if entry["source"] == "default"} == rest


def test_one_class_under_both_names_that_can_be_pickled() -> None:
    callback = InTuneCallback()
    for namespace in runs.NAMESPACES.values():
        assert isinstance(callback, namespace.Callback)
    assert pickle.loads(pickle.dumps(callback)).config == callback.config


def test_a_trainer_can_be_copied_in_mid_fit() -> None:
    copies: list[Any] = []

    class Copies(LIGHTNING.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 15:
                held = trainer.fit_loop._combined_loader._iterator.iterators[0]
                copies.extend([copy.deepcopy(trainer), copy.deepcopy(callback), held])

    callback = InTuneCallback(show_card=False, **EAGER)
    trainer = runs.make_trainer(LIGHTNING, Copies(), callback)
    trainer.fit(runs.make_model(LIGHTNING), runs.shuffled(num_workers=1))
    copied, alone, held = copies
    assert type(held) is LoaderIterator
    with pytest.raises(NotImplementedError):
        copy.copy(held)
    assert callback.report["frozen"] is None and callback.report["steps"] > 15
    assert alone.config == callback.config and not alone.report
    assert any(isinstance(one, InTuneCallback) for one in copied.callbacks)


def test_no_lightning_installed_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('pytorch_lightning', 'lightning')))\n"
        "import intune_callbacks.lightning"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "MissingPackage" in run.stderr
    assert install_line("lightning") in run.stderr


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [runs.shuffled, runs.graph], ids=["map", "nodes"])
def test_off_leaves_no_trace(make: Any) -> None:
    torch.manual_seed(0)
    without, off, tuned = Spy(LIGHTNING), Spy(LIGHTNING), Spy(LIGHTNING)
    runs.make_trainer(LIGHTNING, without).fit(runs.make_model(LIGHTNING), make())
    callback = InTuneCallback(mode="off")
    trainer = runs.make_trainer(LIGHTNING, callback, off, logger=Memory(LIGHTNING).logger)
    trainer.fit(runs.make_model(LIGHTNING), make())
    assert off.attributes == without.attributes
    # torchdata names its threads Thread-<n>; Dummy is a native one of an earlier test, which may be gone by now.
    before, now = ({x.split("-")[0] for x in spy.threads} for spy in (without, off))
    assert before - {"Dummy"} <= now <= before
    assert callback.report == {}
    assert callback.state_dict() == {}
    assert "in" not in trainer.progress_bar_metrics
    runs.make_trainer(LIGHTNING, InTuneCallback(), tuned).fit(runs.make_model(LIGHTNING), make())
    assert tuned.attributes != without.attributes  # so that the comparison above means something


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_observe_and_advise_measure_and_change_nothing(mode: str, tmp_path: Path) -> None:
    callback = InTuneCallback(mode=mode, run_dir=str(tmp_path), show_card=False, cpus=8.0, **EAGER)
    fit(callback, loader=slow_graph())
    report = callback.report
    spy = Spy(LIGHTNING)
    runs.make_trainer(LIGHTNING, InTuneCallback(mode=mode), spy).fit(runs.make_model(LIGHTNING), runs.shuffled())
    assert "loader._get_iterator" not in spy.attributes  # the user's loader keeps its own engine
    assert report["mode"] == mode
    assert report["changes"] == 0
    assert report["verdict"] == "input-bound"
    assert report["before"]["allocation"] == report["after"]["allocation"]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) > 3
    advised = [decision["granted"] for decision in report["decisions"]]
    assert any("slow" in granted for granted in advised) == (mode == "advise")


def test_tune_feeds_a_starved_model(tmp_path: Path) -> None:
    given = EAGER | {"decide_every_s": 0.1}
    callback = InTuneCallback(run_dir=str(tmp_path / "run"), cpus=8.0, **given)
    fit(callback, loader=slow_graph(6000), max_epochs=1)
    report = callback.report
    assert report["changes"] >= 1
    assert report["after"]["allocation"]["slow"] > 1
    assert report["after"]["throughput_samples_per_s"] > 1.5 * report["before"]["throughput_samples_per_s"]
    assert report["after"]["wait_frac"] < report["before"]["wait_frac"]


# -- what is left behind -----------------------------------------------------------------------------------------------

UNUSED = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
]


def test_hooks_that_do_nothing_are_not_called_in_a_fit_and_those_of_a_subclass_are() -> None:
    class Subclass(InTuneCallback):
        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            called.append("on_train_batch_start")

    class Around(LIGHTNING.Callback):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def on_after_backward(self, *args: Any) -> None:
            self.inner.on_after_backward(*args)
            called.append("on_after_backward")

        def setup(self, *args: Any, **named: Any) -> None:
            self.inner.setup(*args, **named)

        def teardown(self, *args: Any, **named: Any) -> None:
            self.inner.teardown(*args, **named)

    for make, expected in [
        (lambda: InTuneCallback(show_card=False), []),
        (lambda: Subclass(show_card=False), ["on_train_batch_start"]),
        (lambda: Around(InTuneCallback(show_card=False)), ["on_after_backward"]),
    ]:
        called: list[str] = []
        timed: list[str] = []
        callback = make()
        trainer = runs.make_trainer(LIGHTNING, callback, max_epochs=1)
        profile = trainer.profiler.profile
        trainer.profiler.profile = lambda name, profile=profile, timed=timed: timed.append(name) or profile(name)
        trainer.fit(runs.make_model(LIGHTNING), runs.shuffled())
        assert sorted(set(called)) == expected and len(called) == len(expected) * trainer.global_step
        ours = {name.rpartition(".")[2] for name in timed if callback.state_key in name}
        assert set(UNUSED) & ours == (set(UNUSED) if isinstance(callback, Around) else set(expected))
        assert all(callable(getattr(callback, name)) for name in UNUSED)  # as before, once the fit is over


LEFT_BEHIND = {
    "map": lambda: runs.shuffled(num_workers=1),
    "stateful": lambda: runs.stateful(num_workers=1),
    "nodes": runs.graph,
    "process nodes": lambda: runs.graph(process=True),
}


@pytest.mark.parametrize("make", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_nothing_outlives_the_fit(make: Any, namespace: Any) -> None:
    before = runs.running()
    callback, loader = InTuneCallback(show_card=False, **EAGER), make()
    trainer = fit(callback, namespace, loader)
    assert runs.only(before)
    loop = trainer.fit_loop
    assert not {"_on_before_fetch", "_on_after_fetch"} & set(vars(loop.epoch_loop))
    assert "dataloader" not in vars(loop._data_source)
    assert "_get_iterator" not in vars(loader)
    # and a second fit of the same objects works
    trainer.fit_loop.max_epochs = 3
    trainer.fit(runs.make_model(namespace), loader)
    assert runs.only(before)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_dataloader_works_in_threads_when_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", runs.RestlessTuner)
    spy = Spy(LIGHTNING)
    callback = InTuneCallback(workers_kind=kind, show_card=False, **EAGER)
    runs.make_trainer(LIGHTNING, callback, spy).fit(runs.make_model(LIGHTNING), runs.shuffled())
    assert "intune-load" in spy.threads
    assert bool(spy.children) == (kind == "process")


def test_of_a_stream_the_tuner_learns_how_many_epochs_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("intune_callbacks.session.tuner.Tuner.expect", lambda _, *given: told.append(given))
    fit(InTuneCallback(show_card=False), LIGHTNING, DataLoader(runs.Stream(), batch_size=4))
    assert told == [(None, None, 2), (None, None, 1)]


@pytest.mark.parametrize("first", ["pytorch_lightning", "lightning.pytorch"])
def test_the_lightning_that_is_imported_first_keeps_its_logger(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages went to the other one's, where the level a user had set was not in force."""
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("pytorch_lightning")
    shared = importlib.import_module("lightning_utilities.core.rank_zero")
    imported = importlib.import_module
    log, form = logging.getLogger(first), warnings.formatwarning
    monkeypatch.setattr(shared, "log", log)
    for name in ours._NAMES:
        if name != first:
            monkeypatch.delitem(sys.modules, name)

    def importing(name: str) -> Any:  # what both do at their first import
        if name != f"{first}.callbacks":
            shared.log, warnings.formatwarning = logging.getLogger(name), lambda *_: ""
            return SimpleNamespace(Callback=type("Callback", (), {}))
        return imported(name)

    monkeypatch.setattr(warnings, "formatwarning", form)
    monkeypatch.setattr(importlib, "import_module", importing)
    assert len(ours._callback_bases()) == 2
    assert (shared.log, warnings.formatwarning) == (log, form)
