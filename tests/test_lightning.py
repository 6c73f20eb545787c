"""InTuneCallback in a real Trainer: arguments, modes, what it measures, logs, shows, saves and leaves behind."""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning_runs as runs
import pytest
import torch
import torchdata.nodes as nodes
from busy_machine import slept
from torch.utils.data import DataLoader, Dataset

from intune_callbacks import ConfigError, TunerConfig
from intune_callbacks.installing import install_line
from intune_callbacks.lightning import InTuneCallback
from intune_callbacks.pipelines.find import Found
from intune_callbacks.pipelines.torch_iterator import LoaderIterator
from intune_callbacks.session import lightning_fit, lightning_hooks
from intune_callbacks.types import Hint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
EAGER: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}
LIGHTNING = runs.NAMESPACES["lightning.pytorch"]


@pytest.fixture(params=runs.NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> Any:
    return runs.NAMESPACES[request.param]


def fit(callback: Any, namespace: Any = LIGHTNING, loader: Any = None, **options: Any) -> Any:
    model = runs.make_model(namespace)
    trainer = runs.make_trainer(namespace, callback, **options)
    trainer.fit(model, runs.graph() if loader is None else loader)
    return trainer


class Memory:
    """Keeps what a Trainer logs."""

    def __init__(self, namespace: Any) -> None:
        logged = self.logged = {}  # type: dict[int, dict[str, float]]

        class Logger(namespace.loggers.Logger):  # type: ignore[misc, name-defined]
            name, version = "memory", "0"

            def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                logged.setdefault(step or 0, {}).update(metrics)

        self.logger = Logger()

    @property
    def keys(self) -> set[str]:
        return {key for metrics in self.logged.values() for key in metrics if key.startswith("intune/")}


def slow(index: int) -> torch.Tensor:
    time.sleep(0.003)
    return runs.as_row(index)


def slow_graph(rows: int = runs.ROWS) -> Any:
    """One mapper that needs 12 ms a batch with the one worker it has."""
    node: Any = nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(rows)))
    node = nodes.ParallelMapper(node, slow, num_workers=1)
    return nodes.Loader(nodes.ParallelMapper(nodes.Batcher(node, runs.BATCH), torch.stack, num_workers=1))


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
    monkeypatch.setenv("INTUNE_MODE", "tun")
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


def test_the_report_says_where_each_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTUNE_MODE", raising=False)
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


class Spy:
    """A callback that notes threads and the private attributes of the loops while training runs."""

    def __new__(cls, namespace: Any) -> Any:
        class Callback(namespace.Callback):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.threads: set[str] = set()
                self.attributes: set[str] = set()
                self.children: set[int | None] = set()

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                loop = trainer.fit_loop
                self.threads |= {thread.name for thread in threading.enumerate()}
                self.children |= {child.pid for child in multiprocessing.active_children()}
                self.attributes |= {f"epoch_loop.{name}" for name in vars(loop.epoch_loop)}
                self.attributes |= {f"source.{name}" for name in vars(loop._data_source)}
                self.attributes |= {f"loader.{name}" for x in loop._combined_loader.flattened for name in vars(x)}
                self.attributes |= {f"iterator {type(x).__name__}" for x in loop._combined_loader._iterator.iterators}

        return Callback()


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


# -- what is measured --------------------------------------------------------------------------------------------------

FETCH_S, MODEL_S, VALIDATION_S, BATCHES = 0.02, 0.01, 0.05, 12


class Slow:
    """Batches that take FETCH_S each, with or without a known length; on a busy machine more, `slept_s` in all."""

    slept_s = 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(BATCHES):
            self.slept_s += slept(FETCH_S)
            yield torch.ones(runs.BATCH, 2)


class SlowSized(Slow):
    def __len__(self) -> int:
        return BATCHES


