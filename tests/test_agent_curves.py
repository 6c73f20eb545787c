"""The fitted curves: what workers bring, learned from a few noisy windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from views import SCALING, a_view, service_s

from intune_callbacks.decide.curves import Curves
from intune_callbacks.decide.view import View


def seen(n: int, scaling: tuple[float, float, float], error: float = 1.0, **given: Any) -> View:
    """Return one stage with n workers as it is measured; what is no constant work is waiting."""
    work_s = float(service_s(scaling, n))
    return a_view([[n]], work_s * error, 32.0, cpu_share=scaling[0] / work_s, **given)


def learned(scaling: tuple[float, float, float], stays: list[tuple[int, int]], noise: float = 0.02) -> Curves:
    """Return curves that saw (workers, windows) one after the other."""
    rng = np.random.default_rng(0)
    every = [n for n, windows in stays for _ in range(windows)]
    curves = Curves(seen(every[0], scaling))
    for n in every:
        curves.learn(seen(n, scaling, float(np.exp(noise * rng.normal()))))
    return curves


def at(curves: Curves, n: float) -> float:
    return float(curves.service_s(np.array([[n]]))[0, 0])


@pytest.mark.parametrize("name", SCALING)
def test_a_few_noisy_readings_tell_the_curve(name: str) -> None:
    scaling = SCALING[name]
    curves = learned(scaling, [(16, 2), (8, 2), (24, 2), (12, 2)])
    for n in (8, 12, 16, 20, 24):
        assert at(curves, n) == pytest.approx(service_s(scaling, n), rel=0.08)
    # Beyond what was seen it is still a good guess.
    for n in (4, 32):
        assert at(curves, n) == pytest.approx(service_s(scaling, n), rel=0.35)
    assert min(curves.constant.min(), curves.linear.min(), curves.square.min()) >= 0.0


def test_a_long_stay_does_not_wipe_out_what_was_seen_elsewhere() -> None:
    scaling = SCALING["serial"]
    curves = learned(scaling, [(16, 2), (8, 3), (24, 3), (16, 400)], noise=0.05)
    for n in (8, 24):
        assert at(curves, n) == pytest.approx(service_s(scaling, n), rel=0.12)


@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_follows_a_jump_of_the_work(factor: float) -> None:
    before = SCALING["serial"]
    after = (before[0] * factor, before[1] * factor, 0.0)
    curves = learned(before, [(16, 2), (8, 2), (24, 2), (16, 50)])
    for _ in range(25):
        curves.learn(seen(16, after))
    assert at(curves, 16) == pytest.approx(service_s(after, 16), rel=0.15)
    assert float(curves.work_s[0, 0]) == pytest.approx(service_s(after, 16), rel=0.05)


def test_one_wild_reading_changes_little() -> None:
    curves = learned(SCALING["serial"], [(16, 5), (8, 5), (16, 5)])
    before = at(curves, 16)
    curves.learn(seen(16, SCALING["serial"], error=20.0))
    assert at(curves, 16) < 2.0 * before


def test_waiting_without_other_readings_is_half_believed_to_be_a_lock() -> None:
    """Sixteen workers that compute a third of their time: fewer would serve each batch faster."""
    scaling = SCALING["lock"]
    first = Curves(seen(16, scaling))
    assert 0.25 * at(first, 16) < at(first, 4) < 0.7 * at(first, 16)
    reader = Curves(a_view([[16]], 0.3, 32.0, cpu_share=0.3, weight=0.3))
    # A reader of known CPU weight that computes all of it waits for no lock.
    assert at(reader, 4) == pytest.approx(0.3, rel=0.01)


def test_noise_is_no_growth() -> None:
    """A stage whose items differ much, with 6 to 28 workers: there is no reason to expect little of 64."""
    stays, expected = [6, 6, 16, 12, 13, 11, 16, 20, 20, 28, 27, 28, 28], []
    for draw in range(60):
        rng = np.random.default_rng(draw)
        readings = [0.42 * float(np.exp(0.2 * rng.normal())) for _ in stays]
        curves = Curves(a_view([[6]], readings[0], 32.0, work_noise=0.2))
        for n, work_s in zip(stays, readings, strict=True):
            curves.learn(a_view([[n]], work_s, 32.0, work_noise=0.2))
        expected.append(at(curves, 64) / at(curves, 28))
    assert np.median(expected) == pytest.approx(1.0, abs=0.01)
    assert np.quantile(expected, 0.9) < 1.5


def test_a_coefficient_that_may_not_be_negative_takes_the_other_one_with_it() -> None:
    """Storage waits of .65 s, one window of a queue that drained: 64 workers seemed to need a quarter of that at 16."""
    readings = [(4, 0.654), (4, 0.654), (16, 0.516), (16, 0.661), (64, 0.765)]
    curves = Curves(a_view([[4]], 0.654, 1.0, cpu_share=0.015, weight=0.015))
    for n, work_s in readings[1:]:
        curves.learn(a_view([[n]], work_s, 1.0, cpu_share=0.015, weight=0.015))
    for n, work_s in ((4, 0.654), (16, 0.6), (64, 0.765)):
        assert at(curves, n) == pytest.approx(work_s, rel=0.15)


def test_restart_forgets_only_the_rows_named() -> None:
    slow, fast = a_view([[8], [8]], 0.4), a_view([[8], [8]], 0.1)
    curves = Curves(slow)
    for _ in range(30):
        curves.learn(slow)
    curves.restart(np.array([True, False]))
    curves.learn(fast)
    n = np.full((2, 1), 8.0)
    assert curves.service_s(n)[0, 0] == pytest.approx(0.1, rel=0.05)
    assert curves.service_s(n)[1, 0] > 0.15


def test_windows_of_a_machine_that_is_down_teach_nothing() -> None:
    curves = Curves(seen(8, SCALING["serial"]))
    for _ in range(20):
        curves.learn(seen(8, SCALING["serial"], error=9.0, alive=False))
    assert at(curves, 8) == pytest.approx(service_s(SCALING["serial"], 8))


def test_workers_for_a_rate_is_the_inverse_of_the_curve() -> None:
    for name, scaling in SCALING.items():
        curves = learned(scaling, [(16, 3), (8, 3), (24, 3)], noise=0.0)
        grid = np.arange(1.0, 200.0)
        top = max(n / at(curves, n) for n in grid)
        for part in (0.3, 0.6, 0.95):
            n = float(curves.workers_for(np.array([[part * top]]))[0, 0])
            assert max(n, 1.0) / at(curves, n) >= part * top * 0.999, name
            if n > 1.0:
                assert n / at(curves, n) == pytest.approx(part * top, rel=1e-6), name
    # A lock gives ten batches a second and no more, however many wait for it.
    curves = learned(SCALING["lock"], [(16, 3), (8, 3), (24, 3)], noise=0.0)
    assert np.isinf(curves.workers_for(np.array([[11.5]]))[0, 0])


@pytest.mark.parametrize("cpus", [0.0, 1e9])
def test_curves_of_a_machine_without_cpus_are_finite(cpus: float) -> None:
    view = a_view([[4, 8]], 0.1, cpus)
    curves = Curves(view)
    for _ in range(5):
        curves.learn(view)
    assert all(np.isfinite(getattr(curves, name)).all() for name in ("work_s", "constant", "linear", "square"))
