"""A pipeline that only exists as numbers: what it measures follows from what was decided, and costs next to nothing."""

from __future__ import annotations

import numpy as np

from intune_callbacks.types import Allocation, Observation, Resources, Stage, StageRates

__all__ = ["Synthetic"]

CPUS_PER_STAGE = 8
GB = 10**9


class Synthetic:
    """A pipeline whose numbers change a little from one observation to the next.

    Args:
        stages: worker stages; every third one only waits for storage half of its time.
        seed: of costs and noise.
    """

    def __init__(self, stages: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._names = [f"stage{i}" for i in range(stages)]
        self._work_s = np.exp(self._rng.normal(-3.0, 0.7, stages))
        self.cpu_share = {name: 0.5 if i % 3 == 2 else 1.0 for i, name in enumerate(self._names)}
        self._step = 0
        self.allocation: Allocation = {"prefetch": 4}
        """As in force; set it to what was decided."""
        for name in self._names:
            self.allocation |= {name: CPUS_PER_STAGE, f"{name}.window": 4 * CPUS_PER_STAGE}

    def observe(self) -> Observation:
        """Return what a window of one second would have measured."""
        rng, count = self._rng, len(self._names)
        self._step += 1
        workers = np.array([self.allocation[name] for name in self._names], float)
        work_s = self._work_s * np.exp(0.03 * rng.normal(size=count))
        # More workers of a stage disturb each other a little: elasticities and curves have something to find.
        service_s = work_s * (1.0 + 0.002 * (workers - 1.0))
        rate = float((workers / service_s).min() * np.exp(0.02 * rng.normal()))
        busy = np.minimum(1.0, rate * service_s / workers)
        fill = np.clip(0.5 + 0.2 * rng.normal(size=count), 0.0, 1.0)
        items = max(10, round(rate))
        rates = {
            name: StageRates(
                items=items,
                items_per_batch=1.0,
                service_s=float(service_s[i]),
                service_cpu_s=float(service_s[i]) * self.cpu_share[name],
                service_cv=0.3,
                busy_frac=float(busy[i]),
                starved_frac=float(1.0 - busy[i]),
                blocked_frac=0.0,
                queue_fill=float(fill[i]),
                item_bytes=1e6,
                worker_bytes=8e6,
            )
            for i, name in enumerate(self._names)
        }
        return Observation(
            step=self._step * items,
            at_s=float(self._step),
            elapsed_s=1.0,
            batches=items,
            samples=items,
            batches_per_s=rate,
            samples_per_s=rate,
            wait_frac=0.9,
            model_s=1e-4,
            stages=self._stages(),
            rates=rates,
            resources=Resources(float(CPUS_PER_STAGE * count), 256 * GB, 16 * GB),
        )

    def _stages(self) -> tuple[Stage, ...]:
        found = []
        for name in self._names:
            found.append(Stage(name, "cpu", "workers", 1, 512, self.allocation[name]))
            window = f"{name}.window"
            found.append(Stage(window, "memory", "items", 1, 8192, self.allocation[window], window_of=name))
        return (*found, Stage("prefetch", "memory", "items", 1, 512, self.allocation["prefetch"]))
