"""`report.html`: one file that needs nothing else, from a disk and without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from intune_callbacks import __version__
from intune_callbacks.errors import MissingPackage
from intune_callbacks.record.files import write_whole
from intune_callbacks.record.history import HISTORY
from intune_callbacks.show.page import parts
from intune_callbacks.show.page.columns import RunColumns, columns_of
from intune_callbacks.show.page.figures import Drawing, draw, draw_together
from intune_callbacks.show.page.plot import SIGNS
from intune_callbacks.show.page.runs import Run
from intune_callbacks.show.page.sides import before_and_after, two_runs

__all__ = ["comparison_html", "page_html", "plotly_source", "write"]

# Characters of reasons on the page at most; of a run with very many different ones each is cut.
TEXTS = 300_000
CUTS = (400, 200, 120, 80, 60, 40)
# plotly.js is a core that draws lines, to which its last statement adds some fifty other kinds of plots, see
# https://github.com/plotly/plotly.js/blob/master/lib/index.js. What is not added is not evaluated either: the page is
# drawn in half the time.
OTHER_KINDS = re.compile(r"\.register\(\[(?:[\w$]+\(\),?)+\]\)")
# The page may load nothing, from anywhere, whatever is in the names it shows.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page_html(runs: Sequence[Run]) -> str:
    """Return the page of a run.

    Args:
        runs: what `runs.read` gave: one, or one for each rank.

    Raises:
        MissingPackage: plotly is not installed.
    """
    first = runs[0]
    courses = [columns_of(run.lines) for run in runs]
    course = courses[0]
    body = [
        f"<header>{parts.verdict(first, first.name)}</header>",
        _section("Before and after", parts.table(before_and_after(first.report), "before", "after")),
        _section("The pipeline", parts.boxes(first, course)),
    ]
    if seen := parts.hints(first.report):
        body.append(_section("What can be seen without running it", seen))
    told = list(first.notes)
    drawings = []
    if len(runs) > 1:
        together = draw_together({f"rank {run.rank}": c for run, c in zip(runs, courses, strict=True)})
        drawings.append(together)
        body.append(_section("The ranks", parts.ranks(runs) + parts.plots(together.figures)))
        told += [f"rank {run.rank}: {note}" for run in runs[1:] for note in run.notes]
    data: dict[str, Any] = {}
    if len(course):
        drawing = draw(course, first.report)
        drawings.append(drawing)
        title = "Over time" if len(runs) == 1 else f"Over time, rank {first.rank}"
        body.append(_section(title, parts.plots(drawing.figures)))
        data["decisions"], cut = _decisions(course, drawing.kept)
        data["unit"] = drawing.unit
        told += _thinned(course, drawing, cut)
    body.append(_section("Decisions", parts.decisions(course)))
    body.append(_section("Settings and versions", parts.facts(first.report)))
    if told:
        body.append(_section("Notes", parts.notes(told)))
    return _document(f"InTune: {first.name}", body, _joined(drawings) | data)


def comparison_html(first: Run, second: Run) -> str:
    """Return a page with the figures and courses of two runs beside each other.

    Raises:
        MissingPackage: plotly is not installed.
    """
    labels = _labels(first, second)
    together = draw_together({label: columns_of(run.lines) for label, run in zip(labels, (first, second), strict=True)})
    body = [
        f"<header><p class=run>InTune</p><h1>{escape(labels[0])} and {escape(labels[1])}</h1></header>",
        _section("Side by side", parts.table(two_runs(first, second), *labels)),
    ]
    if together.figures:
        body.append(_section("Over time", parts.plots(together.figures)))
    told = [f"{label}: {note}" for label, run in zip(labels, (first, second), strict=True) for note in run.notes]
    if told:
        body.append(_section("Notes", parts.notes(told)))
    return _document(f"InTune: {labels[0]} and {labels[1]}", body, _joined([together]))


def write(path: Path, page: str) -> Path:
    """Write the page as a whole or not at all, and return its path.

    Raises:
        OSError: when it cannot be written.
    """
    # A file name may hold bytes that are no text; the page shows a sign for them.
    write_whole(path, page.encode("utf-8", "replace").decode("utf-8"))
    return path


def plotly_source() -> str:
    """Return the text of plotly.js, which plotly brings along, for a page that draws lines only.

    Raises:
        MissingPackage: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPackage("plotly", "report") from error
    whole = str(get_plotlyjs())
    lines_only, found = OTHER_KINDS.subn(".register([])", whole)
    return lines_only if found == 1 else whole


def _document(title: str, body: Iterable[str], data: Mapping[str, Any]) -> str:
    files = resources.files("intune_callbacks.show.page")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel=icon href="data:,"><style>\n{style}</style></head><body><main>'
        f'<button id=theme type=button aria-label="light or dark">◐</button>{"".join(body)}'
        f"<footer>Made by intune_callbacks {__version__}; plotted by plotly.js.</footer></main>"
        "<div id=tip role=status hidden></div>"
        f"<script type=application/json id=data>{_json(data)}</script>"
        f"<script>{plotly_source()}</script><script>\n{script}</script></body></html>\n"
    )


def _json(data: Mapping[str, Any]) -> str:
    """As JSON in which nothing can end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _joined(drawings: Iterable[Drawing]) -> dict[str, Any]:
    joined: dict[str, Any] = {"columns": {}, "figures": {}}
    for drawing in drawings:
        joined["columns"] |= drawing.columns
        joined["figures"] |= {figure.key: figure.spec for figure in drawing.figures}
    return joined


def _decisions(course: RunColumns, kept: Sequence[int]) -> tuple[dict[str, Any], int | None]:
    """Return the kept decisions as columns, each different text once, and where texts were cut."""
    events = [course.events[index] for index in kept]
    texts = dict.fromkeys(["", *(text for event in events for text in (event.change, event.reason, event.refused))])
    cut = next((n for n in CUTS if sum(min(len(text), n) for text in texts) <= TEXTS), CUTS[-1])
    number = {text: at for at, text in enumerate(texts)}
    kinds = list(SIGNS)
    columns = {
        "step": [course.steps[index] for index in kept],
        "kinds": [sum(1 << kinds.index(kind) for kind in event.kinds) for event in events],
        "change": [number[event.change] for event in events],
        "reason": [number[event.reason] for event in events],
        "refused": [number[event.refused] for event in events],
        "effect": [None if event.effect is None else float(f"{event.effect:.3g}") for event in events],
        "texts": [text if len(text) <= cut else f"{text[: cut - 1]}…" for text in texts],
        "names": [f"{sign} {kind}" for kind, (_, sign) in SIGNS.items()],
    }
    return columns, cut if any(len(text) > cut for text in texts) else None


def _thinned(course: RunColumns, drawing: Drawing, cut: int | None) -> Iterable[str]:
    if len(drawing.kept) < len(course):
        yield (
            f"{len(drawing.kept)} of {len(course)} decisions are drawn: each in which something was changed, taken "
            f"back, refused or advised, and of the others the peaks; {HISTORY} has them all"
        )
    if drawing.marked < len(course.eventful):
        yield f"{drawing.marked} of {len(course.eventful)} marks are drawn; the others are found by hovering"
    if cut is not None:
        yield f"reasons longer than {cut} characters are cut here; {HISTORY} has them whole"


def _labels(first: Run, second: Run) -> tuple[str, str]:
    return (first.name, second.name) if first.name != second.name else (str(first.folder), str(second.folder))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"
