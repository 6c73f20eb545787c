"""What `intune watch` shows of a run: one line of text for a decision, or a live view of all ranks on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from intune_callbacks.errors import MissingPackage
from intune_callbacks.record.running import Rank
from intune_callbacks.words import COLOURS, UNKNOWN, allocation, amount, changed, memory, moment, percent

__all__ = ["line", "live", "view"]

_number, _percent = partial(amount, unknown=UNKNOWN), partial(percent, unknown=UNKNOWN)
BARS = "▁▂▃▄▅▆▇█"
PANELS = 4
"""Ranks that get a panel each; more get a row each. A choice: what a terminal has lines for."""


def line(rank: Rank, decision: Mapping[str, Any]) -> str:
    """Return one decision as a line of text."""
    seen = decision["observation"]
    parts = [rank.name, f"step {decision['step']}", f"{_number(seen['samples_per_s'])} samples/s"]
    parts += [
        f"wait {_percent(seen['wait_frac'])}",
        _start(seen),
        _allocation(decision["after"]),
        f"RAM {_memory(seen)}",
    ]
    return "   ".join([*filter(None, parts), change(decision)])


def change(decision: Mapping[str, Any]) -> str:
    """Return what a decision changed, or would change, and why."""
    moved = changed(decision["before"], decision["after"])
    if not moved and decision["granted"] and not decision["applied"]:
        moved = "would set " + ", ".join(f"{name} {value}" for name, value in decision["granted"].items())
    return ": ".join(filter(None, [moved, decision["reason"]]))


def _sparkline(values: Sequence[float | None], most: float | None = None) -> str:
    """Return one bar for each value, from 0 to `most`, by default the largest; a space where it is unknown."""
    most = max((value for value in values if value is not None), default=0.0) if most is None else most
    top = len(BARS) - 1
    steps = [None if v is None else max(0, min(top, int(v / most * len(BARS)))) if most else 0 for v in values]
    return "".join(" " if step is None else BARS[step] for step in steps)


def live() -> Any:
    """Return rich's `Live`.

    Raises:
        MissingPackage: rich is not installed.
    """
    try:
        from rich.live import Live
    except ImportError:
        raise MissingPackage("rich", "report") from None
    return Live(auto_refresh=False)


def view(ranks: Sequence[Rank], now_s: float) -> Any:
    """Return what rich shows of the ranks: a panel for each or, of many, a row.

    Args:
        ranks: each with at least one decision.
        now_s: seconds since the epoch.
    """
    from rich.console import Group
    from rich.table import Table

    if len(ranks) <= PANELS:
        return Group(*[_panel(rank, now_s) for rank in ranks])
    table = Table()
    for title in ("rank", "step", "samples/s", "wait", "memory", "verdict", "stages"):
        table.add_column(title)
    for rank in ranks:
        last, verdict = rank.decisions[-1], rank.verdict()
        seen, where = last["observation"], f": {verdict.stage}" if verdict.stage else ""
        cells = [rank.name, str(last["step"]), _number(seen["samples_per_s"]), _percent(seen["wait_frac"])]
        cells += [_memory(seen), _coloured(verdict.kind, where), _allocation(last["after"])]
        table.add_row(*[_text(cell) for cell in cells])
    return table


def _panel(rank: Rank, now_s: float) -> Any:
    from rich.panel import Panel
    from rich.table import Table

    last, verdict = rank.decisions[-1], rank.verdict()
    seen = last["observation"]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    rows: list[tuple[str, Any]] = [("verdict", _coloured(verdict.kind, f": {verdict.why}"))]
    figures = (("samples/s", "samples_per_s", _number, None), ("wait", "wait_frac", _percent, 1.0))
    for label, key, words, most in figures:
        past = [decision["observation"][key] for decision in list(rank.decisions)[-60:]]
        rows.append((label, f"{words(seen[key]):<8}{_sparkline(past, most)}"))
    if seen["exposed_wait_frac"] is not None:
        rows.append(("GPU idle", _percent(seen["exposed_wait_frac"])))
    if start := _start(seen):
        rows.append(("seam", start))
    rows.append(("stages", _allocation(last["after"])))
    if verdict.stage is not None:
        busy = seen["rates"].get(verdict.stage, {}).get("busy_frac")
        rows.append(("slowest", f"{verdict.stage}, whose workers are busy {_percent(busy)} of the time"))
    rows.append(("memory", _memory(seen)))
    if rank.change is not None:
        rows.append(("changed", f"step {rank.change['step']}: {change(rank.change)}"))
    rows.append(("now", last["reason"]))
    for label, text in rows:
        grid.add_row(_text(label), _text(text))
    seconds = f", {now_s - rank.modified_s:.0f} s ago" if rank.modified_s is not None else ""
    title = " ".join(filter(None, [rank.folder.as_posix(), f"step {last['step']}{seconds}"]))
    return Panel(grid, title=_text(title), title_align="left", border_style=COLOURS[verdict.kind])


def _text(value: Any) -> Any:
    from rich.text import Text

    return value if isinstance(value, Text) else Text(value)  # a plain string would be read as markup


def _coloured(kind: str, rest: str) -> Any:
    from rich.text import Text

    return Text.assemble((kind.upper(), f"bold {COLOURS[kind]}"), rest)


def _start(seen: Mapping[str, Any]) -> str:
    """How long the start of an epoch took, where the window held one."""
    return f"start of an epoch {moment(seen['seam_s'])}" if seen["seam_s"] else ""


def _allocation(values: Mapping[str, int]) -> str:
    windows = {name.removesuffix(".window"): value for name, value in values.items() if name.endswith(".window")}
    return allocation({name: n for name, n in values.items() if not name.endswith(".window")}, windows)


def _memory(seen: Mapping[str, Any]) -> str:
    used, limit = seen["memory_used_bytes"], seen["memory_limit_bytes"]
    if used is None or limit is None:
        return UNKNOWN
    return memory(used, limit) + (f" ({percent(used / limit)})" if limit else "")
