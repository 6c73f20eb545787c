"""Warm starts of the callbacks: their argument, modes, ranks, and real fits in Lightning and Keras."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import FakeLoop
from saved_runs import refused, save, started, three_stages, tuner_of

from intune_callbacks.errors import ConfigError
from intune_callbacks.record.card import end_card
from intune_callbacks.record.findings import build_report
from intune_callbacks.session.arguments import Settings
from intune_callbacks.session.fit import TunedFit
from intune_callbacks.session.found import parse_found
from intune_callbacks.session.tuner import Tuner

# -- modes, ranks, arguments -------------------------------------------------------------------------------------------


def test_observe_and_advise_do_not_apply_it(saved: Path) -> None:
    whys = {}
    for mode in ("observe", "advise"):
        pipeline = three_stages()
        entry = started(saved, tuner_of(pipeline, mode=mode))
        assert not entry["used"] and pipeline.resizes == []
        whys[mode] = entry["why"]
    assert whys["observe"] == "mode='observe' changes nothing"
    assert whys["advise"].startswith("mode='advise' changes nothing; it would start with read ")
    entry = started(saved, tuner_of(three_stages(), mode="advise"), batch_size=1)
    assert entry["why"] == "batch size: 32 there, 1 here"


def test_each_rank_reads_its_own(tmp_path: Path) -> None:
    for rank, seconds in ((0, 60.0), (1, 60.0)):
        pipeline = three_stages()
        if rank:
            pipeline.work["decode"] = replace(pipeline.work["decode"], service_s=0.03)
        loop = FakeLoop(pipeline)
        tuner = tuner_of(pipeline)
        loop.run(tuner, seconds)
        tuner.close()
        save(tmp_path / f"rank{rank}", tuner, ranks=2)
    decode = {}
    for rank, source in itertools.product((0, 1), (tmp_path, tmp_path / "rank0" / "found.yaml", tmp_path / "rank1")):
        pipeline = three_stages()
        assert started(source, tuner_of(pipeline), rank=rank, world=2)["used"]
        decode.setdefault(rank, set()).add(pipeline.values["decode"])
    assert all(len(values) == 1 for values in decode.values()) and decode[0] != decode[1]
    assert f'warm_start="{tmp_path}"' in (tmp_path / "rank0" / "found.yaml").read_text()
    assert refused(tmp_path, tuner_of(three_stages())) == "ranks: 2 there, 1 here"
    assert refused(tmp_path, tuner_of(three_stages()), rank=2, world=3) == "ranks: 2 there, 3 here"


class Turns:
    """In place of the tuner: the turns of a callback's fit."""

    def __init__(self, fit: TunedFit) -> None:
        self.fit = fit

    def batch(self, totals: Any, samples: int) -> Any:
        self.fit._unseen = self.fit._batch_samples = samples
        return self.fit.turn(totals)  # type: ignore[func-returns-value]


def test_the_fits_of_all_callbacks_save_and_start_by_rank(tmp_path: Path) -> None:
    began, used, found = {}, {}, {}
    for source in (None, str(tmp_path)):
        for rank in (0, 1):
            pipeline = three_stages(32.0 if rank else 16.0)
            fit = TunedFit(Settings.checked("tune", str(tmp_path), False, source), rank, 2)
            fit.tuner = tuner_of(pipeline)
            loop = FakeLoop(pipeline)
            loop.run(cast("Tuner", Turns(fit)), 20.0 if source else 60.0)
            report = fit.finish(None)
            assert report is not None
            used[source, rank] = report.warm_start
            began[source, rank] = report.before.allocation
            found[source, rank] = parse_found((tmp_path / f"rank{rank}" / "found.yaml").read_text())
    for rank in (0, 1):
        assert used[None, rank] is None
        assert used[str(tmp_path), rank] == {"from": str(tmp_path), "used": True, "why": "the fingerprint is the same"}
        kept = {name: entry["value"] for name, entry in found[None, rank]["allocation"].items()}
        assert began[str(tmp_path), rank] == kept != began[None, rank]
        # It replaced what it was started from.
        assert found[str(tmp_path), rank]["started_from"] == str(tmp_path)
        assert found[str(tmp_path), rank]["fingerprint"]["ranks"] == 2
    assert began[str(tmp_path), 0] != began[str(tmp_path), 1]


