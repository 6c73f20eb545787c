"""Write `report.html`: at the end of a fit, by `intune report DIR`, and of two runs by `intune compare DIR DIR`."""

from __future__ import annotations

import logging
import sys
import webbrowser
from pathlib import Path

from intune_callbacks.errors import MissingPackage
from intune_callbacks.record.history import HISTORY
from intune_callbacks.show.card import show as show_card
from intune_callbacks.show.page.comparison import Row, two_runs
from intune_callbacks.show.page.html import check_packages, comparison_html, page_html, write
from intune_callbacks.show.page.runs import read
from intune_callbacks.words import wrapped

__all__ = ["at_the_end", "compare", "report"]

PAGE = "report.html"
# What a fit that ends reads at most, all ranks together: two or three seconds. The command reads whatever there is.
MOST_BYTES = 32 << 20

log = logging.getLogger(__name__)


def at_the_end(folder: Path) -> Path | None:
    """Write the page of a fit that has just ended, if plotly and jinja2 are installed; never raises.

    Args:
        folder: of the run, or of its ranks.

    Returns:
        Its path; None without them, or where the history is so long that `intune report` had better be asked.
    """
    try:
        check_packages()
        if sum(path.stat().st_size for path in [*folder.glob(HISTORY), *folder.glob(f"rank*/{HISTORY}")]) > MOST_BYTES:
            log.info("InTune: the history is long; the page is made by: intune report %s", folder)
            return None
        return write(folder / PAGE, page_html(read(folder)))
    except MissingPackage:
        return None
    except Exception as error:  # a page is not worth a training
        log.warning("InTune could not write %s: %s: %s", folder / PAGE, type(error).__name__, error)
        return None


def report(directory: Path, out: Path | None = None, show: bool = False) -> int:
    """Print the end card of a run, write its page, and return the exit code.

    Args:
        out: where the page goes; `report.html` in the directory by default.

    Raises:
        ConfigError: the directory holds no run.
        MissingPackage: plotly or jinja2 is not installed; the card is printed nevertheless.
    """
    runs = read(directory)
    show_card(runs[0].report)
    for note in runs[0].notes:
        print(wrapped(f"note    {note}"))
    return _written(out or directory / PAGE, page_html(runs), show)


def compare(first: Path, second: Path, html: Path | None = None, show: bool = False) -> int:
    """Print two runs side by side, and return the exit code.

    Args:
        html: where a page with both courses goes; None writes one only to show it, beside the second run.

    Raises:
        ConfigError: one of the directories holds no run.
        MissingPackage: a page is wanted, and plotly or jinja2 is not installed.
    """
    one, other = read(first)[0], read(second)[0]
    print(_comparison_text(two_runs(one, other), str(first), str(second)))
    if html is None and not show:
        return 0
    return _written(html or second / "compare.html", comparison_html(one, other), show)


def _comparison_text(rows: list[Row], first: str, second: str) -> str:
    """Return the rows as a table for a terminal."""
    lines = [Row("", first, second)]
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.group != row.group:
            lines.append(Row("", "", ""))
        lines.append(row)
    widths = [max(len(getattr(row, name)) for row in lines) for name in ("name", "first", "second")]
    return "\n".join(
        f"{row.name:<{widths[0]}}  {row.first:>{widths[1]}}  {row.second:>{widths[2]}}  {row.more}".rstrip()
        for row in lines
    )


def _written(path: Path, page: str, show: bool) -> int:
    try:
        # A link, a device as /dev/stdout, a pipe: it is written to; to put a file in its place would destroy it.
        write(path, page, through=path.is_symlink() or (path.exists() and not path.is_file()))
    except OSError as error:
        print(f"intune: {path} cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"\nthe page is in {path}")
    if show and not webbrowser.open(path.absolute().as_uri()):
        print("intune: no browser could be opened; open the file above", file=sys.stderr)
        return 1
    return 0
