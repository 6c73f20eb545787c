"""GpuProbe with a made-up driver, CudaWait with made-up events: neither needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from intune_callbacks.measure.device import CudaWait, GpuProbe, cuda_wait
from intune_callbacks.types import Clock


class Driver:
    """Stands in for the module pynvml."""

    def __init__(self, percent: int = 37, driver: bool = True) -> None:
        self.percent: int | None = percent
        self.driver = driver
        self.asked: list[object] = []

    def nvmlInit(self) -> None:
        if not self.driver:
            raise OSError("no driver")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        self.asked.append(index)
        return ("gpu", index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        self.asked.append(uuid)
        return ("gpu", uuid)

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any:
        if self.percent is None:
            raise OSError("not supported")
        return SimpleNamespace(gpu=self.percent)


def probe(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, device: int = 0, visible: str | None = None
) -> GpuProbe:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return GpuProbe(device, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def test_utilisation_is_a_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch, Driver(percent=37)).read() == 0.37


def test_without_package_or_driver_there_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch, None).read() is None  # import raises ImportError
    assert probe(monkeypatch, Driver(driver=False)).read() is None


@pytest.mark.parametrize(
    ("device", "visible", "asked"),
    [(1, None, 1), (1, "", 1), (1, "6, 3", 3), (0, "GPU-5f3c", "GPU-5f3c"), (0, "MIG-77", "MIG-77")],
)
def test_the_device_is_the_one_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, device: int, visible: str | None, asked: object
) -> None:
    driver = Driver()
    probe(monkeypatch, driver, device, visible)
    assert driver.asked == [asked]


def test_a_device_that_is_not_there_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch, Driver(), device=3, visible="0,1").read() is None


def test_a_device_that_does_not_tell_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    gpu = probe(monkeypatch, driver)
    driver.percent = None
    assert gpu.read() is None
    driver.percent = 50
    assert gpu.read() is None


class Gpu:
    """A stream that works off kernels in order; the host runs ahead of it until it waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy_until_s = 0.0
        self.visible = True
        self.broken = False

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now_s)

    def kernel(self, seconds: float) -> None:
        self.busy_until_s = max(self.busy_until_s, self.now_s) + seconds

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.done_s: float | None = None

    def record(self) -> None:
        if self.gpu.broken:
            raise RuntimeError("CUDA error")
        self.done_s = max(self.gpu.now_s, self.gpu.busy_until_s)

    def query(self) -> bool:
        assert self.done_s is not None
        return self.done_s <= self.gpu.now_s

    def elapsed_time(self, end_event: FakeEvent) -> float:
        # As CUDA: asking before both are done is an error.
        assert self.query()
        assert end_event.query()
        assert self.done_s is not None
        assert end_event.done_s is not None
        return 1000.0 * (end_event.done_s - self.done_s)


def step(gpu: Gpu, wait: CudaWait, *, kernel_s: float, host_s: float, fetch_s: float) -> None:
    gpu.kernel(kernel_s)
    gpu.now_s += host_s
    wait.fetch_begin()
    gpu.now_s += fetch_s
    wait.fetch_end()


@pytest.mark.parametrize(
    ("kernel_s", "host_s", "fetch_s", "exposed_s"),
    [
        (5.0, 0.0, 3.0, 0.0),  # the GPU still works when the batch comes: no stall
        (1.0, 0.0, 3.0, 2.0),  # idle for the last 2 s of the fetch
        (1.0, 4.0, 3.0, 3.0),  # idle since long, but only the fetch is the data's fault
        (3.0, 2.0, 3.0, 2.0),
        (2.75, 0.0, 3.0, 0.25),
        (1.0, 4.0, 0.0, 0.0),
    ],
)
def test_exposed_wait_of_one_fetch(kernel_s: float, host_s: float, fetch_s: float, exposed_s: float) -> None:
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    step(gpu, wait, kernel_s=kernel_s, host_s=host_s, fetch_s=fetch_s)
    assert wait.read() == pytest.approx(exposed_s)


def test_exposed_wait_adds_up_over_steps() -> None:
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    for _ in range(100):
        step(gpu, wait, kernel_s=1.0, host_s=0.5, fetch_s=1.5)
    assert wait.read() == pytest.approx(100 * 1.0)


def test_a_host_that_runs_ahead_exposes_nothing() -> None:
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    for _ in range(100):  # the host waits half of its time, the GPU never does
        step(gpu, wait, kernel_s=2.1, host_s=1.0, fetch_s=1.0)
    assert wait.read() == 0.0


def test_a_gap_that_is_not_over_is_read_later() -> None:
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    gpu.kernel(1.0)
    wait.fetch_begin()
    gpu.now_s += 3.0
    gpu.kernel(0.5)  # another stream user got in before the start event: it is done at 3.5 s
    wait.fetch_end()
    assert wait.read() == 0.0
    gpu.now_s += 1.0
    assert wait.read() == pytest.approx(2.5)


