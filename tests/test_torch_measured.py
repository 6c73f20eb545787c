"""What is measured of a DataLoader: time, CPU and bytes of its batches, and the start of its workers."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from busy_machine import eventually, three_attempts

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402
from torch_rows import BATCH, ROWS, Rows  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.watched import Watch  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402


@pytest.mark.parametrize("live", [True, False])
def test_without_workers_the_fetch_is_timed_exactly(live: bool) -> None:
    loader = DataLoader(Rows(40, sleep_s=0.002, spin_s=0.001), batch_size=BATCH)
    pipeline = find(loader, live=live, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    for _ in iterator:
        time.sleep(0.005)
    seen = pipeline.stats().stages["load"]
    assert seen.items == 10 and seen.item_bytes == 8 * BATCH
    assert seen.busy_s / 10 >= BATCH * 0.003
    assert BATCH * 0.001 <= seen.cpu_s / 10 < seen.busy_s / 10 - BATCH * 0.0015
    assert seen.blocked_s >= 9 * 0.005 and seen.queued == 0
    pipeline.close()


def test_a_fetch_that_is_long_now_and_then_waits_for_its_reads() -> None:
    """A shard is opened every tenth fetch: what the others compute says nothing of it."""
    wall_s, cpu_s = [0.0], [0.0]

    def fetches():
        for batch in range(320):
            wall_s[0] += 0.1 if batch % 10 == 5 else 0.0001
            cpu_s[0] += 0.0001
            yield batch

    watch, batches = Watch(0, 1, Clock(lambda: wall_s[0], lambda: cpu_s[0])), fetches()
    for _ in range(320):
        watch.fetch(batches.__next__)
    assert watch.counters.cpu_s == pytest.approx(320 * 0.0001)
    assert watch.counters.busy_s > 3.0


@pytest.mark.parametrize(
    ("model_s", "fetch_s", "reads"), [(0.0001, 0.0001, 400), (0.0001, 0.02, 1600), (0.02, 0.0001, 1600)]
)
def test_the_cpu_clock_is_read_now_and_then_where_steps_are_quick(model_s: float, fetch_s: float, reads: int) -> None:
    """A look at a thread's clock costs as much as a quick fetch; how much of one is CPU time is still measured."""
    wall_s, cpu_s, read = [0.0], [0.0], [0]

    def cpu() -> float:
        read[0] += 1
        return cpu_s[0]

    def fetches() -> Iterator[int]:
        for batch in range(800):
            wall_s[0] += fetch_s
            cpu_s[0] += 0.25 * fetch_s
            yield batch

    watch, batches = Watch(0, 1, Clock(lambda: wall_s[0], cpu)), fetches()
    for _ in range(800):
        watch.fetch(batches.__next__)
        wall_s[0] += model_s
        cpu_s[0] += model_s
    assert watch.counters.busy_s == pytest.approx(800 * fetch_s)
    assert watch.counters.cpu_s == pytest.approx(0.25 * watch.counters.busy_s)
    assert 100 <= read[0] <= reads


def test_the_time_of_a_batch_is_that_of_whole_rounds_where_batches_come_in_bursts() -> None:
    """Four workers take 1.4 s each: four batches come within .2 s, every one of them waited for, then none."""
    wall_s = [0.0]

    def fetches() -> Iterator[int]:
        for batch in range(40):
            wall_s[0] += 0.8 if batch % 4 == 0 else 0.2
            yield batch

    watch, batches = Watch(4, 8, Clock(lambda: wall_s[0], lambda: 0.0)), fetches()
    read = []
    for _ in range(40):
        watch.fetch(batches.__next__)
        read.append(watch.counters.busy_s)
    each_s = [after_s - before_s for before_s, after_s in itertools.pairwise(read)]
    assert all(1.2 < service_s < 1.5 for service_s in each_s[7:]), each_s
    assert sum(each_s[7:]) / len(each_s[7:]) == pytest.approx(1.4, rel=0.05)


