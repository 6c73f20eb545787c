"""What others do, for N simulated machines at once: nothing, water-filling, Plumber's linear program, AUTOTUNE."""

from __future__ import annotations

import numpy as np

from intune_callbacks.decide.target import fit_memory, windows_for
from intune_callbacks.decide.view import Bools, Floats, Ints, View

__all__ = ["Autotune", "PlumberLP", "Unoptimized", "WaterFilling", "output_time", "water_fill"]

MEMORY_LIMIT = 0.90
"""Share of the memory the guarded ones plan with, windows and buffer full: the same as the shell's."""
BUFFER = 16.0
"""Batches the guarded ones ask the prefetch buffer for."""
LEVEL = 0.25
"""Weight of a new reading in the running mean."""
FIRST_DECISIONS, WORTH = 3, 1.04
"""Water-filling waits so many decisions, then changes where so many times the throughput is promised."""
PLUMBER_DECISIONS = 6
HALVINGS = 40
LONGEST_GAP = 60
"""Decisions between two optimisations of AUTOTUNE: its period doubles up to a minute."""
SWINGS, SLOWER = 5.0, 0.75
"""Full-to-empty swings per decision of a prefetch buffer of b batches, f of it full: ``SWINGS f (1 - f) / b^SLOWER``; a
free parameter, set so that about 8 % of static machines run out of memory, as InTune measured (its section 5.1)."""
FIRST_BUFFER, MOST_BUFFER = 2.0, 512.0


def water_fill(cost_s: Floats, view: View) -> Floats:
    """Return whole workers, one or more per stage and within the budget, that maximise min(workers / cost_s), [N, S].

    Args:
        cost_s: worker seconds for one batch, [N, S].
        view: N pipelines; slots that hold no workers get 0.
    """
    mask, weight = view.workers, np.where(view.workers, view.weight, 0.0)
    cost = np.where(mask, np.maximum(cost_s, 1e-12), 0.0)

    def enough(rate: Floats) -> Floats:
        return np.where(mask, np.maximum(1.0, np.ceil(cost * rate[:, None] - 1e-9)), 0.0)

    low, high = np.zeros(len(cost)), view.budget / np.maximum((cost * weight).sum(1), 1e-12)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        fits = (enough(middle) * weight).sum(1) <= view.budget + 1e-9
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    n = enough(low)
    while True:
        free = view.budget - (n * weight).sum(1)
        slowest = np.where((weight > 0.0) & (weight <= free[:, None] + 1e-9), cost / np.maximum(n, 1.0), 0.0)
        rows = np.flatnonzero(slowest.max(1) > 0.0)
        if not len(rows):
            return n
        n[rows, slowest[rows].argmax(1)] += 1.0


def output_time(work_s: Floats, workers: Floats) -> Floats:
    """Return the seconds AUTOTUNE's model expects between two batches, [...].

    A stage takes its own time over its workers plus the wait for its input, an M/M/1/k queue of as many places as it
    has workers: the input's time, times the probability that the queue is empty. ``AsyncRatio::OutputTimeLocked`` and
    ``Node::ComputeWaitTime`` of https://github.com/tensorflow/tensorflow/blob/v2.11.0/tensorflow/core/framework/model.cc

    Args:
        work_s: worker seconds for one batch, [..., S].
        workers: 0 where there is no stage, [..., S].
    """
    each_s = np.where(workers > 0.0, work_s / np.maximum(workers, 1.0), 0.0)
    # What consumes an input is the stage and all behind it; the model is taken to be infinitely fast.
    consumer_s = np.cumsum(each_s[..., ::-1], -1)[..., ::-1]
    total_s = each_s[..., 0]
    for i in range(1, each_s.shape[-1]):
        ratio = np.clip(consumer_s[..., i] / np.maximum(total_s, 1e-12), 1e-6, 1e6)
        log, places = np.log(ratio), workers[..., i] + 1.0
        level = np.abs(log) < 1e-6
        rise = np.expm1(np.minimum(places * log, 700.0))
        empty = np.where(level, 1.0 / places, np.expm1(log) / np.where(level, 1.0, rise))
        total_s = np.where(workers[..., i] > 0.0, each_s[..., i] + empty * total_s, total_s)
    return np.asarray(total_s)


