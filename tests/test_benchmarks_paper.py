"""The paper's evaluation: machines are really changed, runs are kept and not repeated, and tables say it right."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.emulated import SHAPES, VirtualMachine
from benchmarks.live_loop import Case
from benchmarks.paper import convergence, cores, drift, figure7, figure8, judge, memory, runs
from benchmarks.paper.__main__ import FIGURES
from benchmarks.paper.runs import Options, Task, make
from benchmarks.paper.summary import grouped, spread
from benchmarks.paper.trace import Event, mean, trace
from benchmarks.paper.wrapped import COST
from benchmarks.wild.table import markdown

EVALUATION = Path(__file__).parents[1] / "docs" / "evaluation"

SERIES = {"at_s": [1.0, 2.0, 4.0], "batches_per_s": [2.0, 4.0, 8.0], "limit": [4.0, 8.0, 8.0]}
RUN = SERIES | {"computed_per_s": SERIES["batches_per_s"], "utilisation": [0.5, 0.5, 1.0], "cpus": [4, 8, 8]}
REACHED = {"seconds_to": {"90": 4.0, "95": 6.0, "99": None}, "decisions_to": {"90": 1, "95": 2, "99": None}}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stages_of_a_pipeline_share_its_whole_work(shape: str) -> None:
    assert sum(SHAPES[shape].values()) == pytest.approx(1.0)
    case = Case("torchdata", 4, 2.0, 0.0, 0, shape=shape)
    assert case.batch_work_s(0) == pytest.approx(2.0)


def test_a_machine_is_changed_by_events() -> None:
    class Live:
        machine = VirtualMachine(8)

        def change_cpus(self, cpus: int) -> None:
            self.machine.resize(cpus)

    live = Live()
    Event(0.0, "cpus", 4).happen(live)
    assert (live.machine.cpus, live.machine.probe().read().cpus) == (4, 4.0)
    Event(0.0, "taken", 3).happen(live)
    assert (live.machine.cpus, live.machine.probe().read().cpus) == (1, 4.0)
    Event(0.0, "taken", 0).happen(live)
    assert (live.machine.cpus, live.machine.probe().read().cpus) == (4, 4.0)
    Event(0.0, "cost udf", 2.0).happen(live)
    live.machine.compute("udf", 0.02)
    assert live.machine.stage_seconds() == {"udf": 0.04}
    assert live.machine.usage().held_s >= 0.04


def test_a_stage_that_waits_holds_no_cpu() -> None:
    machine = VirtualMachine(1)
    machine.wait["disk"] = 9.0
    begin = time.perf_counter()
    threads = [threading.Thread(target=machine.compute, args=("disk", 0.02)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # One after the other each holds the CPU for .02 s, then all wait side by side for .18 s.
    assert 0.24 <= time.perf_counter() - begin < 0.5
    assert machine.usage().asked_s == pytest.approx(0.06)


@pytest.mark.parametrize("system", ["InTune (model-jump)", "hill climb", "even split relaunched"])
def test_a_system_is_traced_through_a_change_of_the_machine(system: str) -> None:
    pytest.importorskip("torchdata")
    found = trace("torch", system, Case("torch", 2, 0.05, 0.0, 0), 0.5, 3.0, [Event(1.5, "cpus", 4)])
    assert found["cpus"][0] == 2 and found["cpus"][-1] == 4
    assert found["limit"][0] == 40.0 and found["limit"][-1] == 80.0
    assert all(rate > 0 for rate in found["batches_per_s"])
    assert 0.1 < mean(found) < 1.2
    assert ("frozen" in found) == ("relaunched" not in system)
    assert found.get("frozen") is None
    json.dumps(found, allow_nan=False)


def test_a_mean_weighs_seconds() -> None:
    assert mean(RUN, of="batches_per_s") == pytest.approx((2 + 4 + 2 * 8) / 4)
    assert mean(RUN) == pytest.approx((2 + 4 + 16) / (4 + 8 + 16))
    assert mean(RUN | {"computed_per_s": [4.0, 4.0, 6.0]}) == pytest.approx((4 + 4 + 12) / (4 + 8 + 16))
    assert mean(RUN | {"computed_per_s": [9.0, 9.0, 9.0]}, of="rate") == mean(RUN, of="batches_per_s")
    assert mean(RUN, 1.0, 2.0, of="utilisation") == 0.5
    assert mean(RUN, 1.5, 3.0, of="batches_per_s") == pytest.approx((0.5 * 4 + 8) / 1.5)


def test_a_spread_is_told_and_what_was_never_reached_too() -> None:
    assert spread("x", [1.0]) == {"x": "1"}
    assert spread("x", [1.0, 3.0]) == {"x": "2 (1 to 3)"}
    assert spread("x", [1.0, None]) == {"x": "1, never in 1"}
    assert spread("x", [None]) == {"x": "never"}
    keys = list(grouped([{"a": 1, "b": 2, "c": 0}, {"a": 1, "b": 3, "c": 1}, {"a": 1, "b": 2, "c": 2}], "a", "b"))
    assert keys == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]


class Played:
    """A figure whose runs are what they are given."""

    TITLE = "played"

    def __init__(self) -> None:
        self.given: list[int] = []

    def tasks(self, options: Options) -> list[Task]:
        return [Task({"seed": seed}, dict, ([("value", 2 * seed)],), alone=seed > 1) for seed in options.seeds]

    def rows(self, runs: Any) -> list[dict[str, Any]]:
        self.given = [run["seed"] for run in runs]
        return [{"sum": sum(run["value"] for run in runs)}]

    def draw(self, runs: Any, figure: Any) -> None:
        figure.subplots().plot([run["value"] for run in runs])


def test_runs_are_kept_and_only_what_lacks_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    real = runs._done
    monkeypatch.setattr(runs, "_done", lambda tasks, jobs: done.extend(tasks) or real(tasks, jobs))
    figure = Played()
    assert make("played", figure, Options([1, 2]), tmp_path) == [{"sum": 6}]
    assert make("played", figure, Options([2, 3]), tmp_path) == [{"sum": 12}]
    assert [task.key["seed"] for task in done] == [1, 2, 3]
    written = json.loads((tmp_path / "played.json").read_text())
    assert written["machine"]["cpus"] and written["versions"]["python"] and len(written["runs"]) == 3
    assert (tmp_path / "played.md").read_text().splitlines()[-1] == "| 12 |"
    make("played", figure, Options([1], quick=True), tmp_path)
    assert (tmp_path / "played-quick.json").exists()


def test_without_matplotlib_a_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    runs.picture(tmp_path / "x.png", Played(), [])
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "x.png").exists()


def _made_up(name: str) -> list[dict[str, Any]]:
    """Return runs as the tasks of a figure would give them."""
    played = {
        figure7: RUN | {"phase_s": 2.0}, figure8: RUN, drift: RUN | {"phase_s": 1.3}, convergence: REACHED,
        memory: {"killed": False, "cgroup": True, "fraction_of_allowed": 0.5, "peak_gb": 1.0},
        cores: {"batches_per_s": 2.0},
        judge: {"au": [50.0, 90.0], "samples_per_s": [5.0, 9.0]},
    }  # fmt: skip
    figure: Any = FIGURES[name]
    made = []
    for task in figure.tasks(Options([1, 2])):
        made.append(task.key | (played[figure] if name not in ("cost", "cache", "peers") else {"rows": _rows(task)}))
    return made


def _rows(task: Task) -> list[dict[str, Any]]:
    part = next(
        part for one in ("cost", "cache", "peers") for part in FIGURES[one].parts if part.module == task.args[0]  # type: ignore[attr-defined]
    )  # fmt: skip
    return [dict.fromkeys(part.names, "a") | dict.fromkeys(part.values, 1.0), dict.fromkeys(part.names, "b")]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_rows_and_a_picture(name: str, tmp_path: Path) -> None:
    figure, made = FIGURES[name], _made_up(name)
    rows = figure.rows(made)
    assert rows and all(isinstance(value, (str, int, float, bool)) for row in rows for value in row.values())
    pytest.importorskip("matplotlib")
    runs.picture(tmp_path / "x.png", figure, made)
    assert (tmp_path / "x.png").read_bytes()[1:4] == b"PNG"


def test_what_the_tables_say() -> None:
    run = {"framework": "torch", "pipeline": "criteo", "seed": 1, "phase_s": 2.0}
    slow = RUN | {"batches_per_s": [1.0, 2.0, 4.0]}
    rows = figure7.rows([run | {"system": "Unoptimized"} | slow, run | {"system": "InTune (dqn)"} | RUN])
    assert [row["x Unoptimized"] for row in rows] == ["1", "2"]
    point = {"study": "CPUs", "point": 8, "seed": 1}
    rows = figure8.rows([point | {"system": "AUTOTUNE"} | slow, point | {"system": "even split"} | RUN])
    assert [row["x AUTOTUNE"] for row in rows] == ["1", "2"]
    shape = {"shape": "DLRM", "loader": "pytorch", "seed": 1}
    judged = [
        shape | {"system": "stock, 1", "au": [20.0, 20.0]},
        shape | {"system": "stock, 4", "au": [70.0, 80.0]},
        shape | {"system": judge.OURS, "au": [60.0, 81.6], "changes": 2},
    ]
    ours = judge.rows(judged)[-1]
    assert (ours["first / best"], ours["second / best"], ours["changes"]) == ("0.75", "1.02", 2)
    late = {"framework": "torch", "system": "hill climb"} | REACHED
    rows = convergence.rows([late, late])
    assert [row["seconds, median"] for row in rows] == [4.0, 6.0, "never"]
    assert [row["never"] for row in rows] == [0, 0, 2]
    system = {"system": "even split", "seed": 1}
    both = [system | {"machine": "real", "batches_per_s": 3.0}, system | {"machine": "emulated", "batches_per_s": 4.0}]
    assert cores.rows(both)[0]["measured / predicted"] == "0.75"
    of = {"stages": 5, "phase": "burst"}
    two = [{"benchmark": "decision", "seed": ms, "rows": [of | {"with_guard_ms": float(ms)}]} for ms in (1, 3)]
    assert COST.rows(two)[0]["with_guard_ms"] == "2 (1 to 3)"


def test_the_judge_takes_the_readers_shape() -> None:
    given = {"shapes": ["DLRM"], "loaders": ["tensorflow"], "files": 3, "compute_s": 0.5}
    tasks = judge.tasks(Options([7], given=given))
    assert {task.key["system"] for task in tasks} == {*(f"stock, {n}" for n in judge.THREADS), judge.OURS}
    for task in tasks:
        shape, loader, _, seed = task.args
        assert (shape.files, shape.compute_s, loader, seed) == (3, 0.5, "tensorflow", 7)
        # Not the key of a run with the shape as it is, which may stand in the same file.
        assert task.key["shape"] == "DLRM, files 3, compute_s 0.5" and task.alone
    with pytest.raises(SystemExit, match="--epochs 1: expected 2 or more"):
        judge.tasks(Options([7], given={"epochs": 1}))


@pytest.mark.parametrize("path", sorted(EVALUATION.glob("*.json")), ids=lambda path: path.stem)
def test_the_page_shows_what_was_measured(path: Path) -> None:
    measured = json.loads(path.read_text(encoding="utf-8"))["runs"]
    table = markdown(FIGURES[path.stem].rows(measured))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == table
    assert path.with_suffix(".png").read_bytes()[1:4] == b"PNG"
    page = (EVALUATION.parent / "evaluation.md").read_text(encoding="utf-8")
    assert table in page, f"docs/evaluation.md has to hold the table of {path.with_suffix('.md').name}"
    assert f"(evaluation/{path.stem}.png)" in page
