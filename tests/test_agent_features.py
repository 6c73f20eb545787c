"""The state: its width, its ranges, what it says of simple pipelines, and that nothing makes it infinite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from views import a_view, row_of

from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT, features
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.target import target
from intune_callbacks.decide.track import Track
from intune_callbacks.decide.view import View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.machines import BUFFER, sample


def state(view: View, track: Track | None = None) -> tuple[Any, Any]:
    track = track or Track(view)
    return features(view, track, target(view, track.curves, 0.97), view.window / np.maximum(view.value, 1.0))


def column(name: str) -> int:
    """Return the index of the one entry whose description begins like this."""
    (found,) = [i for i, text in enumerate(OF_SLOT) if text.startswith(name)]
    return found


def entry(name: str) -> int:
    (found,) = [i for i, text in enumerate(OF_PIPELINE) if text.startswith(name)]
    return found


def documented(texts: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the lowest and highest value that each text promises; 5 either way where it promises none."""
    ranges = [re.search(r", (-?[\d.]+)\.\.(-?[\d.]+)$", text) for text in texts]
    assert sum(found is not None for found in ranges) >= 9
    return tuple(
        np.array([float(found[k]) if found else (5.0, 5.0)[k - 1] * (2 * k - 3) for found in ranges]) for k in (1, 2)
    )


def lived(decisions: int = 30) -> Iterator[tuple[View, Any, Any]]:
    """Yield what is measured, and the states, while machines are tuned and sometimes lose workers."""
    env = Env(sample(24, np.random.default_rng(2)), np.random.default_rng(2))
    shell, rng = Shell(None), np.random.default_rng(3)
    for decision in range(decisions):
        view = env.view
        value, window = shell.act(view)
        assert shell.track is not None
        yield view, *state(view, shell.track)
        lost = rng.integers(0, 6, value.shape) if decision % 4 == 0 else 0
        env.step(np.where(view.workers, np.maximum(value - lost, 1.0), value), window)


def test_every_number_is_described() -> None:
    view = a_view([[4, 8, 2], [1, 1, 1]])
    slots, pipeline = state(view)
    assert slots.shape == (2, 3, len(OF_SLOT)) and pipeline.shape == (2, len(OF_PIPELINE))
    assert slots.dtype == pipeline.dtype == np.float32
    assert len(set(OF_SLOT)) == len(OF_SLOT) and len(set(OF_PIPELINE)) == len(OF_PIPELINE)


def test_numbers_of_lived_runs_are_in_their_documented_ranges() -> None:
    slot_low, slot_high = documented(OF_SLOT)
    low, high = documented(OF_PIPELINE)
    for view, slots, pipeline in lived():
        # Allocations beyond the budget are asked for by nobody.
        within = np.where(view.workers, view.value * view.weight, 0.0).sum(1) <= view.budget + 1e-6
        for x, least, most, texts in ((slots, slot_low, slot_high, OF_SLOT), (pipeline, low, high, OF_PIPELINE)):
            axes = tuple(range(x.ndim - 1))
            wrong = (x[within].min(axes) < least - 1e-6) | (x[within].max(axes) > most + 1e-6)
            assert not wrong.any(), [texts[i] for i in np.flatnonzero(wrong)]


def test_every_number_says_something() -> None:
    """An entry that never changes would be one the network cannot use."""
    states = [(slots.reshape(-1, len(OF_SLOT)), pipeline) for _, slots, pipeline in lived()]
    slots, pipeline = (np.concatenate(parts) for parts in zip(*states, strict=True))
    silent = [OF_SLOT[i] for i in np.flatnonzero(slots.std(0) < 1e-6)]
    silent += [OF_PIPELINE[i] for i in np.flatnonzero(pipeline.std(0) < 1e-6)]
    assert not silent


def test_missing_slots_are_all_zero_and_change_nothing() -> None:
    env = Env(sample(8, np.random.default_rng(0), stages=3), np.random.default_rng(0))
    slots, pipeline = state(env.view)
    assert not slots[~env.view.mask].any()
    assert slots[env.view.mask].any(-1).all()
    for row in range(8):
        here = np.flatnonzero(env.view.mask[row])
        alone, about = state(row_of(env.view, row, here))
        np.testing.assert_allclose(alone[0], slots[row, here], atol=1e-6)
        np.testing.assert_allclose(about[0], pipeline[row], atol=1e-6)


