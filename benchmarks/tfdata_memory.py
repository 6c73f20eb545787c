"""A tf.data pipeline whose every stage leaves a large batch, watched while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import tensorflow as tf

from benchmarks.emulated import SHARES, VirtualMachine
from benchmarks.live_loop import ENDLESS, Case, Loop
from benchmarks.systems import even_start
from benchmarks.tfdata_cases import AUTOTUNE, PREFETCH, Charged
from intune_callbacks.config import TunerConfig
from intune_callbacks.measure.resources import MachineProbe
from intune_callbacks.pipelines.find import find
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Resources

__all__ = ["Heavy"]

WATCH_EVERY_S = 0.05


class MemoryProbe:
    """The emulated machine's CPUs with the real memory of this process and its container.

    Args:
        machine: the emulated machine.
        limit_bytes: the memory limit to report; 0 reports the container's own.
    """

    def __init__(self, machine: VirtualMachine, limit_bytes: int) -> None:
        self._machine, self._limit_bytes, self._real = machine, limit_bytes, MachineProbe()

    def read(self) -> Resources:
        """Return what there is now."""
        real = self._real.read()
        if self._limit_bytes:
            used = psutil.Process().memory_info().rss
            real = replace(real, memory_limit_bytes=self._limit_bytes, memory_used_bytes=used)
        return replace(real, cpus=float(self._machine.cpus))


class Heavy(Loop):
    """The five stages, each leaving one batch of `batch_bytes`.

    Args:
        case: the machine and the work.
        system: of `benchmarks.memory_tfdata.SYSTEMS`.
        batch_bytes: size of a batch.
        limit_bytes: see `MemoryProbe`.
    """

    def __init__(self, case: Case, system: str, batch_bytes: int, limit_bytes: int) -> None:
        self.case, self.machine, self._floats = case, VirtualMachine(case.cpus), batch_bytes // 4
        tuned, automatic = system.startswith("InTune"), system.startswith("AUTOTUNE")
        dataset = tf.data.Dataset.range(ENDLESS)
        split = even_start(case)
        for number, stage in enumerate(SHARES):
            calls = AUTOTUNE if automatic else split[stage]
            dataset = dataset.map(self._stage(stage, number), num_parallel_calls=calls, deterministic=True)
        dataset = dataset.prefetch(AUTOTUNE if automatic else PREFETCH)
        options = tf.data.Options()
        # What TensorFlow would find on a machine of that size; ours begins with it, too.
        options.threading.private_threadpool_size = case.cpus
        if not tuned:
            options.autotune.cpu_budget = case.cpus
            if "ram_budget" in system:
                options.autotune.ram_budget = 1 << 30
        dataset = dataset.with_options(options)
        pipeline = None
        if tuned:
            found = find(dataset, clock=self.machine.clock)
            if found.pipeline is None:
                raise RuntimeError(f"nothing to tune: {found.why}")
            pipeline = Charged(found.pipeline, self.machine)
            dataset = found.pipeline.dataset  # type: ignore[attr-defined]
        self.peak_bytes, self._process = 0, psutil.Process()
        threading.Thread(target=self._watch, daemon=True).start()
        super().__init__(case, self.machine, pipeline, _numbers(dataset))
        self.tuner: Tuner | None = None
        if pipeline is not None:
            probe = MemoryProbe(self.machine, limit_bytes)
            self.tuner = Tuner(pipeline, TunerConfig(), probe=probe, clock=self.machine.clock)

    def used_bytes(self) -> int:
        """Return the process's memory now."""
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self.used_bytes())
            time.sleep(WATCH_EVERY_S)

    def _stage(self, stage: str, number: int) -> Callable[..., Any]:
        def compute(item: Any) -> Any:
            self.machine.compute(stage, self.case.stage_work_s(stage, int(item)))
            return item

        def function(item: Any, batch: Any = None) -> Any:
            item = tf.ensure_shape(tf.numpy_function(compute, [item], tf.int64), [])
            return item, tf.fill([self._floats], tf.cast(item, tf.float32))

        def first(item: Any) -> Any:
            return function(item)

        chosen = function if number else first
        chosen.__name__ = stage
        return chosen


def _numbers(dataset: tf.data.Dataset) -> Iterator[int]:
    for item, _ in dataset:
        yield int(item)
