"""One live pipeline is decided for in plain numbers: the same decisions as for its row among many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from views import OF_ROWS, a_network, a_view, row_of

from intune_callbacks.agent.curves import Curves
from intune_callbacks.agent.features import features
from intune_callbacks.agent.live import slots_of, view_of
from intune_callbacks.agent.moves import MOVES, STAY, allowed, best_moves
from intune_callbacks.agent.moves_one import allowed_of_one, best_moves_of_one
from intune_callbacks.agent.phases import BURST, HOLD, Moved, ShellConfig
from intune_callbacks.agent.shell import Shell
from intune_callbacks.agent.target import target
from intune_callbacks.agent.track import Track
from intune_callbacks.agent.view import FIELDS, View
from intune_callbacks.sim.env import Env
from intune_callbacks.sim.machines import sample
from intune_callbacks.sim.observe import observe

CLOSE = 1e-9
REMEMBERED = (
    "resized", "age", "log_rate", "smooth", "change", "last_move", "noise", "low", "value", "mean", "count", "score",
    "work_elasticity", "rate_elasticity", "tried",
)  # fmt: skip
LEARNED = ("work_s", "cpu_share", "cv", "constant", "linear", "square")


def assert_same(track: Track, alone: Track, row: int) -> None:
    """What one pipeline's track remembers is what a track of many does of its row."""
    pairs = {name: (getattr(alone, name), getattr(track, name)) for name in REMEMBERED}
    pairs |= {name: (getattr(alone.curves, name), getattr(track.curves, name)) for name in LEARNED}
    pairs |= {f"best {i}": (alone.best[i], track.best[i]) for i in range(2)}
    for name, (one, many) in pairs.items():
        np.testing.assert_allclose(one[0], many[row], rtol=CLOSE, atol=1e-12, err_msg=name)


def lived(count: int = 9, decisions: int = 45, **shell: Any) -> Iterator[tuple[View, Shell, Any, Any]]:
    """Yield what is measured, the shell of all, what it decides, and its windows; some machines are resized."""
    rng = np.random.default_rng(7)
    cpus = rng.choice([8.0, 32.0, 96.0], count)
    env = Env(sample(count, np.random.default_rng(6)), np.random.default_rng(6), {25: np.where(cpus > 8.0, cpus, 16.0)})
    together = Shell(a_network(3, size=0.5), **shell)
    for _ in range(decisions):
        # Some have hardly any memory left, some models are nearly fed; shares and irregularity are uneven.
        kind, factor, now = np.arange(count) % 3, rng.uniform(0.5, 1.5, (count, 1)), env.view
        view = replace(
            now,
            memory=np.where(kind == 0, np.maximum(now.memory, 0.88), now.memory),
            demand=np.where(kind == 1, now.rate * rng.uniform(0.95, 1.6, count), now.demand),
            weight=now.weight * factor,
            cv=now.cv * factor,
        )
        value, window = together.act(view)
        yield view, together, value, window
        # Now and then one is down, or does not get what it asked for.
        given = np.round(window * rng.uniform(0.7, 1.0, (count, 1)))
        env.step(np.where(view.workers & (rng.random(value.shape) < 0.05), np.maximum(value - 2.0, 1.0), value), given)


def followed(moved: Moved | None, row: int) -> bool:
    """Whether the network decided for this pipeline."""
    return moved is not None and bool(moved.followed[row])


FOREVER = ShellConfig(burst=1000, patience=1000)