def test_tells_the_bottleneck_and_what_a_worker_more_would_give() -> None:
    view = a_view([[4, 4, 4]], [0.1, 0.4, 0.1], memory=0.25, demand=1e3)
    slots, pipeline = state(view)
    np.testing.assert_allclose(
        slots[0, :, column("ln(capacity")], [np.log(4.0) / 2.0, 0.0, np.log(4.0) / 2.0], atol=1e-6
    )
    np.testing.assert_allclose(slots[0, :, column("units x CPU")], 0.25, atol=1e-6)
    np.testing.assert_allclose(slots[0, :, column("share of the pipeline")], [1 / 6, 4 / 6, 1 / 6], atol=1e-6)
    gains = slots[
        0, :, [column(f"10 x expected gain in ln(throughput) of {move}") for move in ("-5", "-1", "+1", "+5")]
    ].T
    # The slowest stage alone decides: a fifth more workers is a quarter more throughput, the others give nothing.
    np.testing.assert_allclose(gains[1], [-2.0, -2.0, 2.0, 2.0], atol=1e-6)
    assert 0.0 <= gains[[0, 2], 2].max() < 0.01
    assert pipeline[0, entry("free CPUs / budget")] == pytest.approx(0.25)
    assert pipeline[0, entry("memory left")] == pytest.approx(0.75)
    assert pipeline[0, entry("number of slots")] == pytest.approx(3 / 8)


def test_gain_of_one_worker_is_that_of_the_curves() -> None:
    slots, _ = state(a_view([[40]], 0.1, 64.0))
    assert slots[0, 0, column("10 x expected gain in ln(throughput) of +1")] == pytest.approx(
        10 * np.log(41 / 40), abs=1e-4
    )
    # A model that takes no more than it gets is worth no worker; half of the gain is the mean of two equals.
    busy, _ = state(a_view([[40]], 0.1, 64.0, demand=100.0))
    assert abs(busy[0, 0, column("10 x expected gain in ln(throughput) of +1")]) < 1e-3


def test_tells_the_way_to_target_and_best() -> None:
    track = Track(a_view([[8, 8]], rate=100.0))
    for _ in range(3):
        track.update(a_view([[8, 8]], rate=100.0))
    for _ in range(3):
        track.update(now := a_view([[13, 8]], rate=60.0))
    slots, pipeline = features(now, track, np.array([[13.0, 16.0]]), np.full((1, 2), 2.0))
    np.testing.assert_allclose(slots[0, :, column("tanh((target")], [0.0, np.tanh(8 / 5)], atol=1e-6)
    np.testing.assert_allclose(slots[0, :, column("ln(target")], [0.0, np.log(2.0)], atol=1e-6)
    np.testing.assert_allclose(slots[0, :, column("tanh((units of the best")], [np.tanh(-1.0), 0.0], atol=1e-6)
    np.testing.assert_allclose(slots[0, :, column("last move")], 0.0)
    assert pipeline[0, entry("decisions at the present")] == pytest.approx(0.3)
    assert pipeline[0, entry("decisions clearly below")] > 0.0


# Live pipelines come in through `view_of`, which makes every number finite: 0 to 1e9.
ABSURD = st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 1e9])
FIELDS = ("work_s", "cv", "busy", "fill", "window", "unit_memory", "item_memory", "rate", "demand", "cpus", "budget",
          "memory")  # fmt: skip


@settings(max_examples=150)
@given(
    st.dictionaries(st.sampled_from(FIELDS), ABSURD, max_size=5),
    st.dictionaries(st.sampled_from(["weight", "cpu_share"]), st.sampled_from([0.0, 1e-9, 1.0])),
)
def test_absurd_pipelines_give_finite_states(changes: dict[str, float], shares: dict[str, float]) -> None:
    sane = a_view([[4, 8, 16]], [0.1, 0.2, 0.3], is_buffer=[[False, False, True]])
    odd = replace(sane, **{name: np.full_like(getattr(sane, name), v) for name, v in (changes | shares).items()})
    track = Track(sane)
    for view in (odd, sane, odd):
        track.update(view)
        slots, pipeline = state(view, track)
        assert np.isfinite(slots).all() and np.isfinite(pipeline).all()
        assert max(np.abs(slots).max(), np.abs(pipeline).max()) <= 5.0


def test_a_buffer_is_marked_and_costs_no_cpu() -> None:
    env = Env(sample(5, np.random.default_rng(1), cpus=32), np.random.default_rng(1))
    slots, _ = state(env.view)
    here = env.view.mask[:, BUFFER]
    assert (slots[here, BUFFER, column("1 for a buffer")] == 1.0).all()
    assert not slots[:, :BUFFER, column("1 for a buffer")].any()
    for name in ("units x CPU", "share of the pipeline", "10 x expected gain in ln(throughput) of +5"):
        assert not slots[:, BUFFER, column(name)].any()
