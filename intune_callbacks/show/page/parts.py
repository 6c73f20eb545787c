"""The parts of the page that are text: verdict, tables, the pipeline as boxes, decisions; everything is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from intune_callbacks.record.card import headline, in_short, said, tone
from intune_callbacks.record.report import Report, StageRow
from intune_callbacks.show.page.columns import RunColumns
from intune_callbacks.show.page.plot import SIGNS, Figure
from intune_callbacks.show.page.runs import Run
from intune_callbacks.show.page.sides import Row, allocation_line
from intune_callbacks.words import (
    PAGE_ARROW,
    amount,
    duration,
    four_digits,
    percent,
    quantity,
    ratio,
    setting,
    short_percent,
    stage_value,
)

__all__ = ["boxes", "decisions", "facts", "hints", "notes", "plots", "ranks", "table", "verdict"]

FIRST_LISTED, LAST_LISTED = 20, 80
LONGEST = 400
LATELY = 20


def verdict(run: Run, name: str) -> str:
    """Return the head of the page: what was found, why, and what to do, in the words of the end card."""
    report = run.report
    rows = "".join(f"<dt>{key}</dt><dd>{escape(text)}</dd>" for key, text in said(report).items() if text)
    head = escape(headline(report)).replace("-&gt;", "<span class=arrow>-&gt;</span>")
    return (
        f'<p class=run>InTune <b>{escape(name)}</b></p><h1 class="{tone(report)}">{head}</h1>'
        f"<p class=told>{escape(in_short(report))}</p><dl class=said>{rows}</dl>"
    )


def table(rows: Sequence[Row], first: str, second: str) -> str:
    """Return a table of two columns and a ratio, its rows under their headings."""
    lines, group = [], ""
    for row in rows:
        if row.group != group and row.group:
            lines.append(f"<tr class=group><th colspan=4 scope=rowgroup>{escape(row.group)}</th></tr>")
        group = row.group
        cells = "".join(f"<td>{escape(text)}</td>" for text in (row.first, row.second, row.more))
        lines.append(f"<tr><th scope=row>{escape(row.name)}</th>{cells}</tr>")
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in (first, second))
    return f"<div class=scroll><table><tr><td></td>{head}<td></td></tr>{''.join(lines)}</table></div>"


def boxes(run: Run, course: RunColumns) -> str:
    """Return the pipeline in its order, each stage with its numbers, and a mark where the bottleneck is."""
    report = run.report
    stages = report.stages
    windows = {stage.window_of: stage for stage in stages if stage.window_of is not None}
    shown = [stage for stage in stages if stage.window_of is None]
    if not shown:
        return "<p class=quiet>No stage of this pipeline can be resized.</p>"
    sides = report.before, report.after
    first_limit, limit = (side.stage if side.verdict == "input-bound" else None for side in sides)
    made = []
    for stage in shown:
        name = stage.name
        now, first = limit == name, first_limit == name
        flag = "bottleneck" if now else "bottleneck at first" if first else ""
        lines = [("workers" if stage.unit == "workers" else "depth", _moved(stage))]
        if name in windows:
            lines.append(("window", _moved(windows[name])))
        bars = [("busy", _lately(course.busy.get(name))), ("queue", _lately(course.fill.get(name)))]
        made.append(_box(name, "now" if now else "first" if first else "", flag, lines, bars))
    fed = tone(report) == "good"
    steps = [("a step", quantity(report.after.model_s, "ms"))]
    waits = [("waits", report.after.wait_frac)]
    limited = report.after.verdict == "compute-bound"
    made.append(_box("model", "model" if fed else "", "bottleneck" if limited else "", steps, waits))
    return f"<ol class=pipeline>{''.join(made)}</ol>"


def ranks(runs: Sequence[Run]) -> str:
    """Return a table of the ranks, the one that keeps the others waiting marked."""
    told = runs[0].report.ranks or {}
    rows = []
    for run in runs:
        after, late = run.report.after, told.get("straggler") == run.rank
        waits = told.get("wait_s")
        wait_s = waits[run.rank] if isinstance(waits, list) and run.rank is not None and run.rank < len(waits) else None
        cells = [
            quantity(after.throughput_samples_per_s, ""),
            quantity(after.wait_frac, "%"),
            quantity(wait_s, "ms"),
            quantity(after.model_s, "ms"),
            amount(run.report.changes),
            allocation_line(run.report),
        ]
        name = f"rank {run.rank}{' <b>straggler</b>' if late else ''}"
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr{' class=late' if late else ''}><th scope=row>{name}</th>{row}</tr>")
    heads = ("samples/s", "data wait", "wait of a step", "model time of a step", "changes", "allocation")
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    line = f"<p>{escape(str(told['line']))}</p>" if "line" in told else ""
    return f"{line}<div class=scroll><table class=ranks><tr><td></td>{head}</tr>{''.join(rows)}</table></div>"


def plots(figures: Iterable[Figure]) -> str:
    """Return the places of the plots, each with its title and legend; one without a neighbour takes the row."""
    shown = list(figures)
    narrow = [figure.key for figure in shown if not figure.wide]
    alone = narrow[-1] if len(narrow) % 2 else None
    made = []
    for figure in shown:
        signs = "".join(
            f'<li><i style="color:var({paint})">{sign}</i>{escape(label)}</li>' for paint, sign, label in figure.legend
        )
        wide = " class=wide" if figure.wide or figure.key == alone else ""
        height_px = figure.spec["layout"]["height"]
        made.append(
            f"<figure{wide}><figcaption><h3>{escape(figure.title)}</h3><ul class=legend>{signs}</ul></figcaption>"
            f'<div class=plot id="{figure.key}" style="height:{height_px}px"></div></figure>'
        )
    return f"<div class=plots>{''.join(made)}</div>"


def decisions(course: RunColumns) -> str:
    """Return the eventful decisions as a list that opens; of many, the first and the last."""
    found = course.eventful
    if not found:
        return "<p class=quiet>Nothing was changed, advised or refused.</p>"
    cut = len(found) > FIRST_LISTED + LAST_LISTED
    listed: list[int | None] = [*found[:FIRST_LISTED], None, *found[-LAST_LISTED:]] if cut else [*found]
    rows = []
    for index in listed:
        if index is None:
            left = f"{len(found) - FIRST_LISTED - LAST_LISTED} more are in the plots and in history.jsonl"
            rows.append(f"<tr class=group><th colspan=4>{left}</th></tr>")
            continue
        event = course.events[index]
        signs = " ".join(f"{SIGNS[kind][1]} {kind}" for kind in event.kinds)
        parts = [event.change, event.reason, f"refused: {event.refused}" if event.refused else ""]
        text = "<br>".join(escape(part[:LONGEST]) for part in parts if part)
        effect = ratio(event.effect) if event.effect is not None else ""
        time = duration(course.at_s[index])
        rows.append(f"<tr><td>{time}</td><td>{escape(signs)}</td><td class=text>{text}</td><td>{effect}</td></tr>")
    heads = ("at", "what", "why", "samples/s then")
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    shown = f"<div class=scroll><table class=decisions><tr>{head}</tr>{''.join(rows)}</table></div>"
    return f"<details><summary>{len(found)} eventful of {len(course)} decisions</summary>{shown}</details>"


def hints(report: Report) -> str:
    """Return what can be seen of the user's pipeline without running it, each with the line to write instead."""
    made = []
    for hint in report.hints:
        line = f"<br><code>{escape(hint.line)}</code>" if hint.line else ""
        made.append(f"<li>{escape(hint.what)}{line}</li>")
    return f"<ul class=notes>{''.join(made)}</ul>" if made else ""