@pytest.mark.parametrize(
    ("config", "phases", "least"),
    [(ShellConfig(), {BURST, HOLD}, 80), (FOREVER, {BURST}, 180), (ShellConfig(burst=2, look=4), {BURST, HOLD}, 20)],
)
def test_each_pipeline_alone_is_decided_for_as_among_many(config: ShellConfig, phases: set[int], least: int) -> None:
    alone: list[Shell] = []
    moves, seen = 0, set()
    for view, shell, value, window in lived(config=config):
        alone = alone or [Shell(shell.values, config) for _ in value]
        assert shell.track is not None
        for row, one in enumerate(alone):
            got, wide = one.act(row_of(view, row))
            assert (got[0].tolist(), wide[0].tolist()) == (value[row].tolist(), window[row].tolist())
            assert one.phase[0] == shell.phase[row] and one.track is not None
            assert_same(shell.track, one.track, row)
            assert followed(one.moved, 0) == followed(shell.moved, row)
            if one.moved is not None and shell.moved is not None and followed(one.moved, 0):
                for name in ("moves", "fine", "mask", "weight"):
                    np.testing.assert_array_equal(getattr(one.moved, name)[0], getattr(shell.moved, name)[row], name)
                for name in ("slots", "pipeline", "room"):
                    wanted = getattr(shell.moved, name)[row]
                    np.testing.assert_allclose(getattr(one.moved, name)[0], wanted, 1e-6, 1e-7, err_msg=name)
                moves += int((one.moved.moves[0] != STAY).sum())
            seen.add(int(one.phase[0]))
    assert moves > least and seen >= phases


