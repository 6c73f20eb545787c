"""What a run has shown: whether it got slower, why it is not faster, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from intune_callbacks.measure.advice import to_set
from intune_callbacks.measure.cause import advice, causes
from intune_callbacks.measure.evidence import Cause, Evidence
from intune_callbacks.measure.measured import Measured
from intune_callbacks.measure.predict import WORTH, Advice
from intune_callbacks.types import Hint
from intune_callbacks.words import SLOWER, amount, changed, count, ratio

__all__ = ["Findings", "as_json", "findings"]

LEAST_LOSS, ERRORS = 0.03, 2.0
RAISED = 1.5
LATELY = 2
OF_NUMBERS = ("storage", "workers", "loader", "startup")
"""Causes whose remedy is in the advised numbers."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What is said of a run.

    Args:
        verdict: the word for the run.
        why: what the training waited for before the first change; of a slower run, what was done to it.
        cause: why that was so, empty where there is nothing to say.
        next: what to do, the first line in words and then what to paste.
        causes: why it is not faster now, what limits first.
        advice: numbers to write: ``allocation``, ``gain``, ``lines`` to paste and ``words`` for the rest; None where
            no gain is predicted.
    """

    verdict: str
    why: str
    cause: str
    next: str
    causes: tuple[Cause, ...]
    advice: dict[str, Any] | None


def findings(summary: Mapping[str, Any], note: str | None = None) -> Findings:
    """Return what a run has shown.

    Args:
        summary: what `Tuner.summary()` gave; ``hints`` and ``whole`` may be missing.
        note: why nothing can be tuned and what would change that, if so.
    """
    known = _evidence(summary)
    whole = known.whole
    before, after = (_measured(summary[side], whole) for side in ("before", "after"))
    first, last = causes(before, known), causes(after, known)
    told = _advised(summary, _advice(summary, after, known), last, after)
    slower = _slower(summary, before, after)
    if slower is not None:
        return Findings(SLOWER, slower, _because(last), _remedy(summary), last, None)
    word, why, waited = summary["after"]["verdict"], summary["before"]["why"], summary["before"]["verdict"]
    cause = _because(first) if waited == "input-bound" else ""
    return Findings(word, why, cause, _next(summary, note, last, told), last, told)


def _measured(side: Mapping[str, Any], whole: Mapping[str, Any]) -> Measured | None:
    told = side.get("measured")
    if told is None:
        return None
    seen = Measured.from_json(told)
    if not seen.seam_s and whole.get("seam_s") and whole.get("steps"):
        # None of the windows that are remembered held the start of an epoch.
        return replace(seen, seam_s=whole["seam_s"] / whole["steps"])
    return seen


def _evidence(summary: Mapping[str, Any]) -> Evidence:
    return Evidence(
        hints=tuple(Hint(**hint) for hint in summary.get("hints") or ()),
        whole={"steps": summary["steps"], **(summary.get("whole") or {})},
        tried=_tried(summary["decisions"]),
        vetoes=tuple(veto for decision in summary["decisions"][-LATELY:] for veto in decision["vetoes"]),
        first={stage["name"]: stage["first"] for stage in summary["stages"]},
    )


def _tried(decisions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Stage name -> the most that clearly more workers for it, and for no other, have brought."""
    tried: dict[str, float] = {}
    for decision in decisions:
        before, after = decision["before"], decision["after"]
        moved = [name for name, n in after.items() if before.get(name) != n and not name.endswith(".window")]
        if decision["applied"] and decision["effect"] is not None and len(moved) == 1:
            (name,) = moved
            if after[name] >= RAISED * max(1, before.get(name, 1)):
                tried[name] = max(decision["effect"], tried.get(name, 0.0))
    return tried


def _advice(summary: Mapping[str, Any], seen: Measured | None, known: Evidence) -> Advice:
    if seen is not None and summary["mode"] == "tune" and summary["changes"]:
        # What could be changed while it ran was tried: there the measurements go before the prediction.
        stages = tuple(replace(s, high=s.current) if s.when == "now" else s for s in seen.stages)
        seen = replace(seen, stages=stages)
    return advice(seen, known)


