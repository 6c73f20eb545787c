"""The reward as it is logged: throughput pays, memory near its limit and CPUs held cost; any policy, no torch."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks.decide.reward import CPU_PRICE, FREE_MEMORY, worth
from intune_callbacks.session.metrics import metrics
from intune_callbacks.types import Resources, Stage

DECODE = Stage("decode", "cpu", "workers", 1, 64, 8)
WINDOW = Stage("decode.window", "memory", "items", 1, 64, 32, window_of="decode")
MACHINE = Resources(cpus=16.0, memory_limit_bytes=100 * GB, memory_used_bytes=10 * GB)


def worth_of(rate: float = 50.0, share: float = 0.5, used: float = 0.1, workers: int = 8) -> float:
    stages = (replace(DECODE, current=workers), WINDOW)
    return worth(rate, stages, {"decode": share}, replace(MACHINE, memory_used_bytes=int(used * 100 * GB)))


def test_worth_is_the_log_of_the_throughput_less_the_price_of_the_cpus() -> None:
    assert worth_of() == pytest.approx(math.log(50.0) - CPU_PRICE * 8 * 0.5 / 16.0)
    assert worth_of(share=0.0) == worth(50.0, (WINDOW,), {}, MACHINE) == pytest.approx(math.log(50.0))


@given(st.floats(0.0, 1e9), st.floats(0.0, 1.5), st.floats(0.0, 4.0), st.integers(1, 64))
def test_worth_is_finite_and_falls_with_memory_and_cpus(rate: float, used: float, share: float, workers: int) -> None:
    here = worth_of(rate, share, used, workers)
    assert math.isfinite(here)
    assert here <= worth_of(rate + 1.0, share, used, workers)
    assert here >= worth_of(rate, share, used + 0.01, workers) and here >= worth_of(rate, share, used, workers + 1)


def test_near_full_memory_any_throughput_is_worth_little() -> None:
    lost = worth_of(used=1.0 - FREE_MEMORY / 2) - worth_of()
    assert lost == pytest.approx(math.log(0.5))
    assert worth_of(rate=400.0, used=0.9999) < worth_of(rate=1.0)


@pytest.mark.parametrize("memory_limit_bytes", [0, 100 * GB])
def test_what_is_logged_rises_with_what_more_workers_bring(memory_limit_bytes: int) -> None:
    loop = FakeLoop(FakePipeline({"parse": Work(0.05)}, FakeMachine(), depth=2))
    seen = [loop.observe()]
    loop.pipeline.resize({"parse": 4, "parse.window": 8})
    loop.observe()
    seen.append(loop.observe())
    machine = replace(MACHINE, memory_limit_bytes=memory_limit_bytes)
    first, then = (metrics(replace(one, resources=machine))["intune/reward"] for one in seen)
    shares = [one.rates["parse"].service_cpu_s / one.rates["parse"].service_s for one in seen]
    price = CPU_PRICE * (4 * shares[1] - shares[0]) / machine.cpus
    gained = math.log(seen[1].batches_per_s / seen[0].batches_per_s)
    assert gained > 0.5 and price > 1e-3
    assert then - first == pytest.approx(gained - price, abs=1e-6)


def test_it_needs_no_framework() -> None:
    code = "import sys, intune_callbacks.session.fit; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split())
    assert not loaded & {"torch", "tensorflow", "keras", "lightning", "pytorch_lightning"}
