"""Trainings that are ended, starved and moved about: signals, a rank that dies, limits that shrink, clocks that jump.

The rest of the fault matrix (docs/reliability.md), by the same adapters and moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

from fault_runs import ADAPTERS, EPOCH, EPOCHS, ITEMS, MOMENTS, leftovers
from test_monitor_resources import GIB, Machine

from intune_callbacks.config import TunerConfig
from intune_callbacks.measure.wait import StepTimer
from intune_callbacks.pipelines.base import busy_limit
from intune_callbacks.pipelines.find import find
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Clock, Observation, Proposal

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent

# -- signals -----------------------------------------------------------------------------------------------------------

MOMENTS_OF = {"tf.data": ("middle", "seam")}  # each of its trainings starts TensorFlow anew
STOPPED_WITHIN_S, KILLED_WITHIN_S = 8.0, 8.0
TENSORFLOW_S = 30.0


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_signal_ends_the_training_and_all_its_children(name: str) -> None:
    moments = MOMENTS_OF.get(name, tuple(MOMENTS))
    if name == "tf.data":
        pytest.importorskip("tensorflow")
    more_s = TENSORFLOW_S if name == "tf.data" else 0.0
    command = [sys.executable, str(HERE / "fault_ends.py"), str(HERE), name, *moments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(row["signal"], row["moment"]) for row in rows] == [
        (which, moment) for which in ("SIGINT", "SIGTERM", "SIGKILL") for moment in moments
    ], run.stderr[-2000:]
    for row in rows:
        assert row["left"] == 0, row
        assert row["took_s"] < more_s + (STOPPED_WITHIN_S if row["signal"] == "SIGINT" else KILLED_WITHIN_S), row
        if row["signal"] != "SIGINT":
            assert row["status"] == getattr(signal, row["signal"]), row
            continue
        epoch, item = MOMENTS[row["moment"]]
        seen = row["seen"]
        assert seen["ended"] == "KeyboardInterrupt", row
        whole, last = seen["delivered"][:-1], seen["delivered"][-1]
        assert whole == [list(range(ITEMS))] * epoch
        # TensorFlow hears of Ctrl+C when the element is there.
        assert last in (list(range(item)), list(range(item + 1)))
        assert seen["children"] == 0


RANKS = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningModule, Trainer
from intune_callbacks.lightning import InTuneCallback

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if (self.trainer.global_rank, self.current_epoch, batch_idx) == (1, int(sys.argv[1]), int(sys.argv[2])):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

often = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}
trainer = Trainer(
    max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[InTuneCallback(**often)],
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.arange(160.0).view(160, 1)), 4, num_workers=2))
"""


@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (1, 11), (0, 19), (2, 19)])
def test_a_rank_that_dies_takes_the_others_and_all_workers_with_it(epoch: int, batch: int) -> None:
    pytest.importorskip("lightning")
    mark = f"rank-{os.getpid()}-{time.monotonic_ns()}"
    variables = {**os.environ, "RANKS_MARK": mark}
    begin_s = time.monotonic()
    command = [sys.executable, "-c", RANKS, str(epoch), str(batch)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=variables)
    assert run.returncode != 0
    assert "InTune froze" not in run.stderr
    assert time.monotonic() - begin_s < 80.0

    def ours() -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RANKS_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    until_s = time.monotonic() + 12.0
    while (left := ours()) and time.monotonic() < until_s:
        time.sleep(0.2)
    assert left == []


# -- limits that shrink, clocks that jump ------------------------------------------------------------------------------


class Restless:
    """Asks for other numbers each time."""

    name = "restless"

    def __init__(self) -> None:
        self.draw = random.Random(1)

    def decide(self, observation: Observation) -> Proposal:
        # Now and then all there is.
        low = self.draw.choice((1, 12))
        return Proposal({s.name: min(s.high, self.draw.randint(low, 12)) for s in observation.stages}, "restless")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def tuned(name: str, probe: Any, at: tuple[int, int], then: Callable[[], None], clock: Clock) -> tuple[Any, Tuner]:
    """Train under a tuner that changes the numbers every few batches; `then` happens at one batch of one epoch.

    By the clock it is told a batch takes 0.2 s.
    """
    adapter = ADAPTERS[name]
    source: Any = adapter.make()
    pipeline: Any = find(source, **adapter.options).pipeline
    pipeline.prepare()
    source = getattr(pipeline, "dataset", source)
    config = TunerConfig(decide_every_s=0.0, decide_every_batches=2, warmup_batches=0)
    tuner = Tuner(pipeline, config, policy=Restless(), probe=probe, clock=clock)
    seen: list[list[int]] = []
    told_s = 0.0
    timer = StepTimer(Clock(wall=lambda: told_s + clock.wall() - time.perf_counter()))
    try:
        for epoch in range(EPOCHS):
            EPOCH.value = epoch
            timer.epoch_begin()
            iterator = pipeline.adopt(iter(source))
            seen.append([])
            for number in range(ITEMS):
                timer.fetch_begin()
                if (epoch, number) == at:
                    then()
                    until_s = time.monotonic() + 5.0
                    while getattr(pipeline, "is_growing", False) and time.monotonic() < until_s:
                        time.sleep(0.01)  # nothing is decided until the children that were asked for have started
                seen[-1].append(int(next(iterator)))
                told_s += 0.1
                timer.fetch_end()
                told_s += 0.1
                tuner.batch(timer.read(), 1)
            assert next(iterator, None) is None
            del iterator
        tuner.close()
    finally:
        pipeline.close()
        EPOCH.value = 0
    return seen, tuner


