"""The benchmark of the agent: its table, its paired differences, its situations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import agent, decision
from benchmarks.agent_methods import METHODS, OPTIONAL, Missing, build, named
from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT
from intune_callbacks.decide.network import Network
from intune_callbacks.pretrain.machines import sample
from intune_callbacks.pretrain.scenarios import SCENARIOS, Controller, Scenario, play

COLUMNS = ["method", "mean", "median", "p5", "decisions_to_90", "decisions_to_95", "oom_share", "move_share"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a static run last 12 decisions."""
    monkeypatch.setitem(SCENARIOS, "static", Scenario(12, every=12))


def network(path: Path, seed: int) -> Path:
    """Write a network with random weights."""
    rng, h, inputs = np.random.default_rng(seed), 8, len(OF_SLOT) + len(OF_PIPELINE)
    shapes = {"w1": (inputs, h), "b1": h, "w2": (3 * h, h), "b2": h, "w3": (h, 5), "b3": 5}
    Network.of({name: rng.normal(size=shape) for name, shape in shapes.items()}).save(path)
    return path


@pytest.mark.usefixtures("short")
def test_table_and_file_have_a_row_per_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, weights = tmp_path / "agent.json", [network(tmp_path / f"{k}.npz", k) for k in range(2)]
    methods = ["unoptimized", "even split", "jump + hold", "DQN"]
    given = ["--machines", "3", "--seed", "5", "--jobs", "0", "--json", str(file), "--methods", ",".join(methods)]
    agent.main([*given, *(word for path in weights for word in ("--weights", str(path)))])
    written = json.loads(file.read_text())
    names = [*methods[:3], "DQN seed 1", "DQN seed 2"]
    assert [row["method"] for row in written["rows"]] == names
    assert all(list(row) == COLUMNS for row in written["rows"])
    assert (written["benchmark"], written["seed"], written["scenario"], written["machines"]) == (
        "agent",
        5,
        "static",
        3,
    )
    by_name = {row["method"]: row for row in written["rows"]}
    assert by_name["unoptimized"]["decisions_to_95"] is None
    assert "never" in capsys.readouterr().out
    for row in written["rows"]:
        assert 0.0 < row["p5"] <= row["median"] <= 1.02 and row["oom_share"] == 0.0
    assert by_name["unoptimized"]["mean"] < by_name["even split"]["mean"] < by_name["jump + hold"]["mean"]
    pairs = {(pair["method"], pair["against"]): pair for pair in written["paired"]}
    assert list(pairs) == [("DQN seed 1", name) for name in names[:3]] + [("DQN seed 2", "jump + hold")]
    pair = pairs["DQN seed 1", "even split"]
    assert pair["mean"] == pytest.approx(by_name["DQN seed 1"]["mean"] - by_name["even split"]["mean"])
    assert pair["low"] <= pair["mean"] <= pair["high"]
    assert {row["method"] for row in written["situations"]} == {"jump + hold", "DQN seed 1", "DQN seed 2"}


@pytest.mark.usefixtures("short")
def test_parts_of_the_oracle_are_the_oracle_and_nobody_beats_it() -> None:
    setting = agent.Setting("static", 5, 11)
    whole = agent.oracle(setting, slice(0, 5))
    parts = np.concatenate([agent.oracle(setting, part) for part in (slice(0, 2), slice(2, 5))], 1)
    np.testing.assert_array_equal(parts, whole)
    rate = play(build("water-filling", {}), setting.make(), "static", setting.seed + 1).rate
    assert (rate <= 1.01 * whole).all()


def test_intervals_of_known_differences() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 0.9, 400)
    means = {"DQN": base + 0.05, "jump + hold": base, "even split": base + rng.normal(0.0, 0.1, 400)}
    first, second = agent.differences(means)
    assert (first["against"], second["against"]) == ("jump + hold", "even split")
    # The same difference on every machine leaves no doubt; else the interval is 1.96 standard errors wide each way.
    assert [first[k] for k in ("mean", "low", "high")] == pytest.approx([0.05] * 3)
    error = (means["DQN"] - means["even split"]).std() / np.sqrt(400)
    assert second["high"] - second["low"] == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert agent.differences({"even split": base}) == []


def test_situations_hold_the_machines_they_name() -> None:
    machines = sample(6, np.random.default_rng(1), plain=True, cpus=16)
    lock, cpus = np.zeros(machines.mask.shape), machines.cpus.copy()
    lock[0], cpus[:2] = 0.1, 128.0
    interference = np.array([0.0, 0.0, 0.3, 0.1, 0.0, 0.0])
    machines = replace(machines, lock=lock, cpus=cpus, interference=interference)
    rows = agent.situations(machines, {"jump + hold": np.arange(6) / 10.0, "even split": np.zeros(6)})
    counts = {row["situation"]: row["machines"] for row in rows}
    assert counts == {"all": 6, "shared lock": 1, "interference > .2": 1, "128 CPUs or more": 2, "benign": 3}
    means = {row["situation"]: row["mean"] for row in rows}
    assert means["interference > .2"] == 0.2 and means["128 CPUs or more"] == 0.05
    assert means["benign"] == pytest.approx((0.1 + 0.4 + 0.5) / 3)
    assert {row["method"] for row in rows} == {"jump + hold"}


@pytest.mark.usefixtures("short")
def test_what_is_missing_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Controller:
        raise Missing("no weights")

    monkeypatch.setitem(OPTIONAL, "DQN", missing)
    written = agent.main(["--machines", "2", "--jobs", "0", "--methods", "DQN,unoptimized"])
    assert [row["method"] for row in written["rows"]] == ["unoptimized"]
    assert "DQN is left out: no weights" in capsys.readouterr().out


def test_unknown_methods_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        agent.main(["--methods", "water-filing"])
    assert "did you mean 'water-filling'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        agent.main(["--machines", "0"])
    assert "--machines 0: expected 1 or more" in capsys.readouterr().err


def test_all_methods_of_the_comparison_have_a_row() -> None:
    assert [*METHODS, *OPTIONAL] == [
        "unoptimized",
        "even split",
        "hill climb",
        "water-filling",
        "Plumber LP",
        "HILL_CLIMB of TF 2.11",
        "model-jump",
        "jump + hold",
        "random moves",
        "literal DQN",
        "DQN",
        "DQN fine-tuned",
    ]
    assert list(named([Path("a.npz")])) == ["DQN"]


def test_what_a_decision_costs_is_told_for_each_part() -> None:
    burst, hold = decision.run([2], count=4, seed=0)
    parts = [
        f"{name}_ms"
        for name in ("learn", "counts", "view", "track", "target", "features", "network", "argmax", "guard")
    ]
    assert (burst["phase"], hold["phase"]) == ("burst", "hold")
    assert all(burst[name] >= 0.0 for name in parts) and not set(parts) & set(hold)
