"""Workers on a real Ray cluster, on loopback: in order, each item once, whatever ends; ``tox run -e reach``."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif("INTUNE_TEST_REACH" not in os.environ, reason="tox run -e reach runs it: minutes"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.timeout(180),
]
if "INTUNE_TEST_REACH" in os.environ:
    pytest.importorskip("ray", reason="tox run -e reach installs it")

import ray_runs as runs  # noqa: E402

from intune_callbacks.errors import WorkerDied  # noqa: E402
from intune_callbacks.pipelines.ray import members  # noqa: E402
from intune_callbacks.pipelines.ray.cluster import ENDING, LEFT_OUT, LOST_CLUSTER, Cluster  # noqa: E402
from intune_callbacks.pipelines.ray.mixed import DIFFERS, RANDOM, MixedPool  # noqa: E402
from intune_callbacks.pipelines.workers.elastic import ElasticMap  # noqa: E402
from intune_callbacks.pipelines.workers.processes import ProcessPool  # noqa: E402

MOST = 9


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that sleep count as a whole CPU, so that two workers are here and all others elsewhere."""
    monkeypatch.setattr(members, "LEAST_SHARE", 1.0)


@pytest.fixture
def made() -> Iterator[list[Any]]:
    held: list[Any] = []
    yield held
    for one in reversed(held):
        one.close()


def engine_of(
    address: str,
    made: list[Any],
    fn: Callable[[int], Any] = runs.item,
    workers: int = MOST,
    start: Any = None,
    is_full: bool = False,
) -> tuple[Any, Cluster, Any]:
    """Return an engine over 0, 1, 2, ..., the cluster whose CPUs it has seen, and its pool."""
    cluster = Cluster(address)
    made.append(cluster)
    cluster.begin()
    cluster.local_cpus = 1.0
    assert runs.wait_for(lambda: bool(cluster.cpus or cluster.gone or (is_full and cluster.machines_seen)))
    pool = MixedPool(
        ProcessPool(fn, multiprocessing.get_context("fork"), start),
        cluster,
        (fn, start, None),
        (),
        own=1,  # type: ignore[arg-type]
    )
    made.append(pool)
    engine = ElasticMap(itertools.count(), None, workers=workers, window=40, pool=pool, may_stop=True)  # type: ignore[arg-type,var-annotated]
    made.append(engine)
    return engine, cluster, pool


def test_two_thousand_resizes(made: list[Any]) -> None:
    with runs.running(2, 2, 2) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made)
        read = runs.Restless(engine, MOST)
        assert runs.wait_for(lambda: len(cluster.machines) == 3)
        read.resize(400)
        killed_s = time.monotonic()
        nodes.actors()[0].kill()
        read.resize(500)
        assert read.longest_gap_s(killed_s) < 3.0
        removed_s = time.monotonic()
        nodes.remove(nodes.nodes[0])
        read.resize(500)
        assert read.longest_gap_s(removed_s) < 5.0
        nodes.add(4)
        assert runs.wait_for(lambda: cluster.cpus >= 8.0)
        read.resize(600)
        engine.resize(MOST, 40)
        assert runs.wait_for(lambda: cluster.ready == 7)
        assert runs.wait_for(lambda: sum(many for _, many in cluster.machines) == 7)
        begin_s = time.monotonic()
        read.end()
        cluster.close()
        assert time.monotonic() - begin_s < 10.0
        assert nodes.has_no_actor()
        assert read.error is None and read.are_right() and len(read.values) > 1000


@pytest.mark.parametrize("what", ["bridge", "head"])
def test_when_the_bridge_or_the_head_ends(what: str, made: list[Any]) -> None:
    with runs.running(3) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made, workers=5)
        read = runs.Restless(engine, 5)
        assert runs.wait_for(lambda: cluster.ready == 3)
        read.resize(50)
        begin_s = time.monotonic()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if what == "bridge":
                os.kill(cluster._driver.pid, signal.SIGKILL)  # type: ignore[union-attr]
                assert runs.wait_for(lambda: bool(cluster.gone), 2.0)
            else:
                nodes.kill_head()
            read.resize(300)
        assert read.longest_gap_s(begin_s) < 2.0
        assert read.error is None and read.are_right()
        if what == "bridge":
            said = [str(one.message) for one in told if "InTune" in str(one.message)]
            why = "Ray's driver ended with exit code -9"
            assert said == [LOST_CLUSTER.format(nodes.address, why)]
            assert cluster.cpus == 0.0 and cluster.ready == 0
        begin_s = time.monotonic()
        read.end()
        cluster.close()
        assert time.monotonic() - begin_s < 10.0


def test_a_silent_machine_is_not_waited_for(made: list[Any]) -> None:
    with runs.running(2) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made, workers=4)
        read = runs.Restless(engine, 4)
        assert runs.wait_for(lambda: cluster.ready == 2)
        read.resize(50)
        stopped = [nodes.process(nodes.nodes[0], "raylet"), *nodes.actors()]
        begin_s = time.monotonic()
        for process in stopped:
            process.suspend()
        try:
            assert runs.wait_for(lambda: len(read.values) > 0 and time.monotonic() - begin_s > 12.0)
            assert read.longest_gap_s(begin_s) < 15.0
            count = len(read.values)
            assert runs.wait_for(lambda: len(read.values) > count + 50)
        finally:
            for process in stopped:
                process.resume()
        read.end()
        assert read.error is None and read.are_right()


def test_a_poison_item_ends_as_with_workers_here(made: list[Any]) -> None:
    with runs.running(3) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made, runs.poison, workers=5)
        assert runs.wait_for(lambda: cluster.ready == 3)
        read = runs.Restless(engine, 5)
        assert runs.wait_for(lambda: read.error is not None)
        assert isinstance(read.error, WorkerDied) and "is killed by signal: Killed" in str(read.error)
        assert read.are_right() and len(read.values) == 150
        assert nodes.actors()


