"""The policies: what they choose on a machine whose best allocation is known, and when they keep still."""

from __future__ import annotations

import heapq
import json
import math
import random
from dataclasses import replace

import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work, best_static
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from intune_callbacks.agent.baselines import ClosedForm, EvenSplit, HillClimb, ModelJump, make_policy
from intune_callbacks.agent.fitter import Fitter
from intune_callbacks.agent.measured import Measured
from intune_callbacks.agent.model import StageFit, plan, predict
from intune_callbacks.agent.ordering import RARE, in_order_efficiency, window_for
from intune_callbacks.config import POLICIES, TunerConfig
from intune_callbacks.errors import ConfigError
from intune_callbacks.pipelines.base import busy_limit
from intune_callbacks.tuner import Tuner
from intune_callbacks.types import Policy, Stage

FIVE = {"read": 0.14, "shuffle": 0.117, "decode": 0.423, "batch": 0.28, "copy": 0.04}


def five_stages(cpus: float, seconds: float = 0.5, cv: float = 0.9, **changes: float) -> FakePipeline:
    """Five stages, evenly split over `cpus`, with the shares of a recommendation pipeline."""
    each = max(1, int(cpus // 5))
    work = {
        name: Work(seconds * share, cv=cv if name == "decode" else 0.1, workers=each, window=each, high=256)
        for name, share in FIVE.items()
    }
    return FakePipeline({n: replace(w, **changes) for n, w in work.items()}, FakeMachine(cpus))  # type: ignore[arg-type]


def tuner_of(pipeline: FakePipeline, policy: Policy | None = None, **config: object) -> Tuner:
    machine = pipeline.machine
    config = {"policy": "model-jump"} | config
    return Tuner(pipeline, TunerConfig(**config), policy=policy, probe=machine, clock=machine.clock())  # type: ignore[arg-type]


def fraction_of_best(loop: FakeLoop) -> float:
    demand = 1.0 / loop.model_s if loop.model_s else math.inf
    return loop.throughput / min(best_static(loop.pipeline), demand)


# -- the fitted model ----------------------------------------------------------------------------------------------


def test_plan_is_the_closed_form() -> None:
    fits = {"a": StageFit(1.0, 0.03, 0.03), "b": StageFit(2.0, 0.04, 0.04)}
    stages = [Stage("a", "cpu", "workers", 1, 64, 8), Stage("b", "cpu", "workers", 1, 64, 8)]
    wanted = plan(fits, stages, cpus=11.0, demand=math.inf)
    # .11 CPU seconds a batch on 11 CPUs: 100 batches/s, which keeps 3 and 8 workers busy.
    assert wanted.rate == pytest.approx(100.0)
    assert wanted.allocation == {"a": 3, "b": 8}
    assert wanted.limit == "the CPUs"


def test_plan_gives_waiting_stages_workers_but_no_cpus() -> None:
    fits = {"read": StageFit(1.0, 0.1, 0.0), "decode": StageFit(1.0, 0.02, 0.02)}
    stages = [Stage("read", "io", "workers", 1, 64, 8), Stage("decode", "cpu", "workers", 1, 64, 8)]
    assert plan(fits, stages, cpus=2.0, demand=math.inf).allocation == {"read": 10, "decode": 2}


def test_plan_stops_at_the_models_demand() -> None:
    fits = {"a": StageFit(1.0, 0.1, 0.1)}
    wanted = plan(fits, [Stage("a", "cpu", "workers", 1, 64, 1)], cpus=64.0, demand=40.0)
    assert wanted.rate == pytest.approx(50.0)
    assert (wanted.allocation["a"], wanted.limit) == (5, "the model")


def test_plan_does_not_pile_workers_on_a_lock() -> None:
    fits = {"a": StageFit(1.0, 0.1, 0.1, serial=1.0)}
    wanted = plan(fits, [Stage("a", "cpu", "workers", 1, 64, 16)], cpus=64.0, demand=math.inf)
    assert wanted.allocation["a"] == 1
    assert wanted.limit == "stage 'a'"


def test_windows_are_wide_for_irregular_work_and_depths_small() -> None:
    stages = [
        Stage("a", "cpu", "workers", 1, 64, 4),
        Stage("a.window", "memory", "items", 1, 512, 4, window_of="a"),
        Stage("prefetch", "memory", "items", 1, 64, 2),
    ]
    for cv, least, most in ((0.0, 2.0, 2.0), (0.5, 2.5, 5.0), (0.95, 6.0, 12.0), (5.0, 12.0, 12.0)):
        wanted = plan({"a": StageFit(1.0, 0.1, 0.1, cv=cv)}, stages, cpus=16.0, demand=math.inf).allocation
        assert least <= wanted["a.window"] / wanted["a"] <= most
        assert 2 <= wanted["prefetch"] <= 8


def simulated_efficiency(workers: int, window: int, cv: float, items: int = 6000) -> float:
    """An ordered pool, item by item: item i starts when a worker is free and item i - window was delivered."""
    draw = random.Random(0)
    sigma = math.sqrt(math.log1p(cv * cv))
    free, delivered, work_s = [0.0] * workers, [0.0], 0.0
    for i in range(items):
        begin = max(heapq.heappop(free), delivered[i - window + 1] if i >= window else 0.0)
        service_s = draw.lognormvariate(-sigma * sigma / 2, sigma)
        heapq.heappush(free, begin + service_s)
        delivered.append(max(begin + service_s, delivered[-1]))
        work_s += service_s
    return work_s / (workers * delivered[-1])


@pytest.mark.parametrize("workers", [2, 8, 32])
@pytest.mark.parametrize("cv", [0.3, 0.5, 0.95])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_cost_of_order_agrees_with_a_simulation(workers: int, cv: float, width: int) -> None:
    expected = simulated_efficiency(workers, width * workers, cv)
    assert in_order_efficiency(workers, width * workers, cv) == pytest.approx(expected, abs=0.11)


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
@pytest.mark.parametrize("cv", [0.0, 0.3, 0.95])
def test_windows_cost_little_and_are_no_wider_than_needed(workers: int, cv: float) -> None:
    window = window_for(workers, cv)
    assert simulated_efficiency(workers, window, max(cv, 1e-3)) >= 0.94
    assert window == 2 * workers or in_order_efficiency(workers, window - workers, RARE * cv) < 0.96


def test_predict_knows_that_a_narrow_window_costs_throughput_when_work_is_irregular() -> None:
    stages = [
        Stage("a", "cpu", "workers", 1, 64, 32),
        Stage("a.window", "memory", "items", 1, 512, 32, window_of="a"),
    ]
    regular, rough = ({"a": StageFit(1.0, 0.1, 0.0, cv=cv)} for cv in (0.0, 0.95))
    assert predict(regular, stages, {}, 32.0, math.inf) == pytest.approx(320.0)
    assert predict(rough, stages, {}, 32.0, math.inf) < 0.4 * 320.0
    assert predict(rough, stages, {"a.window": 320}, 32.0, math.inf) > 0.95 * 320.0


@given(st.floats(0.0, 1.0), st.floats(1e-3, 1.0), st.integers(1, 60))
def test_workers_for_is_the_inverse_of_capacity(serial: float, work_s: float, workers: int) -> None:
    fit = StageFit(1.0, work_s, work_s, serial=serial)
    if serial < 0.999:
        assert fit.workers_for(fit.capacity(workers)) == pytest.approx(workers, rel=1e-3)


def test_a_serial_part_is_learnt_from_two_numbers_of_workers() -> None:
    machine = FakeMachine(cpus=64.0)
    pipeline = FakePipeline({"a": Work(0.1, cpu_share=0.2, serial=0.5, workers=2, window=8)}, machine)
    loop, fitter = FakeLoop(pipeline), Fitter()
    fitter.learn(loop.observe())
    assert fitter.fits()["a"].serial == 0.0
    pipeline.resize({"a": 8, "a.window": 32})
    fitter.learn(loop.observe())
    assert fitter.fits()["a"].serial == pytest.approx(0.5, abs=0.05)
    assert fitter.fits()["a"].work_s == pytest.approx(0.1, rel=0.1)


def test_contention_does_not_make_the_work_look_bigger() -> None:
    machine = FakeMachine(cpus=4.0)
    pipeline = FakePipeline(
        {"a": Work(0.1, workers=32, window=64), "b": Work(0.05, 0.5, workers=32, window=64)}, machine
    )
    loop, fitter = FakeLoop(pipeline), Fitter()
    seen = loop.observe()
    assert seen.rates["a"].service_s > 0.3  # eight times the work there are CPUs for
    fitter.learn(seen)
    assert fitter.fits()["a"].work_s == pytest.approx(0.1, rel=0.1)


def test_what_fills_a_wider_window_is_not_taken_for_demand() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=8)}, FakeMachine(cpus=64.0))
    loop, fitter = FakeLoop(pipeline), Fitter()
    for _ in range(3):
        fitter.learn(loop.observe())
    pipeline.resize({"a": 8, "a.window": 64})
    seen = loop.observe()
    made = replace(seen.rates["a"], items=3 * seen.batches)
    for _ in range(3):
        fitter.learn(replace(seen, rates={"a": replace(made, stored=2 * seen.batches)}))
    assert fitter.fits()["a"].items_per_batch == pytest.approx(1.0)
    for _ in range(120):
        fitter.learn(replace(seen, rates={"a": made}))
    assert fitter.fits()["a"].items_per_batch == pytest.approx(3.0), "what lasts is demand"