def test_a_fit_that_ends_before_its_first_turn_says_so(tmp_path: Path) -> None:
    fit = TunedFit(Settings.checked("tune", str(tmp_path), False, str(tmp_path)))
    fit.tuner = tuner_of(three_stages())
    why = "training ended before its first batches were seen"
    report = fit.finish(None)
    assert report is not None and report.warm_start == {"from": str(tmp_path), "used": False, "why": why}
    assert {file.name for file in tmp_path.iterdir()} - {"report.html"} == {"report.json"}


@pytest.mark.parametrize("wrong", [3, True, "", b"runs/x", ["runs/x"]])
def test_a_wrong_type_is_a_config_error_with_all_others(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.checked("tune", 3, True, wrong, policy="x")
    assert len(caught.value.problems) == 3
    assert any(problem.startswith(f"warm_start={wrong!r}: expected the folder") for problem in caught.value.problems)


def test_a_path_is_as_good_as_text(tmp_path: Path) -> None:
    assert Settings.checked("tune", None, True, tmp_path).warm_start == str(tmp_path)
    assert Settings.checked("tune", None, True).warm_start is None


def test_the_card_has_a_line_of_it() -> None:
    tuner = tuner_of(three_stages())
    report, told = build_report(tuner.summary()), {"from": "runs/x", "used": True, "why": "it fits"}
    assert "\nwarm    started from runs/x: it fits\n" in end_card(replace(report, warm_start=told))
    card = end_card(replace(report, warm_start=told | {"used": False}))
    assert "\nwarm    not started from runs/x: it fits\n" in card


def test_a_recipe_has_the_key(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    from dlrm_examples.recipes.config import load
    from dlrm_examples.recipes.runner import callback_options

    file = tmp_path / "recipe.yaml"
    file.write_text("intune: {warm_start: runs/x}\n")
    assert callback_options(load(file).config, "tune")["warm_start"] == "runs/x"
    assert load(file, ["intune.warm_start=null"]).config.intune.warm_start is None
    with pytest.raises(ConfigError, match=r"intune\.warm_start=3: expected text"):
        load(file, ["intune.warm_start=3"])


# -- real frameworks ---------------------------------------------------------------------------------------------------

quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
OFTEN: dict[str, Any] = {
    "decide_every_s": 0.05,
    "decide_every_batches": 2,
    "warmup_batches": 2,
    "cpus": 8.0,
    "workers_kind": "thread",
    "policy": "model-jump",
}


def lightning_fit(callback: Any, **options: Any) -> Any:
    """What one fit on a slow, shuffled DataLoader saw; the same whenever it is called."""
    import lightning_runs as runs
    import torch

    class Slow(runs.Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.003)
            return super().__getitem__(index)

    namespace = runs.NAMESPACES["lightning.pytorch"]
    torch.manual_seed(3)
    model, losses = runs.make_model(namespace), []
    step = type(model).training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        losses.append(float(loss := step(self, batch, batch_idx)))
        return loss

    type(model).training_step = training_step
    batch_size = options.pop("batch_size", 4)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=batch_size, shuffle=True, num_workers=1)
    trainer = runs.make_trainer(namespace, callback, **{"max_epochs": 6} | options)
    trainer.fit(model, loader, ckpt_path=None)
    return model.seen, losses, trainer


@quiet
def test_lightning_starts_warm_and_sees_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    from intune_callbacks.lightning import InTuneCallback

    plain, plain_losses, _ = lightning_fit(InTuneCallback("off"))
    first = InTuneCallback(run_dir=str(tmp_path / "x"), show_card=False, **OFTEN)
    cold, cold_losses, _ = lightning_fit(first)
    assert first.report["changes"] >= 1 and "warm_start" not in first.report
    # What so short a run finds depends on what else the machine does; a value that was edited does not.
    text = (tmp_path / "x" / "found.yaml").read_text()
    (tmp_path / "x" / "found.yaml").write_text(re.sub(r'("load": {"value": )\d+', r"\g<1>3", text))
    found = parse_found((tmp_path / "x" / "found.yaml").read_text())
    assert found["fingerprint"]["batch_size"] == 4

    second = InTuneCallback(run_dir=str(tmp_path / "y"), warm_start=str(tmp_path / "x"), **OFTEN)
    warm, warm_losses, _ = lightning_fit(second)
    assert warm == cold == plain
    assert warm_losses == cold_losses == plain_losses
    assert second.report["warm_start"] | {"why": ""} == {"from": str(tmp_path / "x"), "used": True, "why": ""}
    started_with = second.report["before"]["allocation"]
    assert started_with == {name: entry["value"] for name, entry in found["allocation"].items()}
    assert started_with["load"] == 3
    assert json.loads((tmp_path / "y" / "report.json").read_text())["warm_start"]["used"]
    assert f"warm started from {tmp_path}/x" in " ".join(capsys.readouterr().out.split())

    third = InTuneCallback(warm_start=str(tmp_path / "x" / "found.yaml"), show_card=False, **OFTEN)
    with pytest.warns(RuntimeWarning, match="batch size: 4 there, 8 here"):
        lightning_fit(third, batch_size=8, max_epochs=1)
    assert third.report["warm_start"]["why"] == "batch size: 4 there, 8 here"


@quiet
def test_a_resumed_checkpoint_goes_first(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from intune_callbacks.lightning import InTuneCallback

    first = InTuneCallback(run_dir=str(tmp_path / "x"), show_card=False, **OFTEN)
    lightning_fit(first)
    resumed = InTuneCallback(warm_start=str(tmp_path / "x"), show_card=False, **OFTEN)
    state = first.state_dict()
    resumed.load_state_dict(state | {"allocation": {"load": 3, "load.window": 6}})
    lightning_fit(resumed, max_epochs=1)
    assert resumed.report["before"]["allocation"] == {"load": 3, "load.window": 6}
    assert resumed.report["warm_start"]["used"] is False
    assert resumed.report["warm_start"]["why"].startswith("a checkpoint was resumed")


@pytest.mark.timeout(300)
@quiet
def test_keras_starts_warm_and_sees_the_same(tmp_path: Path) -> None:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import tensorflow  # noqa: F401
    pytest.importorskip("tensorflow")
    if pytest.importorskip("keras").backend.backend() != "tensorflow":
        pytest.skip("of the TensorFlow backend")
    import keras_runs as runs

    from intune_callbacks.keras import InTuneCallback

    def fit(callback: Any) -> dict[str, Any]:
        # 80 ms of data a batch: more than a step of the model on a busy machine, so that there is something to tune.
        return runs.trained(lambda: runs.rows(160, 0.02, workers=1), [callback], epochs=2)

    plain = fit(InTuneCallback("off"))
    first = InTuneCallback(run_dir=str(tmp_path), show_card=False, **OFTEN)
    cold = fit(first)
    assert first.report["changes"] >= 1
    found = parse_found((tmp_path / "found.yaml").read_text())
    assert found["fingerprint"]["batch_size"] == runs.BATCH
    second = InTuneCallback(warm_start=str(tmp_path), show_card=False, **OFTEN)
    warm = fit(second)
    for key in ("seen", "history", "weights"):
        assert warm[key] == cold[key] == plain[key], key
    assert second.report["warm_start"]["used"], second.report["warm_start"]
    assert second.report["before"]["allocation"] == {name: e["value"] for name, e in found["allocation"].items()}
    # The same callback goes on with what it found itself.
    fit_again = runs.make_model()
    data = runs.rows(100)
    fit_again.fit(data, epochs=1, verbose=0, callbacks=[second])
    fit_again.fit(data, epochs=1, verbose=0, callbacks=[second])
    assert second.report["warm_start"]["why"].startswith("this callback has trained on the same data before")
