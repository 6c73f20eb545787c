"""What the benchmarks share, and a short run of every one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from busy_machine import three_attempts

from benchmarks import output
from benchmarks.emulated import SHARES


def test_output_has_the_agreed_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "file.json"
    output.write("name", [{"a": 1.23456, "b": None}, {"a": 2.0, "c": {"x": 1}}], 3, path)
    written = json.loads(path.read_text())
    assert list(written) == ["benchmark", "versions", "seed", "rows"]
    assert written["benchmark"] == "name"
    assert written["seed"] == 3
    assert written["rows"] == [{"a": 1.23456, "b": None}, {"a": 2.0, "c": {"x": 1}}]
    assert written["versions"]["python"].startswith("3.")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a", "b", "c"]
    assert lines[1].split() == ["1.23", "-", "-"]
    assert lines[2].split() == ["2", "-", "x=1"]


def test_lists_of_numbers_on_the_command_line() -> None:
    assert output.numbers("8,32,64") == [8, 32, 64]
    with pytest.raises(argparse.ArgumentTypeError, match="expected positive integers separated by commas, got 'x'"):
        output.numbers("8,x")
    assert output.words("a, b,") == ["a", "b"]


def test_differences_are_counted() -> None:
    from benchmarks.differences import Differences, compare

    expected = [10, 11, 12, 13]
    assert compare([10, 11, 12, 13], expected) == Differences(4, 0, 0, 0)
    assert compare([10, 12, 13], expected) == Differences(3, 1, 0, 0)
    assert compare([10, 11, 11, 12, 13], expected) == Differences(5, 0, 1, 0)
    assert compare([10, 12, 11, 13], expected) == Differences(4, 0, 0, 1)
    assert compare([10, 11, 12, 99], expected) == Differences(4, 1, 1, 0)
    assert compare([], expected) == Differences(0, 4, 0, 0)
    # Equal items are told apart by how many there were before.
    assert compare([7, 8, 7, 9], [7, 8, 7, 9]) == Differences(4, 0, 0, 0)
    assert compare([7, 7, 8, 9], [7, 8, 7, 9]) == Differences(4, 0, 0, 1)
    assert compare([7, 8, 9], [7, 8, 7, 9]) == Differences(3, 1, 0, 0)


def test_an_adapter_that_reorders_is_caught() -> None:
    from collections.abc import Iterator
    from random import Random

    from benchmarks.differences import exact
    from benchmarks.exactness import stress
    from benchmarks.exactness_cases import Adapter
    from benchmarks.exactness_loaders import nodes

    class Hasty:
        def __init__(self, items: int) -> None:
            self.items = items

        def start(self) -> Iterator[object]:
            import torch

            order = [1, 0, *range(2, self.items)]
            return iter([torch.full((3,), item) for item in order])

        def change(self, choices: Random) -> None:
            return None

        def close(self) -> None:
            return None

    row = stress(Adapter("hasty", 1, lambda n, s: Hasty(n), lambda n, s: nodes(n, 0), False), 100, 0)
    assert row["out_of_order"] > 0
    assert not exact({"rows": [row]})


def test_every_adapter_is_exact_under_a_few_resizes() -> None:
    from benchmarks.differences import exact
    from benchmarks.exactness import ADAPTERS, main

    result = main(["--quick", "--seed", "5"])
    assert [row["adapter"] for row in result["rows"]] == [adapter.name for adapter in ADAPTERS]
    assert all(row["items"] and row["resizes"] for row in result["rows"])
    assert exact(result)


def test_time_to_a_throughput_is_judged_over_a_window() -> None:
    from benchmarks.live_loop import Delivery, seconds_to

    # One batch a second for 10 s, then ten a second; batches of half the mean work count half.
    slow = [Delivery(float(i), 1.0) for i in range(1, 11)]
    fast = [Delivery(10.0 + i / 10, 1.0) for i in range(1, 101)]
    reached = seconds_to(9.0, slow + fast, 0.0, 1.0, 2.0)
    assert reached == pytest.approx(11.8, abs=0.3)
    assert seconds_to(9.0, slow + fast, 5.0, 1.0, 2.0) == pytest.approx(6.8, abs=0.3)
    assert seconds_to(9.0, slow, 0.0, 1.0, 2.0) is None
    halves = [Delivery(delivery.at_s, 0.5) for delivery in slow + fast]
    assert seconds_to(9.0, halves, 0.0, 1.0, 2.0) is None


def test_search_tries_oversubscription_and_windows() -> None:
    from benchmarks.live_loop import Case
    from benchmarks.live_search import Plan, candidates
    from intune_callbacks.types import Stage

    stages = [Stage(name, "cpu", "workers", 1, 99, 1) for name in SHARES]
    stages += [Stage(f"{name}.window", "memory", "items", 1, 999, 2, window_of=name) for name in SHARES]
    tried = candidates(stages, Case("torchdata", 32, 1.0, 0.8, 0), Plan())
    assert tried["1x water-fill, window 2x"]["udf"] == 13
    assert tried["1x water-fill, window 2x"]["udf.window"] == 26
    assert all(tried["N each, window 4x"][name] == 32 for name in SHARES)
    assert len({tuple(allocation.items()) for allocation in tried.values()}) == len(tried)


@pytest.mark.parametrize("pipeline", ["torchdata", "dataloader"])
@three_attempts
def test_live_run_tunes_a_real_pipeline(pipeline: str) -> None:
    from benchmarks.live_loop import Case
    from benchmarks.live_search import Plan
    from benchmarks.live_torch import run

    def speed(row: dict[str, Any]) -> float:
        """The throughput of a host that sleeps as long as it is told."""
        return float(row["throughput"] * row["sleep_inflation"])

    plan = Plan(0.3, 0.7, 0.3, 0.7, 4.0, 1.0, 0, 1.0, 0.2, (1.0,), (2.0,), ())
    rows = run([Case(pipeline, 4, 0.1, 0.3, 0)], ["model-jump"], plan, jobs=0, warm=True)
    warm = [row for row in rows if row["phase"] == "warm start"]
    by_policy: dict[str, dict[str, Any]] = {row["policy"]: row for row in rows if row not in warm}
    wanted = {"pipeline", "cpus", "policy", "throughput", "best_static", "fraction_of_best", "fraction_of_fluid"}
    assert all(wanted | {"seconds_to_95"} <= set(row) for row in rows)
    tuned, start = by_policy["model-jump"], by_policy["start, no tuner"]
    assert "frozen" not in tuned
    assert speed(tuned) > 1.2 * speed(start)
    # No pipeline is faster than its machine, beyond what was already in the buffers.
    assert tuned["fraction_of_fluid"] < 1.15
    assert len(warm) == 1 and "not_warm" not in warm[0]
    assert speed(warm[0]) > 1.2 * speed(start)
    assert {"decisions_to_95", "changes"} <= set(warm[0])


def test_decisions_are_counted_until_what_follows_is_fast_enough() -> None:
    from benchmarks.live_loop import Delivery, decisions_to

    # One batch a second for ten seconds, then ten a second.
    deliveries = [Delivery(float(at), 1.0) for at in range(1, 11)]
    deliveries += [Delivery(10.0 + at / 10.0, 1.0) for at in range(1, 101)]
    assert decisions_to(0.9, deliveries, [3, 6], 0.0, 1.0, 5.0) == 0
    assert decisions_to(9.0, deliveries, [3, 6, 9, 60], 0.0, 1.0, 5.0) == 3
    assert decisions_to(3.0, deliveries, [3, 6, 10], 0.0, 1.0, 5.0) == 2
    assert decisions_to(11.0, deliveries, [3, 6, 10], 0.0, 1.0, 5.0) is None


def test_reach_rows() -> None:
    from benchmarks.reach import main

    rows = main(["--quick", "--only", "plain", "subclass", "--seed", "3"])["rows"]
    assert [row["loader"] for row in rows] == ["DataLoader", "subclass with a generator"]
    assert all(row["losses"] == "same" and row["stock_s"] > 0 for row in rows)


def test_gap_rows() -> None:
    from benchmarks.gaps import main

    (row,) = main(["--quick", "--methods", "fork"])["rows"]
    assert row["stock_ms"] > 10.0 and row["resized_ms"] > 0.0 and row["ratio"] > 0.0


def test_overhead_rows() -> None:
    from benchmarks.overhead import main

    rows = main(["--quick", "--repeats", "1"])["rows"]
    assert all({"what", "us", "ratio_to_stock"} <= set(row) for row in rows)
    kinds = [row["what"].split(",")[0] for row in rows]
    assert kinds.count("ParallelMapper thread") == 2
    assert "DataLoader process" in kinds
    assert any(row["what"].startswith("callback tune") for row in rows)
    assert all(row["us"] > 0 for row in rows if not row["what"].startswith("callback"))


def test_turns_are_taken_in_pairs() -> None:
    from benchmarks.overhead import side_by_side

    turns: list[str] = []
    values = {"ours": iter([2.0, 4.0, 60.0]), "stock": iter([1.0, 4.0, 20.0])}

    def turn(who: str) -> float:
        turns.append(who)
        return next(values[who])

    assert side_by_side(lambda: turn("ours"), lambda: turn("stock"), 3) == (4.0, 4.0, 2.0)
    assert turns == ["ours", "stock", "stock", "ours", "ours", "stock"]


def test_keeping_what_is_decoded_is_compared_with_fixed_sizes() -> None:
    from benchmarks.cache import main

    rows = {row["system"]: row for row in main(["--quick", "--decode-ms", "10"])["rows"]}
    assert {"none", "static 10%", "static 105%", "InTune"} <= set(rows)
    assert all(row["same"] for row in rows.values() if "same" in row)
    assert rows["InTune"]["times_none"] > 1.2
    assert rows["InTune"]["of_best"] > 0.2
