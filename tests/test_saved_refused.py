"""Every reason not to start from what another run left: another setting, a file that is no good."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_runs import VERSIONS, edit, refused, started, three_stages, tuner_of

from intune_callbacks.config import POLICIES
from intune_callbacks.record.fingerprint import differences
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation, Stage

# -- the fingerprint ---------------------------------------------------------------------------------------------------


class Altered(FakePipeline):
    """The three stages, but for what `alter` makes of each."""

    alter: Callable[[Stage], Stage] = staticmethod(lambda stage: stage)

    def stages(self) -> tuple[Stage, ...]:
        return tuple(self.alter(stage) for stage in super().stages())


def altered(alter: Callable[[Stage], Stage]) -> FakePipeline:
    pipeline = three_stages()
    pipeline.__class__ = Altered
    pipeline.alter = alter  # type: ignore[attr-defined]
    return pipeline


def only(which: str, **changes: Any) -> Callable[[Stage], Stage]:
    return lambda stage: replace(stage, **changes) if stage.name == which else stage


def more() -> FakePipeline:
    return FakePipeline({**three_stages().work, "augment": Work(0.01)}, FakeMachine(32.0), depth=2)


def fewer() -> FakePipeline:
    return FakePipeline(three_stages().work, FakeMachine(32.0))


MISMATCHES: dict[str, tuple[Callable[[], Tuner], dict[str, Any], str]] = {
    "another stage": (lambda: tuner_of(more()), {}, "stage 'augment' only here; stage 'augment.window' only here"),
    "a stage less": (lambda: tuner_of(fewer()), {}, "stage 'prefetch' only there"),
    "name": (
        lambda: tuner_of(altered(only("read", name="fetch"))),
        {},
        "stage 'read' only there; stage 'fetch' only here",
    ),
    "kind": (lambda: tuner_of(altered(only("read", kind="io"))), {}, "kind of stage 'read': cpu there, io here"),
    "unit": (
        lambda: tuner_of(altered(only("prefetch", unit="MiB"))),
        {},
        "unit of stage 'prefetch': items there, MiB here",
    ),
    "sequential": (
        lambda: tuner_of(altered(only("read", sequential=True))),
        {},
        "sequential of stage 'read': False there, True here",
    ),
    "window of": (
        lambda: tuner_of(altered(only("prefetch", window_of="batch"))),
        {},
        "window_of of stage 'prefetch': None there, batch here",
    ),
    "batch size": (lambda: tuner_of(three_stages()), {"batch_size": 64}, "batch size: 32 there, 64 here"),
    "CPUs": (lambda: tuner_of(three_stages(31.0)), {}, "CPUs: 32 there, 31 here"),
    "memory": (
        lambda: tuner_of(FakePipeline(three_stages().work, FakeMachine(32.0, 16 * GB), depth=2)),
        {},
        "memory limit: 64 GB there, 16 GB here",
    ),
    "package": (
        lambda: tuner_of(three_stages()),
        {"versions": VERSIONS | {"intune_callbacks": "0.2.0"}},
        "intune_callbacks: 0.1 there, 0.2 here",
    ),
    "library": (
        lambda: tuner_of(three_stages()),
        {"versions": VERSIONS | {"torch": "3.13.0"}},
        "torch: 2.13 there, 3.13 here",
    ),
    "policy": (lambda: tuner_of(three_stages(), policy="even"), {}, "policy: dqn there, even here"),
    "ranks": (lambda: tuner_of(three_stages()), {"world": 4}, "ranks: 1 there, 4 here"),
    "several": (
        lambda: tuner_of(three_stages(16.0)),
        {"batch_size": 8},
        "batch size: 32 there, 8 here; CPUs: 32 there, 16 here",
    ),
}


@pytest.mark.parametrize(("make", "changes", "why"), MISMATCHES.values(), ids=MISMATCHES)
def test_whatever_differs_is_named_with_both_values(
    saved: Path, make: Callable[[], Tuner], changes: dict[str, Any], why: str
) -> None:
    assert refused(saved, make(), **changes) == why


def test_what_does_not_matter_is_no_difference(saved: Path) -> None:
    pipeline = FakePipeline(three_stages().work, FakeMachine(32.1, int(0.95 * 64 * GB), 3 * GB), depth=9)
    versions = {"intune_callbacks": "0.1.7", "torch": "2.13.1+cpu", "keras": "3.15"}
    assert started(saved, tuner_of(pipeline, decide_every_s=2.0), versions=versions)["used"]


def test_a_refused_start_is_a_cold_one(saved: Path) -> None:
    loop, cold = FakeLoop(three_stages()), FakeLoop(three_stages())
    tuner = tuner_of(loop.pipeline)
    refused(saved, tuner, batch_size=1)
    decisions, of_cold = loop.run(tuner, 30.0), cold.run(tuner_of(cold.pipeline), 30.0)
    assert [(d.reason, d.after) for d in decisions] == [(d.reason, d.after) for d in of_cold]


NAMES = st.sampled_from(["read", "decode", "load", "load.window"])
STAGES = st.dictionaries(
    NAMES,
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["cpu", "io", "memory"]),
            "unit": st.sampled_from(["workers", "items", "MiB"]),
            "sequential": st.booleans(),
            "window_of": st.none() | NAMES,
        }
    ),
)
FINGERPRINTS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 9),
        "cpus": st.integers(1, 256).map(float),
        "memory_limit_bytes": st.sampled_from([0, 8 * GB, 64 * GB]),
        "policy": st.sampled_from(POLICIES),
        "ranks": st.integers(1, 9),
        "versions": st.dictionaries(st.sampled_from(["torch", "keras"]), st.sampled_from(["1.0", "1.1"])),
        "stages": STAGES,
    }
)


@given(FINGERPRINTS, FINGERPRINTS)
def test_fingerprints_fit_themselves_and_differences_are_mutual(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert differences(one, one) == []
    there, here = differences(one, two), differences(two, one)
    swapped = [phrase.replace("there", "X").replace("here", "there").replace("X", "here") for phrase in here]
    assert len(there) == len(here)
    assert sorted(p.split(": ")[0] for p in there) == sorted(p.split(": ")[0] for p in swapped)
    for key in ("batch_size", "policy", "ranks"):
        changed = differences(one, one | {key: two[key]})
        assert [key.replace("_", " ") + f": {one[key]} there, {two[key]} here"] * (one[key] != two[key]) == changed


# -- files that are no good --------------------------------------------------------------------------------------------


def rewrite_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the state and make `found.yaml` vouch for it."""
    file = folder / "state.json"
    old, text = file.read_bytes(), json.dumps(change(json.loads(file.read_text())))
    file.write_text(text)
    edit(folder, (hashlib.sha256(old).hexdigest(), hashlib.sha256(text.encode()).hexdigest()))