class Unoptimized:
    """One worker per stage, whatever happens."""

    def act(self, view: View) -> tuple[Floats, None]:
        """Return the fewest workers; buffers stay as they are."""
        return np.where(view.workers, view.low, view.value), None


class WaterFilling:
    """Spreads the CPUs over the stages in proportion to their measured CPU time, again and again."""

    def __init__(self) -> None:
        self._cost_s: Floats | None = None
        self._decisions = 0
        self._windows = _Windows()

    def act(self, view: View) -> tuple[Floats, Floats]:
        """Return the new spread where it promises 4 % more or the CPUs are overcommitted."""
        now_s = _cpu_cost(view)
        self._cost_s = now_s if self._cost_s is None else self._cost_s + LEVEL * (now_s - self._cost_s)
        self._decisions += 1
        wanted = water_fill(self._cost_s, view)
        gain = _slowest(self._cost_s, view.value, view) / np.maximum(_slowest(self._cost_s, wanted, view), 1e-12)
        over = np.where(view.workers, view.value * view.weight, 0.0).sum(1) > view.budget + 1e-9
        change = ((gain > WORTH) & (self._decisions > FIRST_DECISIONS)) | over
        return self._windows.guarded(view, np.where(change[:, None], wanted, view.value))


class PlumberLP:
    """Plumber: the linear program over measured rates, solved once; launched anew when the machine changes.

    ``max X with X cost_i <= n_i, sum(weight_i n_i) <= cpus``, which water-filling solves; M. Kuchnik et al., "Plumber:
    Diagnosing and Removing Performance Bottlenecks in Machine Learning Data Pipelines", MLSys 2022. A new launch costs
    nothing here; in truth it restarts the training.
    """

    def __init__(self) -> None:
        self._launch = _Launch(on_resize=True)
        self._total_s: Floats | float = 0.0
        self._windows = _Windows()

    def act(self, view: View) -> tuple[Floats, Floats]:
        """Return the even split while measuring, the solution once, then what is there."""
        new = self._launch.update(view)
        self._total_s = np.where(new[:, None], 0.0, self._total_s) + _cpu_cost(view)
        even = np.maximum(1.0, np.floor(view.cpus / np.maximum(view.workers.sum(1), 1)))
        wanted = np.where(new[:, None], even[:, None], view.value)
        solved = self._launch.age == PLUMBER_DECISIONS
        if solved.any():
            wanted = np.where(solved[:, None], water_fill(self._total_s, view), wanted)
        return self._windows.guarded(view, wanted)


