"""What the agent looks at, as arrays: one row per pipeline, one column (slot) per stage it can change.

The same code decides for one live pipeline, an array of one row, and learns on hundreds of simulated ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Floats", "Ints", "View"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


ALWAYS = 0.99
"""From this share of its time on a stage computes all the time: no buffer behind it fills. A choice."""


# Without slots: what several parts of a decision need of the same view is computed once and kept in the instance.
@dataclass(frozen=True)
class View:
    """N pipelines of S slots; arrays are [N, S] unless said otherwise. Memory is a share of the limit, 0..1.

    Args:
        mask: slots that exist and were measured.
        is_buffer: the slot holds buffered batches, not workers.
        value, low, high: units now, fewest, most.
        weight: CPUs one more busy worker takes; 0 for buffers.
        work_s: worker seconds for one delivered batch; 0 for buffers.
        cpu_share: CPU seconds / wall seconds of a busy worker, now.
        cv: coefficient of variation of single service times.
        work_noise: relative error of `work_s` to expect of one window of so few items.
        busy: share of the workers' time spent computing.
        fill: how full the slot's own window or buffer is, 0..1.
        window: results the stage may hold back; 0 for buffers.
        unit_memory: of one worker, or of one buffered batch.
        item_memory: of one result in the stage's window.
        rate: delivered batches per second, [N].
        demand: batches per second the model would take, [N].
        cpus: CPUs the pipeline may use, [N].
        budget: the sum of weights all workers together may reach, [N].
        memory: in use now, [N].
        noise: relative error of `rate` to expect of one window, until its own spread is known, [N].
        alive: False while a pipeline that ran out of memory is down, [N].
    """

    mask: Bools
    is_buffer: Bools
    value: Floats
    low: Floats
    high: Floats
    weight: Floats
    work_s: Floats
    cpu_share: Floats
    cv: Floats
    work_noise: Floats
    busy: Floats
    fill: Floats
    window: Floats
    unit_memory: Floats
    item_memory: Floats
    rate: Floats
    demand: Floats
    cpus: Floats
    budget: Floats
    memory: Floats
    noise: Floats
    alive: Bools

    @cached_property
    def workers(self) -> Bools:
        """Slots that hold workers, [N, S]."""
        return self.mask & ~self.is_buffer

    @cached_property
    def worker_weight(self) -> Floats:
        """CPUs one more busy worker takes, 0 where there are no workers, [N, S]."""
        return np.where(self.workers, self.weight, 0.0)

    @cached_property
    def is_buffer_of_use(self) -> Bools:
        """Pipelines in which no stage computes all the time: a larger buffer has something to hold, [N]."""
        return np.asarray(~(self.workers & (self.busy >= ALWAYS)).any(1))

    @cached_property
    def free_cpus(self) -> Floats:
        """CPUs that may be added; negative where the budget is exceeded, [N]."""
        return np.asarray(self.budget - (self.value * self.worker_weight).sum(1))

    @cached_property
    def full_memory(self) -> Floats:
        """Memory in use once every window and buffer of the present allocation is full, [N]."""
        return self.needed(self.value, self.window)

    def needed(self, value: Floats, window: Floats) -> Floats:
        """Return the memory in use once every window and buffer is full, [N].

        Workers that leave give nothing back: they are kept for later.

        Args:
            value: units, [N, S].
            window: [N, S].
        """
        more = np.maximum(value - self.value, 0.0) * self.unit_memory
        windows = np.maximum(window - self.fill * self.window, 0.0) * self.item_memory
        buffers = np.maximum(value - self.fill * self.value, 0.0) * self.unit_memory
        return np.asarray(self.memory + np.where(self.is_buffer, buffers, more + windows).sum(1))
