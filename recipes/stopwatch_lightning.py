"""The clock and the loss curve of a Lightning run; the same for a tuned and an untuned one, no part of the tuner."""

from __future__ import annotations

import time
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.profilers import Profiler

from .stopwatch import Marks

__all__ = ["Curve", "FetchClock"]

FETCH = "train_dataloader_next"


class FetchClock(Profiler):
    """Adds up the seconds the training loop spends in Lightning's own fetch of the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wait_s = 0.0
        self._began_s = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith(FETCH):
            self._began_s = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(FETCH):
            self.wait_s += time.perf_counter() - self._began_s


class Curve(Marks, Callback):
    """Notes each step's end, data wait, samples and loss.

    Args:
        clock: the Trainer's profiler.
    """

    def __init__(self, clock: FetchClock) -> None:
        super().__init__()
        self._clock = clock
        self._losses: list[torch.Tensor] = []

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [float(loss) for loss in self._losses]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Kept as tensors: reading the number here would make the CPU wait for the GPU.
        self._losses.append(outputs["loss"].detach())
        self.mark(time.perf_counter(), self._clock.wait_s, len(batch["labels"]))