@st.composite
def pipelines(draw: Any) -> tuple[View, list[View]]:
    """Two pipelines, few stages or many, and what is measured of them later; some of it absurd."""
    shape = (2, draw(st.sampled_from([1, 3, 6, 17, 33])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low = rng.integers(1, 4, shape)
    high = low + rng.integers(0, draw(st.sampled_from([4, 500])), shape)
    weights = [np.ones(shape), rng.random(shape), rng.integers(0, 5, shape) / 4.0]
    first = a_view(
        np.clip(rng.integers(1, 40, shape), low, high),
        np.exp(rng.uniform(-9.0, 2.0, shape)),
        cpus=rng.uniform(2.0, 64.0, 2),
        mask=rng.random(shape) < 0.9,
        is_buffer=(np.arange(shape[1]) == shape[1] - 1) & draw(st.booleans()),
        low=low,
        high=high,
        weight=weights[draw(st.integers(0, 2))],
        cpu_share=rng.random(shape),
        cv=rng.random(shape),
        fill=rng.random(shape),
        unit_memory=0.01 * rng.random(shape),
        item_memory=0.001 * rng.random(shape),
        demand=np.exp(rng.uniform(-3.0, 8.0, 2)),
    )
    later = []
    for _ in range(draw(st.integers(1, 6))):
        changes: dict[str, Any] = {
            "value": np.clip(first.value + rng.integers(-5, 6, shape), low, high),
            "work_s": first.work_s * np.exp(0.3 * rng.normal(size=shape)),
            "rate": np.exp(rng.uniform(-3.0, 5.0, 2)),
            "alive": rng.random(2) < 0.9,
        }
        absurd = draw(st.dictionaries(st.sampled_from(ABSURD_FIELDS), st.sampled_from(ABSURD), max_size=3))
        changes |= {name: np.full(shape[: 1 + (name not in OF_ROWS)], of) for name, of in absurd.items()}
        later.append(replace(first, **changes))
    return first, later


ABSURD = [0.0, 1e-300, 1e-9, 1.0, 1e9]
ABSURD_FIELDS = ("work_s", "cv", "busy", "fill", "window", "unit_memory", "item_memory", "rate", "demand", "cpus",
                 "budget", "memory")  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_whatever_is_measured_is_remembered_and_seen_as_among_many(question: tuple[View, list[View]]) -> None:
    first, later = question
    track, alone = Track(first), [Track(row_of(first, row)) for row in range(2)]
    for view in later:
        track.update(view)
        ratio = view.window / np.maximum(view.value, 1.0)
        slots, pipeline = features(view, track, wanted := target(view, track.curves, 0.95), ratio)
        for row, one in enumerate(alone):
            mine = row_of(view, row)
            one.update(mine)
            assert_same(track, one, row)
            aimed = target(mine, one.curves, 0.95)
            assert aimed[0].tolist() == wanted[row].tolist()
            own, whole = features(mine, one, aimed, ratio[row : row + 1])
            np.testing.assert_allclose(own[0], slots[row], rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(whole[0], pipeline[row], rtol=1e-6, atol=1e-7)
            fine = allowed_of_one(mine.one, ratio[row].tolist(), 0.9)
            assert fine == allowed(view, ratio, 0.9)[row].tolist()
            np.testing.assert_allclose([mine.one.room, mine.one.full_memory], [view.room[row], view.full_memory[row]])


def test_what_is_live_is_the_same_in_numbers_and_in_arrays() -> None:
    row = row_of(Env(sample(3, np.random.default_rng(1)), np.random.default_rng(1)).view, 1)
    live = View.of_one([getattr(row, name)[0].tolist() for name in FIELDS])
    assert live.is_one and live.one == row.one
    for name in (*FIELDS, "workers", "worker_weight", "room", "full_memory"):
        one, other = getattr(live, name), getattr(row, name)
        assert (one.tolist(), one.dtype, one.shape) == (other.tolist(), other.dtype, other.shape), name
    seen = observe(replace(row, high=row.high + 0.5), 0)
    assert view_of(seen, {}, {}).one.high == [float(stage.high) for stage in slots_of(seen.stages)]
    with pytest.raises(AttributeError, match="View has no 'speed'"):
        live.speed  # noqa: B018


@pytest.mark.parametrize("cpus", [0.0, 1e9])
def test_curves_of_a_machine_without_cpus_are_finite(cpus: float) -> None:
    view = a_view([[4, 8]], 0.1, cpus)
    curves = Curves(view)
    for _ in range(5):
        curves.learn(view)
    assert all(np.isfinite(getattr(curves, name)).all() for name in LEARNED)


@pytest.mark.parametrize("slots", [1, 4, 12, 33])
@pytest.mark.parametrize("size", [2.0**-20, 1.0, 1e6])
def test_moves_of_each_pipeline_alone_are_those_among_many(slots: int, size: float) -> None:
    rng = np.random.default_rng(slots)
    for digits in (0, 9):
        # Whole numbers: many combinations are worth the same.
        q = size * (np.round(rng.normal(size=(60, slots, 5)), digits) + rng.choice([0.0, 0.5], (60, 1, 1)) * MOVES)
        fine = rng.random(q.shape) < rng.choice([0.3, 0.8, 1.0], (60, 1, 1))
        fine[..., STAY] = True
        weight = np.where(rng.random((60, 1)) < 0.5, rng.integers(0, 9, (60, slots)) / 4.0, rng.random((60, slots)))
        room = np.round(rng.uniform(-30.0, 20.0, 60), digits)
        together = best_moves(q, fine, weight, room)
        for row in range(60):
            one = slice(row, row + 1)
            np.testing.assert_array_equal(together[one], best_moves(q[one], fine[one], weight[one], room[one]))


@pytest.mark.parametrize("slots", [2, 5, 9])
def test_nobody_moves_only_where_no_moves_are_worth_it(slots: int) -> None:
    rng = np.random.default_rng(slots)
    proved = 0
    for _ in range(400):
        # Values as of a network: one move more is worth less than the one before it.
        q = np.cumsum(-np.sort(-rng.normal(0.2, 0.3, (slots, 5))), 1)
        fine = rng.random(q.shape) < 0.9
        fine[:, STAY] = True
        weight, room = rng.choice([0.25, 0.5, 1.0, 0.93], slots), float(rng.choice([0.0, 1.3, 6.0]))
        best = best_moves(q[None], fine[None], weight[None], np.array([room]))[0].tolist()
        gain = sum(q[i, move] - q[i, STAY] for i, move in enumerate(best))
        worth = gain + float(rng.normal(0.0, 0.2))
        given = (q.tolist(), fine.tolist(), weight.tolist(), room)
        got = best_moves_of_one(*given, worth=worth)
        assert got == best or (got == [STAY] * slots and gain < worth)
        free = np.where(fine, q, -np.inf).max(1).sum() - q[:, STAY].sum()
        proved += got != best and free >= worth
    assert proved > 8
