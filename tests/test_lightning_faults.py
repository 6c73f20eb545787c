"""Faults inside a fit: an error at its place or a frozen tuner, never a hang, a wrong sample or a leftover."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
import torch
import torchdata.nodes as nodes

from intune_callbacks import WorkerDied
from intune_callbacks.lightning import InTuneCallback
from intune_callbacks.session import fit, lightning_fit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
LIGHTNING = runs.NAMESPACES["lightning.pytorch"]
EAGER: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2, "show_card": False}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = runs.running()
    yield
    assert runs.only(before)


class Data(LIGHTNING.LightningDataModule):  # type: ignore[misc, name-defined]
    def train_dataloader(self) -> Any:
        return runs.shuffled(num_workers=1)


def trained(*callbacks: Any) -> Any:
    """Return the batches of three epochs, each from a new DataLoader."""
    model = runs.make_model(LIGHTNING)
    torch.manual_seed(0)
    trainer = runs.make_trainer(LIGHTNING, *callbacks, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(model, datamodule=Data())
    return model.seen


class Planted(Exception):
    pass


@pytest.mark.parametrize(
    ("where", "nth"),
    [
        ("Tuner.batch", 5),
        ("Tuner.rebind", 1),
        ("StepTimer.read", 5),
        ("TrainLoaders.refresh", 1),
        ("TrainLoaders.refresh", 5),
        ("TrainLoaders.told", 1),
        ("History.add", 1),
        ("Combined.stats", 2),
        ("Tuner.summary", 1),
    ],
)
def test_an_error_of_ours_freezes_the_tuner_and_training_goes_on(
    where: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, method = where.split(".")
    owner = getattr(lightning_fit if hasattr(lightning_fit, name) else fit, name)
    stock = getattr(owner, method)
    calls = []

    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) >= nth:
            raise Planted("planted")
        return stock(*args, **kwargs)

    monkeypatch.setattr(owner, method, breaks)
    callback = InTuneCallback(**EAGER)
    with pytest.warns(RuntimeWarning, match="planted") as caught:
        seen = trained(callback)
    assert seen == trained()
    assert len([w for w in caught if "planted" in str(w.message)]) == 1
    if where != "Tuner.summary":  # without it there is no report
        assert "planted" in callback.report["frozen"]


@pytest.mark.parametrize(
    "attribute", ["_on_before_fetch", "_on_after_fetch", "_data_source", "_combined_loader", "iterators"]
)
def test_a_missing_private_attribute_is_no_knob_and_no_crash(attribute: str) -> None:
    """Each is hidden behind a proxy of the Trainer, as a future Lightning without it would look to us."""

    class Hiding:
        def __init__(self, inner: Any) -> None:
            vars(self)["inner"] = inner

        def __getattr__(self, name: str) -> Any:
            if name == attribute:
                raise AttributeError(name)
            value = getattr(vars(self)["inner"], name)
            return Hiding(value) if name in ("fit_loop", "epoch_loop", "_combined_loader", "_iterator") else value

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(vars(self)["inner"], name, value)

        def __delattr__(self, name: str) -> None:
            delattr(vars(self)["inner"], name)

    class Callback(InTuneCallback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(Hiding(trainer), pl_module, stage)

    callback = Callback(**EAGER)
    assert trained(callback) == trained()
    if attribute != "_data_source":  # only needed to reach torchdata graphs before their first batch
        assert callback.report["changes"] == 0
        assert "this version of Lightning" in callback.report["next"]


def test_keyboard_interrupt_closes_everything() -> None:
    callback = InTuneCallback(**EAGER)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 9:
            raise KeyboardInterrupt
        return self.layer(batch).mean()

    trainer = runs.make_trainer(LIGHTNING, callback)
    stock = signal.getsignal(signal.SIGINT)
    try:
        with contextlib.suppress(SystemExit):  # how Lightning ends after Ctrl+C, since 2.4
            trainer.fit(runs.make_model(LIGHTNING, training_step=training_step), runs.shuffled(num_workers=2))
    finally:
        signal.signal(signal.SIGINT, stock)
    assert trainer.state.status == "interrupted"
    assert callback.report["steps"] > 5
    assert not {"_on_before_fetch", "_on_after_fetch"} & set(vars(trainer.fit_loop.epoch_loop))


class Faulty(runs.Rows):
    """Row 41 goes wrong."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 41:
            if self.how == "raise":
                raise ValueError("row 41 is broken")
            if self.how == "hang":
                time.sleep(30)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raise", ValueError, "row 41"),
        ("kill", WorkerDied, r"^DataLoader worker \(pid \d+\) is killed by signal: Killed\. "),
    ],
)
def test_a_faulty_worker_is_an_error_at_its_batch(how: str, error: type[Exception], text: str) -> None:
    """Once it is ours; of a killed worker the stock iterator tells whenever it hears of it."""
    callback = InTuneCallback(**EAGER)

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            callback._fit.loaders.told()[0].resize({"load": 3})  # type: ignore[union-attr]

    model = runs.make_model(LIGHTNING, on_train_batch_start=on_train_batch_start)
    loader = torch.utils.data.DataLoader(Faulty(how), runs.BATCH, num_workers=2)
    begin = time.monotonic()
    with pytest.raises(error, match=text):
        runs.make_trainer(LIGHTNING, callback).fit(model, loader)
    assert time.monotonic() - begin < 20
    assert model.seen == [tuple(float(i) for i in range(b, b + 4) for _ in "12") for b in range(0, 40, 4)]
    assert callback.report["steps"] > 5


