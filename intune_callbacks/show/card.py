"""Show the end card: a coloured panel on a terminal where rich is installed, the same words as plain text elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from intune_callbacks.record.card import card_rows, end_card
from intune_callbacks.record.report import Report
from intune_callbacks.words import ARROW, COLOURS, SLOWER, wrapped

__all__ = ["show"]


def show(report: Report, folder: Path | None = None) -> None:
    """Print the end card to stdout.

    rich leaves out the colours where ``NO_COLOR`` is set (https://no-color.org).
    """
    console = _console()
    if console is not None:
        console.print(_panel(report, folder))
        return
    text, encoding = wrapped(end_card(report, folder)), getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _console() -> Any:
    """Return a console of rich, None where plain text is all that can be read."""
    terminal = getattr(sys.stdout, "isatty", None)
    if terminal is None or not terminal():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, markup=False)
    return None if console.is_dumb_terminal or not console.encoding.startswith("utf") else console


def _panel(report: Report, folder: Path | None) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    (name, head), *rows = card_rows(report, folder)
    verdict, _, facts = head.partition("  ")
    first = Text()
    for word in verdict.partition(ARROW):
        first.append(word, f"bold {COLOURS.get(word.lower(), 'default')}" if word != ARROW else "default")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(name), first.append(f"   {facts}", "dim"))
    for label, text in rows:
        grid.add_row(Text(label), Text(text))
    word = SLOWER if report.verdict == SLOWER else report.after.verdict
    colour = "yellow" if report.frozen else COLOURS.get(word, "default")
    return Panel(grid, border_style=colour, expand=False)
