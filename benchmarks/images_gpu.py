"""JPEG files into a ResNet-18 on a GPU: how fast and how busy it is with a given number of workers, and tuned from it.

The images are decoded, cropped and normalised as in PyTorch's ImageNet example, whose model, batch of 256 and four
workers these are.
Default arguments of `InTuneCallback`. Needs torchvision, for the model, and nvidia-ml-py, for how busy the GPU is.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import ConcatDataset, DataLoader

from benchmarks.output import arguments, numbers, write
from benchmarks.wild.data import jpeg
from benchmarks.wild.vision_torch import CLASSES, ImageFolder
from intune_callbacks.lightning import InTuneCallback
from intune_callbacks.measure.device import GpuProbe

__all__ = ["main"]

LOOK_EVERY_S = 0.1


class Classifier(pl.LightningModule):
    """Trains a network on ``(images, labels)`` and keeps its losses on the device."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net, self.losses = net, list[torch.Tensor]()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images.contiguous(memory_format=torch.channels_last)), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Watch(pl.Callback):
    """Notes when batches begin, and in a thread how busy the GPU is."""

    def __init__(self) -> None:
        self.starts_s, self.busy = list[float](), list[float]()
        self._end = threading.Event()
        self._probe = GpuProbe()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def on_train_start(self, *_: Any) -> None:
        self.starts_s.append(time.perf_counter())
        self._thread.start()

    def on_train_batch_end(self, *_: Any) -> None:
        self.starts_s.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.starts_s.append(time.perf_counter())
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(LOOK_EVERY_S):
            share = self._probe.read()
            if share is not None:
                self.busy.append(share)


def trained(folder: Path, mode: str, workers: int, batch: int, times: int, seed: int) -> dict[str, Any]:
    """Train for one epoch.

    Args:
        folder: of the images.
        mode: ``off`` is without the callback.
        workers: the user's number.
        batch: images of a batch.
        times: how often each image is in the epoch.
        seed: of the model and of the order.
    """
    from torchvision.models import resnet18

    pl.seed_everything(seed, verbose=False)
    images = ConcatDataset([ImageFolder(folder)] * times)  # many files take long to write, and are read the same
    loader = DataLoader(images, batch, shuffle=True, num_workers=workers, pin_memory=True)
    watch, ours = Watch(), [InTuneCallback()] if mode == "tune" else []
    model = Classifier(resnet18(num_classes=CLASSES).to(memory_format=torch.channels_last))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="auto",
        devices=1,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        callbacks=[watch, *ours],
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(model, loader)
    losses = torch.stack(model.losses).float().cpu()
    wall_s = watch.starts_s[-1] - watch.starts_s[0]
    last = watch.starts_s[2 * len(watch.starts_s) // 3 :]
    report = ours[0].report if ours else {}
    return {
        "mode": mode,
        "num_workers": workers,
        "wall_s": round(wall_s, 2),
        "images_per_s": round(len(losses) * batch / wall_s, 1),
        "last_third_images_per_s": round((len(last) - 1) * batch / (last[-1] - last[0]), 1),
        "gpu_busy": round(fmean(watch.busy), 3) if watch.busy else None,
        "gpu_idle_for_data": report.get("after", {}).get("exposed_wait_frac"),
        "allocation": report.get("after", {}).get("allocation"),
        "losses": hashlib.sha256(losses.numpy().tobytes()).hexdigest()[:12],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpus": len(os.sched_getaffinity(0)),
    }


def _make(folder: Path, images: int) -> None:
    """Write as many pictures, on all CPUs."""
    with ProcessPoolExecutor() as pool:
        for number, data in enumerate(pool.map(jpeg, range(images), chunksize=16)):
            path = folder / f"{number % CLASSES:03d}" / f"{number:06d}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns what was written."""
    parser = arguments("images_gpu", (__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=1280, help="how many files (default 1280)")
    parser.add_argument("--batch", type=int, default=256, help="images of a batch (default 256)")
    parser.add_argument("--times", type=int, default=16, help="how often each is read (default 16)")
    parser.add_argument("--workers", type=numbers, default=[4, 16], help="numbers without us; the first is the start")
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    images, batch, times = (8, 4, 2) if given.quick else (given.images, given.batch, given.times)
    # The same kernels for the same shapes, so that equal data give equal losses.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _make(Path(folder), images)
        first, *others = given.workers
        runs = [("off", first), ("tune", first), *(("off", workers) for workers in others)]
        for mode, workers in runs:
            rows.append(trained(Path(folder), mode, workers, batch, times, given.seed))
            print(rows[-1], flush=True)
    return write("images_gpu", rows, given.seed, given.json)


if __name__ == "__main__":
    main()
