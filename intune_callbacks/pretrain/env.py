"""N simulated machines that run side by side, one decision at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from intune_callbacks.decide.view import Bools, Floats, Ints, View
from intune_callbacks.pretrain.flow import Flow, flow, memory
from intune_callbacks.pretrain.machines import BUFFER, SLOTS, Machines, log_uniform

__all__ = ["MOST_WINDOW", "Env", "even_split"]

DOWN = 8
"""Decisions a machine that ran out of memory needs to restart. A choice: some seconds, as long as a process takes."""
MOST_BUFFER, MOST_WORKERS, MOST_WINDOW = 512, 512, 8192
"""A choice: more than the largest machine, of 256 CPUs, needs."""
FIRST_BUFFER = 2.0
"""Batches in the prefetch buffer at the start: `prefetch_factor` of a DataLoader."""
EXPECTED_NOISE = 0.05
"""As `decide.live` expects it of the first windows."""


def even_split(machines: Machines, cpus: Floats) -> Floats:
    """Return the same number of workers for every stage, [N, stages]."""
    each = np.maximum(1.0, np.floor(cpus / machines.stages))
    return np.where(machines.mask, each[:, None], 0.0)


class Env:
    """Steps all machines: apply an allocation, let the work drift, measure.

    Args:
        rng: measurement noise and drift.
        sizes: decision -> factor on the machines' first number of CPUs (a number or [N]).
        mixed: start half of the machines from random allocations, for learning.
    """

    def __init__(
        self,
        machines: Machines,
        rng: np.random.Generator,
        sizes: Mapping[int, Floats | float] | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        self.machines, self._sizes = machines, dict(sizes or {})
        # The drift of the work has its own stream: it must not depend on what a policy does.
        self._rng, self._drift_rng = rng.spawn(2)
        rng = self._rng
        count = len(machines)
        self.cpus, self.work_s, self.base = machines.cpus.copy(), machines.work_s.copy(), machines.base.copy()
        self.workers = even_split(machines, self.cpus)
        self.windows = 2.0 * self.workers
        self.buffer = np.full(count, FIRST_BUFFER)
        if mixed:
            self._mix()
        self.decision = 0
        self.ran_out = np.zeros(count, int)
        self.down = np.zeros(count, int)
        self.rate = np.zeros(count)
        """Batches per second really delivered in the last decision, cost of the change included, [N]."""
        self.steady_rate = np.zeros(count)
        """The same without the cost of the change."""
        self._slow_noise, self._memory_noise = np.zeros(count), np.zeros(count)
        # Sizes are measured, with an error that stays.
        self._size_error = np.exp(0.05 * rng.normal(size=(count, SLOTS)))
        self.view, _ = self._measure(np.zeros(count))

    def __len__(self) -> int:
        return len(self.machines)

    def step(self, value: Floats, window: Floats | None = None) -> View:
        """Set an allocation, run one decision, return what was measured.

        Args:
            value: workers and, last, the prefetch buffer, [N, SLOTS].
            window: results each stage may hold back, [N, SLOTS]; by default twice the workers.
        """
        m, rng = self.machines, self._rng
        self.decision += 1
        if self.decision in self._sizes:
            self.cpus = np.maximum(2.0, np.round(m.cpus * self._sizes[self.decision]))
        workers = np.where(m.mask, np.clip(np.round(value[:, :BUFFER]), 1, MOST_WORKERS), 0.0)
        windows = 2.0 * workers if window is None else np.clip(np.round(window[:, :BUFFER]), workers, MOST_WINDOW)
        buffer = np.where(m.has_buffer, np.clip(np.round(value[:, BUFFER]), 1, MOST_BUFFER), self.buffer)
        changed = np.abs(workers - self.workers)
        lost = np.minimum(0.5, m.resize_cost * ((changed > 0).sum(1) + changed.sum(1) / 5.0))
        self.workers, self.windows, self.buffer = workers, np.where(m.mask, windows, 0.0), buffer
        drift = self._drift_rng
        jumps = np.where(drift.random(m.mask.shape) < m.jump, drift.uniform(0.6, 1.7, m.mask.shape), 1.0)
        self.work_s = self.work_s * np.exp(m.drift * drift.normal(size=m.mask.shape)) * jumps
        self.work_s = np.clip(self.work_s, 0.3 * m.work_s, 3.0 * m.work_s)
        self.base = self.base + m.leak
        self._slow_noise = 0.8 * self._slow_noise + 0.43 * rng.normal(size=len(self))
        self._memory_noise = 0.7 * self._memory_noise + 0.008 * rng.normal(size=len(self))
        self.down = np.maximum(0, self.down - 1)
        self.view, used = self._measure(lost)
        out = (used > 1.0) & (self.down == 0)
        if out.any():
            self._restart(out)
            self.view, _ = self._measure(lost)
        return self.view

    def delivered(self, workers: Floats, windows: Floats, buffer: Floats, rows: Ints | None = None) -> Flow:
        """Return what K allocations give now; noise and the cost of a change are left out.

        Args:
            workers, windows: [N, K, stages].
            buffer: [N, K].
            rows: the machines meant, all by default.
        """
        every = np.arange(len(self)) if rows is None else rows
        return flow(self.machines.take(every), self.work_s[every], workers, windows, buffer, self.cpus[every])

    def _restart(self, out: Bools) -> None:
        self.down[out] = DOWN
        self.ran_out[out] += 1
        self.workers[out] = even_split(self.machines, self.cpus)[out]
        self.windows[out] = 2.0 * self.workers[out]
        self.buffer[out] = FIRST_BUFFER

    def _mix(self) -> None:
        m, rng, count = self.machines, self._rng, len(self)
        part = rng.gamma(0.8, 1.0, m.mask.shape) * m.mask + 1e-9
        used = self.cpus * rng.uniform(0.3, 1.0, count)
        workers = np.maximum(1.0, np.floor(part / part.sum(1, keepdims=True) * used[:, None])) * m.mask
        while (over := workers.sum(1) > self.cpus).any():
            rows = np.flatnonzero(over)
            workers[rows, workers[rows].argmax(1)] -= 1.0
        chosen = rng.random(count) < 0.5
        self.workers = np.where(chosen[:, None], workers, self.workers)
        self.windows = 2.0 * self.workers
        drawn = np.round(log_uniform(rng, 1.0, 40.0, count))
        # Nobody starts out of memory.
        used = memory(m, self.base, self.workers[:, None], self.windows[:, None], drawn[:, None], 1.0)[:, 0]
        self.buffer = np.where(m.has_buffer & (used < 0.9), drawn, self.buffer)

    def _measure(self, lost: Floats) -> tuple[View, Floats]:
        m, rng, shape = self.machines, self._rng, self.machines.mask.shape
        now = self.delivered(self.workers[:, None], self.windows[:, None], self.buffer[:, None])
        rate, supply, service_s, batch_s = (a[:, 0] for a in (now.rate, now.supply, now.service_s, now.batch_s))
        delivered_full = np.clip(1.0 / (1.0 + (m.demand / np.maximum(supply, 1e-12)) ** 6.0), 0.05, 1.0)
        # A window is full when the stage behind it is slower than all before it.
        before_s = np.maximum.accumulate(batch_s, 1)
        after_s = np.concatenate([batch_s[:, 1:], np.zeros((len(self), 1))], 1)
        fill = 1.0 / (1.0 + (before_s / np.maximum(after_s, 1e-12)) ** 4)
        rows = np.arange(len(self))
        last = m.mask.sum(1) - 1
        fill[rows, last] = delivered_full
        full = np.concatenate([np.where(m.mask, fill, 0.0), delivered_full[:, None]], 1)
        stalled = rng.random(len(self)) < 0.01
        full_now = np.where(stalled[:, None], 1.0, full)
        used = memory(
            m, self.base, self.workers[:, None], self.windows[:, None], self.buffer[:, None], full_now[:, None]
        )
        used_now = used[:, 0] + self._memory_noise
        up = self.down == 0
        self.rate, self.steady_rate = np.where(up, rate * (1.0 - lost), 0.0), np.where(up, rate, 0.0)
        noise = m.rate_noise * (0.7 * rng.normal(size=len(self)) + self._slow_noise)
        noise = noise + np.where(lost > 0.0, m.settle_noise, 0.0) * rng.normal(size=len(self))
        stage_noise = np.exp(m.stage_noise * rng.normal(size=shape))
        share_noise = np.exp(0.3 * m.stage_noise * rng.normal(size=shape))
        busy = np.clip(rate[:, None] * batch_s * np.exp(0.5 * m.stage_noise * rng.normal(size=shape)), 0.0, 1.0)
        cv = m.cv * np.exp(0.15 * rng.normal(size=shape))
        seen_full = np.clip(full + 0.06 * rng.normal(size=full.shape), 0.0, 1.0)
        buffered = np.zeros((len(self), SLOTS), bool)
        buffered[:, BUFFER] = True

        def slots(workers: Floats, last_slot: Floats | float = 0.0) -> Floats:
            row = np.broadcast_to(np.asarray(last_slot, float), (len(self),))
            return np.concatenate([np.where(m.mask, workers, 0.0), row[:, None]], 1)

        view = View(
            mask=np.concatenate([m.mask, m.has_buffer[:, None]], 1),
            is_buffer=buffered,
            value=slots(self.workers, self.buffer),
            low=slots(np.ones(shape), 1.0),
            high=slots(np.full(shape, float(MOST_WORKERS)), MOST_BUFFER),
            weight=slots(m.share),
            work_s=slots(service_s * stage_noise),
            cpu_share=slots(np.clip(now.cpu_share[:, 0] * share_noise, 0.0, 1.0)),
            cv=slots(cv),
            work_noise=slots(m.stage_noise),
            busy=slots(busy),
            fill=slots(seen_full[:, :-1], seen_full[:, -1]),
            window=slots(self.windows),
            unit_memory=slots(m.worker_memory + m.item_memory, m.batch_memory) * self._size_error,
            item_memory=slots(m.item_memory) * self._size_error,
            rate=np.maximum(self.rate * np.exp(noise), 1e-9 * m.nominal_rate),
            demand=m.demand * np.exp(0.02 * rng.normal(size=len(self))),
            cpus=self.cpus.copy(),
            budget=self.cpus.copy(),
            memory=np.clip(used_now, 0.0, 1.0),
            noise=np.full(len(self), EXPECTED_NOISE),
            alive=up,
        )
        return view, used_now
