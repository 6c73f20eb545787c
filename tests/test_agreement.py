"""The comparison of simulator and emulated machine: what is drawn, which rule stands for it, and that they agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torchdata")

from benchmarks.agreement import measure, simulate, simulated
from benchmarks.agreement_cases import Drawn, draw

REGULAR = Drawn("torchdata", 8, 0.18, 0.0, 3, (0.06, 0.12), 1, 0.0, 0.0, (2, 4), (4, 8))
"""Two stages, both of 33 batches per second."""


def test_draws_are_pipelines_the_emulated_machine_can_run() -> None:
    rng = np.random.default_rng(2)
    cases = [draw(rng, number) for number in range(300)]
    for case in cases:
        assert 2 <= len(case.stage_s) == len(case.workers) == len(case.windows) <= 6
        assert sum(case.workers) <= case.cpus
        assert all(1.5 * n <= w <= 12.5 * n for n, w in zip(case.workers, case.windows, strict=True))
        calls = [s for i, s in enumerate(case.stage_s) if i != case.odd]
        calls += [case.stage_s[case.odd] * part for part in (case.lock, 1.0 - case.lock) if part > 0.0]
        assert min(calls) >= 0.02 - 1e-9
        assert len(calls) / case.slowest_s < 1000
        assert sum(case.stage_s) == pytest.approx(case.work_s)
    assert {case.cpus for case in cases} == {8, 16, 32, 64}
    assert any(case.sigma == 0.0 for case in cases)
    assert any(case.sigma > 0.8 for case in cases)
    assert any(case.lock for case in cases)
    assert any(case.model_s for case in cases)


def test_regular_stages_are_expected_to_be_as_fast_as_the_slowest() -> None:
    assert simulate(REGULAR) == pytest.approx(1 / 0.03, rel=0.03)
    faster = replace(REGULAR, workers=(4, 4), windows=(8, 8))
    assert simulate(faster) == pytest.approx(1 / 0.03, rel=0.001)
    assert simulate(replace(faster, model_s=0.06)) == pytest.approx(1 / 0.06, rel=0.001)
    assert simulate(replace(faster, lock=0.5)) == pytest.approx(1 / 0.06, rel=0.02)


def test_irregular_items_cost_throughput_where_windows_are_narrow() -> None:
    narrow = replace(REGULAR, sigma=0.9)
    wide = replace(narrow, windows=(24, 48))
    assert simulated(narrow).burst > simulated(REGULAR).burst
    assert simulate(narrow) < 0.8 * simulate(REGULAR)
    assert simulate(narrow) < simulate(wide) < simulate(REGULAR)


def test_the_luck_of_the_draw_counts_only_where_it_matters() -> None:
    bound_by_odd = replace(REGULAR, workers=(4, 4), windows=(8, 8))
    bound_by_other = replace(REGULAR, workers=(1, 4))
    assert simulate(bound_by_odd, 1.1) == pytest.approx(simulate(bound_by_odd) / 1.1, rel=0.01)
    assert simulate(bound_by_other, 1.1) == pytest.approx(simulate(bound_by_other), rel=0.01)


@pytest.mark.parametrize(
    "case",
    [REGULAR, replace(REGULAR, model_s=0.045), replace(REGULAR, lock=0.5)],
    ids=["balanced", "model", "lock"],
)
def test_emulated_machine_and_simulator_agree(case: Drawn) -> None:
    expected = simulate(case)
    # A busy host makes real threads late now and then, never early: one quiet stretch in five is enough.
    ratios = (expected / measure(case, warm_s=0.2, seconds=1.0).rate for _ in range(5))
    assert any(0.94 < ratio < 1.06 for ratio in ratios)


def test_stretch_of_an_irregular_pipeline_reports_its_luck() -> None:
    case = replace(REGULAR, sigma=0.6, windows=(16, 32))
    stretch = measure(case, warm_s=0.1, seconds=1.0)
    assert 0.6 < stretch.factor < 1.6
    assert stretch.factor != 1.0
    assert stretch.sleep_inflation > 0.99
    assert 1.0 < stretch.rate < 1 / 0.02
