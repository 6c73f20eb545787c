"""`observe` and `advise` under Lightning: the same batches, losses, weights, threads and processes as without us."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
import torch
from unchanged import MODES, Census, allocations, beyond, settled

from intune_callbacks.lightning import InTuneCallback
from intune_callbacks.pipelines.torch import engine as torch_engine
from intune_callbacks.pipelines.torch import torchdata_nodes
from intune_callbacks.pipelines.worker_cost import WorkerMemory

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
EAGER: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2, "cpus": 8.0}
LIGHTNING = runs.NAMESPACES["lightning.pytorch"]
LOADERS: dict[str, Any] = {
    "map": runs.shuffled,
    "map, 2 workers": lambda: runs.shuffled(num_workers=2),
    "map, kept workers": lambda: runs.shuffled(num_workers=1, persistent_workers=True),
    "stream, 2 workers": lambda: torch.utils.data.DataLoader(runs.Stream(), batch_size=runs.BATCH, num_workers=2),
    "stateful, 1 worker": lambda: runs.stateful(num_workers=1),
    "nodes": runs.graph,
    "nodes, processes": lambda: runs.graph(process=True),
}


def spy(census: Census) -> Any:
    class Callback(LIGHTNING.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            census.take()

    return Callback()


def fit(make: Any, *callbacks: Any) -> dict[str, Any]:
    """Train with `callbacks`, and return what it saw, made of it, and who was alive during and after it."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(runs.plain(batch))
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.item())
        time.sleep(0.001)
        return loss

    before, census = sum(_alive(Census()).native.values()), Census()
    torch.manual_seed(0)
    model = runs.make_model(LIGHTNING, training_step=training_step)
    model.losses = []
    runs.make_trainer(LIGHTNING, *callbacks, spy(census), max_epochs=2).fit(model, make())
    told = {"seen": model.seen, "losses": model.losses, "alive": census.told()}
    told["weights"] = [weight.tolist() for weight in model.parameters()]
    del model
    gc.collect()  # a stock queue's feeder thread ends with its queue
    return told | {"left": settled(before) - before}


def _alive(census: Census) -> Census:
    census.take()
    return census


@pytest.mark.parametrize("kind", list(LOADERS))
def test_nothing_is_changed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = LOADERS[kind]
    fit(make)  # torch and Lightning start threads of their own in the first fit
    off = fit(make, InTuneCallback("off"))
    built: list[str] = []
    for module, name in ((torch_engine, "ElasticMap"), (torch_engine, "ProcessPool"), (torchdata_nodes, "ElasticMap")):
        stock = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, s=stock, **k: built.append(n) or s(*a, **k))
    # The look at the memory of workers, every five seconds in a thread that ends at once, has a test of its own.
    monkeypatch.setattr(WorkerMemory, "read", lambda *_: 0.0)
    for mode in MODES:
        callback = InTuneCallback(mode, run_dir=str(tmp_path / mode), show_card=False, policy="model-jump", **EAGER)
        ours = fit(make, callback)
        for part in ("seen", "losses", "weights"):
            assert ours[part] == off[part], f"{mode}: {part}"
        # The feeder thread of a stock queue ends when it likes, so that of those two fits without us differ.
        if "processes" not in kind:
            assert beyond(ours["alive"], off["alive"]) == {}, mode
            # Below 0 where what earlier tests left ended meanwhile.
            assert ours["left"] <= max(0, off["left"]), mode
        assert ours["alive"][2] == off["alive"][2]
        assert len(allocations(tmp_path / mode)) == 1
        assert callback.report["changes"] == 0 and callback.report["frozen"] is None
    assert built == []


@pytest.mark.parametrize("kind", ["map, 2 workers", "nodes"])
def test_tune_would_be_noticed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: under a tuner that changes something there are threads, or processes, of ours."""
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", runs.RestlessTuner)
    fit(LOADERS[kind])
    off = fit(LOADERS[kind])
    callback = InTuneCallback(run_dir=str(tmp_path), show_card=False, policy="model-jump", **EAGER)
    ours = fit(LOADERS[kind], callback)
    assert beyond(ours["alive"], off["alive"])
    assert ours["losses"] == off["losses"]
