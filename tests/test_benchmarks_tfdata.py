"""The tf.data benchmarks run, and their rows say what they claim to say."""

from __future__ import annotations

import pytest
from busy_machine import three_attempts

pytest.importorskip("tensorflow")

from benchmarks.emulated import SHARES
from benchmarks.live_loop import Case
from benchmarks.systems import linear_program
from benchmarks.tfdata_cases import SYSTEMS, LiveData
from intune_callbacks.pipelines.tf import build as tf_build

needs_compiler = pytest.mark.skipif(not tf_build.available(), reason="the operations cannot be compiled here")
pytestmark = pytest.mark.timeout(300)


@needs_compiler
@three_attempts
def test_tuned_pipeline_is_faster_than_its_start_and_in_order() -> None:
    case = Case("tfdata", 4, 0.1, 0.3, 0)
    speed, of_limit = {}, {}
    for name in ("InTune (model-jump)", "even split"):
        live = LiveData(case, SYSTEMS[name])
        try:
            live.train(6.0, live.tuner)
            # Every batch was checked to be the next of the data.
            measured = live.measure(2.0, live.tuner)
            # The speed of a host that sleeps as long as it is told.
            speed[name] = measured.throughput * measured.sleep_inflation
            of_limit[name] = measured.throughput / case.fluid_limit
            assert live.tuner is None or live.tuner.frozen is None
        finally:
            live.close()
    assert speed["InTune (model-jump)"] > 1.2 * speed["even split"]
    assert max(of_limit.values()) < 1.15


def test_out_of_order_is_an_error_where_order_was_promised() -> None:
    case = Case("tfdata", 4, 0.05, 0.0, 0)
    live = LiveData(case, SYSTEMS["even split"])
    live._iterator = iter([0, 2])
    live.step(None)
    with pytest.raises(RuntimeError, match="batch 2 came where 1 was due"):
        live.step(None)
    live.close()


def test_relaunched_system_goes_on_where_it_was() -> None:
    live = LiveData(Case("tfdata", 2, 0.05, 0.0, 0), SYSTEMS["AUTOTUNE relaunched"])
    live.train(1.0)
    before = len(live.deliveries)
    live.change_cpus(4)
    live.train(1.0)
    assert live.machine.cpus == 4
    assert len(live.deliveries) > before > 0
    live.close()


def test_linear_program_gives_every_stage_its_share() -> None:
    given = linear_program(Case("tfdata", 32, 1.0, 0.8, 0))
    assert given == {"disk": 5, "shuffle": 4, "udf": 14, "batch": 9, "prefetch": 2}
    assert set(given) == set(SHARES)


@needs_compiler
def test_exactness_counts_changes_and_finds_nothing() -> None:
    from benchmarks.differences import exact
    from benchmarks.exactness_tfdata import stress

    rows = [stress(kind, 300, 3) for kind in ("map+batch", "shuffle", "interleave")]
    assert all(row["changes"] >= 300 and row["items"] > 0 for row in rows)
    assert exact({"rows": rows})


@needs_compiler
def test_rows_of_the_commands() -> None:
    from benchmarks import live_tfdata, resize_tfdata

    live = live_tfdata.main(["--quick", "--cpus", "4", "--sigma", "0.3", "--systems", "InTune (dqn)", "--jobs", "1"])
    assert {"system", "ordered", "cpus", "sigma", "fraction_of_fluid", "utilisation", "seconds_to_95"} <= set(
        live["rows"][0]
    )
    assert 0.1 < live["rows"][0]["fraction_of_fluid"] < 1.2 and "frozen" not in live["rows"][0]
    resized = resize_tfdata.main(["--quick", "--cpus", "2,4", "--systems", "AUTOTUNE relaunched", "--jobs", "1"])
    assert [row["phase"] for row in resized["rows"]] == [1, 2, "mean"]
    assert all({"system", "ordered", "phase", "cpus", "fraction_of_fluid"} <= set(row) for row in resized["rows"])
