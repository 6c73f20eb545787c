"""When the loop decides: in batches and in seconds, on quick pipelines and on slow ones."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work, observation
from test_tuner import Script, starved, tuner_of

from intune_callbacks.decide.policies import make_policy
from intune_callbacks.measure.steady import Round, round_of
from intune_callbacks.service.client import Agent, RemotePolicy
from intune_callbacks.service.wire import answer
from intune_callbacks.types import Allocation, Observation, PipelineStats, Proposal, Stage, StageRates, StageStats


def test_no_decision_before_warm_up_and_then_at_the_configured_pace() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script(), warmup_batches=30, decide_every_s=2.0, decide_every_batches=10)
    steps = [d.observation.step for d in loop.run(tuner, seconds=15.0)]
    assert 49 <= steps[0] <= 54  # 30 of warm-up, then 2 s at 10 batches/s
    assert all(19 <= later - earlier <= 23 for earlier, later in pairwise(steps))


def test_fewest_batches_count_when_batches_are_quick_and_seconds_when_they_are_slow() -> None:
    pipeline = FakePipeline({"decode": Work(0.001)}, FakeMachine())
    quick = FakeLoop(pipeline)
    decisions = quick.run(tuner_of(pipeline, policy=Script(), decide_every_s=0.0, decide_every_batches=50), seconds=1.0)
    assert {d.observation.batches for d in decisions} == {50}

    pipeline = FakePipeline({"decode": Work(7.0)}, FakeMachine())
    slow = FakeLoop(pipeline)
    decisions = slow.run(tuner_of(pipeline, policy=Script()), seconds=100.0)
    assert len(decisions) >= 5
    assert all(d.observation.batches == 2 for d in decisions)


@pytest.mark.parametrize("batch_s", [0.4, 1.0, 2.0])
def test_a_slow_pipeline_is_tuned_after_some_batches_and_not_after_the_usual_number(batch_s: float) -> None:
    """A stranger's fit of 110 s began with four workers where sixteen were right, and each second there cost two."""
    pipeline = FakePipeline({"decode": Work(batch_s)}, FakeMachine())
    loop = FakeLoop(pipeline)
    begin_s = pipeline.machine.now_s
    decisions = loop.run(tuner_of(pipeline), seconds=60.0)
    first = next(d for d in decisions if d.applied)
    assert first.after["decode"] > 1
    assert first.observation.batches >= 4
    assert first.observation.at_s - begin_s < max(3.0, 6.5 * batch_s)
    # Later windows are as long as they are said to be.
    later = decisions[decisions.index(first) + 1 :]
    assert later
    assert all(d.observation.batches >= 5 for d in later)


@pytest.mark.parametrize("policy", ["dqn", "model-jump"])
def test_a_window_after_which_it_is_too_early_is_one_of_those_before_the_first_change(policy: str) -> None:
    """How long a stranger's epoch is may be unknown: until two seconds have passed no change can be earned back."""
    pipeline = FakePipeline({"decode": Work(0.1)}, FakeMachine())
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, policy=None, warmup_batches=5)
    tuner.policy = make_policy(policy)
    decisions = loop.run(tuner, seconds=8.0)
    assert decisions[0].reason.startswith("only measuring") and not decisions[0].proposed
    first = next(number for number, decision in enumerate(decisions) if decision.applied)
    assert first == 1, [d.reason for d in decisions]
    assert decisions[1].after["decode"] > 1


def test_however_often_it_is_too_early_nothing_is_proposed() -> None:
    """A run that waits little needs long to earn a change back."""
    pipeline = FakePipeline({"decode": Work(0.1)}, FakeMachine())
    loop = FakeLoop(pipeline, model_s=0.08)
    decisions = loop.run(tuner_of(pipeline, policy=None, warmup_batches=5), seconds=25.0)
    early = [decision for decision in decisions if decision.reason.startswith("only measuring")]
    assert len(early) > 3
    assert not any(decision.proposed for decision in early)
    assert next(decision for decision in decisions if decision.applied) is decisions[len(early)]


class Own:
    """A policy of the user's."""

    name = "own"

    def __init__(self) -> None:
        self.asked: list[Observation] = []

    def decide(self, observation: Observation) -> Proposal:
        self.asked.append(observation)
        return Proposal()


class Learning(Own):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Observation] = []

    def measured(self, observation: Observation) -> None:
        self.told.append(observation)


@pytest.mark.parametrize("kind", [Own, Learning])
def test_a_policy_is_not_asked_where_it_is_too_early(kind: type[Own]) -> None:
    """A remote one was asked over the network for a proposal that nobody looked at."""
    loop = FakeLoop(FakePipeline({"decode": Work(0.1)}, FakeMachine()), model_s=0.08)
    tuner = tuner_of(loop.pipeline, policy=None, warmup_batches=5)
    tuner.policy = policy = kind()
    decisions = loop.run(tuner, seconds=25.0)
    early = [decision for decision in decisions if decision.reason.startswith("only measuring")]
    assert early
    assert policy.asked and all(seen.may_change for seen in policy.asked)
    assert len(policy.asked) == len(decisions) - len(early)
    if isinstance(policy, Learning):
        assert len(policy.told) == len(early) and not any(seen.may_change for seen in policy.told)


@pytest.mark.parametrize("answered", [0, 1])
def test_an_agent_is_told_what_was_measured_with_the_next_question(answered: int) -> None:
    loop, questions = FakeLoop(FakePipeline({"decode": Work(0.1)}, FakeMachine())), []

    class Answering(Agent):
        def ask(self, path: str, question: bytes) -> tuple[int, object]:
            questions.append(json.loads(question))
            return 200, answer(Proposal())

    policy = RemotePolicy(Answering("http://127.0.0.1:9"), make_policy("dqn"))
    for _ in range(answered):
        policy.decide(loop.observe())
    for _ in range(2):
        policy.measured(replace(loop.observe(), may_change=False))
    assert len(questions) == answered
    policy.decide(loop.observe())
    asked = questions[-1]
    assert [event["observation"]["may_change"] for event in asked["events"]] == [False, False, True]
    assert (asked["state"] is None) == bool(answered) and asked["first"] == answered


