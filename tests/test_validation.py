"""What a validation takes is told of the whole run: it is in no step, and without that it would be named nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_runs import WHOLE, run

from intune_callbacks.measure.wait import Apart
from intune_callbacks.record.card import card_rows
from intune_callbacks.record.findings import build_report


@pytest.mark.parametrize(("validation_s", "is_told"), [(12.0, True), (4.0, False), (None, False)])
def test_a_validation_that_takes_much_of_the_run_is_told(validation_s: float | None, is_told: bool) -> None:
    whole = replace(WHOLE, paused_s=13.0, validation_s=validation_s)
    rows = [text for label, text in card_rows(build_report(replace(run(), whole=whole))) if label == "also"]
    assert [row.partition(",")[0] for row in rows] == (["validation took 12 s"] if is_told else [])
    assert not is_told or "60 % of the run, and is not tuned" in rows[0]


def test_only_what_has_a_begin_and_an_end_is_added() -> None:
    now = iter([1.0, 4.0, 10.0, 20.0, 22.5])
    apart = Apart(lambda: next(now))
    apart.end()
    apart.begin()
    apart.end()
    assert apart.total_s == 3.0
    apart.begin()  # left open by an error
    apart.begin()
    apart.end()
    assert apart.total_s == 5.5