def of_shell(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        state["policy"]["state"]["shell"] |= changes
        return state

    return change


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (lambda f: [file.unlink() for file in f.iterdir()], "there is no "),
    "empty": (lambda f: (f / "found.yaml").write_text(""), "found.yaml cannot be read: Expecting value: line 1"),
    "binary": (lambda f: (f / "found.yaml").write_bytes(bytes(range(256))), "found.yaml cannot be read: "),
    "foreign": (lambda f: (f / "found.yaml").write_text('{"seed": 1}'), "is not what InTune wrote"),
    "of another format": (
        lambda f: (f / "found.yaml").write_text("format: 1\n"),
        "cannot be read: Expecting value: line 1",
    ),
    "a list": (
        lambda f: (f / "found.yaml").write_text("[1, 2]"),
        "cannot be read: expected a mapping, found list",
    ),
    "truncated": (lambda f: os.truncate(f / "found.yaml", 700), ""),
    "another format": (lambda f: edit(f, ('"format": 2', '"format": 3')), "format: 3 there, 2 here"),
    "no state": (lambda f: (f / "state.json").unlink(), "state.json cannot be read: "),
    "state elsewhere": (
        lambda f: edit(f, ('"state.json"', '"/dev/zero"')),
        "found.yaml names '/dev/zero': expected the name of a file beside it",
    ),
    "state is no file": (
        lambda f: ((f / "state.json").unlink(), os.mkfifo(f / "state.json")),
        "found.yaml names 'state.json': expected the name of a file beside it",
    ),
    "truncated state": (lambda f: os.truncate(f / "state.json", 99), "state.json is not the one that was written with"),
    "state of another run": (lambda f: (f / "state.json").write_text("{}"), "is not the one that was written with"),
    "no fingerprint": (
        lambda f: edit(f, ('"fingerprint":', '"fingerprint": 3, "other":')),
        "it could not be taken over: TypeError",
    ),
    "state is a list": (lambda f: rewrite_state(f, lambda s: [1]), "it could not be taken over: "),
    "no guard": (lambda f: rewrite_state(f, lambda s: s | {"guard": 3}), "it could not be taken over: TypeError"),
    "no policy": (lambda f: rewrite_state(f, lambda s: s | {"policy": {}}), "it could not be taken over: KeyError"),
    "a curve less": (lambda f: rewrite_state(f, of_shell(theta=[[1.0]])), "theta: expected finite numbers of shape"),
    "infinite": (lambda f: rewrite_state(f, of_shell(noise=1e999)), "noise: expected finite numbers"),
    "no number": (lambda f: rewrite_state(f, of_shell(phase="x")), "could not convert string to float"),
    "no phase": (lambda f: rewrite_state(f, of_shell(phase=9)), "phase: 9 is none"),
}