def test_two_fetches_in_a_row_count_once_each() -> None:
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    step(gpu, wait, kernel_s=1.0, host_s=0.0, fetch_s=3.0)
    wait.fetch_begin()
    gpu.now_s += 4.0
    wait.fetch_end()
    assert wait.read() == pytest.approx(2.0 + 4.0)


def test_an_end_without_a_begin_is_ignored() -> None:
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    wait.fetch_end()
    gpu.now_s += 3.0
    wait.fetch_end()
    assert wait.read() == 0.0


@pytest.mark.parametrize("together", [False, True])
def test_of_short_steps_a_random_part_is_measured(together: bool) -> None:
    """Every fourth batch is waited for, as with four workers: no stride may meet only those, or only the others."""
    gpu, made = Gpu(), []

    def event() -> FakeEvent:
        made.append(gpu.now_s)
        return gpu.event()

    wait = CudaWait(event, gpu.clock())
    exposed_s = 0.0
    for number in range(40_000):
        fetch_s = 0.003 if number % 4 == 0 else 0.00001
        skipped = together and wait.skips > 0
        gpu.kernel(0.0002)
        if skipped:
            gpu.now_s += fetch_s
            wait.skip(1, fetch_s)
        else:
            wait.fetch_begin()
            gpu.now_s += fetch_s
            wait.fetch_end()
        exposed_s += max(0.0, fetch_s - 0.0002)
        gpu.now_s += 0.0002
    assert wait.read() == pytest.approx(exposed_s, rel=0.05)
    # Each that is measured takes an event or two.
    assert 50 * gpu.now_s < len(made) < 400 * gpu.now_s


@pytest.mark.parametrize("step_s", [0.002, 0.02])
def test_where_calls_of_cuda_are_slow_fewer_fetches_are_measured(step_s: float) -> None:
    gpu, calls, exposed_s = Gpu(), 0, 0.0

    class SlowEvent(FakeEvent):
        def record(self) -> None:
            nonlocal calls
            calls, gpu.now_s = calls + 1, gpu.now_s + 0.0005
            super().record()

    wait = CudaWait(lambda: SlowEvent(gpu), gpu.clock())
    for number in range(20_000):
        gpu.now_s += step_s / 2
        wait.fetch_begin()
        gpu.now_s += step_s if number % 4 == 0 else 0.0
        wait.fetch_end()
        exposed_s += step_s if number % 4 == 0 else 0.0
    assert calls * 0.0005 < 0.02 * gpu.now_s
    assert wait.read() == pytest.approx(exposed_s, rel=0.1)


@pytest.mark.parametrize("kernel_s", [0.001, 0.004])
def test_each_second_tells_of_few_long_fetches_among_many_short_ones(kernel_s: float) -> None:
    """Storage that stalls for half a second every 256 steps: the GPU waits for it, or has as much work queued."""
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    wrong_s, before = [], (0.0, 0.0)
    exposed_s = 0.0
    for number in range(40_000):
        gpu.kernel(kernel_s)
        gpu.now_s += 0.001
        begin_s = gpu.now_s
        wait.fetch_begin()
        gpu.now_s += 0.5 if number % 256 == 128 else 0.00001
        wait.fetch_end()
        exposed_s += max(0.0, gpu.now_s - max(begin_s, gpu.busy_until_s))
        if gpu.now_s - before[0] > 3.0:
            wrong_s.append((wait.read() or 0.0) - before[1] - exposed_s)
            before, exposed_s = (gpu.now_s, wait.read() or 0.0), 0.0
    assert len(wrong_s) > 20
    assert max(abs(one) for one in wrong_s[1:]) < 0.1  # of some two seconds


def test_a_cuda_error_ends_the_measurement_silently() -> None:
    gpu = Gpu()
    wait = CudaWait(gpu.event, gpu.clock())
    step(gpu, wait, kernel_s=1.0, host_s=0.0, fetch_s=3.0)
    gpu.broken = True
    step(gpu, wait, kernel_s=1.0, host_s=0.0, fetch_s=3.0)
    assert wait.read() is None
    gpu.broken = False
    step(gpu, wait, kernel_s=1.0, host_s=0.0, fetch_s=3.0)
    assert wait.read() is None


def test_cuda_wait_needs_a_torch_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert cuda_wait() is None
    gpu = Gpu()
    state = {"available": False, "initialised": False}
    cuda = SimpleNamespace(
        is_available=lambda: state["available"],
        is_initialized=lambda: state["initialised"],
        Event=lambda enable_timing: gpu.event() if enable_timing else None,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert cuda_wait() is None
    state["available"] = True
    assert cuda_wait() is None  # creating a CUDA context is not ours to do
    state["initialised"] = True
    wait = cuda_wait(gpu.clock())
    assert wait is not None
    step(gpu, wait, kernel_s=1.0, host_s=0.0, fetch_s=3.0)
    assert wait.read() == pytest.approx(2.0)
