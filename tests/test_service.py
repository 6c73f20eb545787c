"""A training that asks an agent service: the same decisions, and none lost whatever the service does."""

from __future__ import annotations

import http.client
import json
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import FakeLoop
from hypothesis import given, settings
from hypothesis import strategies as some
from policy_runs import five_stages, tuner_of
from service_runs import answering, jobs, remote, serving, train
from torch.utils.data import DataLoader
from torch_rows import Rows

from intune_callbacks import live
from intune_callbacks.config import TunerConfig
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.errors import ConfigError
from intune_callbacks.service import client
from intune_callbacks.service.client import LONGEST_S, Agent, Unanswered
from intune_callbacks.service.jobs import Found
from intune_callbacks.service.wire import Malformed, proposal
from intune_callbacks.session.found import found_by, send_found
from intune_callbacks.session.warm_start import WarmStart
from intune_callbacks.types import Clock

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(scope="module")
def local() -> list[object]:
    return train(make_policy("dqn"))


def test_decisions_are_those_the_same_policy_makes_here(local: list[object]) -> None:
    with serving() as service:
        policy = remote(service.address)
        assert train(policy) == local
        assert policy.answered == policy.asked == policy.decisions > 50
        assert not policy.hints
    assert any(before != after for before, after, *_ in local)


def test_the_word_of_the_service_counts(local: list[object]) -> None:
    with serving(jobs=jobs("even")) as service:
        policy = remote(service.address)
        assert train(policy) == train(make_policy("even")) != local, policy.failures


@pytest.mark.filterwarnings("ignore:the agent service .* gave no answer:RuntimeWarning")
def test_a_service_that_ends_or_forgets_loses_no_decision(local: list[object]) -> None:
    with serving() as service:
        policy = remote(service.address)
        made = train(policy, meanwhile=lambda: service.jobs.forget(policy._run))
        assert made[:20] == local[:20]
        # One was made here, and the state of the policy went along with the next one: it goes on from there.
        assert policy.answered == policy.asked - 1 and list(policy.failures) == [
            "status 409 this training is not known: send the state of its policy"
        ]
    with serving() as service:
        policy = remote(service.address)

        def end() -> None:
            service.shutdown()
            service.server_close()

        assert train(policy, meanwhile=end) == local
    assert 0 < policy.answered < policy.decisions
    (hint,) = policy.hints
    assert hint.what.startswith(f"{policy.answered} of {policy.decisions} decisions were made by the agent service")
    assert "Connection refused" in hint.what