def _advised(
    summary: Mapping[str, Any], found: Advice, last: Sequence[Cause], seen: Measured | None
) -> dict[str, Any] | None:
    lines, words = to_set(found.allocation, summary["stages"], found.kept) if found.gain > 1.0 else ([], [])
    gain = found.gain
    for cause in last:
        if cause.line and (cause.kind not in OF_NUMBERS or not summary["stages"]):
            lines, gain = [*lines, *cause.line.splitlines()], gain * cause.gain
    if gain < WORTH or not (lines or words) or seen is None:
        return None
    gain = min(gain, (seen.period_s + seen.seam_s) / seen.model_s)  # no input is faster than the model
    return {"allocation": found.allocation, "gain": round(gain, 3), "lines": lines, "words": words}


def _slower(summary: Mapping[str, Any], before: Measured | None, after: Measured | None) -> str | None:
    """Say that the run lost speed beyond what chance explains, and what was done to it; None where it did not."""
    rates = [summary[side]["throughput_samples_per_s"] for side in ("before", "after")]
    if not summary["changes"] or before is None or after is None or not all(rates):
        return None
    if "too short" in (before.verdict, after.verdict):
        return None
    got = rates[1] / rates[0]
    if got >= 1.0 - max(LEAST_LOSS, ERRORS * math.hypot(before.noise, after.noise)):
        return None
    shown = [stage for stage in summary["stages"] if stage["window_of"] is None] or summary["stages"]
    first, now = ({stage["name"]: stage[key] for stage in shown} for key in ("first", "current"))
    did = f"InTune set {changed(first, now)}" if first != now else "InTune went back to the numbers of the start"
    rate = f"{amount(rates[1])} samples/s after {amount(rates[0])} before ({ratio(got)})"
    return f"{rate}: {did}, after {count(summary['changes'], 'change')}"


def _remedy(summary: Mapping[str, Any]) -> str:
    moved = {s["name"]: s["first"] for s in summary["stages"] if s["first"] != s["current"] and not s["window_of"]}
    keep = f"keep your own numbers ({', '.join(f'{name} {n}' for name, n in moved.items())})" if moved else ""
    leave = "run with mode='observe', which changes nothing"
    return f"{keep}: {leave}" if keep else f"{leave}, and see whether it is faster: then please report this pipeline"


def _because(found: Sequence[Cause]) -> str:
    return found[0].sentence if found and found[0].kind != "model" else ""


def _next(summary: Mapping[str, Any], note: str | None, last: Sequence[Cause], told: dict[str, Any] | None) -> str:
    verdict, mode = summary["after"]["verdict"], summary["mode"]
    if note:
        return "\n".join([note, *_pasted(told)])
    if summary["frozen"]:
        return "the allocation stayed where it was; please report the error above"
    if verdict == "too short":
        return "train longer: nothing can be said about so few steps"
    if told is None and (mode != "tune" or not summary["changes"]):
        if last and last[0].kind == "order":
            return last[0].sentence
        return f"nothing to change: {last[0].sentence if last else 'no gain is predicted'}"
    if mode == "observe":
        return "run with mode='tune', or mode='advise' to see what it would do"
    if told is not None:
        return "\n".join(_pasted(told, ", or let mode='tune' do it" if mode == "advise" else ""))
    if verdict == "input-bound":
        stage = summary["after"]["stage"]
        why = _because(last)
        return f"{repr(stage) if stage else 'the input'} still limits{': ' if why else ''}{why}"
    workers = {e["name"]: e["current"] for e in summary["stages"] if e["unit"] == "workers"}
    return "start the next run with " + ", ".join(f"{name} {n}" for name, n in workers.items())


def _pasted(told: Mapping[str, Any] | None, instead: str = "") -> list[str]:
    """The lines to paste under a head that says what they promise."""
    if told is None:
        return []
    words = f"set {', '.join(told['words'])}" if told["words"] else ""
    head = ", and ".join([*(["paste what is below"] if told["lines"] else []), *([words] if words else [])])
    return [f"{head} (expected {ratio(told['gain'])}){instead}", *told["lines"]]


def as_json(found: Sequence[Cause]) -> list[dict[str, Any]]:
    """Return causes in plain JSON types, gains with three digits."""
    return [asdict(cause) | {"gain": round(cause.gain, 3)} for cause in found]