@pytest.mark.parametrize(("damage", "why"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_good_is_a_cold_start(copied: Path, damage: Callable[[Path], Any], why: str) -> None:
    damage(copied)
    loop, cold = FakeLoop(three_stages()), FakeLoop(three_stages())
    tuner = tuner_of(loop.pipeline)
    said = refused(copied, tuner)
    assert why in said and "\n" not in said
    decisions, of_cold = loop.run(tuner, 15.0), cold.run(tuner_of(cold.pipeline), 15.0)
    assert tuner.frozen is None
    assert [d.after for d in decisions] == [d.after for d in of_cold]


@pytest.mark.parametrize("part", ["guard", "policy", "history", "allocation", "counts", "shares", "shell"])
def test_of_a_state_that_fails_nothing_is_left(part: str) -> None:
    before = FakeLoop(three_stages())
    first = tuner_of(before.pipeline)
    before.run(first, 60.0)
    state = json.loads(json.dumps(first.state_dict()))
    (state["policy"]["state"] if part in state["policy"]["state"] else state)[part] = 3
    tuner = tuner_of(three_stages())
    with pytest.warns(RuntimeWarning, match="could not restore its state and starts anew"):
        tuner.load_state_dict(state)
    assert tuner.state_dict() == tuner_of(three_stages()).state_dict()


numbers = itertools.count()


@settings(max_examples=80)
@given(st.data())
def test_any_file_is_used_or_refused_and_never_an_error(saved: Path, data: st.DataObject) -> None:
    folder = saved.parent / f"any{next(numbers)}"
    folder.mkdir()
    for file in saved.iterdir():
        content = file.read_bytes()
        if data.draw(st.booleans()):
            begin = data.draw(st.integers(0, len(content)))
            end = data.draw(st.integers(begin, min(len(content), begin + 40)))
            content = (
                content[:begin] + data.draw(st.binary(max_size=8) | st.text(max_size=8).map(str.encode)) + content[end:]
            )
        (folder / file.name).write_bytes(content)
    loop = FakeLoop(three_stages())
    tuner = tuner_of(loop.pipeline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = started(folder, tuner)
    assert entry["why"]
    loop.run(tuner, 4.0)
    assert tuner.frozen is None
    assert bool(loop.pipeline.resizes) or not entry["used"]


def test_nothing_is_raised_where_warnings_are_errors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = started(tmp_path / "x", tuner_of(three_stages()))
    assert entry["why"] == f"there is no {tmp_path}/x/found.yaml"


def test_a_pipeline_that_breaks_at_the_start_is_a_reason(saved: Path) -> None:
    class Broken(FakePipeline):
        def resize(self, allocation: Mapping[str, int]) -> Allocation:
            raise OSError("no more workers")

    pipeline = three_stages()
    pipeline.__class__ = Broken
    assert refused(saved, tuner_of(pipeline)) == "it could not be taken over: OSError: no more workers"