def test_an_error_comes_at_its_place(made: list[Any]) -> None:
    with runs.running(3) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made, runs.raising, workers=5)
        assert runs.wait_for(lambda: cluster.ready == 3)
        got = []
        for _ in range(150):
            got.append(next(engine)[0])
        with pytest.raises(KeyError, match="no item 150"):
            next(engine)
        assert got == list(range(150))
        assert next(engine)[0] == 151
        assert not cluster.left_out


def test_a_failing_start_is_the_users(made: list[Any]) -> None:
    with runs.running(1) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made, workers=3, start=runs.Start(fails=True))
        with pytest.raises(ValueError, match="no such table"):
            next(engine)
        assert not cluster.left_out


@pytest.mark.parametrize(
    ("fn", "variable", "why"),
    [
        (runs.of_file, "OTHER_FILE", DIFFERS),
        (runs.Module(), "NO_MODULE", "ModuleNotFoundError: No module named 'of_the_user'"),
        (runs.unread, "ELSEWHERE", "AttributeError: no such class here"),
        (runs.Ending(), "ENDS", ENDING),
    ],
)
def test_a_machine_that_differs_is_left_out(fn: Any, variable: str, why: str, made: list[Any]) -> None:
    with runs.running(1) as nodes:
        nodes.add(2, **{variable: "1"})
        engine, cluster, _ = engine_of(nodes.address, made, fn, workers=5)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            read = runs.Restless(engine, 5)
            assert runs.wait_for(lambda: bool(cluster.left_out))
            read.resize(100)
        assert [str(one.message) for one in told if "InTune" in str(one.message)] == [LEFT_OUT.format("127.0.0.1", why)]
        assert runs.wait_for(lambda: cluster.cpus == 1.0 and cluster.ready <= 1)
        read.end()
        assert read.error is None and read.are_right()


def test_unseeded_items_are_told_and_made(made: list[Any]) -> None:
    with runs.running(2) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made, runs.unseeded, workers=4)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            read = runs.Restless(engine, 4)
            assert runs.wait_for(lambda: cluster.ready == 2 and len(read.values) > 500)
        assert RANDOM in {str(one.message) for one in told}
        read.end()
        assert [value[0] for value in read.values] == list(range(len(read.values))) and not cluster.left_out


def test_no_free_cpu(made: list[Any]) -> None:
    with runs.running(1) as nodes:
        taken, other_cluster, _ = engine_of(nodes.address, made, workers=3)
        assert runs.wait_for(lambda: other_cluster.ready == 1)
        engine, cluster, _ = engine_of(nodes.address, made, workers=4, is_full=True)
        begin_s = time.monotonic()
        got = [next(engine)[0] for _ in range(300)]
        assert got == list(range(300)) and time.monotonic() - begin_s < 20.0
        assert cluster.ready == 0 and cluster.cpus == 0.0 and not cluster.gone
        taken.close()
        other_cluster.close()
        assert runs.wait_for(lambda: cluster.ready == 1)  # now there is one


def test_workers_live_on_from_one_epoch_to_the_next(made: list[Any]) -> None:
    with runs.running(3) as nodes:
        engine, cluster, pool = engine_of(nodes.address, made, workers=5)
        assert runs.wait_for(lambda: cluster.ready == 3)
        assert [next(engine)[0] for _ in range(100)] == list(range(100))
        actors = {process.pid for process in nodes.actors()}
        engine.close()
        begin_s = time.monotonic()
        again = ElasticMap(itertools.count(), None, workers=5, window=40, pool=pool)  # type: ignore[arg-type,var-annotated]
        made.append(again)
        assert next(again)[0] == 0
        assert time.monotonic() - begin_s < 0.5
        assert [next(again)[0] for _ in range(100)] == list(range(1, 101))
        assert {process.pid for process in nodes.actors()} == actors and len(actors) == 3


def test_the_trainers_machine_is_left_to_it(made: list[Any]) -> None:
    with runs.running(1, head_cpus=4) as nodes:
        engine, cluster, _ = engine_of(nodes.address, made, workers=6)
        assert runs.wait_for(lambda: cluster.ready > 0)
        assert [next(engine)[0] for _ in range(200)] == list(range(200))
        time.sleep(2.0)
        assert cluster.ready == 1
        assert [line.machine.cpus for line in cluster._lines.values()] == [1.0]  # the other one


def test_no_cpu_but_on_the_trainers_machine(made: list[Any]) -> None:
    with runs.running(head_cpus=4) as nodes:
        cluster = Cluster(nodes.address)
        made.append(cluster)
        cluster.begin()
        cluster.want(3)
        time.sleep(3.0)
        assert cluster.cpus == 0.0 and cluster.ready == 0 and not cluster.gone and not nodes.actors()


def test_the_doctor_looks() -> None:
    with runs.running(2, 1, head_cpus=4) as nodes:
        begin_s = time.monotonic()
        assert Cluster(nodes.address).look(30.0) == "2 other machines, 3 CPUs, 3 of them free"
        assert time.monotonic() - begin_s < 20.0
    assert "Connection refused" in Cluster(nodes.address).look(10.0)


def test_nobody_answers() -> None:
    cluster = Cluster("127.0.0.1:9")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cluster.begin()
        assert runs.wait_for(lambda: bool(cluster.gone), 60.0)
        assert runs.wait_for(lambda: bool(told), 5.0)
    assert "no workers on the Ray cluster 127.0.0.1:9 any more" in str(told[0].message)
    cluster.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "intune-ray" and thread.is_alive()]