@pytest.mark.parametrize("live", [True, False])
@three_attempts
def test_with_workers_time_and_cpu_of_a_batch_are_seen_from_outside(live: bool) -> None:
    loader = DataLoader(Rows(400, sleep_s=0.004, spin_s=0.002), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, live=live, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    for _ in range(10):
        next(iterator)
    before = pipeline.stats().stages["load"]
    for _ in range(60):
        next(iterator)
    after = pipeline.stats().stages["load"]
    pipeline.close()
    items = after.items - before.items
    service_s, cpu_s = (after.busy_s - before.busy_s) / items, (after.cpu_s - before.cpu_s) / items
    assert items == 60
    # 24 ms a batch on a free machine, of which 8 are computed; a busy one is slower.
    assert 0.020 < service_s < 0.2 and 0.005 < cpu_s < 0.6 * service_s
    # A loop that does nothing keeps both busy.
    assert after.blocked_s - before.blocked_s < 0.5 * (after.busy_s - before.busy_s)
    assert after.worker_bytes > 0


def test_batches_that_wait_are_seen() -> None:
    loader = DataLoader(Rows(400), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    time.sleep(0.5)
    seen = pipeline.stats().stages["load"]
    assert seen.capacity == 4 and seen.queued >= 3
    pipeline.close()


def test_the_cpu_of_workers_that_end_with_a_short_epoch_is_counted() -> None:
    loader = DataLoader(Rows(160, spin_s=0.002), batch_size=BATCH, num_workers=1)
    pipeline = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    for _ in range(2):
        for _ in loader:
            pass
    seen = pipeline.stats().stages["load"]
    assert 0.5 * 0.008 < seen.cpu_s / seen.items < 3 * 0.008
    pipeline.close()


@pytest.mark.parametrize(("method", "is_dear"), [("spawn", True), ("fork", False)])
def test_what_workers_import_that_are_no_forks_is_their_start(
    method: str, is_dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two workers has computed for 3 s when the first batch comes."""
    times = SimpleNamespace(user=2.5, system=0.5)
    processes = iter(SimpleNamespace(pid=0, create_time=lambda: 0.0, cpu_times=lambda: times) for _ in range(2))
    monkeypatch.setattr("psutil.Process", lambda pid: next(processes))
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)

    class Running:
        _workers = (SimpleNamespace(pid=0, _start_method=method),) * 2

    watch, running = Watch(2, 4, Clock(lambda: 0.0, lambda: 0.0)), Running()
    watch.begin(running)
    watch.fetch(lambda: 1)
    assert watch.startup_s == (1.5 if is_dear else 0.0)


def test_the_start_of_workers_that_live_on_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have computed when the second epoch begins is the first one, and no import."""
    spent_s = [3.0]
    times = SimpleNamespace(create_time=lambda: 0.0, cpu_times=lambda: SimpleNamespace(user=spent_s[0], system=0.0))
    monkeypatch.setattr("psutil.Process", lambda pid: SimpleNamespace(pid=pid, **vars(times)))

    class Running:
        _workers = (SimpleNamespace(pid=0, _start_method="spawn"),)

    watch, running = Watch(1, 2, Clock(lambda: 0.0, lambda: 0.0)), Running()
    for spent_s[0] in (3.0, 100.0):
        watch.begin(running)
        watch.fetch(lambda: 1)
        assert watch.startup_s == 3.0
    again = Running()
    watch.begin(again)
    watch.fetch(lambda: 1)
    assert watch.startup_s == 100.0


def spent_s(pipeline: Any) -> float:
    """Seconds the training loop has spent starting workers, the loader's own and ours."""
    return float(pipeline._engines.startup.total_s + pipeline._engines.stock_startup.total_s)


def test_the_start_of_workers_is_measured_and_charged_where_each_epoch_pays_it() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH)
    pipeline = find(loader, workers_kind="process").pipeline
    guessed_s = pipeline.stages()[0].startup_s
    assert 0.01 < guessed_s < 0.5 and spent_s(pipeline) < 0.05
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 2})
    next(iterator)
    measured_s = pipeline.stages()[0].startup_s
    assert 0.0 < measured_s != guessed_s and spent_s(pipeline) >= 2 * measured_s
    pipeline.close()
    for options in ({"workers_kind": "thread"}, {}):
        loader = DataLoader(Rows(), batch_size=BATCH, num_workers=1, persistent_workers=True)
        pipeline = find(loader, **options).pipeline
        pipeline.prepare()
        assert len(list(loader)) == ROWS // BATCH
        assert pipeline.stages()[0].startup_s == 0.0 and spent_s(pipeline) > 0.0
        assert (pipeline.stages()[0].once_s > 0.0) == (options == {})  # threads have no start
        pipeline.close()


@pytest.mark.parametrize("grown", [False, True])
def test_what_spawned_workers_import_is_charged(grown: bool) -> None:
    """A stranger's epochs began with 1.4 s of it for two workers, 10 ms of which were counted."""
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2, multiprocessing_context="spawn")
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    if grown:
        pipeline.resize({"load": 3})
    next(iterator)
    assert eventually(lambda: pipeline.stages()[0].startup_s > 0.1), "each has imported torch"
    pipeline.close()


def test_a_new_epoch_starts_the_users_workers_and_the_rest_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Rows(400, sleep_s=0.002), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    pipeline.resize({"load": 8, "load.window": 16})
    start = multiprocessing.process.BaseProcess.start
    started = []

    def slow(process) -> None:
        started.append(process)
        time.sleep(0.1)
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", slow)
    iterator = iter(loader)
    assert len(started) == 2
    next(iterator)
    assert len(started) < 8
    for _ in range(20):
        next(iterator)
    assert len(started) == 8 and iterator.engine.workers == 8
    pipeline.close()
