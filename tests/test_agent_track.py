"""What the agent remembers: the best allocation it measured, what its moves did, and when to forget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from views import a_view

from intune_callbacks.decide.features import OF_SLOT, features
from intune_callbacks.decide.track import REMEMBERED, Track
from intune_callbacks.decide.view import View

FIRST, SECOND = [8.0, 8.0], [12.0, 4.0]


def fed(*stays: tuple[list[float], float, int], **given: Any) -> Track:
    """Return what is remembered of (allocation, batches per second, decisions) one after the other."""
    views = [a_view([value], rate=rate, **given) for value, rate, decisions in stays for _ in range(decisions)]
    return continued(Track(views[0]), *views[1:])


def continued(track: Track, *views: View) -> Track:
    for view in views:
        track.update(view)
    return track


def best(track: Track) -> list[float]:
    return track.best[0][0].tolist()


def test_remembers_the_best_allocation_and_comes_back_to_it() -> None:
    track = fed((FIRST, 100.0, 4), (SECOND, 60.0, 6))
    assert best(track) == FIRST
    assert track.best[1][0] == pytest.approx(np.log(100.0), abs=0.05)
    assert best(fed((FIRST, 100.0, 4), (SECOND, 150.0, 4))) == SECOND


def test_a_lucky_reading_does_not_beat_a_sure_one() -> None:
    # Five per cent up and down: one reading of 103 proves nothing, ten do.
    usual = [(FIRST, rate, 1) for rate in 6 * (95.0, 105.0)]
    assert best(fed(*usual, (SECOND, 103.0, 1))) == FIRST
    assert best(fed(*usual, (SECOND, 103.0, 10))) == SECOND


def test_the_first_decision_of_an_allocation_hardly_counts() -> None:
    # Windows fill or drain: 20 batches a second is what the change cost.
    assert best(fed((FIRST, 100.0, 8), (SECOND, 20.0, 1), (SECOND, 130.0, 3))) == SECOND


def test_an_allocation_seen_again_goes_on_where_it_was() -> None:
    track = fed((FIRST, 100.0, 5), (SECOND, 60.0, 3), (FIRST, 100.0, 1))
    assert track.count[0, 0] == 6.0
    # Away and back again it is still one allocation.
    known = track.value[0][track.count[0] > 0.0]
    assert len(known) == len(np.unique(known, axis=0)) == 2


def test_keeps_the_best_of_many() -> None:
    stays = [([8.0 + k, 8.0], 50.0 + 10.0 * k, 3) for k in (1, 7, 3, 9, 0, 5, 2, 4)]
    track = fed(*stays)
    assert track.value.shape[1] == REMEMBERED + 1
    assert sorted(track.value[0, 1:, 0] - 8.0) == [5.0, 7.0, 9.0]
    assert best(track)[0] == 17.0


@pytest.mark.parametrize("change", ["resize", "restart"])
def test_forgets_what_belonged_to_another_machine(change: str) -> None:
    track = fed((FIRST, 100.0, 5), (SECOND, 60.0, 5))
    after = [a_view([SECOND], rate=50.0, cpus=32.0)] if change == "resize" else []
    after = after or [a_view([SECOND], rate=1e-9, alive=False), a_view([SECOND], rate=50.0)]
    continued(track, *after)
    assert (track.resized[0], track.age[0]) == (True, 0)
    # What an allocation gives in the decision of the change belongs to neither machine.
    assert not track.count.any()
    assert track.change[0] == 0.0
    continued(track, a_view([SECOND], rate=50.0, cpus=float(after[-1].cpus[0])))
    assert (track.resized[0], track.age[0]) == (False, 1)
    assert best(track) == SECOND and np.exp(track.mean[0, 0]) == pytest.approx(50.0)


def test_one_pipelines_resize_is_no_other_pipelines() -> None:
    both = a_view([FIRST, FIRST], rate=100.0)
    track = continued(Track(both), both, a_view([FIRST, FIRST], rate=100.0, cpus=np.array([16.0, 32.0])))
    assert track.resized.tolist() == [False, True]
    assert (track.count[:, 0] > 0.0).tolist() == [True, False]


def test_counts_decisions_clearly_below_the_best() -> None:
    track = fed((FIRST, 100.0, 10))
    seen = []
    for _ in range(6):
        seen.append(int(continued(track, a_view([SECOND], rate=70.0)).low[0]))
    # One low reading may be chance: the mean over the last few is looked at.
    assert seen == [1, 2, 3, 4, 5, 6]
    assert continued(track, *[a_view([FIRST], rate=100.0)] * 6).low[0] == 0
    noisy = fed((FIRST, 100.0, 10))
    assert continued(noisy, a_view([FIRST], rate=90.0)).low[0] == 0


def test_old_measurements_fade() -> None:
    """Work drifts: what was best once is tried no longer after it was much slower for long."""
    track = fed((FIRST, 100.0, 10), (SECOND, 90.0, 250))
    assert best(track) == SECOND


def test_forget_is_asked_for_by_row() -> None:
    both = a_view([FIRST, FIRST], rate=100.0)
    track = continued(Track(both), *[both] * 5)
    track.forget(np.array([False, True]))
    assert track.count[:, 0].tolist() == [6.0, 0.0]
    assert track.age.tolist() == [5, 0]


def test_noise_is_the_scatter_of_the_throughput() -> None:
    rng = np.random.default_rng(0)
    for noise in (0.01, 0.15):
        views = [a_view([FIRST], rate=100.0 * np.exp(noise * rng.normal())) for _ in range(200)]
        assert continued(Track(views[0]), *views[1:]).noise[0] == pytest.approx(noise, abs=0.01 + 0.3 * noise)


OF_MOVES = ("measured elasticity of the service", "measured elasticity of the throughput", "how far the slot was moved")


def moves_of(track: Track) -> list[Any]:
    """Return what the state says of the moves of each slot: what service time and throughput did, and how far."""
    value = track.view.value
    slots, _ = features(track.view, track, value, np.ones_like(value))
    return [slots[0, :, [text.startswith(name) for text in OF_SLOT].index(True)] for name in OF_MOVES]


def test_elasticities_tell_what_moves_did() -> None:
    """The first slot scales; in the second each worker more slows all down: it is a lock."""
    track = Track(a_view([[8, 8]], [0.1, 0.8]))
    for first, second in ((10, 8), (10, 12), (7, 12), (7, 6), (9, 6), (9, 10)):
        continued(track, a_view([[first, second]], [0.1, 0.1 * second], rate=10.0 * first))
    of_service_s, of_rate, moved = moves_of(track)
    assert of_service_s == pytest.approx([0.0, 1.0], abs=0.15)
    assert of_rate == pytest.approx([1.0, 0.0], abs=0.25)
    assert (moved > 0.2).all()
    continued(track, *[a_view([[9, 10]], [0.1, 1.0], rate=90.0)] * 150)
    of_service_s, _, moved = moves_of(track)
    assert (moved < 0.1).all() and abs(of_service_s[1]) < 0.3


def test_a_machine_that_is_down_is_measured_by_nobody() -> None:
    track = fed((FIRST, 100.0, 5))
    continued(track, *[a_view([FIRST], rate=1e-9, alive=False)] * 8)
    assert not track.count.any() and track.age[0] == 0 and track.low[0] == 0
    assert track.noise[0] < 0.06
