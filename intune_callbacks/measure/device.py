"""The GPU: how busy it is, and how long it stood idle for want of data. The only monitor that touches torch or NVML."""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from intune_callbacks.types import Clock

__all__ = ["CudaWait", "Event", "GpuProbe", "cuda_wait"]


class GpuProbe:
    """Reads one GPU's utilisation from the NVIDIA driver; without driver, GPU or pynvml it reads None.

    Args:
        device: index among the GPUs this process may see, as CUDA counts them.
        environment: where ``CUDA_VISIBLE_DEVICES`` is looked up; the process environment by default.
    """

    def __init__(self, device: int = 0, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._nvml: Any = None
        try:
            with warnings.catch_warnings():
                # The old package of this name warns on import that nvidia-ml-py has taken it over.
                warnings.simplefilter("ignore")
                import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]
            pynvml.nvmlInit()
            self._handle = _handle(pynvml, device, variables.get("CUDA_VISIBLE_DEVICES"))
            self._nvml = pynvml
        except Exception:  # no package, no driver, no such GPU: there is nothing to measure
            return

    def read(self) -> float | None:
        """Return the share of the driver's last sampling period in which a kernel ran, 0..1; None if unknown."""
        if self._nvml is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100.0
        except Exception:  # a GPU that does not tell (MIG, some laptops) will not tell later either
            self._nvml = None
            return None


def _handle(nvml: Any, device: int, visible: str | None) -> Any:
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(device)
    name = visible.split(",")[device].strip()
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


class Event(Protocol):
    """What `CudaWait` needs of ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class CudaWait:
    """Adds up the time the GPU stood idle while the training loop was blocked in the fetch.

    An event is recorded behind each batch's work. If it is not done when the next fetch returns, the GPU was busy all
    along: no stall, however long the fetch took. If it is done, a second event recorded at that moment ends the idle
    gap, and the part of the gap that lies inside the fetch is the exposed wait (the name of Ray Data's panel). The gap
    is read a step or more later, once the second event is done; nothing here ever synchronizes.

    An error of CUDA ends the measurement and is left to the training to report.

    Args:
        make_event: returns a new event with timing enabled.
        clock: its `wall` times the fetch; the real one by default.
    """

    def __init__(self, make_event: Callable[[], Event], clock: Clock | None = None) -> None:
        self._make_event: Callable[[], Event] | None = make_event
        self._now = (clock or Clock()).wall
        self._fetch_begin_s: float | None = None
        self._work_end: Event | None = None
        self._gaps: deque[tuple[Event, Event, float]] = deque(maxlen=64)
        self._exposed_wait_s = 0.0

    def batch_end(self) -> None:
        """All GPU work of a batch is queued; call it again after other GPU work, such as validation."""
        if self._make_event is None:
            return
        try:
            event = self._make_event()
            event.record()
            self._work_end = event
        except Exception:
            self._make_event = None

    def fetch_begin(self) -> None:
        """The loop asks for the next batch."""
        self._fetch_begin_s = self._now()

    def fetch_end(self) -> None:
        """The loop has its batch."""
        begin_s, self._fetch_begin_s = self._fetch_begin_s, None
        if self._make_event is None or self._work_end is None or begin_s is None:
            return
        fetch_s = self._now() - begin_s
        try:
            self._collect()
            if self._work_end.query():
                start = self._make_event()
                start.record()
                self._gaps.append((self._work_end, start, fetch_s))
        except Exception:
            self._make_event = None

    def read(self) -> float | None:
        """Return the exposed wait so far in seconds, the last gaps perhaps still missing; None after a CUDA error."""
        if self._make_event is None:
            return None
        try:
            self._collect()
        except Exception:
            self._make_event = None
            return None
        return self._exposed_wait_s

    def _collect(self) -> None:
        while self._gaps and self._gaps[0][1].query():
            end, start, fetch_s = self._gaps.popleft()
            # Gap and fetch end at the same moment, so the shorter of the two is what they share.
            self._exposed_wait_s += min(max(end.elapsed_time(start) / 1000.0, 0.0), fetch_s)


def cuda_wait(clock: Clock | None = None) -> CudaWait | None:
    """Return a `CudaWait` for the current CUDA device, None when the process does not train on CUDA."""
    torch = sys.modules.get("torch")  # whoever trains with torch has imported it
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return CudaWait(lambda: torch.cuda.Event(enable_timing=True), clock)