def test_items_behind_a_slow_one_count() -> None:
    """In order, one slow item holds back all behind it: they are made in a window that delivers next to nothing."""
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=64)}, FakeMachine(cpus=64.0))
    seen, fitter = FakeLoop(pipeline).observe(), Fitter()
    for _ in range(40):
        for batches, items in ((2, 26), (16, 10), (15, 10), (15, 2)):
            rates = {"a": replace(seen.rates["a"], items=items)}
            fitter.learn(replace(seen, rates=rates, batches=batches))
    assert fitter.fits()["a"].items_per_batch == pytest.approx(1.0, abs=0.02)


def test_what_the_first_windows_filled_is_not_remembered() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=64)}, FakeMachine(cpus=64.0))
    seen, fitter = FakeLoop(pipeline).observe(), Fitter()
    fitter.learn(replace(seen, rates={"a": replace(seen.rates["a"], items=40 * seen.batches)}))
    assert fitter.fits()["a"].items_per_batch == pytest.approx(40.0), "nothing else is known yet"
    for _ in range(5):
        fitter.learn(seen)
    assert fitter.fits()["a"].items_per_batch == pytest.approx(1.0, abs=0.1)


def test_a_long_drain_is_not_taken_for_less_demand() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=8)}, FakeMachine(cpus=64.0))
    loop, fitter = FakeLoop(pipeline), Fitter()
    for _ in range(60):
        fitter.learn(loop.observe())
    seen = loop.observe()
    # A window of hundreds of results that was cut to a few: half of what is delivered was made before.
    draining = replace(seen, rates={"a": replace(seen.rates["a"], items=seen.batches // 2)})
    for _ in range(20):
        fitter.learn(draining)
    assert fitter.fits()["a"].items_per_batch > 0.85


def test_counts_are_taken_while_only_a_buffer_grows() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=64)}, FakeMachine(cpus=64.0))
    loop, fitter = FakeLoop(pipeline), Fitter()
    seen = loop.observe()
    buffer = Stage("prefetch", "memory", "batches", 1, 4096, 2)

    def learn(items_per_batch: float, depth: int) -> None:
        rates = {"a": replace(seen.rates["a"], items=round(items_per_batch * seen.batches))}
        fitter.learn(replace(seen, rates=rates, stages=(*seen.stages, replace(buffer, current=depth))))

    learn(0.5, 2)
    for window in range(12):
        learn(1.0, 2 + window * (seen.batches // 10))
    assert fitter.fits()["a"].items_per_batch == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("reading", ["service_s", "service_cpu_s", "service_cv"])
def test_what_could_not_be_measured_is_not_learnt(reading: str, odd: float) -> None:
    loop, fitter = FakeLoop(FakePipeline({"a": Work(0.1)}, FakeMachine())), Fitter()
    seen = loop.observe()
    fitter.learn(seen)
    known = fitter.state_dict()["stages"]
    fitter.learn(replace(seen, rates={"a": replace(seen.rates["a"], **{reading: odd})}))
    assert fitter.state_dict()["stages"] == known


def test_other_work_is_forgotten() -> None:
    pipeline = FakePipeline({"a": Work(0.02, cpu_share=0.1, workers=4, window=16)}, FakeMachine(cpus=64.0))
    loop, fitter = FakeLoop(pipeline), Fitter()
    for _ in range(20):
        fitter.learn(loop.observe())
    pipeline.work["a"] = replace(pipeline.work["a"], service_s=0.06)
    fitter.learn(loop.observe())
    assert fitter.fits()["a"].work_s == pytest.approx(0.06, rel=0.05)


def test_measured_noise_shrinks_with_windows() -> None:
    pipeline = FakePipeline({"a": Work(0.1, cv=0.8)}, FakeMachine())
    loop = FakeLoop(pipeline)
    short, long = Measured({}), Measured({})
    for i in range(9):
        seen = loop.observe(10)
        long.add(seen)
        if not i:
            short.add(seen)
    assert long.noise < short.noise / 2


# -- ModelJump -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpus", [8.0, 32.0, 128.0])
def test_model_jump_reaches_the_best_from_an_even_split(cpus: float) -> None:
    loop = FakeLoop(five_stages(cpus))
    assert fraction_of_best(loop) < 0.5
    decisions = loop.run(tuner_of(loop.pipeline), seconds=30.0)
    assert fraction_of_best(loop) >= 0.97
    assert sum(d.applied for d in decisions) <= 4
    assert decisions[-1].settled


works = st.builds(
    Work,
    service_s=st.floats(0.02, 0.5),
    cpu_share=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    serial=st.sampled_from([0.0, 0.0, 1.0]),
    cv=st.sampled_from([0.0, 0.3, 0.9]),
    items_per_batch=st.sampled_from([0.25, 1.0, 4.0]),
    workers=st.integers(1, 4),
    window=st.integers(4, 8),
    high=st.just(32),
)


# Without the phase that explains: it traces every line of a thousand virtual batches.
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(
    work=st.lists(works, min_size=1, max_size=5),
    cpus=st.sampled_from([2.0, 4.0, 8.0, 32.0, 64.0]),
    model_s=st.sampled_from([0.0, 0.0, 0.03, 0.3]),
    seed=st.integers(0, 1000),
)
def test_model_jump_gets_near_the_best_of_any_pipeline(
    work: list[Work], cpus: float, model_s: float, seed: int
) -> None:
    pipeline = FakePipeline({f"s{i}": w for i, w in enumerate(work)}, FakeMachine(cpus), seed=seed)
    loop = FakeLoop(pipeline, model_s=model_s, seed=seed)
    found = loop.throughput
    tuner = tuner_of(pipeline)
    while len(loop.decisions) < 40:
        loop.run(tuner, seconds=60.0, until=lambda: len(loop.decisions) >= 40)
    assert tuner.frozen is None
    # Of 400 drawn evenly the mean was .996 and the worst .933; hypothesis looks for worse ones and found .915.
    assert fraction_of_best(loop) >= 0.88
    assert loop.throughput >= 0.95 * found  # what was lost by less than 3 % and noise is kept


def test_model_jump_is_near_the_best_on_average() -> None:
    draw, reached = random.Random(1), []
    for seed in range(40):
        work = {
            f"s{i}": Work(
                draw.uniform(0.02, 0.5), draw.choice([0.05, 0.5, 0.9, 1.0]), draw.choice([0.0, 0.0, 1.0]),
                draw.choice([0.0, 0.3, 0.9]), draw.choice([0.25, 1.0, 4.0]),
                workers=draw.randint(1, 4), window=6, high=32,
            )
            for i in range(draw.randint(1, 5))
        }  # fmt: skip
        loop = FakeLoop(FakePipeline(work, FakeMachine(draw.choice([2.0, 8.0, 32.0])), seed=seed), seed=seed)
        tuner = tuner_of(loop.pipeline)
        while len(loop.decisions) < 40:
            loop.run(tuner, seconds=60.0, until=lambda loop=loop: len(loop.decisions) >= 40)
        reached.append(fraction_of_best(loop))
    assert sum(reached) / len(reached) >= 0.98, sorted(reached)[:5]
    assert min(reached) >= 0.92


def test_model_jump_stops_where_a_lock_makes_workers_useless() -> None:
    pipeline = FakePipeline({"a": Work(0.1, cpu_share=0.2, serial=0.3, workers=2, high=256)}, FakeMachine(cpus=64.0))
    loop = FakeLoop(pipeline)
    loop.run(tuner_of(pipeline), seconds=60.0)
    # 33.3 batches/s with endlessly many workers; beyond some 20 one more brings less than 1 %.
    assert loop.throughput >= 0.86 * 33.3
    assert pipeline.values["a"] <= 24


def test_model_jump_follows_the_machine_without_a_restart() -> None:
    pipeline = five_stages(32.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline)
    for number, cpus in enumerate((32.0, 64.0, 32.0)):
        pipeline.machine.cpus = cpus
        decisions = loop.run(tuner, seconds=20.0)
        assert fraction_of_best(loop) >= 0.9
        assert sum(pipeline.values[name] for name in FIVE) <= busy_limit(cpus, len(FIVE))
        if number:
            assert decisions[0].applied, "the first decision after the resize jumps"
            assert f"to {cpus:g} CPUs" in decisions[0].reason


def test_model_jump_leaves_a_compute_bound_loop_alone() -> None:
    pipeline = five_stages(8.0)
    loop = FakeLoop(pipeline, model_s=1.5 / pipeline.supply())
    tuner = tuner_of(pipeline)
    loop.run(tuner, seconds=300.0)
    assert pipeline.resizes == []
    assert loop.decisions[-1].settled


def test_model_jump_does_not_take_workers_from_a_compute_bound_loop_that_has_too_many() -> None:
    pipeline = FakePipeline({"decode": Work(0.1, workers=64, window=256)}, FakeMachine(cpus=8.0))
    loop = FakeLoop(pipeline, model_s=0.05)
    loop.run(tuner_of(pipeline), seconds=60.0)
    assert pipeline.resizes == []


def test_model_jump_feeds_the_model_and_no_more() -> None:
    pipeline = five_stages(64.0, seconds=0.4)
    loop = FakeLoop(pipeline, model_s=0.02)
    loop.run(tuner_of(pipeline), seconds=30.0)
    assert loop.throughput == pytest.approx(50.0)
    # It began with 60 workers, which nobody needs to take away; 50 batches/s need 2 more where it is slowest.
    assert sum(pipeline.values[name] for name in FIVE) <= 64


def test_model_jump_takes_back_what_the_model_got_wrong() -> None:
    """More than eight workers thrash: no fit of a smooth curve sees that coming."""

    class Thrashing(FakePipeline):
        def capacity(self, name: str, values: object) -> float:
            good = super().capacity(name, values)  # type: ignore[arg-type]
            return good * (0.1 if values[name] > 8 else 1.0)  # type: ignore[index]

    pipeline = Thrashing({"read": Work(0.1, cpu_share=0.01, workers=8, window=32)}, FakeMachine(8.0))
    loop = FakeLoop(pipeline)
    decisions = loop.run(tuner_of(pipeline), seconds=20.0)
    assert any(d.after["read"] > 8 for d in decisions)
    assert any("back to the best allocation measured" in d.reason for d in decisions)
    assert pipeline.values["read"] == 8
    assert pipeline.values["read.window"] == 32


def test_model_jump_wakes_on_a_lasting_drop_and_not_on_a_short_one() -> None:
    pipeline = five_stages(32.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline)
    loop.run(tuner, seconds=15.0)
    heavy = pipeline.work["copy"]
    pipeline.work["copy"] = replace(heavy, service_s=0.3)
    decisions = list(loop.run(tuner, seconds=1.5))
    pipeline.work["copy"] = heavy
    decisions += loop.run(tuner, seconds=10.0)
    assert not any("woken" in d.reason for d in decisions)

    pipeline.work["copy"] = replace(heavy, service_s=0.3)
    decisions = loop.run(tuner, seconds=15.0)
    assert any("woken" in d.reason for d in decisions)
    assert fraction_of_best(loop) >= 0.95


def test_model_jump_looks_again_less_and_less_often() -> None:
    pipeline = five_stages(8.0)
    loop = FakeLoop(pipeline)
    policy = ModelJump()
    loop.run(tuner_of(pipeline, policy), seconds=400.0)
    # 10 + 20 + 40 + 80 + 160 s.
    assert math.log2(policy.state_dict()["timer_s"] / 10.0) in (5, 6)


def test_idle_workers_the_user_asked_for_are_left() -> None:
    pipeline = FakePipeline(
        {"decode": Work(0.01, workers=16, window=64, worker_bytes=0.2 * GB)}, FakeMachine(cpus=32.0)
    )
    loop = FakeLoop(pipeline, model_s=0.05)
    loop.run(tuner_of(pipeline), seconds=600.0)
    assert pipeline.resizes == []
    assert loop.throughput == pytest.approx(20.0)


def test_a_batch_every_few_seconds_is_tuned_too() -> None:
    pipeline = FakePipeline({"decode": Work(8.0, workers=1, window=4, items_per_batch=1.0)}, FakeMachine(cpus=8.0))
    loop = FakeLoop(pipeline)
    loop.run(tuner_of(pipeline), seconds=400.0)
    assert fraction_of_best(loop) >= 0.93


# -- the others ----------------------------------------------------------------------------------------------------


def test_even_split_follows_the_size() -> None:
    pipeline = five_stages(10.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, EvenSplit())
    loop.run(tuner, seconds=10.0)
    assert {pipeline.values[name] for name in FIVE} == {2}
    pipeline.machine.cpus = 40.0
    loop.run(tuner, seconds=10.0)
    assert {pipeline.values[name] for name in FIVE} == {8}
    assert {pipeline.values[f"{name}.window"] for name in FIVE} == {16}


def test_closed_form_gets_near_the_best_and_stays() -> None:
    pipeline = five_stages(32.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, ClosedForm())
    loop.run(tuner, seconds=30.0)
    assert fraction_of_best(loop) >= 0.95
    before = len(pipeline.resizes)
    loop.run(tuner, seconds=30.0)
    # It has no memory: what the net takes back it wants again, until the net permits no more.
    assert len(pipeline.resizes) <= before + 12


def test_hill_climb_climbs_and_never_ends_below_its_start() -> None:
    pipeline = five_stages(8.0)
    loop = FakeLoop(pipeline)
    start = loop.throughput
    loop.run(tuner_of(pipeline, HillClimb()), seconds=200.0)
    assert loop.throughput > 1.5 * start
    decisions = [d for d in loop.decisions if d.applied]
    assert any("taken back" in d.reason for d in decisions)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_grows_a_compute_bound_pipeline(name: str) -> None:
    if name == "even":
        pytest.skip("the even split does not look at the load")
    pipeline = five_stages(8.0)
    loop = FakeLoop(pipeline, model_s=2.0 / pipeline.supply())
    loop.run(tuner_of(pipeline, make_policy(name)), 60.0)
    assert pipeline.resizes == []


@pytest.mark.parametrize("name", POLICIES)
def test_state_goes_through_json_and_back(name: str) -> None:
    pipeline = five_stages(8.0)
    policy = make_policy(name)
    FakeLoop(pipeline).run(tuner_of(pipeline, policy), seconds=10.0)
    state = json.loads(json.dumps(policy.state_dict()))
    again = make_policy(name)
    again.load_state_dict(state)
    assert json.loads(json.dumps(again.state_dict())) == state


def test_make_policy_names_the_nearest() -> None:
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(ConfigError, match="did you mean 'hill-climb'"):
        make_policy("hillclimb")
