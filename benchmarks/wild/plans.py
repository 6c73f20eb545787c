"""What is run, in which order: pairs with and without InTune, the search for the best numbers, pasted advice."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.wild.advice import pasted
from benchmarks.wild.entry import Entry
from benchmarks.wild.runs import LENGTHS_S, TRIAL, Key, Store, Workplace
from benchmarks.wild.table import losses, ratios, row, spread

__all__ = ["advice", "lengths", "pairs", "sweep"]

AGAIN = 100
"""Repeats from here on are runs without InTune beside the pasted numbers: not those beside the tuned ones."""


def pairs(work: Workplace, entries: Sequence[Entry], length: str, repeats: int) -> list[dict[str, Any]]:
    """Run ``off`` and ``tune`` in turn and return the rows of the table.

    Args:
        work: where.
        entries: which.
        length: ``short`` or ``long``.
        repeats: pairs of each.
    """
    for entry in entries:
        for repeat in range(repeats):
            # Who comes first finds colder caches: they take turns.
            for mode in ("off", "tune") if repeat % 2 == 0 else ("tune", "off"):
                work.run(entry, Key(entry.name, length, mode, repeat))
    return [found for entry in entries if (found := row(work.store, entry, length)) is not None]


def lengths(work: Workplace, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Try each pipeline once without InTune and return how long its fits are on this machine.

    Args:
        work: where.
        entries: which.
    """
    rows: list[dict[str, Any]] = []
    for entry in entries:
        wall_s = work.run(entry, Key(entry.name, TRIAL, "off")).get("wall_s")
        row = {"pipeline": entry.name, TRIAL: str(entry.trial), "off_s": wall_s}
        rows.append(row | {length: str(work.fit(entry, length)) for length in LENGTHS_S})
    return rows


def sweep(work: Workplace, entries: Sequence[Entry], repeats: int) -> list[dict[str, Any]]:
    """Search the best numbers without InTune, one number after the other in short fits, and measure them again.

    They are measured beside runs with the authors' numbers, in long fits where `could_gain`, else in short ones. What
    the tuned runs reached of them is in the rows if these are in the file already.

    Args:
        work: where.
        entries: which; those without a `sweep` are left out.
        repeats: pairs of the last step.
    """
    rows = []
    for entry in entries:
        if not entry.sweep:
            continue
        best = _search(work, entry)
        length, written = "long" if entry.could_gain else "short", Key.written(best)
        for repeat in range(repeats if best else 0):
            for numbers in ("", written):
                work.run(entry, Key(entry.name, length, "off", AGAIN + repeat, numbers))
        rows.append(_best_row(work.store, entry, length, written))
    return rows


def _search(work: Workplace, entry: Entry) -> dict[str, int]:
    """Return what to change of the authors' numbers; empty where nothing was faster."""
    best: dict[str, int] = {}
    fastest = work.run(entry, Key(entry.name, "short", "off")).get("wall_s", float("inf"))
    for name, values in entry.sweep.items():
        for value in values:
            if value == {**entry.numbers, **best}.get(name):
                continue
            tried = {**best, name: value}
            found = work.run(entry, Key(entry.name, "short", "off", 0, Key.written(tried)))
            if found.get("wall_s", float("inf")) < fastest:
                fastest, best = found["wall_s"], tried
    return best


def _best_row(store: Store, entry: Entry, length: str, written: str) -> dict[str, Any]:
    gains = ratios(store, entry.name, length, "off", written, AGAIN) if written else []
    gain = max(1.0, median(gains)) if gains else 1.0
    tuned = ratios(store, entry.name, length)
    return {
        "pipeline": entry.name,
        "length": length,
        "best": written if gain > 1.0 else "the authors' own",
        **spread("gain", gains or [1.0]),
        "losses": losses(store.all(entry.name, length, "off"), store.all(entry.name, length, "off", written)),
        "tuned": round(median(tuned), 3) if tuned else None,
        "reached": round(median(tuned) / gain, 3) if tuned else None,
    }


def advice(work: Workplace, entries: Sequence[Entry], repeats: int) -> list[dict[str, Any]]:
    """Run ``advise`` in a short fit, paste its lines, and measure what they bring without InTune.

    Args:
        work: where.
        entries: which.
        repeats: pairs of authors' and pasted numbers.
    """
    rows: list[dict[str, Any]] = []
    for entry in entries:
        run = work.run(entry, Key(entry.name, "short", "advise"))
        if "error" in run:
            rows.append({"pipeline": entry.name, "advice": f"FAILED {run['error'][-200:]}"})
            continue
        told = pasted(entry, run["report"])
        written = Key.written(told.numbers)
        for repeat in range(repeats if told.numbers else 0):
            for numbers in ("", written):
                work.run(entry, Key(entry.name, "short", "off", AGAIN + repeat, numbers))
        gains = ratios(work.store, entry.name, "short", "off", written, AGAIN) if written else []
        stock, others = (work.store.all(entry.name, "short", "off", numbers) for numbers in ("", written))
        rows.append(
            {
                "pipeline": entry.name,
                "advice": " / ".join(told.lines) or "none",
                "not pasted": " / ".join(told.left) or None,
                "promised": told.promise,
                **(spread("gain", gains) if gains else {}),
                "losses": losses(stock, others) if gains else None,
            }
        )
    return rows
