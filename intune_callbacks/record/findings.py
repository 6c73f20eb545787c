"""What a run has shown: whether it got slower, why it is not faster, and what to do about it; the end of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from intune_callbacks.guard.guard import ALARM, RESTORED
from intune_callbacks.measure.advice import to_set
from intune_callbacks.measure.cause import advice, causes, first_sentence
from intune_callbacks.measure.evidence import Cause, Evidence, measured_hints, tried
from intune_callbacks.measure.measured import Measured
from intune_callbacks.measure.outgrow import outgrow
from intune_callbacks.measure.predict import LEAST_GAIN, Advice
from intune_callbacks.measure.verdict import COMPUTE_BOUND, FED, INPUT_BOUND
from intune_callbacks.record.fingerprint import versions
from intune_callbacks.record.report import Report, Side, Span
from intune_callbacks.words import SLOWER, amount, changed, count, moment, ratio, with_window

__all__ = ["build_report"]

LEAST_LOSS, ERRORS = 0.03, 2.0
"""Share of the throughput, and standard errors of both sides, by which a changed run is called slower. A choice: a
machine changes by some percent, and of normal errors 5 % are larger."""
MOSTLY = 0.5
"""Share of the time a batch takes longer from which on that is the model's. A choice: the larger part."""
LAST_DECISIONS = 2
"""Decisions at the end whose vetoes are a cause: what the guard refuses now, not what it once refused."""
OF_NUMBERS = ("storage", "workers", "loader", "startup")
"""Causes whose remedy is in the advised numbers."""


def build_report(
    summary: Report, *, mode_source: str = "default", note: str | None = None, settings: Mapping[str, Any] | None = None
) -> Report:
    """Return the report of one run: what was measured, and what that has shown.

    Args:
        summary: what `Tuner.summary()` gave.
        mode_source: where the mode came from: ``INTUNE_MODE``, ``command line``, ``argument``, ``recipe`` or
            ``default``.
        note: why nothing can be tuned and what would change that, if so.
        settings: each value of the tuner and where it came from; see `intune_callbacks.config.sourced`.
    """
    known = _evidence(summary)
    before, after = (_measured(side.measured, known.whole) for side in (summary.before, summary.after))
    first = causes(_told(before, summary.before), _then(summary, known))
    last = causes(_told(after, summary.after), known)
    advised = _advised(summary, _advice(summary, after, known), last, after)
    moved = {row.name: row.current for row in summary.stages if row.first not in (None, row.current)}
    is_cpu = bool(last) and last[0].kind == "cpu"
    slower, by_itself = _slower(summary, before, after)
    if slower:
        verdict, why, cause, do, advised = SLOWER, slower, first_sentence(last), _remedy(summary), None
    else:
        verdict, do = summary.after.verdict, _next(summary, note, first, last, advised)
        why = "; ".join(filter(None, (summary.before.why, by_itself, _afterwards(summary))))
        cause = first_sentence(first) if summary.before.verdict == "input-bound" else ""
    return replace(
        summary,
        verdict=verdict,
        why=why,
        cause=cause,
        next=do,
        advice=advised,
        hints=measured_hints(summary.hints, (advised or {}).get("allocation", {}) | moved, last),
        causes=tuple(replace(one, gain=round(one.gain, 3)) for one in last),
        outgrow=outgrow(after, known.share) if after is not None and is_cpu else None,
        before=replace(summary.before, measured=None),
        after=replace(summary.after, measured=None, brought=None),
        memory=replace(
            summary.memory,
            before_bytes=summary.before.memory_used_bytes,
            after_bytes=summary.after.memory_used_bytes,
            limit_bytes=summary.after.memory_limit_bytes,
        ),
        mode_source=mode_source,
        settings=settings or {},
        versions=versions(),
    )


def _measured(seen: Measured | None, whole: Mapping[str, Any]) -> Measured | None:
    if seen is None or not whole.get("steps"):
        return seen
    seam_s = whole.get("seam_s", 0.0) / whole["steps"]
    # The windows that are remembered may not hold the start of an epoch; that of workers that live on they never do.
    is_out = not seen.seam_s or any(stage.once_s for stage in seen.stages)
    return replace(seen, run_batches=whole["steps"], seam_s=max(seen.seam_s, seam_s) if is_out else seen.seam_s)


