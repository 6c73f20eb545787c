"""What slows a training down beside the stage that limits it: starts of epochs, buffers, memory, the order."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

from intune_callbacks.measure.advice import PERSISTENT, to_set
from intune_callbacks.measure.evidence import Cause, Evidence
from intune_callbacks.measure.measured import Measured
from intune_callbacks.measure.predict import LEAST_GAIN, WAITS, is_started_anew, promised, step_s
from intune_callbacks.types import Hint
from intune_callbacks.words import count, moment, percent

__all__ = ["ALL", "entries", "if_it_pays", "model"]

LEAST_S = 1e-6
"""No batch is sooner there."""
MUCH_WAIT = 0.2
"""From this share of data wait on a run is input-bound, see `measure.verdict`: a shuffle buffer is filled meanwhile."""
MOSTLY = 0.5
"""Share of the start of an epoch from which on it is called that of its workers. A choice: the larger part."""
LIMIT_OF_MEMORY = ("soft limit", "memory alarm")
"""Words of the guard's vetoes that are about memory."""


def entries(seen: Measured, known: Evidence) -> list[dict[str, Any]]:
    """Return the stages as the report has them."""
    return [asdict(stage) | {"first": known.first.get(stage.name, stage.current)} for stage in seen.stages]


def if_it_pays(cause: Cause) -> Cause:
    """Return a cause with its line and gain only if it promises enough."""
    return cause if cause.gain >= LEAST_GAIN else replace(cause, line="", gain=1.0)


def startup(seen: Measured, known: Evidence) -> Cause | None:
    """Workers started anew in each epoch."""
    started = [stage for stage in seen.workers if is_started_anew(stage)]
    changing = known.hint("changing")
    if not started or not seen.seam_s or not (known.may_persist or changing):
        return None
    persistent = tuple(stage.name for stage in started)
    gain = promised(step_s(seen) / step_s(seen, persistent=persistent), known.share)
    if gain < LEAST_GAIN:
        return None
    each_s = _seam_of_an_epoch_s(seen, known)
    workers = sum(stage.current for stage in started)
    frac = percent(seen.seam_s / (seen.period_s + seen.seam_s))
    begins = f"each epoch begins with {moment(each_s)} of" if each_s else "the starts of epochs go by with"
    keeps = changing.what if changing else f"{PERSISTENT} keeps them, where nothing changes the dataset between epochs"
    starting = f"starting {count(workers, 'worker')} anew"
    sentence = f"{begins} {starting}, {frac} of the time: {keeps}"
    known_s = sum(stage.startup_s * stage.current for stage in started)
    if known_s < MOSTLY * each_s:  # the first batch has to be made in any case
        begins = f"each epoch begins with {moment(each_s)} without a batch, {frac} of the time"
        sentence = f"{begins}, {moment(known_s)} of them at least for {starting}: {keeps}"
    if not known.may_persist:
        return Cause("startup", persistent[0], sentence)
    return Cause("startup", persistent[0], sentence, "\n".join(to_set({}, entries(seen, known), persistent)[0]), gain)


def left(seen: Measured, known: Evidence) -> Cause | None:
    """Epochs that are left before their end, and so begin more often than they would have to."""
    hint, step_with_seam_s = known.hint("left"), seen.period_s + seen.seam_s
    if hint is None or seen.seam_s < WAITS * step_with_seam_s:
        return None
    begins = f"starts of epochs take {percent(seen.seam_s / step_with_seam_s)} of the time"
    return Cause("startup", hint.stage, f"{begins}: {hint.what}")


def _seam_of_an_epoch_s(seen: Measured, known: Evidence) -> float:
    if seen.epoch_batches:
        return seen.seam_s * seen.epoch_batches
    seam_s, epochs = known.whole.get("seam_s"), known.whole.get("epochs")
    return seam_s / epochs if seam_s and epochs else 0.0


def shuffle(seen: Measured, known: Evidence) -> Cause | None:
    """A shuffle buffer that has to be filled before the first batch."""
    hint = next((h for h in known.hints if h.kind == "shuffle"), None)
    if hint is None:
        return None
    first_s = known.whole.get("first_batch_s") or 0.0
    # While a run waits for data, what fills the buffer had to be read in any case.
    less_s = _fewer(hint) * seen.seam_s if seen.wait_frac < MUCH_WAIT else 0.0
    gain = (seen.seam_s + seen.period_s) / (seen.seam_s - less_s + max(seen.period_s, less_s))
    gain = promised(gain, known.share)
    late = first_s > WAITS * (known.whole.get("wall_s") or float("inf"))
    if gain < LEAST_GAIN and not late:
        return None
    sentence = f"{hint.what}: the first batch came after {moment(first_s)}" if first_s else hint.what
    return if_it_pays(Cause("shuffle", hint.stage, sentence, hint.line, gain))


def _fewer(hint: Hint) -> float:
    """Of what is read before the first batch, the part that a smaller buffer leaves for later."""
    held, then = ([int(number) for number in re.findall(r"\d+", text)] for text in (hint.what, hint.line))
    return max(0.0, 1.0 - then[0] / min(held)) if held and then else 1.0


def prefetch(seen: Measured, known: Evidence) -> Cause | None:
    """Without a buffer before the model, input and model take turns."""
    hint = known.hint("prefetch")
    has_one = any(stage.kind == "memory" and stage.window_of is None for stage in seen.stages)
    if hint is None or not hint.line or has_one or not seen.workers or seen.wait_frac < WAITS:
        return None
    gain = promised(seen.period_s / max(seen.model_s, seen.period_s - seen.model_s), known.share)
    return Cause("prefetch", hint.stage, hint.what, hint.line, gain) if gain >= LEAST_GAIN else None


def memory(seen: Measured, known: Evidence) -> Cause | None:
    """The guard's limit on memory."""
    veto = next((v for v in known.vetoes if any(word in v for word in LIMIT_OF_MEMORY)), None)
    if veto is None or seen.wait_frac < WAITS:
        return None
    return Cause("memory", "", f"memory holds the input back: {veto}")


def held(seen: Measured, known: Evidence) -> Cause | None:
    """What is finished waits for one that is slower, because the order is kept."""
    name, held = max(((n, rate.held_frac) for n, rate in seen.rates.items()), key=lambda one: one[1], default=("", 0.0))
    gain = promised(seen.period_s / max(seen.model_s, seen.period_s * (1.0 - held), LEAST_S), known.share)
    if gain < LEAST_GAIN or known.order != "same":  # where it stays all the same, it has to
        return None
    sentence = f"{percent(held)} of the time finished batches of {name!r} wait for a slower one before them"
    return Cause("held", name, f"{sentence}: order='any' would not keep the order", gain=gain)


def uneven(seen: Measured, known: Evidence) -> Cause | None:
    """Waits that most windows know nothing of: no number of workers was seen to be too small."""
    if not seen.unevenly or seen.wait_frac >= WAITS:
        return None
    why = "caches that are cold at first, storage that stalls, or single samples that are far larger"
    return Cause("uneven", "", f"most batches are there in time, and some come far later: {why}")


def model(seen: Measured) -> Cause:
    """The model itself, where the training does not wait for data."""
    waits = f"the training waits {percent(seen.wait_frac)} of the time for data"
    if seen.seam_s > WAITS * (seen.period_s + seen.seam_s):  # the wait elsewhere on the card holds these too
        waits = f"but for the starts of epochs {waits}"
    return Cause("model", "", f"{waits}, and computes {moment(seen.model_s)} for each batch: the model is the limit")


ALL = (memory, startup, left, shuffle, prefetch, held, uneven)
