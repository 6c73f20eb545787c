"""What the agent looks at, as arrays: one row per pipeline, one column (slot) per stage it can change.

Arrays let the same code decide for one live pipeline and learn on hundreds of simulated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from intune_callbacks.agent.lazy import Lazy

__all__ = ["FIELDS", "Bools", "Floats", "Ints", "Number", "View", "needed_of_one"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Number = TypeVar("Number", float, Floats)


# Without slots: what several parts of a decision need of the same view is computed once and kept in the instance.
@dataclass(frozen=True)
class View(Lazy):
    """N pipelines of S slots; arrays are [N, S] unless said otherwise. Memory is a share of the limit, 0..1.

    Args:
        mask: slots that exist and were measured.
        is_buffer: the slot holds buffered batches, not workers.
        value, low, high: units now, fewest, most.
        weight: CPUs one more busy worker takes; 0 for buffers.
        work_s: worker seconds for one delivered batch; 0 for buffers.
        cpu_share: CPU seconds / wall seconds of a busy worker, now.
        cv: coefficient of variation of single service times.
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
        elapsed_s: length of the window, [N].
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
    elapsed_s: Floats
    noise: Floats
    alive: Bools

    @classmethod
    def of_one(cls, numbers: Sequence[Any]) -> View:
        """Return one pipeline, given in plain numbers in the order of the fields: see `one`."""
        view = cls.__new__(cls)
        view.__dict__["one"] = _one(numbers)
        return view

    def _made(self, name: str) -> NDArray[Any]:
        return np.array([getattr(self.one, name)])

    @property
    def is_one(self) -> bool:
        """One pipeline: on a few stages plain numbers are faster than arrays."""
        return "one" in self.__dict__ or len(self.value) == 1

    @cached_property
    def one(self) -> SimpleNamespace:
        """The only pipeline in plain numbers, faster on a few stages: lists over the slots, single numbers otherwise.

        The fields are those of the view, and `workers`, `worker_weight`, `room` and `full_memory`.
        """
        return _one([getattr(self, name)[0].tolist() for name in FIELDS])

    @cached_property
    def workers(self) -> Bools:
        """Slots that hold workers, [N, S]."""
        return self.mask & ~self.is_buffer

    @cached_property
    def worker_weight(self) -> Floats:
        """CPUs one more busy worker takes, 0 where there are no workers, [N, S]."""
        return np.where(self.workers, self.weight, 0.0)

    @cached_property
    def room(self) -> Floats:
        """CPUs that may be added; negative where the budget is exceeded, [N]."""
        return np.asarray(self.budget - (self.value * self.worker_weight).sum(1))

    @cached_property
    def full_memory(self) -> Floats:
        """Memory in use once every window and buffer of the present allocation is full, [N]."""
        return self.needed(self.value, self.window)

    def rows(self, part: slice) -> View:
        """Return some of the pipelines."""
        return View(**{f.name: getattr(self, f.name)[part] for f in fields(self)})

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


FIELDS = tuple(f.name for f in fields(View))
"""Of a `View`, in order."""
View.ARRAYS = FIELDS


def _one(numbers: Sequence[Any]) -> SimpleNamespace:
    one = SimpleNamespace(**dict(zip(FIELDS, numbers, strict=True)))
    one.workers = [exists and not is_buffer for exists, is_buffer in zip(one.mask, one.is_buffer, strict=True)]
    one.worker_weight = [weight if has else 0.0 for weight, has in zip(one.weight, one.workers, strict=True)]
    one.room = one.budget - sum([n * weight for n, weight in zip(one.value, one.worker_weight, strict=True)])
    one.full_memory = needed_of_one(one, one.value, one.window)
    return one


def needed_of_one(one: SimpleNamespace, value: Sequence[float], window: Sequence[float]) -> float:
    """Return what `View.needed` does for one pipeline, in plain numbers.

    Args:
        one: `View.one`.
        value: units, by slot.
        window: by slot.
    """
    needed: float = one.memory
    for is_buffer, now, wide_now, fill, of_unit, of_item, then, wide in zip(
        one.is_buffer, one.value, one.window, one.fill, one.unit_memory, one.item_memory, value, window, strict=True
    ):
        # Workers come on top of what is used; a buffer holds part of what it may.
        if (more := then - fill * now if is_buffer else then - now) > 0.0:
            needed += more * of_unit
        if not is_buffer and (more := wide - fill * wide_now) > 0.0:
            needed += more * of_item
    return needed
