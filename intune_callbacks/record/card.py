"""What a report says in words: the lines of the card printed at the end, which `intune report` and the page share."""

from __future__ import annotations

import json
import math
import re
import textwrap
from pathlib import Path

from intune_callbacks.measure.advice import PERSISTENT
from intune_callbacks.measure.predict import WAITS, promised
from intune_callbacks.measure.verdict import FED
from intune_callbacks.record.report import NOT_KNOWN, REPORT, Report, Side, Span, StageRow
from intune_callbacks.words import (
    ARROW,
    SLOWER,
    TONES,
    allocation,
    amount,
    count,
    duration,
    memory,
    moment,
    percent,
    ratio,
    size,
)

__all__ = ["card_rows", "end_card", "headline", "in_short", "said", "tone"]

FOUND = "found.yaml"
FILES = ("report.html", REPORT, "history.jsonl", FOUND)
SOURCES = {"argument": "the argument", "recipe": "the recipe", "command line": "the command line"}
WORDS, WIDTH = ("why", "cause", "also", "next"), 72
"""Rows of words, folded at this width, which with the label is that of a usual terminal; numbers, paths and what is to
be pasted stay in one line."""
BESIDE, MOST_BESIDE = ("startup", "held", "shards", "shuffle", "prefetch", "memory", "loader"), 2
"""Causes told beside the first one, and how many. A choice: what can be mended on its own, and what is read."""
APART = 0.1
"""Share from which on two rates, or the time outside of steps, are told apart. A choice: less needs no explanation."""
BESIDE_STEPS = "with what is no step: the start, validation, checkpoints"
"""What the loop is paused for, in the words of somebody who reads of it for the first time."""
SMALL_PART = 0.25
"""Of what the starts of epochs cost, a remedy that mends less is not named beside it. A choice."""
MUCH_VALIDATION = 0.25
"""Share of the run from which on its validation is told. A choice: less is no news to whoever validates."""
MUCH_OWN = 0.1
"""Share of the memory in use from which on what worker processes hold is told. A choice: less is not what fills it."""


def end_card(report: Report, folder: Path | None = None) -> str:
    """Return the card as plain text: verdict first, then why, before, after and what to do next, a row each.

    Args:
        report: of the run.
        folder: where the run wrote its files, if it did.
    """
    (name, head), *rows = card_rows(report, folder)
    verdict, _, facts = head.partition("  ")
    lines = [f"{f'{name}  {verdict}':<34}  {facts}"]
    for label, text in rows:
        first, *code = text.splitlines() or [""]
        folded = _folded(first) if label in WORDS else [first]
        if label == "whole":  # below its figures a sentence
            code = [part for line in code for part in _folded(line)]
        lines.append(f"{label:<6}  " + ("\n" + 8 * " ").join([*folded, *code]))
    return "\n".join(lines)


def _folded(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, break_on_hyphens=False)


def card_rows(report: Report, folder: Path | None = None) -> list[tuple[str, str]]:
    """Return the rows of the end card: a label, and a text that may have several lines.

    Args:
        report: of the run.
        folder: where the run wrote its files, if it did.
    """
    texts = said(report)
    rows = [("InTune", f"{headline(report)}  {in_short(report)}"), *((key, texts[key]) for key in ("why", "cause"))]
    last = f"{_line(report, report.after, 'current')}{_alone(report.after)}{_measured_with(report)}"
    rows += [("before", _line(report, report.before, "first")), ("after", last)] if report.changes else [("now", last)]
    rows += [("whole", texts["whole"]), *(("also", text) for text in texts["also"].splitlines())]
    rows += [(key, texts[key]) for key in ("cache", "warm", "ranks", "frozen")]
    if report.mode_source not in ("default", NOT_KNOWN):
        rows.append(("mode", f"{report.mode}, from {SOURCES.get(report.mode_source, report.mode_source)}"))
    written = [name for name in FILES if folder is not None and (folder / name).is_file()]
    if written:
        rows.append(("files", f"{', '.join(written)} in {folder}"))
    do = report.next
    is_other = any(row.first != row.current for row in report.stages)
    is_known = not report.frozen and report.verdict != SLOWER and report.after.throughput_samples_per_s is not None
    if FOUND in written and is_other and is_known:
        begin = "or begin it" if do.startswith("start the next run") else "begin the next run"
        do += f"\n{begin} where this one ended: warm_start={json.dumps(str(folder))}"
    return [(label, text) for label, text in rows if text] + [("next", do)]


