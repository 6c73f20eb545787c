"""Where no gain of more workers is predicted, the card says so, and not only how long a batch takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cause_windows import LOADER, rate, stage, window
from report_runs import run

from intune_callbacks.record.findings import build_report


@pytest.mark.parametrize(("idle", "told"), [(0.0, " while no CPU is idle"), (3.0, "")])
def test_that_more_workers_promise_nothing_is_the_reason(idle: float, told: str) -> None:
    summary = run(mode="advise")
    loader = stage("load", 2, knob=LOADER, when="epoch")
    measured = replace(window((loader, rate(0.02, 0.02)), cpus=2.0), cpus_idle=idle)
    side = replace(summary.after, verdict="input-bound", stage="load", measured=measured)
    report = build_report(replace(summary, before=side, after=side))
    assert report.cause == "each batch of 'load' takes 20 ms in 2 workers"
    assert report.next == f"nothing to change: no gain of more workers is predicted{told}"


def test_waits_on_a_full_machine_are_no_reason_to_leave_all_as_it_is() -> None:
    """Items that sleep while others have the CPUs: more workers may help a lot, and a short run has not tried them."""
    summary = run(mode="observe")
    loader = stage("load", 1, knob=LOADER)
    measured = replace(window((loader, rate(0.04, 0.005)), period_s=0.045, cpus=2.0), cpus_idle=0.0)
    side = replace(summary.after, verdict="input-bound", stage="load", measured=measured)
    report = build_report(replace(summary, mode="tune", before=side, after=side))
    assert report.next == f"no gain of more workers can be promised: {report.cause}"
    assert "its reads or a CPU, for 0.0 CPUs are idle" in report.cause
