"""The tf.data pipelines of the live benchmarks on an emulated machine, and the ways to run them.

Parallel maps with the shares of a `Case`. Every system is given the same source, the same functions and
the same machine; TensorFlow is told the machine's size where it can be told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from benchmarks.emulated import VirtualMachine
from benchmarks.live_loop import ENDLESS, Case, Loop
from benchmarks.systems import System, all_cpus, even_start, linear_program, one_each, tuner_for
from intune_callbacks.pipelines.base import LiveLoader
from intune_callbacks.pipelines.find import find
from intune_callbacks.types import Allocation, PipelineStats, Stage

__all__ = ["SYSTEMS", "Charged", "LiveData"]

AUTOTUNE = tf.data.AUTOTUNE
PREFETCH = 2
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
        System("Unoptimized", split=one_each),
        System("Plumber LP relaunched", split=linear_program, relaunched=True),
        System("even split relaunched", split=even_start, relaunched=True),
        System("N in every stage relaunched", split=all_cpus, relaunched=True),
        System("hill climb", split=even_start, policy="hill-climb"),
    )
}


class Charged:
    """A live pipeline whose CPU seconds are those of the emulated machine: a sleeping worker takes none of the host's.

    Args:
        inner: the pipeline; its worker stages are called as those of the case.
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
        self.tuner = None if pipeline is None else tuner_for(system, pipeline, self.machine)

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
        split = None if system.split is None else system.split(replace(self.case, cpus=cpus))
        for stage in self.case.shares:
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
