"""The tf.data pipelines of the live benchmarks on an emulated machine, and the ways to run them.

Five parallel maps with the shares of the InTune paper. Every system is given the same source, the same functions and
the same machine; TensorFlow is told the machine's size where it can be told.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from benchmarks.emulated import SHARES, VirtualMachine
from benchmarks.live_loop import ENDLESS, Case, Loop, even_start
from intune_callbacks.config import TunerConfig
from intune_callbacks.pipelines.base import LiveLoader
from intune_callbacks.pipelines.find import find
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation, PipelineStats, Stage

__all__ = ["SYSTEMS", "Charged", "LiveData", "System"]

AUTOTUNE = tf.data.AUTOTUNE
PREFETCH = 2
Split = Callable[[Case], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class System:
    """One way to decide how parallel each stage is.

    Args:
        name: in the rows.
        ordered: elements leave in the order of the data.
        split: static parallelism by stage; None leaves it to AUTOTUNE.
        policy: of our tuner, which starts from `split`; None runs without it.
        algorithm: of AUTOTUNE, by its name in ``tf.data.experimental.AutotuneAlgorithm``.
        relaunched: built anew after each change of the machine, so that TensorFlow hears of it.
    """

    name: str
    ordered: bool = True
    split: Split | None = None
    policy: str | None = None
    algorithm: str = "DEFAULT"
    relaunched: bool = False


def linear_program(case: Case) -> dict[str, int]:
    """Return Plumber's parallelism: the linear program's shares rounded up (Kuchnik et al., MLSys 2022, section 4.2).

    Without sequential stages its solution is in closed form: CPUs in proportion to the cost.
    """
    return {
        stage: max(1, math.ceil(case.cpus * share / sum(SHARES.values()) - 1e-9)) for stage, share in SHARES.items()
    }


def all_cpus(case: Case) -> dict[str, int]:
    """Return as many workers as there are CPUs, in every stage."""
    return dict.fromkeys(SHARES, case.cpus)


SYSTEMS = {
    system.name: system
    for system in (
        System("InTune (dqn)", split=even_start, policy="dqn"),
        System("InTune (model-jump)", split=even_start, policy="model-jump"),
        System("AUTOTUNE"),
        System("AUTOTUNE unordered", ordered=False),
        System("AUTOTUNE relaunched", relaunched=True),
        System("AUTOTUNE relaunched unordered", ordered=False, relaunched=True),
        System("HILL_CLIMB", algorithm="HILL_CLIMB"),
        System("Plumber LP", split=linear_program),
        System("even split", split=even_start),
        System("N in every stage", split=all_cpus),
    )
}


class Charged:
    """A live pipeline whose CPU seconds are those of the emulated machine: a sleeping worker takes none of the host's.

    Args:
        inner: the pipeline; its worker stages are called as those of `SHARES`.
        machine: the emulated machine.
    """

    def __init__(self, inner: LiveLoader, machine: VirtualMachine) -> None:
        self._inner, self._machine = inner, machine

    def stages(self) -> tuple[Stage, ...]:
        return self._inner.stages()

    def stats(self) -> PipelineStats:
        found, used_s = self._inner.stats(), self._machine.stage_seconds()
        return replace(
            found, stages={name: replace(s, cpu_s=used_s.get(name, s.cpu_s)) for name, s in found.stages.items()}
        )

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        return self._inner.resize(allocation)

    def close(self) -> None:
        self._inner.close()


class LiveData(Loop):
    """A running tf.data pipeline with its training loop.

    Args:
        case: what to build.
        system: how.
    """

    def __init__(self, case: Case, system: System) -> None:
        self.case, self.system, self.machine = case, system, VirtualMachine(case.cpus)
        dataset = self._dataset(0, case.cpus)
        pipeline = None
        if system.policy is not None:
            found = find(dataset, clock=self.machine.clock)
            if found.pipeline is None:
                raise RuntimeError(f"nothing to tune in {case}: {found.why}")
            pipeline = Charged(found.pipeline, self.machine)
            dataset = found.pipeline.dataset  # type: ignore[attr-defined]
        super().__init__(case, self.machine, pipeline, _numbers(dataset))
        self.tuner: Tuner | None = None
        if pipeline is not None and system.policy is not None:
            config = TunerConfig(policy=system.policy)
            self.tuner = Tuner(pipeline, config, probe=self.machine.probe(), clock=self.machine.clock)

    def change_cpus(self, cpus: int) -> None:
        """Resize the machine; a system that is relaunched begins anew with the next batch of the data."""
        self.machine.resize(cpus)
        if self.system.relaunched:
            self._iterator = iter(())
            self._iterator = _numbers(self._dataset(len(self.deliveries), cpus))

    def close(self) -> None:
        """Stop everything."""
        if self.tuner is not None:
            self.tuner.close()
        self._iterator = iter(())
        super().close()

    def _batch(self, item: object) -> int:
        assert isinstance(item, int)
        if self.system.ordered and item != len(self.deliveries):
            raise RuntimeError(f"batch {item} came where {len(self.deliveries)} was due")
        return item

    def _dataset(self, first: int, cpus: int) -> tf.data.Dataset:
        system, dataset = self.system, tf.data.Dataset.range(first, ENDLESS)
        split = None if system.split is None else system.split(self.case)
        for stage in SHARES:
            calls = AUTOTUNE if split is None else split[stage]
            dataset = dataset.map(self._stage(stage), num_parallel_calls=calls, deterministic=system.ordered)
        dataset = dataset.prefetch(AUTOTUNE if split is None else PREFETCH)
        options = tf.data.Options()
        options.deterministic = system.ordered
        # What TensorFlow would find on a machine of that size; ours begins with it, too.
        options.threading.private_threadpool_size = max(cpus, *(split or {"": 0}).values())
        if system.policy is None:
            options.autotune.enabled = split is None
            options.autotune.cpu_budget = cpus
            algorithm = getattr(tf.data.experimental.AutotuneAlgorithm, system.algorithm)
            options.autotune.autotune_algorithm = algorithm
        return dataset.with_options(options)

    def _stage(self, stage: str) -> Callable[[Any], Any]:
        def compute(item: Any) -> Any:
            self.machine.compute(stage, self.case.stage_work_s(stage, int(item)))
            return item

        def function(item: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(compute, [item], tf.int64), [])

        function.__name__ = stage
        return function


def _numbers(dataset: tf.data.Dataset) -> Iterator[int]:
    for item in dataset:
        yield int(item)