def _told(seen: Measured | None, side: Side) -> Measured | None:
    """Few steps are enough to say why a change was made, but not to call the run slower, or to promise a gain."""
    return replace(seen, verdict=side.verdict, stage=side.stage) if seen is not None else None


def _evidence(summary: Report) -> Evidence:
    whole, last = asdict(summary.whole or Span()), summary.decisions[-LAST_DECISIONS:]
    over = max((i for i, one in enumerate(last) if one.get("reason", "").startswith(RESTORED)), default=-1)
    return Evidence(
        hints=summary.hints,
        whole={"steps": summary.steps} | {key: value for key, value in whole.items() if value is not None},
        tried=tried(summary.decisions),
        vetoes=tuple(veto for decision in last[over + 1 :] for veto in decision["vetoes"]),
        first={row.name: row.first for row in summary.stages if row.first is not None},
        order=summary.settings.get("order", {}).get("value", "same"),
    )


def _afterwards(summary: Report) -> str:
    """Why a run that was changed does not wait any more, where the share that is told beside it looks otherwise."""
    side = summary.after
    least = {"compute-bound": COMPUTE_BOUND, "balanced": INPUT_BOUND}.get(side.verdict, math.inf)
    is_told = summary.changes and side.exposed_wait_frac is None and (side.wait_frac or 0.0) >= least
    return f"afterwards {side.why}" if is_told else ""


def _then(summary: Report, known: Evidence) -> Evidence:
    """Before the first change nothing was tried; what was tried in vain later is a reason where the run went back."""
    kept = {row.name for row in summary.stages if row.first is not None and row.current > row.first}
    return replace(known, tried={name: brought for name, brought in known.tried.items() if name not in kept})


def _advice(summary: Report, seen: Measured | None, known: Evidence) -> Advice:
    if seen is not None and summary.mode == "tune" and summary.changes:
        # What could be changed while it ran was tried: there the measurements go before the prediction.
        stages = tuple(replace(s, high=s.current) if s.when == "now" else s for s in seen.stages)
        seen = replace(seen, stages=stages)
    return advice(seen, known)


def _advised(summary: Report, found: Advice, last: Sequence[Cause], seen: Measured | None) -> dict[str, Any] | None:
    rows = [asdict(row) for row in summary.stages]
    lines, words = to_set(found.allocation, rows, found.persistent) if found.gain > 1.0 else ([], [])
    gain = found.gain
    for cause in last:
        if cause.line and cause.gain > 1.0 and (cause.kind not in OF_NUMBERS or not summary.stages):
            lines, gain = [*lines, *cause.line.splitlines()], gain * cause.gain
    if gain < LEAST_GAIN or not (lines or words) or seen is None:
        return None
    gain = min(gain, (seen.period_s + seen.seam_s) / seen.model_s)  # no input is faster than the model
    return {"allocation": found.allocation, "gain": round(gain, 3), "lines": lines, "words": words}


