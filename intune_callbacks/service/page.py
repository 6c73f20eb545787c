"""One page of all trainings a service decides for."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from intune_callbacks.service.jobs import Job
from intune_callbacks.words import amount, percent

__all__ = ["page"]

HEAD = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<meta name="viewport" content="width=device-width"><title>InTune: trainings</title>
<style>
:root { color-scheme: light dark } body { font: 15px system-ui, sans-serif; margin: 1.5rem }
table { border-collapse: collapse } th, td { padding: .3rem .8rem; text-align: left; vertical-align: top }
tr + tr td { border-top: 1px solid #8884 } td.n { text-align: right; font-variant-numeric: tabular-nums }
</style>
"""
NUMBERS = ("samples/s", "data wait", "decisions", "last asked")
COLUMNS = ("training", *NUMBERS, "allocation", "last decision")


def page(rows: Sequence[tuple[float, Job]], found: int) -> str:
    """Return the page of trainings, each with the seconds since its last question; so many results are kept."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(_row(idle_s, job) for idle_s, job in rows)
    kept = f"{len(rows)} trainings; {found} results are kept for the next ones to start from."
    return f"{HEAD}<h1>Trainings</h1><p>{kept}</p><table><tr>{head}</tr>{body}</table></html>\n"


def _row(idle_s: float, job: Job) -> str:
    seen = job.last
    samples = wait = allocation = "–"
    if seen is not None:
        samples, wait = amount(seen.samples_per_s), percent(seen.wait_frac)
        allocation = ", ".join(f"{name} {value}" for name, value in seen.allocation.items())
    numbers = (samples, wait, str(job.asked), f"{idle_s:.0f} s ago")
    cells = [f"<td>{escape(job.name)}</td>", *(f'<td class="n">{escape(one)}</td>' for one in numbers)]
    return f"<tr>{''.join(cells)}<td>{escape(allocation)}</td><td>{escape(job.answer.reason)}</td></tr>"
