"""Which workers of an iterable-style DataLoader deliver: said where it is known, and nothing is said elsewhere."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shards import Faulty, Late, Rows, Shards, Tars, Watched, loader  # noqa: E402

from intune_callbacks import Clock, live  # noqa: E402
from intune_callbacks.record.card import said  # noqa: E402
from intune_callbacks.record.report import Report  # noqa: E402
from intune_callbacks.show.page.boxes import boxes  # noqa: E402
from intune_callbacks.show.page.columns import columns_of  # noqa: E402

EAGER: dict[str, Any] = {"decide_every_s": 0.02, "decide_every_batches": 4, "warmup_batches": 2}
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*IterableDataset.*length")


ONE = "worker 0 of 4 delivered everything: 1 shard for 4 workers; num_workers=1 is enough, or reshard"
TWO = "2 of 4 workers ended without a batch: 2 shards for 4 workers; num_workers=2 is enough, or reshard"
UNKNOWN = "3 of 4 workers ended without a batch; num_workers=1 is enough, or give each worker a shard"
SOME = "2 of 4 workers ended without a batch: shards of equal size, one for each worker, keep all busy"
TO_ONE, TO_TWO = (
    "DataLoader(num_workers=1)  # was 4",
    "DataLoader(num_workers=2)  # was 4; the samples' order may change",
)
CASES: dict[str, tuple[Any, int, str, str, int | None]] = {
    "1 shard": (lambda: Shards([12]), 4, ONE, TO_ONE, 1),
    "2 shards": (lambda: Shards([6, 6]), 4, TWO, TO_TWO, 2),
    "4 shards": (lambda: Shards([4] * 4), 4, "", "", 4),
    "5 shards of a batch": (lambda: Shards([1] * 5), 4, "", "", 4),
    "1 tar": (lambda: Tars([12]), 4, ONE, TO_ONE, 1),
    "1 of an unknown number": (lambda: Shards([12], is_known=False), 4, UNKNOWN, TO_ONE, 1),
    "2 of an unknown number": (lambda: Shards([6, 6], is_known=False), 4, SOME, "", 2),
    "2 without an item": (lambda: Shards([0, 0, 6, 6]), 4, SOME, "", 2),
    "fewer batches than workers": (lambda: Shards([3]), 4, "", "", None),
    "one worker": (lambda: Shards([5]), 1, "", "", 1),
    "map-style": (Rows, 2, "", "", None),
}


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "watched"])
@pytest.mark.parametrize("case", CASES)
def test_who_delivers(case: str, is_live: bool) -> None:
    make, workers, sentence, line, delivering = CASES[case]
    expected = sorted(batch.item() for batch in loader(make(), workers)) if case == "2 shards" else None
    watched = Watched(loader(make(), workers), is_live)
    seen = watched.epoch()
    assert watched.said == (sentence, line)
    assert watched.delivering == delivering
    assert expected is None or sorted(seen) == expected
    if sentence:  # as soon as each worker could have delivered, and not before
        assert watched.told[: workers - 1] == [""] * (workers - 1)
        assert watched.told[workers - 1 :] == [sentence] * (len(seen) - workers + 1)
    watched.pipeline.close()
    assert watched.said == (sentence, line)


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "watched"])
@pytest.mark.parametrize(("sizes", "sentence"), [([4, 4, 4, 4], ""), ([16], "worker 0 of 4 delivered everything")])
def test_workers_that_live_on_over_the_epochs(sizes: list[int], sentence: str, is_live: bool) -> None:
    watched = Watched(loader(Shards(sizes), 4, persistent_workers=True), is_live)
    for epoch in range(3):
        watched.epoch()
        until = 3 if epoch == 0 else 0
        assert all(one.startswith(sentence) for one in watched.told[until:]) and any(watched.told) == bool(sentence)
        assert watched.delivering == len(sizes)
    watched.pipeline.close()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "watched"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_is_left_early_says_what_it_has_shown(persistent: bool, is_live: bool) -> None:
    healthy = Watched(loader(Shards([9, 2]), 2, persistent_workers=persistent), is_live)
    for _ in range(2):
        healthy.epoch(stop=3)
        assert (healthy.said, healthy.delivering) == (("", ""), 2)
    starved = Watched(loader(Shards([9]), 3, persistent_workers=persistent), is_live)
    starved.epoch(stop=2)
    assert (starved.said, starved.delivering) == (("", ""), None)
    starved.epoch(stop=4)
    assert starved.said[0].startswith("worker 0 of 3 delivered everything") and starved.delivering == 1
    healthy.pipeline.close()
    starved.pipeline.close()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "watched"])
def test_uneven_shards_are_judged_by_the_time_they_take(is_live: bool) -> None:
    now = [0.0]

    def gone_through(sizes: list[int], alone_s: float) -> str:
        watched = Watched(loader(Shards(sizes), 2), is_live, Clock(wall=lambda: now[0]))

        def train(number: int) -> None:
            now[0] += 0.5 if number <= 40 else alone_s

        watched.epoch(each=train)
        assert not any(watched.told)  # it is known at the end of the epoch
        watched.pipeline.close()
        return watched.said[0]

    # Two workers make a batch in half the time, so of 60 batches the last 20 take half of it.
    sentence = gone_through([40, 20], 1.0)
    assert sentence.startswith("the shards are uneven: for ")
    assert sentence.endswith("(20 to 40 batches each); shards of equal size keep all busy")
    assert 40 <= int(sentence.split(" % ")[0].split()[-1]) <= 65
    assert "3 shards for 2 workers, a multiple of 2 keeps all busy" in gone_through([20, 20, 20], 1.0)
    # The last batch of equal shards is no unevenness, however long it takes; nor are a few that take no time.
    assert gone_through([21, 20], 100.0) == ""
    assert gone_through([23, 20], 0.1) == ""


def test_an_iterator_that_the_loader_keeps_behind_the_stopwatch() -> None:
    watched = Watched(loader(Shards([5, 5]), 2, persistent_workers=True), False)
    kept = watched.loader._iterator = watched.pipeline.adopt(iter(watched.loader))
    next(kept)
    assert watched.delivering is None
    again = iter(watched.loader)
    assert again is kept and len(list(again)) == 10 and watched.delivering == 2
    watched.pipeline.close()


def test_batches_out_of_order_are_those_of_their_workers() -> None:
    for sizes, delivering in (([20], 1), ([5, 5, 5, 5], 4)):
        watched = Watched(loader(Shards(sizes), 4, in_order=False), True)
        watched.epoch()
        assert watched.delivering == delivering and bool(watched.said[0]) == (delivering == 1)
        watched.pipeline.close()


def test_a_worker_that_is_late_has_not_ended() -> None:
    leave = multiprocessing.get_context("fork").Event()
    watched = Watched(loader(Late([6, 2], leave), 2, in_order=False, multiprocessing_context="fork"), True)

    def check(number: int) -> None:
        assert (watched.said, watched.delivering) == (("", ""), None if number < 2 else 2)
        if number == 4:
            leave.set()

    assert len(watched.epoch(each=check)) == 8
    watched.pipeline.close()


def test_a_window_that_changes_hides_nobody() -> None:
    sizes = [7, 0, 12, 3]
    expected = [batch.item() for batch in loader(Shards(sizes), 4)]
    watched = Watched(loader(Shards(sizes), 4), True)
    assert watched.epoch(each=lambda number: watched.pipeline.resize({"load.window": 1 + number * 7 % 11})) == expected
    assert watched.delivering == 3
    watched.pipeline.close()


def test_two_iterators_of_a_loader_keep_apart() -> None:
    watched = Watched(loader(Shards([6, 6]), 2), True)
    first, second = (watched.pipeline.adopt(iter(watched.loader)) for _ in range(2))
    for _ in zip(first, second, strict=True):
        assert watched.said == ("", "")
    assert watched.delivering == 2
    watched.pipeline.close()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "watched"])
@pytest.mark.parametrize(("sizes", "met", "delivering"), [([3, 12], 6, None), ([3, 12], 1, 2), ([0, 12], 2, None)])
def test_an_epoch_that_is_met_late(sizes: list[int], met: int, delivering: int | None, is_live: bool) -> None:
    watched = Watched(loader(Shards(sizes), 2), is_live)
    watched.pipeline.release()
    iterator = iter(watched.loader)
    for _ in range(met):
        next(iterator)
    assert len(list(watched.pipeline.adopt(iterator))) == sum(sizes) - met
    assert watched.delivering == delivering and not watched.said[0].startswith(("worker", "1 of"))
    watched.pipeline.close()


def test_a_resumed_epoch_is_not_judged() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def build() -> Any:
        return stateful.StatefulDataLoader(Shards([3, 12]), batch_size=1, num_workers=2)

    whole = Watched(build(), True)
    whole.epoch(stop=8)
    state = whole.loader.state_dict()
    assert whole.delivering == 2
    whole.pipeline.close()
    resumed = build()
    resumed.load_state_dict(state)
    watched = Watched(resumed, True)
    assert len(watched.epoch()) == 7
    assert (watched.said, watched.delivering) == (("", ""), None)
    watched.pipeline.close()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "watched"])
def test_an_error_is_no_end(is_live: bool) -> None:
    watched = Watched(loader(Faulty([9]), 2), is_live)
    iterator, errors = watched.pipeline.adopt(iter(watched.loader)), 0
    for _ in range(10):
        try:
            next(iterator)
        except KeyError:
            errors += 1
    assert errors and watched.said == ("", "")
    watched.pipeline.close()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "watched"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_start_of_workers_is_timed_where_they_start_anew(persistent: bool, is_live: bool) -> None:
    watched = Watched(loader(Shards([4, 4, 4]), 3, persistent_workers=persistent), is_live)
    watched.epoch()
    startup_s, once_s = (getattr(watched.pipeline.stages()[0], name) for name in ("startup_s", "once_s"))
    assert 0.0 < startup_s < 30.0 if not persistent else startup_s == 0.0
    assert is_live or (once_s > 0.0) == persistent
    watched.pipeline.close()


@pytest.mark.parametrize("mode", ["tune", "observe"])
def test_the_card_the_report_and_the_page_say_it(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    loop = live(loader(Shards([60], item_s=0.003), 4), mode=mode, **EAGER)
    for _ in loop:
        pass
    report = loop.close()
    card = " ".join(capsys.readouterr().out.split())
    assert ONE in card and "DataLoader(num_workers=1) # was 4" in card
    assert report["frozen"] is None and report["verdict"] == "input-bound"
    assert report["cause"] == ONE
    assert (report["causes"][0]["kind"], report["causes"][0]["stage"]) == ("shards", "load")
    assert report["next"] == f"paste what is below, or give each worker a shard\n{TO_ONE}"
    assert report["stages"][0]["delivering"] == 1
    assert report["hints"][-1]["kind"] == "shards"
    read = Report.from_json(json.loads(json.dumps(report)))
    assert said(read)["cause"] == ONE and read.stages[0].delivering == 1
    assert ("delivering", "1") in boxes(read, columns_of([]))[0].lines


def test_of_two_loaders_it_says_whose() -> None:
    first, second = live(loader(Shards([9, 9]), 2), loader(Shards([20]), 2), **EAGER)
    for _ in zip(first, second, strict=False):
        pass
    (hint,) = [hint for hint in first.close()["hints"] if hint["kind"] == "shards"]
    assert hint["stage"] == "1/load" and "1 shard for 2 workers" in hint["what"]
