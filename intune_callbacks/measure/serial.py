"""What does one item at a time: a stage that has no workers, in front of those that have some or behind them."""

from __future__ import annotations

from intune_callbacks.measure.advice import PROCESSES, PYDATASET
from intune_callbacks.measure.evidence import Cause, Evidence
from intune_callbacks.measure.measured import Measured
from intune_callbacks.measure.predict import OWN_PROCESSES, limiting
from intune_callbacks.measure.verdict import is_held_up, is_starved
from intune_callbacks.types import Hint, Stage
from intune_callbacks.words import moment, percent

__all__ = ["feeds", "serial", "without_workers"]

ONE_CPU = (0.85, 1.1)
"""CPUs that threads use together where the GIL lets one run at a time. A choice: one, as exactly as windows show it."""
THREADS = {"ParallelMapper(": "method='process'", PYDATASET: PROCESSES}
"""How the knobs of stages begin whose workers may be threads, and how the user writes processes there."""


def serial(seen: Measured, known: Evidence, stage: Stage) -> Cause | None:
    """Return the reason where what limits does one item at a time: the stage, what feeds it or what comes behind it."""
    name, rate = repr(stage.name), seen.rates.get(stage.name)
    if rate is None:
        return None
    batch_s = rate.items_per_batch * rate.service_s
    if stage.sequential or (stage.high <= 1 and stage.kind != "io"):  # a longer cycle reads more files at once
        each = f"{name} takes {moment(batch_s)} for each batch and does one item at a time"
        return Cause("serial", stage.name, f"{each}: only a cheaper {name} helps")
    if is_starved(rate):
        idle = f"the workers of {name} stand idle {percent(rate.starved_frac)} of the time"
        before = without_workers(seen, known)
        if before:
            return Cause("serial", stage.name, f"{idle}: {before[0].what}", before[0].line)
        source = feeds(seen, known)
        if source is not None:
            return Cause("serial", source.stage, f"{idle}: {source.what}")
        feeds_them = "the sampler" if stage.knob.startswith(OWN_PROCESSES) else "what feeds them"
        return Cause("serial", stage.name, f"{idle}, for {feeds_them} is slower and has no workers of its own")
    if is_held_up(rate) and stage == limiting(seen) and stage.when == "now":  # from outside it is not known
        wait = f"the workers of {name} wait {percent(rate.blocked_frac)} of the time until what they made is taken"
        behind = without_workers(seen, known)
        if behind:
            return Cause("serial", behind[-1].stage, f"{wait}: {behind[-1].what}", behind[-1].line)
        return Cause("serial", "", f"{wait}: what comes behind them is slower and has no workers of its own")
    low, high = ONE_CPU
    processes = next((line for knob, line in THREADS.items() if stage.knob.startswith(knob)), "")
    in_threads = processes and processes not in stage.knob and not rate.worker_bytes and stage.current > 1
    if in_threads and low <= rate.items_per_batch * rate.service_cpu_s / seen.period_s <= high:
        together = (
            f"the {stage.current} threads of {name} keep 1 CPU busy between them, for Python lets one run at a time"
        )
        return Cause("serial", stage.name, f"{together}: processes ({processes}) would use more")
    return None


def feeds(seen: Measured, known: Evidence) -> Hint | None:
    """Return what is said of a source that feeds all stages with one element at a time; None where nothing is."""
    live = {"", *(stage.name for stage in seen.workers)}
    return next((hint for hint in known.hints if hint.kind == "serial" and hint.stage not in live), None)


def without_workers(seen: Measured, known: Evidence) -> list[Hint]:
    """What computes one element at a time where nothing can be set while it runs, and what to write there, in order."""
    live = {"", *(stage.name for stage in seen.workers)}  # without a name it is of all stages
    return [h for h in known.hints if h.kind in ("order", "workers") and h.line and h.stage not in live]