@pytest.fixture
def bounded() -> Iterator[None]:
    before, begin_s = leftovers(), time.monotonic()
    yield
    until_s = time.monotonic() + 8.0
    while (leftovers()[0] or leftovers()[1] > before[1]) and time.monotonic() < until_s:
        time.sleep(0.05)
    after = leftovers()
    assert after[0] == [] and after[1] <= before[1]
    assert time.monotonic() - begin_s < 30.0


SHRINKS = [
    *((version, what, moment) for version, what in (("v1", "CPUs"), ("v2", "memory")) for moment in MOMENTS),
    ("v1", "memory", "middle"),
    ("v2", "CPUs", "middle"),
]


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(("version", "what", "moment"), SHRINKS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_container_that_shrinks_under_load(
    name: str, version: str, what: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 8 CPUs to 1, or from 32 GiB to hardly more than is used."""
    machine = Machine(tmp_path, monkeypatch)
    getattr(machine, version)()
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "sys/fs/cgroup/memory/memory"

    def limit(cpus: int, memory_bytes: int) -> None:
        if version == "v2":
            machine.write("sys/fs/cgroup/cpu.max", f"{cpus * 100_000} 100000")
            machine.v2_memory("", memory_bytes, GIB)
        else:
            machine.write(cpu, cpus * 100_000)
            machine.write(cpu.replace("quota", "period"), 100_000)
            machine.write(f"{memory}.limit_in_bytes", memory_bytes)
            machine.write(f"{memory}.usage_in_bytes", GIB)
            machine.write(f"{memory}.stat", "total_inactive_file 0")

    limit(8, 32 * GIB)
    least = (1, 32 * GIB) if what == "CPUs" else (8, GIB + GIB // 100)
    epoch, item = MOMENTS[moment]
    at = (epoch, item - 8 if moment == "end" else item)  # so that there is a decision left
    seen, tuner = tuned(name, machine.probe(trainer_cpus=0.0), at, lambda: limit(*least), Clock())
    assert seen == [list(range(ITEMS))] * EPOCHS
    assert tuner.frozen is None
    decisions = tuner.history.decisions
    shrunk = [
        d
        for d in decisions
        if (d.observation.resources.cpus, d.observation.resources.memory_limit_bytes) == (float(least[0]), least[1])
    ]
    assert shrunk
    assert moment == "first" or len(shrunk) < len(decisions)
    workers = [s.name for s in decisions[-1].observation.stages if s.kind == "cpu"]
    for decision in shrunk:
        before, given, rates = decision.before, decision.after, decision.observation.rates
        if what == "memory":  # above the soft limit of the memory no window may grow
            assert all(given[n] <= before[n] for n in given if n not in workers)
        elif sum(given[n] for n in workers) > sum(before[n] for n in workers):
            busy = sum(given[n] * min(1.0, r.service_cpu_s / r.service_s) for n, r in rates.items() if r.service_s)
            assert busy <= busy_limit(1.0, len(workers))


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 1e9])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_clock_that_jumps(name: str, jump_s: float, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped for an hour, or a clock that was set, also backwards, as no such clock should."""
    offset = [0.0]
    wall, real = time.perf_counter, time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    clock = Clock(wall=lambda: wall() + offset[0])

    class Plenty:
        def read(self) -> Any:
            from intune_callbacks.types import Resources

            return Resources(8.0, 32 * GIB, GIB)

    jumped_s = [0.0]

    def jump() -> None:
        jumped_s[0], offset[0] = wall(), jump_s

    seen, tuner = tuned(name, Plenty(), MOMENTS[moment], jump, clock)
    assert seen == [list(range(ITEMS))] * EPOCHS
    assert tuner.frozen is None
    if jump_s > 0.0 and moment != "end":  # it is tuned as before
        after = [one for one in tuner.history.decisions if one.observation.at_s > jumped_s[0]]
        assert any(decision.applied for decision in after)
        assert not any("trials have cost" in veto for decision in after for veto in decision.vetoes)