def _slower(summary: Report, before: Measured | None, after: Measured | None) -> tuple[str, str]:
    """Say that the run lost speed beyond what chance explains; nothing where it did not.

    Returns:
        What was done to it and, where that was not why, what else is known of it; one of them at least is empty.
    """
    first, last = summary.before.throughput_samples_per_s, summary.after.throughput_samples_per_s
    if not (summary.changes and first and last and before and after) or "too short" in (before.verdict, after.verdict):
        return "", ""
    got, brought = last / first, summary.after.brought
    least = 1.0 - max(LEAST_LOSS, ERRORS * math.hypot(before.noise, after.noise))
    if got >= least:
        return "", ""
    shown = [row for row in summary.stages if row.window_of is None] or summary.stages
    then, now = ({row.name: getattr(row, which) for row in shown} for which in ("first", "current"))
    lost_s, model_s = after.period_s - before.period_s, after.model_s - before.model_s
    # Workers can slow the model down where there are more of them than before, and no CPU is left for it.
    is_more = any(row.first is not None and row.current > row.first for row in summary.stages if row.unit == "workers")
    may_crowd = is_more and (after.cpus_idle is None or after.cpus_idle < 1.0)
    by_model = model_s > MOSTLY * lost_s > 0.0 and not may_crowd
    # Numbers that are back do harm only where workers that were taken away did not come back with them.
    is_whole = then == now and not _was_less(summary)
    has_fewer = after.cpus < (1.0 - LEAST_LOSS) * before.cpus
    if (has_fewer or by_model or is_whole or (brought is not None and brought >= least)) and not _was_cut(summary):
        why = ""
        if has_fewer:
            why = f": it had {amount(after.cpus)} CPUs, and {amount(before.cpus)} before"
        elif model_s > MOSTLY * lost_s > 0.0:
            why = f": the model takes {moment(after.model_s)} for each batch, {moment(before.model_s)} before"
        return "", f"later it became slower, but not by a change{why}"
    did = f"InTune set {changed(then, now)}" if then != now else "InTune went back to the numbers of the start"
    rate = f"{amount(last)} samples/s after {amount(first)} before ({ratio(got)})"
    return f"{rate}: {did}, after {count(summary.changes, 'change')}", ""


def _was_less(summary: Report) -> bool:
    """Return whether some stage had less than at the start meanwhile."""
    first = {row.name: row.first for row in summary.stages if row.first is not None}
    changes = (one["after"] for one in summary.decisions if one["applied"])
    return any(value < first.get(name, value) for after in changes for name, value in after.items())


def _was_cut(summary: Report) -> bool:
    """Return whether something is smaller at the end than at the start, and a memory alarm's cut is still in force."""
    is_less = any(row.first is not None and row.current < row.first for row in summary.stages)
    reasons = [one["reason"] for one in summary.decisions if one["applied"]]
    cuts = [reason for reason in reasons if reason.startswith((ALARM, RESTORED))]
    return is_less and bool(cuts) and cuts[-1].startswith(ALARM)


def _remedy(summary: Report) -> str:
    if _was_cut(summary):
        return "memory was short: make room in it or, where what fills it does no harm, raise memory_soft_limit"
    moved = {row.name: row.first for row in summary.stages if row.first != row.current and not row.window_of}
    keep = f"keep your own numbers ({', '.join(f'{name} {n}' for name, n in moved.items())})" if moved else ""
    leave = "run with mode='observe', which changes nothing"
    return f"{keep}: {leave}" if keep else f"{leave}, and see whether it is faster: then please report this pipeline"


def _next(
    summary: Report, note: str | None, first: Sequence[Cause], last: Sequence[Cause], advised: dict[str, Any] | None
) -> str:
    verdict, mode = summary.after.verdict, summary.mode
    # What feeds a live stage, and the line that gives it workers; no gain can be promised.
    fed = f"\n{last[0].line}" if last and last[0].kind == "serial" and last[0].line else ""
    if note:
        if verdict == "compute-bound" and advised is None:
            return f"nothing to change now; should the input limit: {note}"
        return "\n".join([note, *_pasted(advised)])
    if summary.frozen:
        return "the allocation stayed where it was; please report the error above"
    if verdict == "too short":
        if not summary.changes:
            return "train longer: nothing can be said about so few steps"
        if summary.before.verdict in FED:
            return "keep your own numbers: too few steps came behind the last change to say what it brought"
        return "train longer: too few steps came behind the last change to say what it brought"
    if advised is None and (mode != "tune" or not summary.changes):
        return _unchanged(summary, last, fed)
    # What is left alone, and workers that shall live on, `tune` does not set.
    alone = {row.name for row in summary.stages if row.when == "user"}
    may_tune = advised is None or any(name not in alone for name in advised["allocation"])
    if mode == "observe":
        do = "run with mode='tune', or mode='advise' to see what it would do"
        return do if may_tune else "run with mode='advise' to see what to write"
    if advised is not None:
        return "\n".join(_pasted(advised, ", or let mode='tune' do it" if mode == "advise" and may_tune else ""))
    if verdict == "input-bound":
        stage = summary.after.stage
        why = first_sentence(last)
        if [(one.kind, one.stage) for one in (*first[:1], *last[:1])] == [("cpu", stage)] * 2:  # the card has said so
            why = f"more CPUs or a cheaper {stage!r} would help, other numbers would not"
        return f"{repr(stage) if stage else 'the input'} still limits{': ' if why else ''}{why}{fed}"
    return _found(summary)


