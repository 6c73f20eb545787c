"""Numbers as a reader wants them: few digits, a unit, a dash for what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = [
    "NOTHING",
    "amount",
    "arrow",
    "changed",
    "duration",
    "headline",
    "number",
    "quantity",
    "reason_why",
    "setting",
    "span",
    "times",
    "warm_start",
]

NOTHING = "–"
SECONDS_UP_TO, MINUTES_UP_TO = 180.0, 3 * 3600.0


def number(value: object) -> float | None:
    """Return `value` as a finite float; None if it is none: files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def amount(value: object) -> str:
    """Return a plain number in three digits, thousands apart."""
    found = number(value)
    if found is None:
        return NOTHING
    if abs(found) >= 1000:
        return f"{found:,.0f}".replace(",", " ")
    return f"{found:.3g}"


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
        return f"{found:.0%}".replace("%", " %")
    if unit == "ms":
        return f"{found * 1e3:.3g} ms"
    if unit == "GB":
        return f"{found / 1e9:.1f} GB"
    return f"{amount(found)} {unit}".rstrip()


def times(before: object, after: object) -> str:
    """Return how many times `before` `after` is; nothing where that says nothing."""
    first, last = number(before), number(after)
    return f"× {last / first:.2f}" if first and last is not None else ""


def duration(seconds: object) -> str:
    """Return a span of time in one or two units."""
    found = number(seconds)
    if found is None:
        return NOTHING
    minutes = int(found // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {int(found % 60)} s" if minutes else f"{found:.0f} s"


def span(seconds: float) -> tuple[float, str]:
    """Return the unit for an axis of so many seconds: its length in seconds, and its name."""
    if seconds <= SECONDS_UP_TO:
        return 1.0, "s"
    return (60.0, "min") if seconds <= MINUTES_UP_TO else (3600.0, "h")


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return what differs between two allocations, such as ``decode 1 → 4, prefetch 2 → 8``."""
    moved = {name: n for name, n in after.items() if before.get(name) != n}
    return ", ".join(f"{name} {arrow(before.get(name, NOTHING), n)}" for name, n in moved.items())


def arrow(first: object, last: object) -> str:
    """Return ``first → last``, kept together at the end of a line."""
    return f"{first}\u00a0→\u00a0{last}"


def headline(report: Mapping[str, Any]) -> str:
    """Return the verdict in the words of the end card: at first and at last, once if they are the same."""
    first, last = (str(report[side]["verdict"]).upper() for side in ("before", "after"))
    return first if first == last else f"{first} -> {last}"


def reason_why(report: Mapping[str, Any]) -> str:
    """Return the sentence that stands behind `why` on the end card."""
    if report["after"]["verdict"] in ("compute-bound", "balanced") and not report["changes"]:
        return "the input pipeline is not the bottleneck; nothing was changed"
    return str(report["why"])


def setting(given: object) -> str:
    """Return a setting and where it came from; reports hold both as ``value`` and ``source``, or the value alone."""
    if isinstance(given, Mapping) and "value" in given:
        return f"{given['value']} (from {given['source']})" if given.get("source") else str(given["value"])
    return NOTHING if given is None else str(given)


def warm_start(given: object) -> str:
    """Return whether the run started from another one, and why; nothing where that was not asked for."""
    if not isinstance(given, Mapping):
        return ""
    return f"{'' if given.get('used') else 'not '}started from {given.get('from')}: {given.get('why')}"