def said(report: Report) -> dict[str, str]:
    """Return the sentences of the card and of the page by their labels; those without anything to say are empty."""
    warm = report.warm_start or {}
    used = "" if warm.get("used") else "not "
    return {
        "why": _why(report),
        "cause": report.cause,
        "whole": _whole(report),
        "also": _also(report),
        "cache": _cache(report),
        "ranks": str((report.ranks or {}).get("line") or ""),
        "frozen": report.frozen or "",
        "warm": f"{used}started from {warm.get('from')}: {warm.get('why')}" if warm else "",
        "next": report.next,
    }


def headline(report: Report) -> str:
    """Return the verdict: at first and at last, once if they are the same; before all that a run became slower."""
    if report.verdict == SLOWER:
        return SLOWER.upper()
    first, last = report.before.verdict, report.after.verdict
    if last == "too short" and first in FED:  # it was fast enough, and not for want of steps
        last = first
    return (first if first == last else f"{first}{ARROW}{last}").upper()


def in_short(report: Report) -> str:
    """Return what stands beside the verdict: the whole run's speed and length, and what was done in it."""
    rate, length = (report.whole or Span()).throughput_samples_per_s, duration(report.wall_s)
    parts = [f"{amount(rate)} samples/s in {length}" if rate is not None else length]
    parts.append(count(report.changes, "change") if report.changes else "nothing was changed")
    if report.settled_after_s is not None:
        parts.append(f"settled after {duration(report.settled_after_s)}")
    return ", ".join([*parts, "frozen"] if report.frozen else parts)


def tone(report: Report) -> str:
    """Return what the verdict says of the input, of a run that became slower that this is bad."""
    return TONES.get(SLOWER if report.verdict == SLOWER else report.after.verdict, "open")


def _why(report: Report) -> str:
    is_uneven = "uneven" in [cause.kind for cause in report.causes]
    if report.verdict == "compute-bound" and not report.changes and not is_uneven:
        return "the input pipeline is not the bottleneck; nothing was changed"
    return report.why


def _whole(report: Report) -> str:
    """The whole run in a line, and where it was slower than while it ran, why; nothing where it is not known."""
    whole = report.whole or Span()
    rate = whole.throughput_samples_per_s
    if rate is None:
        return ""
    parts = [f"{amount(rate)} samples/s in {duration(whole.wall_s)}"]
    if whole.wait_frac is not None:
        parts.append(f"wait {percent(whole.wait_frac)}")
    if whole.first_batch_s:
        parts.append(f"first batch after {moment(whole.first_batch_s)}")
    return "\n".join(["   ".join(parts), *_apart(report, whole, rate)])


def _apart(report: Report, whole: Span, rate: float) -> list[str]:
    """The speed while it runs beside the whole run's, where they are more than a tenth apart, and what lies between."""
    rates = [report.after.running_samples_per_s, report.after.throughput_samples_per_s]
    running = max((known for known in rates if known is not None), default=None)
    if running is None or abs(running - rate) <= APART * running:
        return []
    seam_s, paused_s = whole.seam_s or 0.0, whole.paused_s or 0.0
    lost = max(APART, 0.5 * (1.0 - rate / running))  # half of it at least is to be explained
    if running < rate or seam_s + paused_s < lost * (whole.wall_s or 0.0):
        return [f"{amount(running)} samples/s at last, {amount(rate)} in the whole run"]
    if paused_s > seam_s or seam_s < lost * (whole.wall_s or 0.0):  # the starts of epochs alone do not explain it
        return [f"{amount(running)} samples/s while it runs, {amount(rate)} {BESIDE_STEPS}"]
    # As it is called there: transformers has a name of its own for it. Not where that mends but a small part.
    least = 1.0 + SMALL_PART * (promised(running / rate) - 1.0)
    starts = (one.sentence for one in report.causes if one.kind == "startup" and one.gain >= least)
    called = re.search(rf"\w*{PERSISTENT}", next(starts, ""))
    mend = f": {called.group()}" if called else ""
    return [f"{amount(running)} samples/s while it runs, {amount(rate)} with the start of each epoch{mend}"]


