"""On a GPU: the same batches and losses bit by bit, pinned where they are to be, and how long it stood idle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from busy_machine import three_attempts  # noqa: E402
from restless import Restless  # noqa: E402
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

from intune_callbacks import live  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning and transformers warn of much that is not ours

EACH: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 1, "warmup_batches": 1, "show_card": False}
ROWS, BATCH, WIDTH = 480, 4, 64


class Rows(Dataset):
    """Row i holds random numbers of the seed i; i / 512 is its label."""

    def __init__(self, rows: int = ROWS, width: int = WIDTH, row_s: float = 0.0005) -> None:
        self.rows, self.width, self.row_s = rows, width, row_s

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.row_s)
        return torch.randn(self.width, generator=torch.Generator("cpu").manual_seed(index), device="cpu"), index / 512


class OnDevice(Rows):
    """Each item is put on the GPU by the worker that makes it."""

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return x.cuda(), label


def shuffled(rows: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows or Rows(), batch_size=BATCH, shuffle=True, **options)


def network(width: int = WIDTH) -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(width, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 1)
    )


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def looped(loader: Any, epochs: int = 2, precision: Any = None, sync: bool = False) -> list[float]:
    """Train on the GPU and return every loss; the loop waits for none of them before the end, unless it is to."""
    torch.manual_seed(0)
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    losses = []
    for _ in range(epochs):
        for x, label in loader:
            with torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None):
                loss = (model(x.cuda(non_blocking=True)).squeeze(1) - label.cuda(non_blocking=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item() if sync else loss.detach())
    return [float(loss) for loss in losses]


LOOPS: dict[str, dict[str, Any]] = {
    "two workers": {"num_workers": 2},
    "pinned": {"num_workers": 2, "pin_memory": True},
    "pinned, persistent": {"num_workers": 2, "pin_memory": True, "persistent_workers": True},
    "pinned, no workers": {"pin_memory": True},
}


@pytest.mark.parametrize("sync", [False, True], ids=["ahead", "in step"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_the_same(name: str, sync: bool, restless: type[Restless]) -> None:
    expected = looped(shuffled(**LOOPS[name]), sync=sync)
    assert looped(live(shuffled(**LOOPS[name]), **EACH), sync=sync) == expected
    assert (restless.resizes > 10) == ("no workers" not in name)


def test_mixed_precision_trains_the_same(restless: type[Restless]) -> None:
    options = LOOPS["pinned"]
    expected = looped(shuffled(**options), precision=torch.float16)
    assert looped(live(shuffled(**options), **EACH), precision=torch.float16) == expected
    assert restless.resizes > 10


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_batch_is_not_overwritten_while_it_is_copied(pin_memory: bool, restless: type[Restless]) -> None:
    """The GPU is some hundred milliseconds behind the loop, which has let go of the batch by then."""
    rows = Rows(width=16384, row_s=0.0)
    loader = live(shuffled(rows, num_workers=2, pin_memory=pin_memory), **EACH)
    sums, labels = [], []
    for x, label in loader:
        torch.cuda._sleep(2_000_000)
        sums.append(x.cuda(non_blocking=True).double().sum(1))
        labels += label.tolist()
        del x, label
    expected = {i / 512: float(Rows(width=16384, row_s=0.0)[i][0].cuda().double().sum()) for i in range(ROWS)}
    assert torch.cat(sums).tolist() == [expected[label] for label in labels]
    assert sorted(labels) == sorted(expected)
    assert restless.resizes > 10


def test_pinned_is_what_stock_pins(restless: type[Restless]) -> None:
    options = {"num_workers": 2, "pin_memory": True}
    stock = [(x.is_pinned(), label.is_pinned()) for x, label in shuffled(**options)]
    ours = [(x.is_pinned(), label.is_pinned()) for x, label in live(shuffled(**options), **EACH)]
    assert ours == stock
    assert restless.resizes > 10 and all(all(pinned) for pinned in stock)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("namespace", ["pytorch_lightning", "lightning.pytorch"], indirect=True)
def test_lightning_trains_the_same(namespace: Any, precision: str, restless: type[Restless]) -> None:
    from intune_callbacks.lightning import InTuneCallback

    class Model(namespace.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.pinned = network(), [], []

        def on_before_batch_transfer(self, batch: Any, _: int) -> Any:
            self.pinned.append(batch[0].is_pinned())
            return batch

        def training_step(self, batch: Any, _: int) -> Any:
            x, label = batch
            assert x.is_cuda
            loss = (self.net(x).squeeze(1) - label).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    def trained(*callbacks: Any) -> tuple[list[float], list[bool]]:
        namespace.seed_everything(1, verbose=False)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        model = Model()
        trainer = namespace.Trainer(
            max_epochs=2, accelerator="gpu", devices=1, precision=precision, callbacks=list(callbacks), **quiet
        )
        trainer.fit(model, shuffled(num_workers=2, pin_memory=True))
        return [float(loss) for loss in model.losses], model.pinned

    expected = trained()
    ours = InTuneCallback(**EACH)
    assert trained(ours) == expected
    assert len(expected[0]) == 2 * ROWS // BATCH and all(expected[1])
    assert restless.resizes > 10
    assert ours.report["frozen"] is None


def test_the_trainer_of_hugging_face_trains_the_same(tmp_path: Path, restless: type[Restless]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers_runs import Model, Slow

    from intune_callbacks.transformers import InTuneCallback

    def trained(*callbacks: Any) -> list[Any]:
        transformers.set_seed(5)
        options = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, dataloader_num_workers=1, remove_unused_columns=False, seed=5,
        )  # fmt: skip
        made = transformers.Trainer(Model(), options, train_dataset=Slow(), callbacks=list(callbacks))
        made.train()
        return [(log["loss"], log["grad_norm"]) for log in made.state.log_history if "loss" in log]

    expected = trained()
    assert trained(InTuneCallback(**EACH)) == expected
    assert len(expected) > 100
    assert restless.resizes > 10


@pytest.mark.parametrize("kind", [None, "process", "thread"])
@pytest.mark.parametrize("rows", [OnDevice, None], ids=["each item moved", "all moved before"])
def test_a_dataset_on_the_gpu_stays_in_the_training_process(kind: Any, rows: Any, restless: type[Restless]) -> None:
    """Also where the user allowed workers: in a forked process CUDA cannot be used."""
    torch.zeros(1).cuda()  # so that CUDA is in use
    on_gpu = TensorDataset(torch.randn(ROWS, WIDTH).cuda(), (torch.arange(ROWS) / 512).cuda())
    data = on_gpu if rows is None else rows(row_s=0.003)
    expected = looped(shuffled(data))
    assert looped(live(shuffled(data), workers_kind=kind, **EACH)) == expected


@pytest.mark.timeout(400)
def test_spawned_workers_may_use_the_gpu(restless: type[Restless]) -> None:
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    expected = looped(shuffled(OnDevice(), **options), epochs=1)
    assert looped(live(shuffled(OnDevice(), **options), **EACH), epochs=1) == expected


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_captured_graph_is_trained_the_same(pin_memory: bool, restless: type[Restless]) -> None:
    def trained(loader: Any) -> list[float]:
        torch.manual_seed(0)
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        x, label, losses = torch.zeros(BATCH, WIDTH).cuda(), torch.zeros(BATCH).cuda(), []
        graph = torch.cuda.CUDAGraph()

        def step() -> Any:
            optimizer.zero_grad(set_to_none=False)
            loss = (model(x).squeeze(1) - label).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        for number, (given, numbers) in enumerate(loader):
            x.copy_(given, non_blocking=True)
            label.copy_(numbers, non_blocking=True)
            if number < 10:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    losses.append(step().detach().clone())
                torch.cuda.current_stream().wait_stream(side)
                continue
            if number == 10:
                # torch's own thread that pins may call CUDA meanwhile.
                with torch.cuda.graph(graph, capture_error_mode="thread_local" if pin_memory else "global"):
                    loss = step()
            graph.replay()
            losses.append(loss.detach().clone())
        return [float(loss) for loss in losses]

    options = {"num_workers": 2, "pin_memory": pin_memory}
    expected = trained(shuffled(**options))
    assert trained(live(shuffled(**options), **EACH)) == expected
    assert restless.resizes > 10


def idle_frac(fetch_s: float, model_s: float, sync: bool, steps: int = 150) -> Any:
    """Return the report of a loop in which a fetch and the GPU's work take this long."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    torch.cuda.synchronize()
    cycles = int(50_000_000 / start.elapsed_time(end) * model_s * 1e3)
    rows = Rows(steps * BATCH, row_s=fetch_s / BATCH)
    options: dict[str, Any] = {"mode": "observe", "decide_every_s": 0.2, "warmup_batches": 10, "show_card": False}
    with live(DataLoader(rows, batch_size=BATCH), **options) as loader:
        for _ in loader:
            torch.cuda._sleep(cycles)
            if sync:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
    return loader.report


@three_attempts
@pytest.mark.parametrize(
    ("fetch_s", "model_s", "sync", "expected", "verdict"),
    [
        (0.020, 0.005, False, 0.75, "input-bound"),
        (0.004, 0.020, False, 0.0, "compute-bound"),
        (0.010, 0.010, True, 0.5, "input-bound"),
    ],
)
def test_the_idle_share_is_the_gpus_own(
    fetch_s: float, model_s: float, sync: bool, expected: float, verdict: str
) -> None:
    report = idle_frac(fetch_s, model_s, sync)
    assert report["after"]["exposed_wait_frac"] == pytest.approx(expected, abs=0.08)
    assert report["verdict"] == verdict


def test_the_driver_tells_how_busy_the_gpu_is() -> None:
    pytest.importorskip("pynvml")
    from intune_callbacks.measure.device import GpuProbe

    probe = GpuProbe()
    torch.cuda._sleep(2_000_000_000)
    time.sleep(0.8)
    assert (probe.read() or 0.0) > 0.5
    torch.cuda.synchronize()
