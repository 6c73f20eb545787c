"""The clock and the loss curve of a run; the same for a tuned and an untuned one, and independent of the tuner."""

from __future__ import annotations

import time
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.profilers import Profiler

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


class Curve(Callback):
    """Notes each step's end, data wait, samples and loss.

    Args:
        clock: the Trainer's profiler.
    """

    def __init__(self, clock: FetchClock) -> None:
        self._clock = clock
        self._marks: list[tuple[float, float]] = []
        self._samples: list[int] = []
        self._losses: list[torch.Tensor] = []

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [float(loss) for loss in self._losses]

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self._marks)

    @property
    def samples(self) -> int:
        """Samples so far."""
        return sum(self._samples)

    @property
    def wall_s(self) -> float:
        """Seconds from the end of the first step to the end of the last one."""
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Kept as tensors: reading the number here would make the CPU wait for the GPU.
        self._losses.append(outputs["loss"].detach())
        self._samples.append(len(batch["labels"]))
        self._marks.append((time.perf_counter(), self._clock.wait_s))

    def steady(self) -> tuple[int, int, float, float]:
        """Return steps, samples, wall seconds and data wait seconds of the second half of the steps.

        The first half is the time to start up and, for a tuned run, to find its allocation.
        """
        first = self.steps // 2
        if first < 1:
            return 0, 0, 0.0, 0.0
        (begin_s, begin_wait_s), (end_s, end_wait_s) = self._marks[first - 1], self._marks[-1]
        return self.steps - first, sum(self._samples[first:]), end_s - begin_s, end_wait_s - begin_wait_s
