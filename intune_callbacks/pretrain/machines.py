"""The population of simulated machines: what their stages cost, where they do not scale, what limits them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from intune_callbacks.decide.view import Bools, Floats, Ints

__all__ = ["BUFFER", "DISK", "MOST_WORKER_STAGES", "SLOTS", "Machines", "log_uniform", "sample"]

MOST_WORKER_STAGES = 6
"""A choice: the network takes any number, and learns from pipelines of two to six."""
BUFFER = MOST_WORKER_STAGES
"""Slot of the prefetch buffer: the last one."""
SLOTS = MOST_WORKER_STAGES + 1

DISK, BATCH, SHUFFLE, UDF = range(4)
_LAYOUTS = {
    2: (DISK, UDF),
    3: (DISK, UDF, BATCH),
    4: (DISK, BATCH, SHUFFLE, UDF),
    5: (DISK, BATCH, SHUFFLE, UDF, UDF),
    6: (DISK, BATCH, SHUFFLE, UDF, UDF, UDF),
}
_TYPICAL_WORK = np.array([0.5, 0.15, 0.12, 1.0])
"""CPU seconds of the four kinds of stages, relative to each other. A choice: the user's own functions cost most."""
_SIZES = (8, 16, 32, 64, 128, 256)
_SIZE_SHARES = (0.05, 0.25, 0.25, 0.2, 0.2, 0.05)
"""CPUs of the machines, and how often each size is drawn. A choice: the ends of the range are rare."""