def test_a_broken_row_of_a_graph_is_an_error_at_its_batch() -> None:
    node: Any = nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(runs.ROWS)))
    node = nodes.ParallelMapper(node, Faulty("raise").__getitem__, num_workers=2)
    loader = nodes.Loader(nodes.ParallelMapper(nodes.Batcher(node, runs.BATCH), torch.stack, num_workers=1))
    model = runs.make_model(LIGHTNING)
    with pytest.raises(ValueError, match="row 41"):
        runs.make_trainer(LIGHTNING, InTuneCallback(**EAGER)).fit(model, loader)
    # As with the stock graph: Lightning fetches one batch ahead of a loader without a length.
    assert len(model.seen) == 9


def test_a_hanging_worker_ends_at_the_loaders_timeout() -> None:
    loader = torch.utils.data.DataLoader(Faulty("hang"), runs.BATCH, num_workers=2, timeout=1)
    model = runs.make_model(LIGHTNING)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        runs.make_trainer(LIGHTNING, InTuneCallback(**EAGER)).fit(model, loader)
    assert time.monotonic() - begin < 20
    assert len(model.seen) == 10


def test_a_checkpoint_of_a_failing_fit_still_resumes_exactly(tmp_path: Path) -> None:
    """Lightning saves it after our pools were closed."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 9 and not resumed:
            raise Planted
        self.seen.append(runs.plain(batch))
        return self.layer(batch).mean()

    seen: list[Any] = []
    for resumed in (False, True):
        save = LIGHTNING.callbacks.OnExceptionCheckpoint(tmp_path, "failed")
        trainer = runs.make_trainer(LIGHTNING, InTuneCallback(**EAGER), save, max_epochs=1, enable_checkpointing=True)
        model = runs.make_model(LIGHTNING, training_step=training_step)
        path = tmp_path / "failed.ckpt" if resumed else None
        with contextlib.nullcontext() if resumed else pytest.raises(Planted):
            trainer.fit(model, runs.graph(length=True), ckpt_path=path, **runs.SAFE if resumed else {})
        seen += model.seen
    rows = [row for batch in seen for row in batch[::2]]
    missed = [float(row) for row in range(9 * runs.BATCH, 10 * runs.BATCH)]  # fetched, its step failed
    assert sorted(rows + missed) == [float(row) for row in range(runs.ROWS)]