def _also(report: Report) -> str:
    """The causes not named yet that gain something or do harm for certain, two at most, a line each."""
    shown = f"{report.cause}\n{report.next}"
    others = [cause for cause in report.causes if cause.kind in BESIDE and cause.sentence not in shown]
    gains = (f" (expected {ratio(cause.gain)})" if cause.gain > 1.0 else "" for cause in others)
    lines = [f"{cause.sentence}{gain}" for cause, gain in zip(others[:MOST_BESIDE], gains, strict=False)]
    more = [f"{report.outgrow.sentence} (expected {ratio(report.outgrow.gain)})"] if report.outgrow else []
    known = [hint.what for hint in report.hints if hint.kind in ("cluster", "generator")]
    return "\n".join([*more, *known, *lines, *_of_validation(report), *_of_workers(report)])


def _of_validation(report: Report) -> list[str]:
    """What validation takes, where that is much of the run: it is in no step, and nothing of it is tuned."""
    whole = report.whole or Span()
    spent_s, frac = whole.validation_s or 0.0, (whole.validation_s or 0.0) / (whole.wall_s or math.inf)
    if frac < MUCH_VALIDATION:
        return []
    waits = "if it waits for its data, give its own dataset or loader more workers, else validate less often"
    return [f"validation took {duration(spent_s)}, {percent(frac)} of the run, and is not tuned: {waits}"]


def _cache(report: Report) -> str:
    """What was kept of each pure function's results, a line each, and what that saved."""
    use = report.cache
    if use is None:
        return ""
    if use.why_not and not use.used_bytes:
        return f"nothing was kept: {use.why_not}"
    lines = []
    for one in sorted(use.functions, key=lambda row: -row.saved_s):
        calls = one.hits + one.misses
        told = f"{percent(one.hits / calls)} of {amount(calls)} calls from memory" if calls else "not called again"
        saved = f", {duration(one.saved_s)} of work saved" if one.saved_s >= 1.0 else ""
        lines.append(f"{one.name}: not kept: {one.why_not}" if one.why_not else f"{one.name}: {told}{saved}")
    return "\n".join([*lines, f"{size(use.used_bytes)} of {size(use.limit_bytes)} in use"] if lines else [])


def _of_workers(report: Report) -> list[str]:
    """What worker processes hold beside what they share with the training process, where that is much of the memory."""
    own, used = report.memory.worker_bytes or 0.0, report.memory.after_bytes or 0
    many = max((row.current for row in report.stages if row.unit == "workers"), default=0)
    is_much = used > 0 and own * many >= MUCH_OWN * used
    return [f"each worker process holds {size(own)} of memory of its own"] if is_much else []


def _alone(side: Side) -> str:
    """What the model would take if its input were free, where that is more than it gets."""
    rate, wait = side.throughput_samples_per_s, side.exposed_wait_frac
    wait = side.wait_frac if wait is None else wait
    if rate is None or wait is None or not WAITS <= wait < 1.0:
        return ""
    return f"   the model alone would take {amount(rate / (1.0 - wait))} samples/s"


def _measured_with(report: Report) -> str:
    """The numbers that the figures behind the changes are of, where the last change came too late for figures."""
    shown = {row.name: row.current for row in report.stages if row.window_of is None}
    measured = {name: value for name, value in report.after.allocation.items() if name in shown}
    moved = {name: value for name, value in measured.items() if shown[name] != value}
    if not moved or not report.changes or report.after.throughput_samples_per_s is None:
        return ""
    return f"\nmeasured with {allocation(moved, {})}, for the last change came shortly before the end"


def _line(report: Report, side: Side, which: str) -> str:
    rate, used, limit = side.throughput_samples_per_s, side.memory_used_bytes, side.memory_limit_bytes
    parts = [f"{amount(rate)} samples/s" if rate is not None else "not measured", _wait(side)]
    parts.append(_allocation(report.stages, which))
    if used is not None and limit:
        parts.append(f"RAM {memory(used, limit)}")
    return "   ".join(part for part in parts if part)


def _wait(side: Side) -> str:
    if side.wait_frac is None:
        return ""
    idle = side.exposed_wait_frac
    # A blocked loop does no harm while the GPU still has work, and the verdict goes by the GPU.
    return f"wait {percent(side.wait_frac)}" + (f" (GPU idle {percent(idle)})" if idle is not None else "")


def _allocation(stages: tuple[StageRow, ...], which: str) -> str:
    """Workers and depths; a window only where it changed while its workers did not."""
    moved = {row.name for row in stages if row.first != row.current}
    windows = {
        row.window_of: getattr(row, which)
        for row in stages
        if row.name in moved and row.window_of is not None and row.window_of not in moved
    }
    return allocation({row.name: getattr(row, which) for row in stages if row.window_of is None}, windows)