@dataclass(frozen=True, slots=True)
class Machines:
    """N machines; [N] or [N, MOST_WORKER_STAGES] arrays. Memory is a share of the machine's memory.

    Args:
        cpus: CPUs at the start.
        mask: worker stages that exist.
        kind: 0 disk, 1 batch, 2 shuffle, 3 user function.
        work_s: CPU seconds of one batch with one worker.
        share: CPUs one busy worker occupies; below 1 for a reader that waits for its disk.
        serial, coherence: sigma and kappa of the Universal Scalability Law.
        lock: share of the work done under the one lock all stages with `lock` > 0 share.
        convoy: growth of the lock's cost with every further worker that wants it.
        io_rate: batches per second the disk gives.
        interference: slowdown of all stages when all CPUs are busy.
        demand: batches per second the model takes.
        burst: how uneven batches come; large bursts need large buffers.
        cv: coefficient of variation of single service times.
        base: memory in use without workers and buffers.
        worker_memory: of one worker.
        item_memory: of one finished item in a stage's window.
        batch_memory: of one batch in the prefetch buffer.
        leak: growth of `base` per decision.
        rate_noise, stage_noise: relative errors of measured throughput and service times.
        settle_noise: further error of the throughput in the decision of a change, when windows fill or drain.
        drift, jump: random walk of the work per decision, probability of a jump.
        resize_cost: share of a decision lost per changed stage and five workers.
        has_buffer: the prefetch buffer can be changed.
    """

    cpus: Floats
    mask: Bools
    kind: Ints
    work_s: Floats
    share: Floats
    serial: Floats
    coherence: Floats
    lock: Floats
    convoy: Floats
    io_rate: Floats
    interference: Floats
    demand: Floats
    burst: Floats
    cv: Floats
    base: Floats
    worker_memory: Floats
    item_memory: Floats
    batch_memory: Floats
    leak: Floats
    rate_noise: Floats
    stage_noise: Floats
    settle_noise: Floats
    drift: Floats
    jump: Floats
    resize_cost: Floats
    has_buffer: Bools

    def __len__(self) -> int:
        return len(self.cpus)

    @property
    def stages(self) -> Floats:
        """Number of worker stages, [N]."""
        return np.asarray(self.mask.sum(1), float)

    @property
    def nominal_rate(self) -> Floats:
        """Batches per second of the ideal machine: every CPU busy, nothing serial; [N]."""
        return np.asarray(self.cpus / self.work_s.sum(1))

    def take(self, index: Ints | slice) -> Machines:
        """Return the machines of `index`."""
        return Machines(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def log_uniform(rng: np.random.Generator, low: float, high: float, size: int | tuple[int, ...]) -> Floats:
    """Draw numbers whose logarithm is uniform."""
    return np.asarray(np.exp(rng.uniform(np.log(low), np.log(high), size)))


def sample(
    count: int, rng: np.random.Generator, *, stages: int | None = None, cpus: int | None = None, plain: bool = False
) -> Machines:
    """Draw machines: 20 % with a shared lock, 25 % of user functions GIL-like, 40 % limited by I/O, 50 % interference,
    50 % possibly limited by the model.

    Args:
        stages: worker stages of every machine, 2..6; drawn if None (the prefetch buffer is one more).
        cpus: size of every machine; drawn from 8..256 if None.
        plain: nothing serial, shared, limited or drifting.
    """
    n, shape = count, (count, MOST_WORKER_STAGES)
    size = rng.choice(_SIZES, n, p=_SIZE_SHARES).astype(float) if cpus is None else np.full(n, float(cpus))
    many = rng.integers(2, 7, n) if stages is None else np.full(n, stages)
    # A machine of 8 CPUs with six stages has nothing to share out.
    many = np.minimum(many, np.maximum(2, size // 2).astype(int))
    mask = np.arange(MOST_WORKER_STAGES)[None] < many[:, None]
    kind, relative = np.zeros(shape, int), np.zeros(shape)
    for k in range(n):
        layout = np.array(_LAYOUTS[int(many[k])])
        costs = _TYPICAL_WORK[layout] * np.exp(rng.normal(0.0, 0.75, len(layout)))
        if rng.random() < 0.3:  # the user function is not always the heaviest
            rng.shuffle(costs)
        kind[k, : many[k]], relative[k, : many[k]] = layout, costs
    work_s = relative * 3.0 / rng.uniform(2.0, 4.0, n)[:, None] * log_uniform(rng, 0.1, 10.0, n)[:, None]
    is_udf, is_disk = (kind == UDF) & mask, (kind == DISK) & mask

    serial = rng.uniform(0.0, 0.03, shape)
    coherence = log_uniform(rng, 1e-6, 5e-5, shape)
    draw = rng.random(shape)
    gil = is_udf & (draw > 0.75)
    serial = np.where(is_udf & (draw < 0.25), rng.uniform(0.03, 0.15, shape), serial)
    serial = np.where(gil, rng.uniform(0.15, 0.9, shape), serial)
    coherence = np.where(is_udf & (draw < 0.5), log_uniform(rng, 1e-5, 2e-3, shape), coherence)
    coherence = np.where(gil, log_uniform(rng, 1e-4, 1e-2, shape), coherence)

    shared = rng.random(n) < 0.2
    locks = is_udf | ((kind == BATCH) & mask & (rng.random(n) < 0.5)[:, None])
    lock = np.where(shared[:, None] & locks, rng.uniform(0.02, 0.3, n)[:, None], 0.0)
    convoy = np.where(shared, log_uniform(rng, 1e-3, 5e-2, n), 0.0)
    nominal = size / work_s.sum(1)
    limited = rng.random(n) < 0.4
    io_rate = np.where(limited, nominal * rng.uniform(0.35, 1.5, n), nominal * 50.0)
    share = np.where(is_disk & (limited & (rng.random(n) < 0.5))[:, None], rng.uniform(0.3, 1.0, n)[:, None], 1.0)
    interference = np.where(rng.random(n) < 0.5, rng.uniform(0.05, 0.5, n), 0.0)
    demand = np.where(rng.random(n) < 0.5, nominal * 20.0, nominal * rng.uniform(0.3, 1.3, n))
    cv = np.where(is_udf, log_uniform(rng, 0.05, 1.2, shape), rng.uniform(0.02, 0.15, shape))
    batch_memory = log_uniform(rng, 1.5e-4, 2.5e-3, n)
    heavy = np.where(is_udf, log_uniform(rng, 0.5, 3.0, shape), 1.0)
    drift = np.where(is_udf, rng.uniform(0.0, 0.006, shape), 0.0)
    if plain:
        serial, coherence, lock, drift = (np.zeros(shape) for _ in range(4))
        convoy, interference = np.zeros(n), np.zeros(n)
        io_rate, demand, share = nominal * 50.0, nominal * 20.0, np.ones(shape)
    return Machines(
        cpus=size,
        mask=mask,
        kind=kind,
        work_s=np.where(mask, work_s, 0.0),
        share=share,
        serial=serial,
        coherence=coherence,
        lock=lock,
        convoy=convoy,
        io_rate=io_rate,
        interference=interference,
        demand=demand,
        burst=log_uniform(rng, 0.2, 3.0, n),
        cv=np.where(mask, cv, 0.0),
        base=rng.uniform(0.25, 0.65, n),
        worker_memory=np.where(mask, rng.uniform(0.02, 0.12, n)[:, None] / size[:, None] * heavy, 0.0),
        item_memory=np.where(mask, batch_memory[:, None] * log_uniform(rng, 0.02, 0.3, n)[:, None], 0.0),
        batch_memory=batch_memory,
        leak=rng.uniform(0.0, 1e-4, n),
        rate_noise=rng.uniform(0.01, 0.08, n),
        stage_noise=np.where(is_udf, rng.uniform(0.03, 0.25, shape), rng.uniform(0.01, 0.06, shape)),
        settle_noise=rng.uniform(0.0, 0.2, n),
        drift=drift,
        jump=np.where(is_udf & (drift > 0.0), 0.002, 0.0),
        resize_cost=log_uniform(rng, 0.002, 0.06, n),
        has_buffer=rng.random(n) < 0.8,
    )
