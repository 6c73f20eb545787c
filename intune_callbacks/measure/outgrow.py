"""What an input needs that has outgrown its machine: how many CPUs, what they would bring, what they would send."""

from __future__ import annotations

import math
from dataclasses import dataclass

from intune_callbacks.measure.measured import Measured
from intune_callbacks.measure.predict import LEAST_GAIN, promised
from intune_callbacks.words import amount, moment, size

__all__ = ["Outgrow", "outgrow"]

PACE = 0.9
"""Share of a CPU that an input keeps busy at the model's pace. A choice: with less to spare an irregular item is waited
for."""
MOST_TIMES = 8.0
"""As many times the CPUs at most. A choice: where the model takes so little of a step, its time is hardly measured."""
NETWORK_BYTES_PER_S = 1.2e9
"""What 10 gigabit Ethernet carries."""
SEND_S, SEND_S_PER_BYTE = 0.0002, 0.5e-9
"""CPU seconds the training process takes for a batch from another machine, and for each byte of it, by a prototype that
moved batches through Ray's object store."""
DEAR = 2.0
"""A batch is worth sending that takes so many times as much to make. A choice."""


@dataclass(frozen=True, slots=True)
class Outgrow:
    """What more CPUs than the machine has would bring; each rank for itself.

    Args:
        cpus: that the input can have here.
        cpus_needed: for the pace of the model, or `MOST_TIMES` as many as there are.
        batches_per_s: that are made here.
        model_batches_per_s: that the model could take; its time was measured while it waited.
        gain: the promised factor on the throughput.
        network_bytes_per_s: that would cross the network at that pace; None where the size of a batch is not known.
        sentence: all that in words.
    """

    cpus: float
    cpus_needed: int
    batches_per_s: float
    model_batches_per_s: float
    gain: float
    network_bytes_per_s: float | None
    sentence: str


def outgrow(seen: Measured, share: float = 1.0) -> Outgrow | None:
    """Return what more CPUs would bring to an input that CPUs limit; None where it is not worth a word.

    Args:
        seen: windows in which the CPUs were the limit.
        share: of the run's wall time the part that was measured; the rest stays as it is.
    """
    made, had = 1.0 / seen.period_s, seen.cpus_had
    if had <= 0.0 or seen.cpu_s <= 0.0 or seen.model_s <= 0.0:
        return None
    if seen.seam_s > seen.period_s:  # most is made while an epoch begins, where more CPUs end no batch sooner
        return None
    most = max(had + 1.0, MOST_TIMES * had)
    needed = math.ceil(min(seen.cpu_s / (PACE * seen.model_s), most))
    takes = 1.0 / seen.model_s
    then = min(takes, PACE * needed / seen.cpu_s)
    gain = promised(then / made, share)
    if gain < LEAST_GAIN or needed <= had:
        return None
    batch_bytes = _batch_bytes(seen)
    sends = None if batch_bytes is None else batch_bytes * then
    more = max(1, round(needed - had))
    sentence = (
        f"the model could take {amount(takes)} batches/s, the CPUs here make {amount(made)}: {more} more would help"
        f"{_elsewhere(seen, batch_bytes, sends)}"
    )
    return Outgrow(had, needed, made, takes, gain, sends, sentence)


def _batch_bytes(seen: Measured) -> float | None:
    rates = [seen.rates[stage.name] for stage in seen.workers if stage.name in seen.rates]
    return rates[-1].items_per_batch * rates[-1].item_bytes or None if rates else None


def _elsewhere(seen: Measured, batch_bytes: float | None, sends: float | None) -> str:
    """Say what it would be if they were those of other machines."""
    if batch_bytes is None or sends is None:
        return ""
    if seen.cpu_s < DEAR * (SEND_S + SEND_S_PER_BYTE * batch_bytes):
        return f", not those of other machines: to send what takes {moment(seen.cpu_s)} to make would take as long"
    if sends > NETWORK_BYTES_PER_S:
        carried = f"10 GbE carries {size(NETWORK_BYTES_PER_S)}/s"
        return f", those of other machines less: {size(sends)}/s would cross the network, {carried}"
    return f", also those of other machines, with {size(sends)}/s over the network"
