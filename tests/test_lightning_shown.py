"""InTuneCallback in a real Trainer: what it measures, logs, shows and saves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning_runs as runs
import pytest
import torch
from busy_machine import slept
from lightning_runs import EAGER, LIGHTNING, Memory, fit
from torch.utils.data import DataLoader, Dataset

from intune_callbacks.lightning import InTuneCallback
from intune_callbacks.pipelines.find import Found
from intune_callbacks.session import lightning_fit, lightning_hooks
from intune_callbacks.types import Hint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


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
    totals = fits[0]._timer.read()
    assert totals.wait_s + totals.model_s + totals.paused_s == pytest.approx(totals.wall_s, abs=1e-6)
    # Every batch is one step. Behind the last one Lightning asks a loader without a length only; of that it has fetched
    # one before training starts.
    assert totals.steps == 2 * BATCHES - 1
    assert 2 * BATCHES * FETCH_S * 0.75 < totals.wait_s < loader.slept_s + 0.12
    assert 2 * BATCHES * MODEL_S * 0.9 < totals.model_s < sum(steps_s) + 0.48
    assert fits[0].validation.total_s >= 6 * VALIDATION_S
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

        fetch_end = fetch_begin

    start = lightning_fit.Fit.start

    def started(self: Any, restored: Any) -> None:
        start(self, restored)
        self._cuda = Cuda()

    monkeypatch.setattr(lightning_fit.Fit, "start", started)
    memory = Memory(LIGHTNING)
    fit(InTuneCallback(show_card=False, **EAGER), logger=memory.logger)
    assert "intune/exposed_wait_frac" in memory.keys


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_one_short_field_in_the_progress_bar(namespace: Any, bar: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = getattr(namespace.callbacks, bar)(refresh_rate=1)
    model = runs.make_model(namespace)
    computed: list[float] = []

    class Computes(namespace.Callback):  # type: ignore[misc, name-defined]
        """As people's own bars and logs do."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            computed.extend(float(value) for value in trainer.progress_bar_metrics.values())
            fields.append(shown.get_metrics(trainer, model).get("in"))

    fields: list[Any] = []
    callbacks = [InTuneCallback(show_card=False, **EAGER), shown, Computes()]
    trainer = runs.make_trainer(namespace, *callbacks, enable_progress_bar=True, max_epochs=1)
    trainer.fit(model, runs.graph())
    before, _, now = str(fields[-1]).partition(">")
    assert before.endswith("%")
    assert now.endswith("%")
    output = capsys.readouterr()
    assert "%>" in output.out + output.err
    assert "in" not in trainer.progress_bar_metrics
    assert "get_metrics" not in vars(shown)


def test_report_history_and_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = InTuneCallback(run_dir=str(tmp_path / "run"), **EAGER)
    fit(callback, max_epochs=25)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report == json.loads(json.dumps(callback.report))
    assert {"verdict", "before", "after", "decisions", "stages", "versions", "frozen"} <= set(report)
    assert (report["mode"], report["mode_source"]) == ("tune", "default")
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert len(lines) > 3
    written = [json.loads(line) for line in lines]
    assert len({line.pop("process") for line in written}) == 1
    assert all(decision in written for decision in report["decisions"])
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
    assert "Batches is not a loader InTune knows" in callback.report["next"]


def test_hints_reach_the_report_under_the_names_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that nothing can be changed in, but of which a line would gain: input and model take turns."""

    def hinted(loader: Any, config: Any, **how: Any) -> Found:
        return Found(None, "datapipes shard themselves", (Hint("no workers", "DataLoader(num_workers=1)", "loader"),))

    monkeypatch.setattr(lightning_fit, "found_in", hinted)
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
    assert [hint.stage for hint in loaders.told()[2]] == ["left/read", "", "right/read", ""]
    loaders._loaders = [object()]
    assert [hint.stage for hint in loaders.told()[2]] == ["read", ""]


class SlowRows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.zeros(2)


class Closed:
    def close(self) -> None: ...

    def stages(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(("options", "steps"), [({}, 48), ({"max_steps": 10}, 10), ({"limit_train_batches": 5}, 10)])
@pytest.mark.parametrize("dataset", [runs.Rows(), runs.Stream()], ids=["rows", "stream"])
def test_the_report_holds_all_steps_of_the_fit(dataset: Any, options: dict[str, Any], steps: int) -> None:
    callback = InTuneCallback("observe", show_card=False)
    fit(callback, loader=DataLoader(dataset, batch_size=runs.BATCH), **options)
    report = callback.report
    assert (report["steps"], report["samples"]) == (steps, steps * runs.BATCH)
    assert report["whole"]["steps"] == steps and report["frozen"] is None
