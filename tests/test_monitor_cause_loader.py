"""What the loader or dataset costs as it is written: none or too many workers, their starts, shards, buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cause_windows import INTERLEAVE, ITERABLE, LOADER, MAP, rate, stage, window

from intune_callbacks.measure.cause import advice, causes
from intune_callbacks.measure.evidence import Evidence
from intune_callbacks.measure.predict import Advice, promised
from intune_callbacks.types import Hint, Stage


@pytest.mark.parametrize("hints", [(), (Hint("the shards belong to the workers", kind="order", stage="load"),)])
def test_workers_that_own_the_shards_are_left_alone(hints: tuple[Hint, ...]) -> None:
    seen = window((stage("load", 2, knob=LOADER if hints else ITERABLE), rate(0.02, 0.001)))
    (cause,) = causes(seen, Evidence(hints))
    assert (cause.kind, cause.line) == ("order", "")
    assert cause.sentence == (hints[0].what if hints else causes(seen)[0].sentence)
    assert hints or "own the shards" in cause.sentence
    assert advice(seen, Evidence(hints)).allocation == {}


def test_no_worker_is_one_after_the_other() -> None:
    seen = window((stage("load", 0, knob=LOADER), rate(0.006, 0.006)), wait=0.6, epoch=10_000)
    (cause,) = causes(seen)
    assert (cause.kind, cause.stage) == ("loader", "load")
    assert "makes each batch itself, 6 ms, and then trains on it, 4 ms" in cause.sentence
    assert cause.sentence.endswith("; a worker makes the next one meanwhile")
    assert cause.line == "DataLoader(num_workers=2, persistent_workers=True)  # was 0 and False"
    # 10 ms become the model's 4 and the hand-over of a batch, 1 ms: 2.0, less the margin.
    assert cause.gain == pytest.approx(1.7, abs=0.1)
    short = replace(seen, epoch_batches=100)  # 0.1 s to start a worker are a tenth of that
    assert causes(short)[0].gain < cause.gain
    (order,) = causes(replace(seen, stages=(replace(seen.stages[0], knob=ITERABLE),)))
    assert order.line.startswith("DataLoader(num_workers=1, ")
    # One worker keeps the order, and its 6 ms are the limit: 10 / 6, less the margin.
    assert order.gain == pytest.approx(promised(10 / 6.0), abs=0.05)


def test_items_cheaper_than_the_hand_over_stay_in_the_training_loop() -> None:
    seen = window((stage("load", 0, knob=LOADER), rate(0.0004, 0.0004)), period_s=0.001, wait=0.4)
    (cause,) = causes(seen)
    assert (cause.kind, cause.line, cause.gain) == ("loader", "", 1.0)
    assert cause.sentence.endswith("; from a worker it would not come sooner")
    assert advice(seen).allocation == {}
    full = window((stage("load", 0, knob=LOADER), rate(0.006, 0.006)), wait=0.6, epoch=10_000, idle=0.0)
    assert causes(full)[0].sentence.endswith("; from a worker it may not come sooner, for 0.0 CPUs are idle")
    assert advice(full).allocation == {}
    # A quota, or one rank's share: others are idle, but not for it.
    less = window((stage("load", 0, knob=LOADER), rate(0.006, 0.006)), wait=0.6, epoch=10_000, idle=4.0, cpus=0.6)
    assert causes(less)[0].sentence.endswith("may not come sooner, for the input keeps 0.6 of 0.6 CPUs busy")


def test_what_another_thread_makes_ahead_is_not_said_to_be_made_in_the_loop() -> None:
    knob = "PyDataset(workers={})"
    seen = window((stage("load", 0, knob=knob), rate(0.03, 0.001)), period_s=0.03, wait=0.6, epoch=10_000)
    ahead = Hint("one thread makes the batches ahead, one after the other", kind="ahead", stage="load")
    (cause,) = causes(seen, Evidence((ahead,)))
    assert cause.sentence == (
        "'load' has no worker: one thread makes the batches ahead, one after the other, 30 ms each, "
        "while the training takes 12 ms; workers make several at once"
    )
    assert cause.line.startswith("PyDataset(workers=2)")
    assert "makes each batch itself" in causes(seen)[0].sentence


def test_datapipes_get_a_word_about_workers() -> None:
    hint = Hint("the datapipe has no workers", "DataLoader(num_workers=1)", "loader")
    (cause,) = causes(window(wait=0.5), Evidence((hint,)))
    assert (cause.kind, cause.line) == ("loader", "DataLoader(num_workers=1)")
    assert cause.gain == pytest.approx(promised(10 / 6.0))
    assert causes(window(wait=0.5)) == ()  # it waits, and nobody knows for what
    # Workers it has: whatever their number, batches are made beside the training, and no gain can be told.
    assert causes(window(wait=0.5), Evidence((replace(hint, kind="workers"),))) == ()


def test_start_up_of_workers_each_epoch() -> None:
    load = stage("load", 16, knob=LOADER, startup_s=0.05)
    seen = window((load, rate(0.05, 0.04, 0.3)), period_s=0.0122, wait=0.01, seam_s=0.85)
    (cause,) = causes(seen)
    assert (cause.kind, cause.line) == (
        "startup",
        "DataLoader(num_workers=16, persistent_workers=True)  # was 16 and False",
    )
    assert cause.sentence == (
        "each epoch begins with 850 ms of starting 16 workers anew, 41 % of the time: persistent_workers=True keeps "
        "them, where nothing changes the dataset between epochs"
    )
    # Of 20.7 ms a batch the 8 ms of 16 workers go: 1.63, less the margin.
    assert cause.gain == pytest.approx(promised(20.7 / 12.7), rel=0.01)
    assert advice(seen).persistent == ("load",)
    kept = replace(seen, stages=(replace(load, startup_s=0.0),))
    assert [c.kind for c in causes(kept)] == ["model"]
    # Most of it is the first batch, which has to be made in any case.
    (some,) = causes(replace(seen, stages=(replace(load, startup_s=0.02),)))
    assert some.sentence.startswith(
        "each epoch begins with 850 ms without a batch, 41 % of the time, 320 ms of them at least for starting 16 "
        "workers anew: persistent_workers=True keeps them"
    )
    assert 1.0 < some.gain < cause.gain


def test_workers_of_epochs_that_are_left_had_better_not_live_on() -> None:
    """They would have to finish what they had read ahead: pasted, it made `next(iter(loader))` 8 % slower."""
    seen = window((stage("load", 16, knob=LOADER, startup_s=0.05), rate(0.05, 0.01)), wait=0.01, seam_s=0.85)
    known = Evidence((Hint("the loop leaves its epochs", kind="left"),))
    assert "load" in advice(seen).persistent and advice(seen, known).persistent == ()
    (cause,) = (one for one in causes(seen, known) if one.kind == "startup")
    assert (cause.line, cause.gain) == ("", 1.0)
    assert cause.sentence.endswith(" of the time: the loop leaves its epochs")
    quick = replace(seen, seam_s=seen.period_s / 1000)
    assert "startup" not in [one.kind for one in causes(quick, known)]


def test_a_wait_without_the_starts_of_epochs_is_told_as_that() -> None:
    parts = (stage("load", 4, knob=LOADER), rate(0.02, 0.01, 0.3))
    plain, begun = (causes(window(parts, wait=0.02, seam_s=seam_s))[0] for seam_s in (0.0, 0.2))
    assert plain.kind == begun.kind == "model"
    assert plain.sentence.startswith("the training waits 2 % of the time for data, and computes ")
    assert begun.sentence.startswith("but for the starts of epochs the training waits 2 % of the time for data, and ")


def test_start_up_of_workers_nobody_can_look_into() -> None:
    load = stage("load", 8, high=8, knob=LOADER, startup_s=0.1)
    seen = replace(window((load, rate(0.05, 0.04)), wait=0.6, seam_s=0.8), rates={}, stage=None)
    (cause,) = (one for one in causes(seen) if one.kind == "startup")
    assert cause.line == "DataLoader(num_workers=8, persistent_workers=True)  # was 8 and False"
    # Of 18 ms a batch the 8 ms of the starts go, and what it waits for beside them stays.
    assert cause.gain == pytest.approx(promised(18 / 10), rel=0.01)
    assert advice(seen).persistent == ("load",)
    # There is no next start.
    once = Evidence(whole={"epochs": 1})
    assert advice(seen, once).persistent == () and "startup" not in [one.kind for one in causes(seen, once)]
    assert advice(seen, Evidence(whole={"epochs": 2})).persistent == ("load",)


STARVED = Hint("worker 0 of 8 delivered everything", "DataLoader(num_workers=1)  # was 8", "shards", "load")


@pytest.mark.parametrize("wait", [0.9, 0.01])
@pytest.mark.parametrize("is_seen", [True, False], ids=["watched", "nobody can look into it"])
def test_workers_without_a_shard(is_seen: bool, wait: float) -> None:
    load = stage("load", 8, knob=ITERABLE, startup_s=0.1)
    seen = window((load, rate(0.08, 0.01)), wait=wait, seam_s=0.8)
    if not is_seen:
        seen = replace(seen, rates={}, stage=None)
    (cause,) = causes(seen, Evidence((STARVED,)))
    assert (cause.kind, cause.stage, cause.gain) == ("shards", "load", 1.0)
    assert (cause.sentence, cause.line) == (STARVED.what, STARVED.line)
    assert advice(seen, Evidence((STARVED,))) == Advice()  # not to keep those that do nothing
    # Uneven ones have work for all; without a wait nobody misses it.
    uneven = Evidence((replace(STARVED, what="the shards are uneven", line=""),))
    kinds = [one.kind for one in causes(replace(seen, stages=(replace(load, startup_s=0.0),)), uneven)]
    assert kinds == (["shards"] if wait > 0.5 else ["model"])


def test_more_workers_are_charged_with_their_start() -> None:
    def wanted(startup_s: float, knob: str = "") -> int:
        load = stage("load", 1, knob=knob, startup_s=startup_s)
        return advice(window((load, rate(0.0099, 0.001)), seam_s=startup_s)).allocation.get("load", 1)

    free, dear = wanted(0.0), wanted(0.2)
    assert 1 < dear < free
    assert wanted(0.2, LOADER) == free  # those can be kept, and the line says so


def test_workers_that_live_on_are_charged_once_in_a_run() -> None:
    """Two spawned workers took 2.6 s to start in a run of 8 s: with as many more as were advised it was slower."""
    load = stage("load", 2, knob=LOADER, once_s=1.3)
    seen = window((load, rate(0.0999, 0.001)), period_s=0.05, seam_s=2.6)
    long, short = (advice(replace(seen, run_batches=batches)) for batches in (100_000, 100))
    assert long.allocation["load"] > 8 and long.gain > 1.7
    # 5 s of batches become less by 2.4 s with a worker more, by 1.2 s with the next: only the first one pays.
    assert short.allocation.get("load", 2) <= 3 and short.gain < 1.2
    # To keep those that each epoch starts now, they have to be started once all the same.
    anew = window((replace(load, startup_s=0.05, once_s=0.0), rate(0.01, 0.001, 0.3)), wait=0.01, seam_s=0.1, epoch=10)
    once, often = (replace(anew, run_batches=batches, seam_s=0.01) for batches in (10, 1000))
    assert advice(often).persistent == ("load",) and advice(often).gain > 1.3
    assert advice(once) == Advice()


def test_a_shuffle_buffer_that_is_being_filled() -> None:
    hint = Hint("shuffle holds all 50000 samples before the first batch", ".shuffle(2048)", "shuffle")
    seen = window((stage("decode", 4, knob=MAP), rate(0.01, 0.01, 0.3)), wait=0.02, seam_s=0.7)
    known = Evidence((hint,), whole={"first_batch_s": 1.4, "wall_s": 20.0})
    (cause,) = causes(seen, known)
    assert (cause.kind, cause.line) == ("shuffle", ".shuffle(2048)")
    assert cause.sentence == f"{hint.what}: the first batch came after 1.4 s"
    assert cause.gain == pytest.approx(promised(1.7 / (1.0 + 0.7 * 2048 / 50000)), rel=0.01)
    # What a buffer nearly as large is filled with is waited for in any case.
    large = Hint("shuffle(1500) holds the whole epoch of 1500 elements", ".shuffle(1000)  # or all", "shuffle")
    (cause,) = causes(seen, replace(known, hints=(large,)))
    assert cause.gain == pytest.approx(promised(1.7 / (1.0 + 0.7 * 1000 / 1500)), rel=0.01)
    # What fills the buffer had to be read in any case, where the training waits for reads.
    waiting = causes(window((stage("decode", 4), rate(0.04, 0.01)), wait=0.8, seam_s=0.7), known)
    assert [(c.line, c.gain) for c in waiting if c.kind == "shuffle"] == [("", 1.0)]


def test_no_prefetch_is_one_after_the_other() -> None:
    hint = Hint("nothing is prefetched", ".prefetch(2)", "prefetch")
    parts = (stage("decode", 4, knob=MAP), rate(0.02, 0.019, 0.5))
    found = causes(window(parts, wait=0.5), Evidence((hint,)))
    assert [(c.line, c.gain) for c in found if c.kind == "prefetch"] == [(".prefetch(2)", pytest.approx(promised(2.0)))]
    # Of a pipeline that waits 94 % for its reads hardly anything is gained.
    reads = causes(window((parts[0], rate(0.04, 0.001)), wait=0.97), Evidence((hint,)))
    assert "prefetch" not in [c.kind for c in reads]
    there = window(parts, (Stage("prefetch", "memory", "items", 1, 64, 2), rate(0.0, 0.0)), wait=0.5)
    assert "prefetch" not in [c.kind for c in causes(there, Evidence((hint,)))]


def test_too_few_files() -> None:
    hint = Hint("interleave has 8 workers for 3 files", kind="files", stage="interleave")
    seen = window((stage("interleave", 8, kind="io", knob=INTERLEAVE), rate(0.08, 0.001)))
    (cause,) = causes(seen, Evidence((hint,)))
    assert (cause.kind, cause.line) == ("files", "")
    assert cause.sentence.startswith("interleave has 8 workers for 3 files: more workers have nothing to read")
    assert "with twice as many expected × 1." in cause.sentence
    assert advice(seen, Evidence((hint,))).allocation == {}
    elsewhere = replace(hint, stage="other")
    assert causes(seen, Evidence((elsewhere,)))[0].kind == "storage"
