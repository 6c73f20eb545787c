"""How numbers, allocations and verdicts are spelled wherever a user reads them: card, watch, page, reports, reasons."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

__all__ = [
    "ARROW",
    "COLOURS",
    "COLUMNS",
    "NOTHING",
    "NOT_MEASURED",
    "PAGE_ARROW",
    "SLOWER",
    "TONES",
    "UNKNOWN",
    "allocation",
    "amount",
    "changed",
    "count",
    "duration",
    "four_digits",
    "memory",
    "moment",
    "number",
    "percent",
    "quantity",
    "ratio",
    "setting",
    "short_percent",
    "six_digits",
    "size",
    "span",
    "stage_value",
    "times",
    "with_window",
    "wrapped",
]

NOTHING = "–"
"""What is not known, in the cell of a table."""
UNKNOWN = "?"
"""The same in a line of words, where a dash would read as one."""
SLOWER = "slower than before"
"""The verdict on a run that lost speed after it was changed."""
NOT_MEASURED = "not measured"
"""The verdict on a run whose steps could not be seen: not for want of them."""
TONES = {"input-bound": "bad", SLOWER: "bad", "balanced": "good", "compute-bound": "good"}
TONES |= {"too short": "open", NOT_MEASURED: "open"}
"""What a verdict says of the input."""
COLOURS = {kind: {"bad": "red", "good": "green", "open": "yellow"}[tone] for kind, tone in TONES.items()}
"""The same on a terminal."""
ARROW = " -> "
"""From one value to the next, in plain text."""
PAGE_ARROW = "\u00a0→\u00a0"
"""The same on the page, kept together at the end of a line."""
COLUMNS, INDENT = 80, 8
"""Width of folded text and indent of what continues a line. A choice: the usual terminal."""
SECONDS_UP_TO, MINUTES_UP_TO = 180.0, 3 * 3600.0
"""Seconds up to which an axis counts in seconds, and in minutes. A choice: no more than three digits."""
MOMENT_UP_TO_S = 0.0995
"""Seconds below which a time is written in its own unit: 37 ms. A choice: 0.0371 s, or 2.6e-06 s, reads badly."""
KB_UP_TO, GB_FROM, WHOLE_GB_FROM = 1e6, 1e9, 10e9
"""Bytes up to which a size is written in kB, from which on in GB, and a memory limit in whole ones: of so many tenths
say nothing."""


def number(value: object) -> float | None:
    """Return `value` as a finite float; None if it is none: files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of more digits than a float has room for
        return None


def amount(value: object, unknown: str = NOTHING) -> str:
    """Return a plain number in three digits, thousands apart."""
    found = number(value)
    if found is None:
        return unknown
    return f"{found:,.0f}".replace(",", " ") if abs(found) >= 100 else f"{found:.3g}"


def percent(share: object, unknown: str = NOTHING) -> str:
    """Return a share 0..1, such as ``34 %``."""
    found = number(share)
    return unknown if found is None else f"{found:.0%}".replace("%", " %")


def short_percent(share: float) -> str:
    """Return a share 0..1 where each letter counts, as on a progress bar or in a style: ``34%``."""
    return f"{share:.0%}"


def quantity(value: object, unit: str) -> str:
    """Return a number in the unit a reader expects.

    Args:
        value: a count, a share 0..1, seconds or bytes; anything else is not known.
        unit: ``%`` for a share, ``ms`` for seconds of one step, ``GB`` for bytes; any other word stands behind it.
    """
    found = number(value)
    if found is None:
        return NOTHING
    if unit == "%":
        return percent(found)
    if unit == "ms":
        return f"{amount(found * 1e3)} ms"
    if unit == "GB":
        return f"{found / 1e9:.1f} GB"
    if unit == "s" and 0.0 < found < MOMENT_UP_TO_S:
        return moment(found)
    return f"{amount(found)} {unit}".rstrip()


def memory(used_bytes: float, limit_bytes: float) -> str:
    """Return memory in use and its limit, such as ``1.2 of 64 GB``."""
    return f"{used_bytes / 1e9:.1f} of {limit_bytes / 1e9:.{0 if limit_bytes >= WHOLE_GB_FROM else 1}f} GB"


