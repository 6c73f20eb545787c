"""What `advise` said: the lines to paste as numbers of the entry, and how much faster it promised to become."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.wild.entry import AUTOTUNE, Entry

__all__ = ["Pasted", "pasted"]

CALL = re.compile(r"^\.?(?P<call>\w+)\((?P<inside>.*)\)")
PAIR = re.compile(r"(?P<name>\w+)=(?P<value>[\w.]+)")
STAGE = re.compile(r"\((?P<stage>[^()]+)\)$")
LOADER = ("num_workers", "prefetch_factor", "persistent_workers")


@dataclass(frozen=True, slots=True)
class Pasted:
    """The lines of one report.

    Args:
        lines: as they were printed.
        numbers: what they set; empty where nothing was advised.
        left: lines that have no place in the entry.
        promise: how many times as fast it was said to become; None where nothing was said.
    """

    lines: list[str]
    numbers: dict[str, int]
    left: list[str]
    promise: float | None


def pasted(entry: Entry, report: Mapping[str, Any]) -> Pasted:
    """Return what the report of a run with ``mode="advise"`` tells its user to write.

    Args:
        entry: whose loader it is.
        report: of the callback.
    """
    told = report.get("advice") or {}
    lines = list(told.get("lines") or str(report.get("next", "")).splitlines()[1:])
    numbers: dict[str, int] = {}
    left: list[str] = []
    for line in lines:
        found = _numbers(entry, line)
        if found and set(found) <= entry.settable:
            numbers |= found
        else:
            left.append(line)
    changed = {name: value for name, value in numbers.items() if entry.numbers.get(name) != value}
    return Pasted(lines, changed, left, told.get("gain"))


def _numbers(entry: Entry, line: str) -> dict[str, int]:
    """Return what one line sets; empty where it is not understood or not of the entry."""
    code, _, remark = line.partition("#")
    call = CALL.match(code.strip())
    if call is None:
        return {}
    pairs = {pair["name"]: _value(pair["value"]) for pair in PAIR.finditer(call["inside"])}
    if call["call"] == "DataLoader":
        return {name: value for name, value in pairs.items() if name in LOADER and value is not None}
    stage = STAGE.search(remark.strip())
    name = stage["stage"] if stage else _name(call["call"], call["inside"])
    name = entry.stages.get(name, name)
    known = [value for value in pairs.values() if value is not None]
    value = known[-1] if known else _value(call["inside"].strip())
    if call["call"] == "prefetch" and name not in entry.settable and not stage:
        name = "+prefetch"
    return {name: value} if name and value is not None else {}


def _name(call: str, inside: str) -> str:
    if call in ("prefetch", "Prefetcher"):
        return "prefetch"
    first = inside.partition(",")[0].strip()
    if first == "...":  # the function has no name, or there is none
        return call
    return first.partition("=")[2] if "=" in first else first


def _value(text: str) -> int | None:
    if text.endswith("AUTOTUNE"):
        return AUTOTUNE
    if text in ("True", "False"):
        return int(text == "True")
    return int(text) if text.isdigit() else None