def facts(report: Report) -> str:
    """Return mode, policy, settings with where they came from, and versions, as pairs."""
    found = {"mode": f"{report.mode} (from {report.mode_source})", "policy": report.policy or "not known"}
    found |= {str(name): setting(given) for name, given in report.settings.items() if name not in found}
    soft = report.memory.soft_limit_frac
    if soft is not None and "memory_soft_limit" not in found:
        found["memory soft limit"] = f"{quantity(soft, '%')} of the limit"
    found |= {"steps": amount(report.steps), "samples": amount(report.samples)}
    if report.auc is not None:
        found["test AUC"] = four_digits(report.auc)
    found |= {str(name): str(version) for name, version in report.versions.items()}
    pairs = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in found.items())
    return f"<dl class=facts>{pairs}</dl>"


def notes(texts: Iterable[str]) -> str:
    """Return what the reader has to know about the page itself, a line each."""
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul class=notes>{lines}</ul>" if lines else ""


def _box(
    name: str, kind: str, flag: str, lines: Iterable[tuple[str, str]], bars: Iterable[tuple[str, float | None]]
) -> str:
    told = "".join(f"<div><dt>{key}</dt><dd>{escape(value)}</dd></div>" for key, value in lines)
    for key, share in bars:
        if share is not None:
            shown = min(max(share, 0.0), 1.0)
            bar = f'<i class=bar><i style="width:{short_percent(shown)}"></i></i>'
            told += f"<div><dt>{key}</dt><dd>{bar}{percent(shown)}</dd></div>"
    mark = f"<b class=flag>{flag}</b>" if flag else ""
    return f'<li class="{kind}">{mark}<h3>{escape(name)}</h3><dl>{told}</dl></li>'


def _moved(stage: StageRow) -> str:
    first, last = stage_value(stage.first), stage_value(stage.current)
    return last if first == last else f"{first}{PAGE_ARROW}{last}"


def _lately(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in (values or ())[-LATELY:] if value is not None]
    return median(known) if known else None
