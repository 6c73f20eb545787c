"""The whole run in a line: samples over wall; where that is less than the speed while it runs, what lies between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intune_callbacks.measure.advice import KEPT
from intune_callbacks.words import amount, duration, moment, number, percent, whole_rate

__all__ = ["whole_run"]

APART = 0.1


def whole_run(report: Mapping[str, Any]) -> str:
    """Return the whole run in a line, and where it was slower than while it ran, why; nothing where it is not known."""
    whole, rate = report.get("whole") or {}, whole_rate(report)
    if rate is None:
        return ""
    parts = [f"{amount(rate)} samples/s in {duration(whole.get('wall_s'))}"]
    if number(whole.get("wait_frac")) is not None:
        parts.append(f"wait {percent(whole['wait_frac'])}")
    if first_s := number(whole.get("first_batch_s")):
        parts.append(f"first batch after {moment(first_s)}")
    return "\n".join(["   ".join(parts), *_apart(report, whole, rate)])


def _apart(report: Mapping[str, Any], whole: Mapping[str, Any], rate: float) -> list[str]:
    """The speed while it runs beside the whole run's, where they are more than a tenth apart, and what lies between."""
    rates = [number(report["after"].get(key)) for key in ("running_samples_per_s", "throughput_samples_per_s")]
    running = max((known for known in rates if known is not None), default=None)
    if running is None or abs(running - rate) <= APART * running:
        return []
    seam_s, paused_s = (number(whole.get(key)) or 0.0 for key in ("seam_s", "paused_s"))
    if running < rate or seam_s + paused_s < APART * (number(whole.get("wall_s")) or 0.0):
        return [f"{amount(running)} samples/s at last, {amount(rate)} in the whole run"]
    if paused_s > seam_s:
        return [f"{amount(running)} samples/s while it runs, {amount(rate)} with its start, validation and checkpoints"]
    kinds = [cause["kind"] for cause in report.get("causes") or ()]
    mend = f": {KEPT}" if "startup" in kinds else ""
    return [f"{amount(running)} samples/s while it runs, {amount(rate)} with the start of each epoch{mend}"]
