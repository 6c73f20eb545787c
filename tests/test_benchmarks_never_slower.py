"""`benchmarks.never_slower`: kinds of cheap input, pairs in turns, and verdicts that can be bad."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from benchmarks import never_slower
from benchmarks.never_slower_fits import fit
from benchmarks.never_slower_kinds import KINDS, kind_named


def test_every_loader_is_trained_on_in_every_way_it_can_be() -> None:
    frameworks = Counter(kind.framework for kind in KINDS)
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert frameworks == {"lightning": 7, "keras": 5, "plain": 7, "transformers": 7}
    assert kind_named("numpy").name.startswith("numpy")
    with pytest.raises(ValueError, match="expected the beginning of one of"):
        kind_named("nothing of the kind")


def pair(wall: float, cpu: float, off: float | None) -> dict[str, Any]:
    side = {"wall_s": 1.0, "cpu_s": 1.0, "headline_off": None, "changes": 0, "workers": [], "frozen": None}
    tune = {**side, "wall_s": wall, "cpu_s": cpu, "headline_off": off}
    return {"off": side, "tune": tune, "batches": 10}


@pytest.mark.parametrize(
    ("pairs", "kept"),
    [
        ([pair(1.02, 1.04, 0.01), pair(1.02, 1.04, -0.01), pair(9.0, 9.0, 0.0)], True),
        ([pair(1.05, 1.0, None)], False),
        ([pair(1.0, 1.06, None)], False),
        ([pair(1.0, 1.0, 0.0), pair(1.0, 1.0, -0.04)], False),
        ([pair(1.0, 1.0, None)], True),
    ],
)
def test_a_kind_is_judged_by_its_medians_and_by_its_worst_headline(pairs: list[dict[str, Any]], kept: bool) -> None:
    assert never_slower.row_of(KINDS[0], pairs)["kept"] is kept


@pytest.mark.parametrize("name", ["presliced, 0", "plain: presliced, 0", "transformers: presliced, 0"])
def test_a_fit_is_timed_by_a_clock_of_its_own(name: str) -> None:
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    kind = kind_named(name)
    fitted = fit(kind, "none", 20, 2)
    assert fitted.steps == 40 and fitted.report == {}
    # A step sleeps .2 ms, and then some.
    assert fitted.wall_s > 40 * kind.model_s and 0 < fitted.samples_per_s < kind.batch / kind.model_s


@pytest.mark.timeout(300)
def test_a_tiny_run_of_one_kind(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    never_slower.main(["--quick", "--only", "presliced, 0", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert "error" not in row and row["frozen"] is None
    assert row["wall_ratio"] > 0 and row["cpu_ratio"] > 0 and row["off_us"] > 200


def test_a_child_that_fails_is_a_row_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(never_slower.sys, "executable", "/bin/false")
    assert never_slower._in_child(KINDS[0], 1, 0.1)["kept"] is False
