"""`report.html`: one file that needs nothing else, from a disk and without a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from intune_callbacks import __version__, words
from intune_callbacks.errors import MissingPackage
from intune_callbacks.record import card
from intune_callbacks.record.files import write_whole
from intune_callbacks.record.report import Span
from intune_callbacks.show.page.boxes import boxes, facts, wait_of_rank
from intune_callbacks.show.page.columns import RunColumns, columns_of
from intune_callbacks.show.page.comparison import allocation_line, before_and_after, two_runs
from intune_callbacks.show.page.figures import draw, draw_together
from intune_callbacks.show.page.plot import SIGNS
from intune_callbacks.show.page.runs import Run

__all__ = ["check_packages", "comparison_html", "page_html", "write"]

# Of many eventful decisions the first and the last are listed. A choice: the start decides most, the end is how it is.
LISTED = (20, 80)
# plotly.js is a core that draws lines, to which its last statement adds some fifty other kinds of plots, see
# https://github.com/plotly/plotly.js/blob/master/lib/index.js. What is not added is not evaluated either: the page is
# drawn in half the time.
OTHER_KINDS = re.compile(r"\.register\(\[(?:[\w$]+\(\),?)+\]\)")


def page_html(runs: Sequence[Run]) -> str:
    """Return the page of a run, or of all its ranks, as `runs.read` gave them.

    Raises:
        MissingPackage: plotly or jinja2 is not installed.
    """
    first = runs[0]
    of_runs = [_course(run) for run in runs]
    columns, report = of_runs[0], first.report
    labels = [f"rank {run.rank}" for run in runs]
    together = draw_together(dict(zip(labels, of_runs, strict=True))) if len(runs) > 1 else None
    drawn = draw(columns, report)
    notes = [*first.notes, *(f"rank {run.rank}: {note}" for run in runs[1:] for note in run.notes)]
    return _page(
        names=[first.name],
        report=report,
        runs=runs,
        rows=before_and_after(report),
        boxes=boxes(report, columns),
        course=columns,
        facts=facts(report),
        drawings={"together": together, "course": drawn},
        notes=[*notes, *(drawn.notes if drawn is not None else ())],
    )


def comparison_html(first: Run, second: Run) -> str:
    """Return a page with the figures and courses of two runs beside each other.

    Raises:
        MissingPackage: plotly or jinja2 is not installed.
    """
    both = (first, second)
    names = [run.name if first.name != second.name else str(run.folder) for run in both]
    together = draw_together({name: _course(run) for name, run in zip(names, both, strict=True)})
    notes = [f"{name}: {note}" for name, run in zip(names, both, strict=True) for note in run.notes]
    return _page(names=names, rows=two_runs(first, second), drawings={"together": together}, notes=notes)


def _course(run: Run) -> RunColumns:
    return columns_of(run.lines, (run.report.whole or Span()).begin_at_s)


def write(path: Path, page: str, through: bool = False) -> Path:
    """Write the page as a whole or not at all, and return its path.

    Args:
        through: write to what is there instead of putting a file in its place.

    Raises:
        OSError: when it cannot be written.
    """
    # A file name may hold bytes that are no text; the page shows a sign for them.
    text = page.encode("utf-8", "replace").decode("utf-8")
    if through:
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path, text)
    return path


def check_packages() -> None:
    """Look whether a page can be made.

    Raises:
        MissingPackage: plotly or jinja2 is not installed.
    """
    for package in ("plotly", "jinja2"):
        try:
            import_module(package)
        except ImportError as error:
            raise MissingPackage(package, "report") from error


@cache  # each fit of a search writes a page
def _plotly_source() -> str:
    """Return the text of plotly.js, which plotly brings along, for a page that draws lines only."""
    from plotly.offline import get_plotlyjs

    whole = str(get_plotlyjs())
    lines_only, found = OTHER_KINDS.subn(".register([])", whole)
    return lines_only if found == 1 else whole


@cache
def _template() -> Any:
    from jinja2 import Environment

    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return made.from_string(_text("page.html.j2"))


def _text(name: str) -> str:
    return resources.files("intune_callbacks.show.page").joinpath(name).read_text(encoding="utf-8")


def _page(*, drawings: dict[str, Any], **shown: Any) -> str:
    check_packages()
    figures = {key: drawing.figure for key, drawing in drawings.items() if drawing is not None}
    given = {"words": words, "card": card, "allocation_line": allocation_line, "wait_of_rank": wait_of_rank}
    given |= {
        "style": _text("page.css"),
        "script": _text("page.js"),
        "plotly": _plotly_source(),
        "version": __version__,
    }
    given |= {"SIGNS": SIGNS, "LISTED": LISTED, "figures": figures, "drawings": drawings}
    return str(_template().render(given | shown))
