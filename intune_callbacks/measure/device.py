"""The GPU: how busy it is, and how long it stood idle for want of data. The only monitor that touches torch or NVML."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from statistics import median
from typing import Any, Protocol

from intune_callbacks.types import Clock

__all__ = ["CudaWait", "Event", "GpuProbe", "cuda_wait"]


EVERY_S, COST_SHARE, COSTS, SHORTEST_S, KEEP, LATELY_S = 0.005, 0.01, 9, 1e-5, 0.9, 0.1
"""On average one fetch in so many seconds is measured: two hundred a second tell a share. Or fewer, for it takes five
calls of CUDA, 60 us on one virtual machine and several times that on another: no more than a hundredth of the time goes
there, by the median of the last nine. No step is shorter than the fourth number. How long one takes is a mean of the
last ten or so that were measured; which share of a wait is exposed, of so many seconds of it that were measured last,
or of a single longer fetch."""


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
            # The old package of this name warns that nvidia-ml-py has taken it over, and is right: to filter that would
            # have all warnings of the user's that were shown once come again.
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

    An event is recorded behind all work that is queued when the loop asks for its next batch. If it is not done when
    the fetch returns, the GPU was busy all along: no stall, however long the fetch took. If it is done, a second event
    recorded at that moment ends the idle gap, and the part of the gap that lies inside the fetch is the exposed wait
    (the name of Ray Data's panel). The gap is read a step or more later, once the second event is done; nothing here
    ever synchronizes.

    Where steps are short or CUDA's calls slow, some fetches are measured, drawn at random: which are measured must not
    depend on how long they take. Of what was waited in the others the same share is exposed. How long that was is
    known: were a fetch that is measured to stand for so many others, a few long ones among many short would make the
    sum a matter of luck.

    An error of CUDA ends the measurement and is left to the training to report.

    Args:
        make_event: returns a new event with timing enabled.
        clock: its `wall` times the fetch; the real one by default.

    Attributes:
        skips: fetches that need not be told one by one.
    """

    def __init__(self, make_event: Callable[[], Event], clock: Clock | None = None) -> None:
        self._make_event: Callable[[], Event] | None = make_event
        self._now = (clock or Clock()).wall
        self._random = Random(0)
        self._fetch_begin_s: float | None = None
        self._work_end: Event | None = None
        self._gaps: deque[tuple[Event, Event, float]] = deque(maxlen=64)
        self._exposed_wait_s = self._skipped_s = 0.0
        self.skips = 0
        self._fetches, self._last_s = 1, self._now()
        self._begin_cost_s, self._costs_s = 0.0, deque[float](maxlen=COSTS)
        # Seconds and steps; seconds that were waited in measured fetches, and exposed ones among them.
        self._lately, self._measured = (0.0, 0.0), (0.0, 0.0)

    def fetch_begin(self) -> None:
        """The loop asks for the next batch: all work of the last one is queued, and of what else it did since."""
        if self._make_event is None:
            return
        now_s = self._now()
        if not self.skips:
            try:
                self._work_end = self._work_end or self._make_event()
                self._work_end.record()
            except Exception:
                self._make_event = None
            begin_s, now_s = now_s, self._now()
            self._begin_cost_s = now_s - begin_s
        self._fetch_begin_s = now_s

    def fetch_end(self) -> None:
        """The loop has its batch."""
        begin_s, self._fetch_begin_s = self._fetch_begin_s, None
        if self._make_event is None or begin_s is None:
            return
        now_s = self._now()
        if self.skips or self._work_end is None:
            self.skip(1, now_s - begin_s)
            return
        try:
            self._collect()
            if self._work_end.query():
                start = self._make_event()
                start.record()
                self._gaps.append((self._work_end, start, now_s - begin_s))
                self._work_end = None
            else:
                self._add(now_s - begin_s, 0.0)
        except Exception:
            self._make_event = None
        self._costs_s.append(self._begin_cost_s + self._now() - now_s)
        self._draw(self._step_s(now_s))

    def _step_s(self, now_s: float) -> float:
        """Return the seconds of a step, of the last few that were measured and all between them."""
        seconds, steps = self._lately
        self._lately = KEEP * seconds + now_s - self._last_s, KEEP * steps + self._fetches
        self._last_s = now_s
        return max(SHORTEST_S, self._lately[0] / self._lately[1])

    def _draw(self, step_s: float) -> None:
        """Draw how many fetches to skip, so that each is measured with the same probability."""
        share = min(1.0, step_s / max(EVERY_S, median(self._costs_s) / COST_SHARE))
        self.skips = 0 if share >= 1.0 else int(math.log(1.0 - self._random.random()) / math.log(1.0 - share))
        self._fetches = self.skips + 1

    def skip(self, fetches: int, waited_s: float) -> None:
        """So many fetches were not measured, in which the loop waited so long."""
        self.skips = max(0, self.skips - fetches)
        self._skipped_s += waited_s

    def read(self) -> float | None:
        """Return the exposed wait so far in seconds, the last gaps perhaps still missing; None after a CUDA error."""
        if self._make_event is None:
            return None
        try:
            self._collect()
        except Exception:
            self._make_event = None
            return None
        waited_s, exposed_s = self._measured
        if waited_s > 0.0:
            self._exposed_wait_s += self._skipped_s * exposed_s / waited_s
            self._skipped_s = 0.0
        return self._exposed_wait_s

    def _collect(self) -> None:
        while self._gaps and self._gaps[0][1].query():
            end, start, fetch_s = self._gaps.popleft()
            # Gap and fetch end at the same moment, so the shorter of the two is what they share.
            self._add(fetch_s, min(max(end.elapsed_time(start) / 1000.0, 0.0), fetch_s))

    def _add(self, waited_s: float, exposed_s: float) -> None:
        """Take a fetch that was measured."""
        self._exposed_wait_s += exposed_s
        keep = LATELY_S / (LATELY_S + waited_s)
        self._measured = keep * self._measured[0] + waited_s, keep * self._measured[1] + exposed_s


def cuda_wait(clock: Clock | None = None) -> CudaWait | None:
    """Return a `CudaWait` for the current CUDA device, None when the process does not train on CUDA."""
    torch = sys.modules.get("torch")  # whoever trains with torch has imported it
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return CudaWait(lambda: torch.cuda.Event(enable_timing=True), clock)