def size(held_bytes: float) -> str:
    """Return what something holds, such as ``40 kB``, ``85 MB`` or ``1.2 GB``."""
    if held_bytes < KB_UP_TO:
        return f"{held_bytes / 1e3:.0f} kB"
    return f"{held_bytes / 1e9:.1f} GB" if held_bytes >= GB_FROM else f"{held_bytes / 1e6:.0f} MB"


def four_digits(value: object) -> str:
    """Return a test result, of which the fourth digit counts."""
    found = number(value)
    return NOTHING if found is None else f"{found:.4f}"


def six_digits(value: float | None) -> float | None:
    """Return a number for a file: six digits are more than was measured, and JSON knows no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def count(many: float, noun: str) -> str:
    """Return so many of something, such as ``1 change`` or ``3 changes``."""
    return f"{many} {noun}{'s' * (many != 1)}"


def times(before: object, after: object) -> str:
    """Return how many times `before` `after` is; nothing where that says nothing."""
    first, last = number(before), number(after)
    return ratio(last / first) if first and last is not None else ""


def ratio(value: float) -> str:
    """Return how many times as much something is."""
    return f"× {value:.2f}"


def duration(seconds: object) -> str:
    """Return a span of time in one or two units."""
    found = number(seconds)
    if found is None:
        return NOTHING
    if 0.0 < found < 1.0:
        return moment(found)
    minutes = int(found // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {int(found % 60)} s" if minutes else f"{found:.0f} s"


def moment(seconds: float) -> str:
    """Return a short time in the unit a reader expects, such as ``13 us``, ``1.4 ms`` or ``2.5 s``."""
    for unit_s, unit in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit_s:
            return f"{_two_digits(seconds / unit_s)} {unit}"
    return f"{_two_digits(seconds)} s"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def span(seconds: float) -> tuple[float, str]:
    """Return the unit for an axis of so many seconds: its length in seconds, and its name."""
    if seconds <= SECONDS_UP_TO:
        return 1.0, "s"
    return (60.0, "min") if seconds <= MINUTES_UP_TO else (3600.0, "h")


def stage_value(value: object) -> str:
    """Return workers, depth or window of a stage, as it would be written in code: ``1024``."""
    found = number(value)
    return NOTHING if found is None else f"{found:.0f}"


def with_window(value: object, window: object) -> str:
    """Return the value of one stage, such as ``4`` or ``4 (window 16)``."""
    return stage_value(value) if window is None else f"{stage_value(value)} (window {stage_value(window)})"


def allocation(values: Mapping[str, object], windows: Mapping[str, object]) -> str:
    """Return workers and depths in one line.

    Args:
        values: stage name -> its workers or depth, in pipeline order.
        windows: stage name -> its window, for those whose window is to be told.
    """
    return " · ".join(f"{name} {with_window(value, windows.get(name))}" for name, value in values.items())


def changed(before: Mapping[str, object], after: Mapping[str, object], arrow: str = ARROW) -> str:
    """Return what differs between two allocations, such as ``decode 1 -> 4, prefetch 2 -> 8``."""
    moved = {name: value for name, value in after.items() if before.get(name) != value}
    return ", ".join(f"{name} {stage_value(before.get(name))}{arrow}{stage_value(n)}" for name, n in moved.items())


def setting(given: object) -> str:
    """Return a setting and where it came from; reports hold both as ``value`` and ``source``, or the value alone."""
    if isinstance(given, Mapping) and "value" in given:
        return f"{given['value']} (from {given['source']})" if given.get("source") else str(given["value"])
    return NOTHING if given is None else str(given)


def wrapped(text: str) -> str:
    """Return plain text in lines of a terminal's width; what is continued stands 8 columns to the right.

    A line that begins with spaces is left as it is: it may be code to paste. So is a path or any other long word.
    """
    lines = []
    for line in text.split("\n"):
        if len(line) <= COLUMNS or line.startswith(" "):
            lines.append(line)
            continue
        begin, indent = line, ""
        while len(indent + begin) > COLUMNS:
            # Between two figures rather than within one, whose thousands stand apart.
            cut = begin.rfind("   ", INDENT, COLUMNS + 1 - len(indent))
            if cut < 0:
                break
            lines.append(indent + begin[:cut])
            begin, indent = begin[cut:].lstrip(), INDENT * " "
        lines += textwrap.wrap(
            begin, COLUMNS, initial_indent=indent, subsequent_indent=INDENT * " ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines)
