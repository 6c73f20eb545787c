"""The report of a run of which no step could be seen: it was not too short, and a longer one would show no more."""

from __future__ import annotations

from dataclasses import replace

from intune_callbacks.record.report import Report
from intune_callbacks.words import NOT_MEASURED

__all__ = ["not_measured"]


def not_measured(report: Report, reason: str) -> Report:
    """Return the report with the reason in place of a verdict.

    Args:
        report: of a run without a measured step.
        reason: why none was seen and, behind the first semicolon, what would change that.
    """
    why, _, do = reason.partition("; ")
    before, after = (replace(side, verdict=NOT_MEASURED, why=why) for side in (report.before, report.after))
    return replace(report, verdict=NOT_MEASURED, why=why, next=do or report.next, before=before, after=after)