def _found(summary: Report) -> str:
    """Say what to begin the next run with, which is where this one ended."""
    workers = [row for row in summary.stages if row.unit == "workers"]
    if all(row.first == row.current for row in workers):  # else a depth or a window, if any, was changed
        workers = [row for row in summary.stages if row.first != row.current and not row.window_of]
    wide: dict[str | None, int] = {}  # windows follow their workers: told where they alone were changed
    if not workers:
        wide = {row.window_of: row.current for row in summary.stages if row.window_of and row.first != row.current}
        workers = [row for row in summary.stages if row.name in wide]
    if not workers:
        return "nothing to change: the run ended with the numbers it began with"
    told = [f"{row.name} {with_window(row.current, wide.get(row.name))}" for row in workers]
    moved = [row for row in summary.stages if row.first != row.current and (row.window_of in wide or row in workers)]
    lines, words = to_set({row.name: row.current for row in moved}, [asdict(row) for row in summary.stages])
    if not lines:
        return f"start the next run with {', '.join(told)}"
    return "\n".join([f"start the next run with {', and '.join(['what is below', *words])}", *lines])


def _unchanged(summary: Report, last: Sequence[Cause], fed: str) -> str:
    if last and last[0].kind == "shards" and last[0].line:
        return f"paste what is below, or give each worker a shard\n{last[0].line}"
    if fed:
        return f"paste what is below, for {last[0].sentence}{fed}"
    named = {"", *(row.name for row in summary.stages)}  # what is no stage of it says itself what would help
    if last and (
        last[0].kind in ("order", "shards", "startup") or (last[0].kind == "serial" and last[0].stage not in named)
    ):
        return last[0].sentence
    why = "no gain is predicted"
    waits = summary.after.verdict == "input-bound"
    if waits and not any(row.unit == "workers" for row in summary.stages):
        why = "what makes the batches has no number of workers that could be set"
    elif waits and summary.mode != "tune" and not last and (unseen := _unseen(summary)):
        return f"run with mode='tune': what the workers of {', '.join(unseen)} do is measured only there"
    is_full = (seen := summary.after.measured) and seen.cpus_idle is not None and seen.cpus_idle < 1.0
    if last and last[0].kind == "storage" and last[0].gain <= 1.0 and is_full:  # whether they would help, nobody knows
        return f"no gain of more workers can be promised: {last[0].sentence}"
    if last and last[0].kind == "workers" and last[0].gain <= 1.0:  # it says how long they take, and no reason
        return f"nothing to change: no gain of more workers is predicted{' while no CPU is idle' if is_full else ''}"
    return f"nothing to change: {last[0].sentence if last else why}"


def _unseen(summary: Report) -> list[str]:
    """The stages of which no item was seen, as those of a `ParallelMapper` whose workers are processes of its own."""
    measured = summary.after.measured
    seen = {name for name, rate in measured.rates.items() if rate.items} if measured is not None else set()
    return [repr(row.name) for row in summary.stages if row.unit == "workers" and row.current and row.name not in seen]


def _pasted(advised: Mapping[str, Any] | None, instead: str = "") -> list[str]:
    """The lines to paste under a head that says what they promise."""
    if advised is None:
        return []
    words = f"set {', '.join(advised['words'])}" if advised["words"] else ""
    head = ", and ".join([*(["paste what is below"] if advised["lines"] else []), *([words] if words else [])])
    return [f"{head} (expected {ratio(advised['gain'])}){instead}", *advised["lines"]]
