"""Why the input is slow, in one plain sentence; what mends it; and by how much, if the measurements predict it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from intune_callbacks.measure import other_causes
from intune_callbacks.measure.advice import PYDATASET, more_threads, to_set
from intune_callbacks.measure.evidence import NONE, Cause, Evidence
from intune_callbacks.measure.measured import LONG_WAIT_S, READS, Measured
from intune_callbacks.measure.other_causes import entries, if_it_pays
from intune_callbacks.measure.predict import (
    LEAST_GAIN,
    OWN_PROCESSES,
    WAITS,
    Advice,
    advise,
    is_started_anew,
    limiting,
    promised,
    step_s,
)
from intune_callbacks.measure.serial import feeds, serial, without_workers
from intune_callbacks.types import Hint, Stage
from intune_callbacks.words import amount, count, moment, ratio

__all__ = ["advice", "causes", "first_sentence"]

CPUS_BUSY = 0.8
"""From this share of the CPUs the input may use on they are short. A choice: the rest is what the training and others
take now and then."""
COMPUTES = 0.5
"""An item that computes for less than this share of its time waits for something. A choice: the larger part counts."""
LEAST_READ_S = 0.0002
"""No read from a disk or a network is shorter: such a wait is for a CPU."""
BROUGHT_NOTHING = 1.03
"""Factor below which more workers brought nothing. A choice: windows differ by as much."""
MEANWHILE = "; a worker makes the next one meanwhile"
ALONGSIDE = "; workers make several at once"
LEFT_ALONE = (
    "; it is left alone, for the dataset may need the training process: if it does not, write {}, or give "
    "InTuneCallback workers_kind='process' or 'thread'"
)
FOLLOWS_WORKERS = "order follows the workers"


def causes(seen: Measured | None, known: Evidence = NONE) -> tuple[Cause, ...]:
    """Return why the training is not faster: what limits first, then what else there is, the largest gain first.

    Nothing, where it waits for data and what was measured does not say for what.

    Args:
        seen: windows of one allocation; None where nothing was measured.
    """
    if seen is None or seen.verdict == "too short":
        return ()
    if any(FOLLOWS_WORKERS in stage.knob and not known.hint("order", stage.name) for stage in seen.workers):
        known = replace(known, hints=(*known.hints, *_owned(seen)))
    limit = _limit(seen, known) if seen.wait_frac >= WAITS else None
    others = [reason(seen, known) for reason in other_causes.ALL]
    if limit is None or limit.kind != "shards":
        others.append(_shards(seen, known))
    found = sorted((cause for cause in others if cause is not None), key=lambda cause: -cause.gain)
    if limit is None and not found:
        return (other_causes.model(seen),) if seen.wait_frac < WAITS else ()
    return (*([limit] if limit is not None else []), *found)


def first_sentence(found: Sequence[Cause]) -> str:
    """Return the sentence of the first cause; empty where the model is it, or there is none."""
    return found[0].sentence if found and found[0].kind != "model" else ""


def advice(seen: Measured | None, known: Evidence = NONE) -> Advice:
    """Return the best predicted numbers, with what may be promised of them."""
    if seen is None or seen.verdict == "too short":
        return Advice()
    return advise(seen, _most(seen, known), share=known.share, may_persist=known.may_persist, changes=known.changes)


def _limit(seen: Measured, known: Evidence) -> Cause | None:
    """The reason that is in the stage that limits."""
    stage = limiting(seen)
    if stage is None or stage.current == 0:
        return _in_the_loop(seen, known, stage)
    for reason in (_shards, _files, _order, serial, _cpu, _tried, _too_few):
        cause = reason(seen, known, stage)
        if cause is not None:
            return cause
    return None


def _in_the_loop(seen: Measured, known: Evidence, stage: Stage | None) -> Cause | None:
    owned = next((one for one in seen.workers if known.hint("order", one.name)), None)
    if stage is None and owned is not None:  # nobody can look into it, but it is the only one that can be meant
        return _shards(seen, known, owned) or _order(seen, known, owned)
    hint = known.hint("loader")
    if stage is None:
        before = [] if seen.workers else without_workers(seen, known)
        if before:
            return Cause("serial", before[0].stage, before[0].what, before[0].line)
        source = None if seen.workers else feeds(seen, known)
        if source is not None:
            return Cause("serial", source.stage, source.what)
        if hint is None or not hint.line or seen.workers:
            return None
        gain = promised(seen.period_s / max(seen.model_s + 0.001, seen.period_s - seen.model_s), known.share)
        sentence = f"{hint.what}; {_one_after_the_other(seen)}{MEANWHILE}"
        return if_it_pays(Cause("loader", "", sentence, hint.line, gain))
    alone = known.hint("serial", stage.name)
    if alone is not None:
        return Cause("serial", stage.name, alone.what)
    found = advise(seen, _most(seen, known), share=known.share, changes=known.changes)
    why = "" if found.gain >= LEAST_GAIN else "; from a worker it would not come sooner"
    if why and _is_crowded(seen):
        why = f"; from a worker it may not come sooner, for {_taken(seen)}"
    ahead, rate = known.hint("ahead", stage.name), seen.rates.get(stage.name)
    how = f"{_one_after_the_other(seen)}{why or MEANWHILE}"
    if ahead is not None:  # what the training waits is not what a batch takes, and a worker makes no more than that
        took = f", {moment(rate.service_s)} each," if rate is not None and rate.service_s else ""
        how = f"{ahead.what}{took} while the training takes {moment(seen.model_s)}{why or ALONGSIDE}"
    sentence = f"{stage.name!r} has no worker: {how}"
    if stage.when == "user" and not why:
        sentence += LEFT_ALONE.format("workers=2" if stage.knob.startswith(PYDATASET) else "num_workers")
    return if_it_pays(Cause("loader", stage.name, sentence, _lines(seen, known, found), found.gain))


def _one_after_the_other(seen: Measured) -> str:
    wait_s = seen.period_s - seen.model_s
    return f"the training loop makes each batch itself, {moment(wait_s)}, and then trains on it, {moment(seen.model_s)}"


def _files(seen: Measured, known: Evidence, stage: Stage) -> Cause | None:
    hint = known.hint("files", stage.name)
    if hint is None:
        return None
    gain = promised(step_s(seen) / step_s(seen, {stage.name: 2 * stage.current}), known.share)
    more = f", with twice as many expected {ratio(gain)}" if gain >= LEAST_GAIN else ""
    return Cause("files", stage.name, f"{hint.what}: more workers have nothing to read, more files would help{more}")


def _order(seen: Measured, known: Evidence, stage: Stage) -> Cause | None:
    hint = known.hint("order", stage.name)
    return None if hint is None else Cause("order", stage.name, hint.what)


def _shards(seen: Measured, known: Evidence, stage: Stage | None = None) -> Cause | None:
    """Workers without a shard are too many whatever the training waits for; uneven ones matter where it waits."""
    found = [h for h in known.hints if h.kind == "shards" and (stage is None or h.stage == stage.name)]
    if not found or (seen.wait_frac < WAITS and not found[0].line):
        return None
    return Cause("shards", found[0].stage, found[0].what, found[0].line)


def _cpu(seen: Measured, known: Evidence, stage: Stage) -> Cause | None:
    had = seen.cpus_had
    if seen.cpus <= 0.0 or seen.cpus_busy < CPUS_BUSY * had or not _knows_cpu(seen, stage):
        return None
    rate = seen.rates[stage.name]
    if rate.service_cpu_s < READS * rate.service_s and rate.service_s > LEAST_READ_S:
        return None
    busy = f"the input keeps {seen.cpus_busy:.1f} of {_cpus(seen)} busy"
    if round(seen.cpus_busy, 1) > seen.cpus:  # while the training waits, its CPU is taken too
        busy = f"the input keeps {seen.cpus_busy:.1f} CPUs busy, and can count on {_tenths(seen.cpus)}"
    twice = "twice as many CPUs"
    if had < CPUS_BUSY * seen.cpus:
        if rate.service_cpu_s < COMPUTES * rate.service_s:  # most of its time it waits, be it for a CPU or not
            return None
        others = "the CPUs are taken by the training and others"
        busy = f"{others}: the input has {seen.cpus_busy:.1f}, and {seen.cpus_idle:.1f} are idle"
        twice = f"{2 * had:.1f} of them for the input"  # not as many again as the machine has
    most = _most(seen, replace(known, tried={}))  # with more CPUs more workers may bring what they did not
    gain = advise(seen, most, cpus=2 * had, share=known.share, may_persist=False).gain
    if gain >= LEAST_GAIN:
        busy += f"; with {twice}, or {stage.name!r} half as dear, expected {ratio(gain)}"
    return Cause("cpu", stage.name, busy)


def _tried(seen: Measured, known: Evidence, stage: Stage) -> Cause | None:
    brought = known.tried.get(stage.name)
    if brought is None or brought >= BROUGHT_NOTHING:
        return None
    anew = ", while each epoch started them anew" if is_started_anew(stage) and seen.seam_s > 0.0 else ""
    nothing = f"brought nothing when tried ({ratio(brought)}){anew}"
    return Cause("serial", stage.name, f"more workers for {stage.name!r} {nothing}")


def _too_few(seen: Measured, known: Evidence, stage: Stage) -> Cause | None:
    """The stage could do more at a time: its items wait, or there are CPUs left for it."""
    rate = seen.rates.get(stage.name)
    if rate is None or not rate.service_s:
        return None
    found = advise(seen, _most(seen, known), share=known.share, may_persist=False, changes=known.changes)
    line = _lines(seen, known, found)
    # A loader's items are batches, also where some were made in vain, for an epoch was left.
    is_batch = abs(rate.items_per_batch - 1.0) < 0.1 or stage.knob.startswith((OWN_PROCESSES, PYDATASET))
    item = f"each {'batch' if is_batch else 'item'} of {stage.name!r}"
    if not _knows_cpu(seen, stage):
        many = count(stage.current, "worker")
        return Cause("workers", stage.name, f"{item} takes {moment(rate.service_s)} in {many}", line, found.gain)
    if rate.service_cpu_s < min(COMPUTES * rate.service_s, rate.service_s - LEAST_READ_S):
        waits_s = rate.service_s - rate.service_cpu_s
        is_unsure = _is_crowded(seen) and (rate.service_cpu_s >= READS * rate.service_s or waits_s <= LONG_WAIT_S)
        of_what = f"its reads or a CPU, for {_taken(seen)}," if is_unsure else "its reads"
        sentence = f"{item} waits {moment(waits_s)} for {of_what} and computes {moment(rate.service_cpu_s)}"
        # What the run showed counts more than what idle CPUs say: others may have had them for that moment alone.
        helped = known.first.get(stage.name) == stage.current and known.tried.get(stage.name, 0.0) >= LEAST_GAIN
        if found.gain >= LEAST_GAIN or helped:
            sentence += ": more workers overlap the waits"
            if not is_unsure:  # else CPUs may be what it waits for
                sentence += ", more CPUs do not help"
        elif stage.kind == "io" and stage.current >= stage.high:
            threads = stage.threads or stage.current
            pool = more_threads(stage.current, threads)
            if pool:  # no more calls are at work at once, however long the cycle
                sentence += f"; its {stage.current} calls share the {count(threads, 'thread')} TensorFlow has for all"
                return _by_threads(seen, known, stage, Cause("serial", stage.name, sentence, pool), threads)
            sentence += _longer_cycle(known, stage, "waits")
        return Cause("storage", stage.name, sentence, line, found.gain)
    free = max(0.0, seen.cpus_had - seen.cpus_busy)
    sentence = f"{item} computes for {moment(rate.service_cpu_s)} in {count(stage.current, 'worker')}"
    sentence += f", while {free:.1f} of {_cpus(seen)} are free"
    if stage.kind == "io" and stage.current >= stage.high:
        sentence += _longer_cycle(known, stage, "work")
    return Cause("workers", stage.name, sentence, line, found.gain)


def _longer_cycle(known: Evidence, stage: Stage, what: str) -> str:
    longer = "a longer one, or order='any'," if known.order == "same" else "a longer one"
    files = f"it reads {count(stage.current, 'file')} at once, as many as its cycle_length"
    return f"; {files}: {longer} overlaps more {what}, and changes the order of the samples"


def _by_threads(seen: Measured, known: Evidence, stage: Stage, cause: Cause, threads: int) -> Cause:
    """Promise what the rest of its calls spare a stage; nothing without an idle CPU, for what they do is not known."""
    now_s, rate, part = step_s(seen), seen.rates[stage.name], 1.0 - threads / stage.current
    spared_s = part * min(seen.period_s, rate.items_per_batch * rate.service_s / stage.current)
    gain = promised(now_s / (now_s - min(spared_s, seen.period_s - seen.model_s)), known.share)
    return replace(cause, line="") if _is_crowded(seen) or gain < LEAST_GAIN else replace(cause, gain=gain)


def _is_crowded(seen: Measured) -> bool:
    return seen.cpus_had - seen.cpus_busy < 1.0 - CPUS_BUSY


def _taken(seen: Measured) -> str:
    """What was measured of the CPUs on a machine that is crowded: a wait alone does not say for what it is."""
    if seen.cpus_idle is None or seen.cpus_idle >= 1.0 - CPUS_BUSY:
        return f"the input keeps {seen.cpus_busy:.1f} of {_cpus(seen)} busy"
    return f"{seen.cpus_idle:.1f} CPUs are idle"


def _cpus(seen: Measured) -> str:
    return f"{_tenths(seen.cpus)} CPU{'s' * (seen.cpus != 1.0)}"


def _tenths(cpus: float) -> str:
    """What a waiting training lends is an estimate: a tenth of a CPU says enough."""
    return amount(round(cpus, 1) if cpus > 1.0 else cpus)


def _owned(seen: Measured) -> list[Hint]:
    what = "its workers own the shards of an iterable dataset: another number of them changes the samples' order"
    # What the knob says besides is why nothing stands beside these workers.
    besides = [(stage, stage.knob.partition(FOLLOWS_WORKERS)) for stage in seen.workers]
    return [Hint(what + rest, kind="order", stage=stage.name) for stage, (_, found, rest) in besides if found]


def _most(seen: Measured, known: Evidence) -> dict[str, int]:
    """What no prediction may exceed: more would read nothing, change the order, or was tried in vain."""
    most = {}
    for stage in seen.workers:
        owned = FOLLOWS_WORKERS in stage.knob or known.hint("order", stage.name)
        if owned:
            most[stage.name] = max(1, stage.current)
        elif any(known.hint(kind, stage.name) for kind in ("serial", "files")) or any(
            reason(seen, known, stage) for reason in (serial, _tried)
        ):
            most[stage.name] = stage.current
    return most


def _knows_cpu(seen: Measured, stage: Stage) -> bool:
    """False where CPU seconds were not measured: a loader seen from outside gives the wall time in their place."""
    rate = seen.rates[stage.name]
    return rate.service_cpu_s > 0.0 and not (stage.when in ("epoch", "user") and rate.service_cpu_s == rate.service_s)


def _lines(seen: Measured, known: Evidence, found: Advice) -> str:
    return "\n".join(to_set(found.allocation, entries(seen, known), found.persistent)[0])