@pytest.mark.parametrize("make", [Slow, SlowSized])
def test_wait_model_and_pauses_add_up_to_the_wall(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, steps_s = make(), []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        steps_s.append(slept(MODEL_S))
        return self.layer(batch).mean()

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(VALIDATION_S)

    fits: list[Any] = []
    close = lightning_fit.Fit.close
    monkeypatch.setattr(lightning_fit.Fit, "close", lambda self, *a: fits.append(self) or close(self, *a))
    model = runs.make_model(LIGHTNING, training_step=training_step, validation_step=validation_step)
    trainer = runs.make_trainer(LIGHTNING, InTuneCallback(mode="observe", show_card=False), val_check_interval=4)
    trainer.fit(model, loader, DataLoader(torch.zeros(1, 2)))
    totals = fits[0].timer.read()
    assert totals.wait_s + totals.model_s + totals.paused_s == pytest.approx(totals.wall_s, abs=1e-6)
    # Every batch is one step, also in epochs that end by StopIteration; the first one ends the start-up, and of a
    # loader without a length Lightning has fetched one more before training starts.
    assert totals.steps == 2 * BATCHES - 1 - (make is Slow)
    assert 2 * BATCHES * FETCH_S * 0.75 < totals.wait_s < loader.slept_s + 0.12
    assert 2 * BATCHES * MODEL_S * 0.9 < totals.model_s < sum(steps_s) + 0.48
    assert totals.paused_s >= 5 * VALIDATION_S  # 3 validations an epoch; the last is over at the end of the fit


def test_the_cost_of_a_batch_is_under_50_us() -> None:
    """The hooks alone, on a loader with nothing to tune: fetch hooks, batch hook, the tuner between decisions."""
    callback = InTuneCallback(mode="tune", decide_every_s=3600.0, show_card=False)
    spent: list[float] = []
    stock = InTuneCallback.on_train_batch_end

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx and batch_idx % 10 == 0:  # five times, far apart: the machine is slow for a while now and then
            live = callback._fit
            assert live is not None
            begin = time.perf_counter()
            for _ in range(200):
                live._before_fetch()
                live._after_fetch()
                stock(callback, None, None, None, batch, 0)
            spent.append((time.perf_counter() - begin) / 200)
            time.sleep(0.1)
        return self.layer(batch).mean()

    model = runs.make_model(LIGHTNING, training_step=training_step)
    trainer = runs.make_trainer(LIGHTNING, callback, max_epochs=1)
    trainer.fit(model, runs.shuffled(4 * 60))
    assert min(spent) < 50e-6


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


# -- what is logged, shown, saved --------------------------------------------------------------------------------------


def test_logged_keys_are_the_documented_ones(namespace: Any) -> None:
    memory = Memory(namespace)
    fit(InTuneCallback(show_card=False, **EAGER), namespace, logger=memory.logger, log_every_n_steps=1)
    documented = {line.split("``")[1] for line in (InTuneCallback.__doc__ or "").splitlines() if "``intune/" in line}
    logged = {"/".join(key.split("/")[:2]) + ("/<stage>" if key.count("/") > 1 else "") for key in memory.keys}
    assert logged == documented - {"intune/exposed_wait_frac", "intune/delivering/<stage>"}
    stages = {key.split("/", 2)[2] for key in memory.keys if key.startswith("intune/workers/")}
    assert len(stages) == 2  # the two mappers of the graph
    assert all(isinstance(value, float) for metrics in memory.logged.values() for value in metrics.values())


def test_the_exposed_wait_is_logged_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        def read(self) -> float:
            return 0.0

        def fetch_begin(self) -> None: ...

        batch_end = fetch_end = fetch_begin

    start = lightning_fit.Fit.start

    def started(self: Any, restored: Any) -> None:
        start(self, restored)
        self.cuda = Cuda()

    monkeypatch.setattr(lightning_fit.Fit, "start", started)
    memory = Memory(LIGHTNING)
    fit(InTuneCallback(show_card=False, **EAGER), logger=memory.logger)
    assert "intune/exposed_wait_frac" in memory.keys


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_one_short_field_in_the_progress_bar(namespace: Any, bar: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = getattr(namespace.callbacks, bar)(refresh_rate=1)
    model = runs.make_model(namespace)
    callbacks = [InTuneCallback(show_card=False, **EAGER), shown]
    trainer = runs.make_trainer(namespace, *callbacks, enable_progress_bar=True, max_epochs=1)
    trainer.fit(model, runs.graph())
    field = trainer.progress_bar_metrics["in"]
    before, _, now = str(field).partition(">")
    assert before.endswith("%")
    assert now.endswith("%")
    output = capsys.readouterr()
    assert "%>" in output.out + output.err


def test_report_history_and_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = InTuneCallback(run_dir=str(tmp_path / "run"), **EAGER)
    fit(callback, max_epochs=25)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report == json.loads(json.dumps(callback.report))
    assert {"verdict", "before", "after", "decisions", "stages", "versions", "frozen"} <= set(report)
    assert (report["mode"], report["mode_source"]) == ("tune", "default")
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert len(lines) > 3
    assert all(decision in map(json.loads, lines) for decision in report["decisions"])
    assert capsys.readouterr().out.count("InTune") == 1


def test_no_run_dir_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = InTuneCallback(show_card=False, **EAGER)
    fit(callback)
    assert callback.report["steps"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_state_survives_a_checkpoint(namespace: Any, tmp_path: Path) -> None:
    first = InTuneCallback(show_card=False, **EAGER)
    trainer = fit(first, namespace, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"][first.state_key]
    assert state == first.state_dict() != {}
    tuned = torch.load(tmp_path / "end.ckpt", weights_only=True)
    tuned["callbacks"][first.state_key]["allocation"] = {"as_row": 2, "stack": 2}
    torch.save(tuned, tmp_path / "tuned.ckpt")
    second = InTuneCallback(show_card=False, policy="even", cpus=8.0, decide_every_s=3600.0)
    trainer = runs.make_trainer(namespace, second, max_epochs=2)
    trainer.fit(runs.make_model(namespace), runs.graph(), ckpt_path=tmp_path / "tuned.ckpt", **runs.SAFE)
    current = {stage["name"]: stage["current"] for stage in second.report["stages"]}
    assert (current["as_row"], current["stack"]) == (2, 2)  # it was made with 2 and 1
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        runs.make_trainer(namespace, InTuneCallback(), InTuneCallback())


def test_what_cannot_be_tuned_is_reported_with_the_reason() -> None:
    callback = InTuneCallback(show_card=False, **EAGER)
    fit(callback, loader=runs.Batches())
    assert callback.report["changes"] == 0
    assert callback.report["next"].startswith("Batches is not a loader InTune knows")


def test_hints_reach_the_report_under_the_names_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that nothing can be changed in, but of which a line would gain: input and model take turns."""

    def hinted(loader: Any, **how: Any) -> Found:
        return Found(None, "datapipes shard themselves", (Hint("no workers", "DataLoader(num_workers=1)", "loader"),))

    monkeypatch.setattr(lightning_fit, "find", hinted)
    callback = InTuneCallback(mode="advise", show_card=False, **EAGER)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.004)
        return self.layer(batch).sum()

    model = runs.make_model(LIGHTNING, training_step=training_step)
    loader = DataLoader(SlowRows(), batch_size=4)
    runs.make_trainer(LIGHTNING, callback).fit(model, loader)
    report = callback.report
    assert report["hints"] == [asdict(Hint("no workers", "DataLoader(num_workers=1)", "loader"))]
    assert report["causes"][0]["kind"] == "loader" and report["causes"][0]["gain"] > 1.1
    assert report["next"].splitlines()[-1] == "DataLoader(num_workers=1)"

    # Two loaders: the names of their stages have the loader's in front, and so have the hints'.
    loaders = lightning_hooks.TrainLoaders(
        SimpleNamespace(_combined_loader=SimpleNamespace(iterables={"left": 1, "right": 2})),
        lambda loader: Found(Closed(), "", (Hint("few files", kind="files", stage="read"), Hint("odd"))),
    )
    loaders._loaders = [object(), object()]
    assert [hint.stage for hint in loaders.hints()] == ["left/read", "", "right/read", ""]
    loaders._loaders = [object()]
    assert [hint.stage for hint in loaders.hints()] == ["read", ""]


class SlowRows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.zeros(2)


class Closed:
    def close(self) -> None: ...


# -- what is left behind -----------------------------------------------------------------------------------------------


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