class Autotune:
    """As tf.data's AUTOTUNE: hill climbing on its model of the pipeline, and a prefetch buffer that doubles.

    The CPU budget is read at launch. A climb starts from one worker per stage and ends when `output_time` is the total
    work over the budget. The buffer doubles each time it was full and is found empty, and nothing looks at the memory:
    ``prefetch_autotuner.cc`` beside the model's source. Stages divide their time by their workers, for all it knows.

    Args:
        seed: of the swings of the buffer.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._launch = _Launch(on_resize=False)
        self._budget, self._buffer, self._due, self._gap = (np.zeros(0) for _ in range(4))
        self._total_s, self._workers = np.zeros((0, 0)), np.zeros((0, 0))

    def act(self, view: View) -> tuple[Floats, None]:
        """Return what the last climb found, and the buffer."""
        first, new = not len(self._budget), self._launch.update(view)
        if first:
            self._budget, self._buffer, self._due, self._gap = (np.zeros(len(new)) for _ in range(4))
            self._total_s, self._workers = np.zeros(view.value.shape), view.value.copy()
        self._budget = np.where(new, view.cpus, self._budget)
        self._buffer, self._gap = np.where(new, FIRST_BUFFER, self._buffer), np.where(new, 1.0, self._gap)
        self._due = np.where(new, 1.0, self._due)
        self._workers = np.where(new[:, None], view.value, self._workers)
        self._total_s = np.where(new[:, None], 0.0, self._total_s) + view.work_s
        rows = np.flatnonzero((self._launch.age >= self._due) & view.alive)
        if len(rows):
            mean_s = np.where(view.workers, self._total_s, 0.0)[rows] / (self._launch.age[rows, None] + 1.0)
            self._workers[rows] = _climb(mean_s, view.workers[rows], self._budget[rows])
            self._gap[rows] = np.minimum(2.0 * self._gap[rows], LONGEST_GAP)
            self._due[rows] = self._launch.age[rows] + self._gap[rows]
        fill = np.where(view.is_buffer, view.fill, 0.0).max(1)
        swings = SWINGS * fill * (1.0 - fill) / self._buffer**SLOWER
        doubled = view.alive & (self._rng.random(len(new)) < swings)
        self._buffer = np.where(doubled, np.minimum(2.0 * self._buffer, MOST_BUFFER), self._buffer)
        return np.where(view.workers, self._workers, np.where(view.is_buffer, self._buffer[:, None], view.value)), None


class _Launch:
    """Counts the decisions since each pipeline was launched: at first, after running out of memory, or on a resize."""

    def __init__(self, *, on_resize: bool) -> None:
        self._on_resize = on_resize
        self._cpus: Floats = np.zeros(0)
        self._alive: Bools = np.zeros(0, bool)
        self.age: Ints = np.zeros(0, int)

    def update(self, view: View) -> Bools:
        """Take note of a decision and return the pipelines that begin with it, [N]."""
        if not len(self.age):
            new = np.ones(len(view.cpus), bool)
            self.age = np.zeros(len(new), int)
        else:
            new = view.alive & ~self._alive
            new |= (view.cpus != self._cpus) & self._on_resize
        self.age = np.where(new, 0, self.age + 1)
        self._cpus, self._alive = view.cpus, view.alive
        return new


def _climb(work_s: Floats, mask: Bools, budget: Floats) -> Floats:
    """Give one worker at a time to the stage that helps `output_time` most, until it is the work over the budget."""
    workers, goal_s = np.where(mask, 1.0, 0.0), work_s.sum(1) / budget
    live = np.flatnonzero(output_time(work_s, workers) >= goal_s)
    one = np.eye(mask.shape[1])
    while len(live):
        tried = workers[live, None] + one
        times = output_time(work_s[live, None], tried)
        times = np.where(mask[live] & (workers[live] < budget[live, None]), times, np.inf)
        best, rows = times.argmin(1), np.arange(len(live))
        found_s = times[rows, best]
        more = np.isfinite(found_s)
        workers[live[more], best[more]] += 1.0
        live = live[more & (found_s >= goal_s[live])]
    return workers


def _cpu_cost(view: View) -> Floats:
    """Worker seconds for one batch, waits for disks included and waits for each other not."""
    return np.where(view.workers, view.work_s * view.cpu_share / np.maximum(view.weight, 1e-3), 0.0)


def _slowest(cost_s: Floats, workers: Floats, view: View) -> Floats:
    return np.asarray(np.where(view.workers, cost_s / np.maximum(workers, 1.0), 0.0).max(1))


class _Windows:
    """Windows as wide as the irregularity asks for, a prefetch buffer, and the guard over the memory of it all.

    These are not these baselines' ideas: with them only the choice of workers is left to compare.
    """

    def __init__(self) -> None:
        self._cv: Floats | None = None

    def guarded(self, view: View, workers: Floats) -> tuple[Floats, Floats]:
        """Return values and windows, as much of them as fits, [N, S]."""
        self._cv = view.cv if self._cv is None else self._cv + LEVEL * (view.cv - self._cv)
        value = np.where(view.workers, np.clip(workers, view.low, view.high), view.value)
        value = np.where(view.mask & view.is_buffer, BUFFER, value)
        return fit_memory(view, value, windows_for(value, self._cv, view), MEMORY_LIMIT)
