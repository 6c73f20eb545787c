"""What the runs say: one row per pipeline, on the screen and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.wild.entry import AUTOTUNE, Entry
from benchmarks.wild.runs import Store

__all__ = ["headline_is_true", "losses", "markdown", "ratios", "row", "sources", "spread"]

CLOSE = 0.03


def ratios(
    store: Store, name: str, length: str, mode: str = "tune", numbers: str = "", first: int = 0, of: str = "wall_s"
) -> list[float]:
    """Return how many times as fast the whole fits were as those without InTune, pair by pair.

    Args:
        store: of the runs.
        name: of the entry.
        length: ``short`` or ``long``.
        mode: of InTune.
        numbers: of the other runs, if not the authors'.
        first: earlier repeats are left out.
        of: which seconds; ``call_s`` are those of the whole call of `fit`, its start and its end included.
    """
    stock = {run["repeat"]: run[of] for run in store.all(name, length, "off")}
    others = {run["repeat"]: run[of] for run in store.all(name, length, mode, numbers)}
    return [stock[repeat] / others[repeat] for repeat in sorted(stock.keys() & others.keys()) if repeat >= first]


def headline_is_true(run: dict[str, Any]) -> bool | None:
    """Return whether the report's figure of the whole run is samples over wall by our clock; None where it has none."""
    told = (run["report"].get("whole") or {}).get("throughput_samples_per_s")
    return None if told is None else abs(told / run["samples_per_s"] - 1) <= CLOSE


def row(store: Store, entry: Entry, length: str) -> dict[str, Any] | None:
    """Return the row of one entry; None before its first pair of runs.

    Args:
        store: of the runs.
        entry: which.
        length: ``short`` or ``long``.
    """
    tuned, stock = store.all(entry.name, length, "tune"), store.all(entry.name, length, "off")
    found = ratios(store, entry.name, length)
    if not found:
        failed = [run for run in store.rows if run["name"] == entry.name and run["length"] == length and "error" in run]
        return {"pipeline": entry.name, "verdict": f"FAILED {failed[-1]['error'][-200:]}"} if failed else None
    reports = [run["report"] for run in tuned]
    told = [headline_is_true(run) for run in tuned]
    typical = sorted(tuned, key=lambda run: run["wall_s"])[len(tuned) // 2]
    return {
        "pipeline": entry.name,
        "off_s": round(median(run["wall_s"] for run in stock), 1),
        **spread("ratio", found),
        "call": round(median(ratios(store, entry.name, length, of="call_s")), 3),
        "losses": losses(stock, tuned),
        "verdict": typical["report"].get("verdict") or "no report",
        "next": " / ".join(str(typical["report"].get("next", "")).splitlines()),
        "headline": "-" if None in told else "true" if all(told) else f"false in {told.count(False)} of {len(told)}",
        "changes": "/".join(str(report.get("changes", "?")) for report in reports),
        **(
            {"frozen": str(frozen)} if (frozen := next((r["frozen"] for r in reports if r.get("frozen")), None)) else {}
        ),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the columns of a repeated measurement: median, smallest, largest, how many."""
    middle, low, high = (round(of(values), 3) for of in (median, min, max))
    return {name: middle, "min": low, "max": high, "pairs": len(values)}


def losses(stock: Sequence[dict[str, Any]], tuned: Sequence[dict[str, Any]]) -> str:
    """Return whether the losses of two kinds of runs are the same, bit by bit."""
    without, with_us = ({run["losses"] for run in runs} for runs in (stock, tuned))
    if len(without) > 1:
        return "not the same without us"
    return "same" if with_us == without else "DIFFERENT"


def sources(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return a row per pipeline that says where it comes from.

    Args:
        entries: which.
    """
    return [
        {
            "pipeline": entry.name,
            "kind": entry.kind,
            "of": entry.domain,
            "source": f"{entry.repository} `{entry.path}` at {entry.commit[:10]}",
            "numbers": ", ".join(f"{name} {_number(value)}" for name, value in entry.numbers.items()) or "none",
            "batch": entry.batch,
            "each read": f"+{entry.read_ms} ms" if entry.read_ms else "local",
            "long": "yes" if entry.could_gain else "",
            "left out": entry.left_out,
        }
        for entry in entries
    ]


def _number(value: int) -> str:
    return "AUTOTUNE" if value == AUTOTUNE else str(value)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, one column per key in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(column, "")).replace("|", "\\|") for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
