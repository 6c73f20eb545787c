"""The time of a loop of the user's own: what counts as a step, what a batch costs, what is gained."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from busy_machine import three_attempts  # noqa: E402
from loop_loaders import BATCH, EAGER, ROWS, Slow, slow, trained  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from intune_callbacks import live  # noqa: E402


def test_what_is_done_in_a_pause_or_behind_the_loop_is_no_step(tmp_path: Path) -> None:
    loader = live(slow(num_workers=1), show_card=False, run_dir=str(tmp_path), **EAGER)
    begin_s = time.monotonic()
    for number, _ in enumerate(loader):
        if number == 50:
            with loader.pause():
                time.sleep(1.0)
    took_s = time.monotonic() - begin_s
    time.sleep(1.0)
    assert loader.close()["whole"]["throughput_samples_per_s"] == pytest.approx(ROWS / took_s, rel=0.05)
    decisions = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert max(decision["observation"]["model_s"] for decision in decisions) < 0.05


def test_what_comes_behind_an_iterator_that_is_still_held_is_no_step() -> None:
    loader = live(slow(num_workers=1), show_card=False, mode="observe")
    for _ in range(2):
        batches = iter(loader)
        begin_s = time.monotonic()
        for _ in range(60):
            next(batches)
        took_s = time.monotonic() - begin_s
        time.sleep(5.0 * took_s)  # an evaluation
    whole = loader.close()["whole"]
    assert (whole["steps"], whole["samples"]) == (119, 120 * BATCH)
    assert whole["wait_frac"] * whole["wall_s"] > 0.5 * (whole["wall_s"] - whole["paused_s"])
    assert len(list(batches)) == ROWS // BATCH - 60


@three_attempts
def test_at_a_quick_pace_the_workers_that_helped_stay() -> None:
    # Two epochs of 4 s each without us. It went 1 > 2 > 16 workers and back to 2, and stayed there.
    pace = {"decide_every_s": 0.15, "decide_every_batches": 3, "warmup_batches": 4, "cpus": 8.0, "trainer_cpus": 0.0}
    loader = live(DataLoader(Slow(0.01), batch_size=8, shuffle=True, num_workers=1), **pace, show_card=False)
    begin_s = time.monotonic()
    trained(loader)
    took_s = time.monotonic() - begin_s
    report = loader.close()
    assert report["frozen"] is None
    assert report["after"]["allocation"]["load"] >= 6
    assert took_s < 0.6 * 2 * ROWS * 0.01


@three_attempts
def test_it_becomes_faster() -> None:
    given = {"num_workers": 1, "batch_size": BATCH}
    seconds = []
    for loader in (DataLoader(Slow(0.01), **given), live(DataLoader(Slow(0.01), **given), **EAGER, show_card=False)):
        begin_s = time.monotonic()
        trained(loader)
        seconds.append(time.monotonic() - begin_s)
    assert seconds[1] < 0.6 * seconds[0]


@three_attempts
def test_what_a_batch_costs() -> None:
    batch = torch.zeros(4)
    loader = live([batch] * 20_000, show_card=False)
    best_s = 1.0
    for _ in range(5):
        begin_s = time.thread_time()
        for _ in loader:
            pass
        best_s = min(best_s, (time.thread_time() - begin_s) / 20_000)
    assert best_s < 10e-6
