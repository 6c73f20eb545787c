"""What an audit broke in DataLoaders: whose dataset may leave the training process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning.pytorch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from intune_callbacks import ConfigError  # noqa: E402
from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.measure.resources import IdleCpus  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402


class Bound(Dataset[Any]):
    """Works in the process that made it only: CUDA tensors, a database handle, TensorFlow or JAX inside."""

    def __init__(self) -> None:
        self.pid, self.hardness = os.getpid(), 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        if os.getpid() != self.pid:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return torch.tensor([float(i), float(self.hardness)])


def pushed(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield all batches, while more workers are asked for at each."""
    pipeline: Any = find(loader).pipeline
    for batch in pipeline.adopt(iter(loader)):
        pipeline.resize({"load": 4, "load.window": 16})
        yield batch
    pipeline.close()


def test_what_the_training_changes_in_the_dataset_is_in_the_next_batch() -> None:
    dataset, seen = Bound(), []
    for batch in pushed(DataLoader(dataset, batch_size=4)):
        seen.append(int(batch[0, 1]))
        dataset.hardness += 1
    assert seen == list(range(10))


class Steps(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = torch.nn.Linear(2, 1), 0

    def training_step(self, batch: Any, index: int) -> Any:
        self.steps += 1
        return self.layer(batch[0] if isinstance(batch, list | tuple) else batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(loader: DataLoader[Any], **options: Any) -> tuple[int, dict[str, Any]]:
    callback = InTuneCallback(show_card=False, decide_every_s=0.0, decide_every_batches=1, warmup_batches=0, **options)
    model = Steps()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(model, loader)
    return model.steps, callback.report


def with_a_lambda(rows: list[Any]) -> Any:
    return torch.stack(rows), (lambda: None)


@pytest.mark.parametrize("collate", [None, with_a_lambda])
def test_a_dataset_bound_to_its_process_trains_under_the_callback(collate: Any) -> None:
    steps, report = fit(DataLoader(Bound(), batch_size=4, collate_fn=collate))
    assert steps == 20
    assert report["frozen"] is None
    assert report["changes"] == 0
    assert {stage["name"]: stage["current"] for stage in report["stages"]} == {"load": 0, "load.window": 1}


class Slow(Bound):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(i)


def test_the_report_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleCpus, "read", lambda self: 2.0)  # where all are busy no worker is advised
    steps, report = fit(DataLoader(Slow(), batch_size=4))
    assert steps == 120
    assert report["causes"][0]["kind"] == "loader"
    assert "workers_kind='process' or 'thread'" in report["causes"][0]["sentence"]
    assert "DataLoader(num_workers=" in report["next"]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_naming_a_kind_of_workers_is_consent(kind: str) -> None:
    loader = DataLoader(list(range(64)), batch_size=4)
    pipeline = find(loader, workers_kind=kind).pipeline
    iterator = pipeline.adopt(iter(loader))
    first = next(iterator)
    assert pipeline.resize({"load": 2, "load.window": 4})["load"] == 2
    assert [int(i) for batch in [first, *iterator] for i in batch] == list(range(64))
    pipeline.close()


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ConfigError, match="workers_kind='fibre': expected one of process, thread"):
        InTuneCallback(workers_kind="fibre")


INSIDE = """
import faulthandler, sys, numpy as np, torch
from torch.utils.data import DataLoader, Dataset
from intune_callbacks.pipelines.find import find
faulthandler.dump_traceback_later(60, exit=True)
if sys.argv[1] == "tensorflow":
    import tensorflow as tf
    op = lambda x: tf.linalg.matmul(x, x).numpy()
else:
    import jax
    f = jax.jit(lambda x: x @ x)
    op = lambda x: np.asarray(f(x))
class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.from_numpy(np.array(op(np.full((64, 64), i, np.float32))))
loader = DataLoader(Data(), batch_size=2)
assert len(list(loader)) == 4
pipeline = find(loader).pipeline
iterator = pipeline.adopt(iter(loader))
pipeline.resize({"load": 2})
print(len(list(iterator)))
"""


@pytest.mark.parametrize("runtime", ["tensorflow", "jax"])
def test_a_dataset_that_calls_another_runtime_does_not_hang(runtime: str) -> None:
    pytest.importorskip(runtime)
    command = [sys.executable, "-W", "ignore", "-c", INSIDE, runtime]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["4"]


# -- the same loader for training and validation -----------------------------------------------------------------------


def test_validating_on_the_same_loader_in_mid_epoch_leaves_the_numbers_with_the_training() -> None:
    loader = DataLoader(list(range(64)), batch_size=4, num_workers=1)
    pipeline = find(loader).pipeline
    training = pipeline.adopt(iter(loader))
    seen = [next(training) for _ in range(4)]
    assert len(list(loader)) == 16
    pipeline.resize({"load": 3, "load.window": 9})
    assert training.engine is not None and training.engine.window == 9
    assert [int(i) for batch in [*seen, *training] for i in batch] == list(range(64))
    second = iter(loader)
    pipeline.resize({"load": 2, "load.window": 5})
    assert second.engine.window == 5
    pipeline.close()
