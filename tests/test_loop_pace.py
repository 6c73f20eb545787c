"""The time of a loop of the user's own: what counts as a step, what a batch costs, what is gained."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from busy_machine import three_attempts  # noqa: E402
from loop_loaders import BATCH, EAGER, ROWS, Slow, slow, trained  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.session.loop_fit import Fit  # noqa: E402


class Generated(IterableDataset):
    """Batches of a generator, made in the loop."""

    def __init__(self, batches: Callable[[], Iterator[torch.Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._batches()


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


def test_quick_fetches_are_told_together_and_nothing_of_them_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, told = [size % 7 + 1 for size in range(2000)], [0]
    stock = Fit.fetch_end

    def fetch_end(self: Fit, *given: object) -> None:
        told[0] += 1
        stock(self, *given)

    monkeypatch.setattr(Fit, "fetch_end", fetch_end)
    spent_s = fetched_s = 0.0

    def batches() -> Iterator[torch.Tensor]:
        nonlocal fetched_s
        for number, size in enumerate(sizes):
            begin_s = time.perf_counter()
            if number % 100 == 0:
                time.sleep(0.02)  # a file is opened
            batch = torch.zeros(size)
            fetched_s += time.perf_counter() - begin_s
            yield batch

    loader = live(DataLoader(Generated(batches), batch_size=None), show_card=False, decide_every_s=2.0)
    for number, _ in enumerate(loader):
        if number == 1000:
            begin_s = time.perf_counter()
            with loader.pause():
                time.sleep(0.3)
            spent_s = time.perf_counter() - begin_s
    whole = loader.close()["whole"]
    assert (whole["steps"], whole["samples"]) == (len(sizes), sum(sizes))
    assert whole["paused_s"] == pytest.approx(spent_s, rel=0.1)
    # What only it measures around each fetch is in its wait, too.
    assert 0.95 * fetched_s < whole["wait_frac"] * whole["wall_s"] < 2.0 * fetched_s + 0.2
    assert told[0] < len(sizes) / 4


def test_an_error_behind_quick_fetches_is_the_users_and_all_before_it_is_counted() -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield from torch.zeros(500, 3)
        raise KeyError("row 500")

    loader = live(DataLoader(Generated(batches), batch_size=None), show_card=False)
    with pytest.raises(KeyError, match="row 500"):
        for _ in loader:
            pass
    report = loader.close()
    assert (report["frozen"], report["whole"]["samples"]) == (None, 1500)


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