def test_a_question_whose_answer_was_lost_is_answered_again_and_told_once(local: list[object]) -> None:
    with serving() as service:
        policy = remote(service.address)
        ask, lose = policy.agent.ask, iter([False, True, False, True, True] + 500 * [False])

        def ask_and_lose(path: str, question: bytes) -> tuple[int, object]:
            found = ask(path, question)
            if next(lose):
                raise Unanswered("lost on its way")
            return found

        policy.agent.ask = ask_and_lose  # type: ignore[method-assign]
        with pytest.warns(RuntimeWarning, match="gave no answer: lost on its way"):
            assert train(policy) == local
        assert policy.answered == policy.asked - 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as long as outside of these tests."""
    monkeypatch.setattr(client, "LONGEST_S", LONGEST_S)


@pytest.mark.usefixtures("impatient")
def test_a_silent_service_costs_a_bounded_part_of_the_training(local: list[object]) -> None:
    with answering(lambda question: None) as address:
        policy, begin_s = remote(address, Clock()), time.monotonic()
        with pytest.warns(RuntimeWarning, match="no answer in 1 s"):
            assert train(policy) == local
        # What waited beyond the first second is a hundredth of the training, but for the last one.
        assert policy._waited_s < 2.2 + 0.01 * (time.monotonic() - begin_s) and policy.decisions > 50
    assert "asked seldom" in policy.hints[0].what


@pytest.mark.usefixtures("impatient")
def test_who_ends_by_the_limit_of_the_connection_hears_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(connection: http.client.HTTPConnection) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(http.client.HTTPConnection, "connect", late)
    with pytest.raises(Unanswered, match="no answer in 1 s"):
        Agent("http://127.0.0.1:9").ask("/v1/decide", b"{}")


ANSWERS = some.one_of(
    some.binary(max_size=200),
    some.builds(
        lambda status, body: b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body),
        some.sampled_from([200, 204, 302, 409, 500]),
        some.one_of(
            some.binary(max_size=80),
            some.builds(
                lambda given: json.dumps(given).encode(),
                some.fixed_dictionaries(
                    {"format": some.sampled_from([1, 2, "1"])},
                    optional={
                        "allocation": some.dictionaries(
                            some.sampled_from(["read", "decode", "decode.window", "\x1b[2J"]),
                            some.one_of(some.integers(-5, 2000), some.booleans(), some.floats(), some.text(max_size=3)),
                            max_size=3,
                        ),
                        "reason": some.one_of(some.text(max_size=20), some.none(), some.just("\x1b[31m" + 2000 * "x")),
                        "settled": some.one_of(some.booleans(), some.integers()),
                    },
                ),
            ),
        ),
    ),
)


@settings(max_examples=60)
@given(answer=ANSWERS)
def test_whatever_is_answered_the_training_goes_on(answer: bytes) -> None:
    pipeline = five_stages(16.0)
    with answering(lambda question: answer) as address, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        policy = remote(address)
        tuner = tuner_of(pipeline, policy)
        made = FakeLoop(pipeline).run(tuner, 6.0)
    assert tuner.frozen is None and made
    assert all(one.reason.isprintable() and len(one.reason) <= 1000 for one in made)
    assert policy.answered or policy.failures
    for stage in pipeline.stages():
        assert stage.low <= stage.current <= stage.high


@pytest.mark.parametrize(
    "wrong", [{"decode": 1000}, {"decode": 0}, {"other": 1}, {"decode": True}, {"decode": 2.0}, []]
)
def test_an_answer_is_an_allocation_of_these_stages(wrong: object) -> None:
    seen = FakeLoop(five_stages(8.0)).observe()
    right = {"format": 1, "allocation": {"decode": 2}, "reason": "", "settled": False}
    assert proposal(right, seen).allocation == {"decode": 2}
    with pytest.raises(Malformed, match="allocation"):
        proposal(right | {"allocation": wrong}, seen)


def test_what_cannot_be_asked_at_all_is_decided_here(local: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    policy = remote("http://127.0.0.1:9")
    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.warns(RuntimeWarning, match="can't start new thread"):
        assert train(policy) == local
    assert policy.answered == 0 and "can't start new thread" in policy.hints[0].what


def test_fifty_trainings_at_once(local: list[object]) -> None:
    with serving() as service, ThreadPoolExecutor(50) as pool:
        policies = [remote(service.address) for _ in range(50)]
        made = list(pool.map(lambda policy: train(policy, 12.0), policies))
        assert sum(policy.answered for policy in policies) > 0
        assert len(service.jobs.rows()) == 50
    # Who was refused sends its state, which is not all that the policy has in memory: see `RemotePolicy._ask`.
    whole = [
        one for one, policy in zip(made, policies, strict=True) if not any("status" in why for why in policy.failures)
    ]
    assert all(one == whole[0] for one in whole)


def test_the_next_training_starts_from_what_the_first_one_found(tmp_path: Path) -> None:
    known = {"batch_size": 32, "ranks": 1, "versions": {"torch": "2.13.0"}}
    with serving(found=Found(tmp_path)) as service:
        first = tuner_of(five_stages(16.0), remote(service.address))
        WarmStart(service.address).begin(first, 32, {"torch": "2.13.0"})
        pipeline = first._pipeline
        FakeLoop(pipeline).run(first, 60.0)
        first.close()
        found = found_by(first, **known)
        assert found is not None
        assert send_found(service.address, *found) is None
        assert len(service.found) == 1
    # It is known over a restart, too.
    with serving(found=Found(tmp_path)) as service:
        other = tuner_of(five_stages(64.0), remote(service.address))
        start = WarmStart(service.address)
        start.begin(other, 32, {"torch": "2.13.0"})
        assert start.entry is not None and not start.entry["used"]
        assert start.entry["why"] == "the service knows no run with this fingerprint yet"
        second = tuner_of(five_stages(16.0), remote(service.address))
        start = WarmStart(service.address)
        start.begin(second, 32, {"torch": "2.13.0"})
        assert start.entry["used"], start.entry
        assert {s.name: s.current for s in second.setting()[0]} == first.best
        assert send_found("http://127.0.0.1:9", *found)


def test_a_plain_loop_asks_and_its_report_says_where_it_started(tmp_path: Path) -> None:
    pace = {"decide_every_s": 0.05, "decide_every_batches": 2, "warmup_batches": 2}
    with serving() as service:
        for number in range(2):
            rows = DataLoader(Rows(240, sleep_s=0.005), batch_size=2, num_workers=1)
            folder = str(tmp_path / str(number))
            with live(rows, policy=service.address, run_dir=folder, show_card=False, **pace) as loader:
                assert [int(batch[0]) for batch in loader] == list(range(0, 240, 2))
            report = json.loads((tmp_path / str(number) / "report.json").read_text())
            assert report["warm_start"]["from"] == report["settings"]["policy"]["value"] == service.address
            assert report["policy"] == "dqn" and not report["frozen"]
        assert report["warm_start"]["used"], report["warm_start"]
        assert service.jobs.rows() and len(service.found) == 1


def test_addresses_are_checked() -> None:
    for good in ("http://10.0.0.1:8765", "https://agent.example/", "http://[::1]:1"):
        assert TunerConfig(policy=good).policy == good
    for bad in ("http://", "http://host:port", "https://user:secret@host", "http://host/path", "http://host?x=1"):
        with pytest.raises(ConfigError, match="expected the address of an agent service"):
            TunerConfig(policy=bad)
    with pytest.raises(ConfigError, match="does not learn"):
        TunerConfig(policy="http://host:1", fine_tune=True)


def test_the_benchmark_of_the_service_compares_with_here() -> None:
    from benchmarks.remote import run

    rows = run((5,), (1, 2), 1.0, 0)
    assert [row["decided"] for row in rows] == 2 * ["here", "by the service"]
    assert all(0.0 < row["p50_ms"] <= row["p99_ms"] for row in rows)
    assert all(row["same"] == 1.0 for row in rows)
    assert all(row["answered"] > 0.0 and (row["service_cpu_ms"] is None) == (row["decided"] == "here") for row in rows)