class Growing(FakePipeline):
    """Its workers come seconds after they were asked for, and the model is slower while they are started."""

    start_s, until_s = 3.0, 0.0

    @property
    def is_growing(self) -> bool:
        return self.machine.now_s < self.until_s

    def resize(self, allocation: Allocation) -> Allocation:
        applied = super().resize(allocation)
        self.until_s = self.machine.now_s + self.start_s
        return applied


class SlowStart(FakeLoop):
    def step(self) -> None:
        pipeline, wanted = self.pipeline, self.pipeline.values["decode"]
        if pipeline.is_growing:  # type: ignore[attr-defined]
            pipeline.values["decode"] = 1
            pipeline.machine.now_s += 0.02
        super().step()
        pipeline.values["decode"] = wanted


@pytest.mark.parametrize(("start_s", "waits"), [(3.0, True), (40.0, False)])
def test_a_trial_is_judged_once_its_workers_can_compute(start_s: float, waits: bool) -> None:
    """On a crowded machine one of three fits went back to one worker for good, judged while fifteen were started."""
    pipeline = Growing({"decode": Work(0.1, cv=0.2)}, FakeMachine(), depth=2)
    pipeline.start_s = start_s
    decisions = SlowStart(pipeline).run(tuner_of(pipeline), seconds=60.0)
    change = next(at for at, d in enumerate(decisions) if d.applied)
    took_s = decisions[change + 1].observation.at_s - decisions[change].observation.at_s
    if waits:
        assert took_s > start_s and decisions[-1].after["decode"] >= 6
        assert all("back" not in d.reason for d in decisions)
    else:
        assert took_s < 15.0


class Hungry(SlowStart):
    """Workers that are being started take memory."""

    def step(self) -> None:
        super().step()
        machine = self.pipeline.machine
        if self.pipeline.is_growing and machine.memory_used_bytes < 0.95 * machine.memory_limit_bytes:  # type: ignore[attr-defined]
            machine.memory_used_bytes += machine.memory_limit_bytes // 20


def test_memory_is_looked_at_while_workers_are_started() -> None:
    pipeline = Growing({"decode": Work(0.1, cv=0.2)}, FakeMachine(), depth=2)
    pipeline.start_s = 9.0
    decisions = Hungry(pipeline).run(tuner_of(pipeline), seconds=30.0)
    change = next(at for at, d in enumerate(decisions) if d.applied)
    less = decisions[change + 1]
    assert less.applied and "memory" in less.reason
    assert less.observation.at_s - decisions[change].observation.at_s < 6.0


class Lockstep(FakeLoop):
    """Workers that began together end together: as many batches at once as there are workers, then none for long."""

    ready = 0

    def step(self) -> None:
        pipeline, before, wait_s = self.pipeline, self.totals, 0.0
        if self.ready == 0:
            self.ready = pipeline.values["load"]
            service_s = pipeline.work["load"].service_s * self._random.lognormvariate(0.0, self.jitter)
            wait_s = max(0.0, service_s - self.ready * self.model_s)
        self.ready -= 1
        pipeline.machine.now_s += wait_s + self.model_s
        pipeline.advance(pipeline.supply(), model_bound=False)
        self.totals = replace(
            before,
            steps=before.steps + 1,
            wait_s=before.wait_s + wait_s,
            model_s=before.model_s + self.model_s,
            wall_s=before.wall_s + wait_s + self.model_s,
        )


@pytest.mark.parametrize("service_s", [1.6, 2.0])
def test_a_window_of_a_trial_holds_a_batch_of_each_worker(service_s: float) -> None:
    """A stranger's loader of 48 workers makes bursts: half a second of it reads a third or three times its speed."""
    pipeline = FakePipeline({"load": Work(service_s, cpu_share=0.1, workers=48, window=96)}, FakeMachine())
    loop = Lockstep(pipeline, model_s=0.02)
    decisions = loop.run(tuner_of(pipeline, policy=Script({}, {}, {"load": 49})), seconds=30.0)
    changed = next(i for i, d in enumerate(decisions) if d.applied)
    first = decisions[changed + 1].observation
    assert first.batches >= 40
    assert 0.6 < first.batches_per_s * service_s / 49 < 1.7


def test_a_round_is_waited_for_two_seconds_at_most() -> None:
    pipeline = FakePipeline({"load": Work(60.0, cpu_share=0.1, workers=48, window=96)}, FakeMachine())
    decisions = FakeLoop(pipeline, model_s=0.002).run(tuner_of(pipeline, policy=Script()), seconds=100.0)
    assert all(d.observation.elapsed_s < 13.0 for d in decisions)


def test_rounds_follow_the_workers_a_resize_has_left() -> None:
    rates = {"load": StageRates(40, 1.0, 0.5, 0.1, 0.0, 0.9, 0.0, 0.0, 0.0, 1.0, 0.0)}
    counters = PipelineStats(0.0, 100, {"load": StageStats(200, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 8)})
    seen = observation([Stage("load", "cpu", "workers", 1, 64, 20)], rates=rates)
    assert round_of(seen, counters) == Round(9.0, 0.5), "20 workers, busy for .9 of the time, two items a batch"
    assert round_of(observation([Stage("other", "cpu", "workers", 1, 64, 20)]), counters) == Round()
