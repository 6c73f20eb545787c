"""Whose word counts at a decision: the guard's alarm, the net's way back, then the policy as far as both let it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from intune_callbacks.guard.guard import Guard, Ruling
from intune_callbacks.guard.net import Net, Return
from intune_callbacks.pipelines.base import clamp
from intune_callbacks.types import Allocation, Observation, Policy, Proposal, Stage

__all__ = ["Resolution", "capped", "changes", "movable", "resolve"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """What is to be done, and on whose word.

    Args:
        proposed: the changes that were wanted.
        granted: what is left of them.
        reason: why, in one sentence.
        vetoes: what was refused, and why.
        settled: True while the policy holds what it found.
        holds: True where nothing more is to come: it is settled, or what it wants may not be tried.
        alarm: True where the guard asked for it.
        restored: True where what an alarm took is given back.
        back: where the net goes back to, if it does.
    """

    proposed: Allocation = field(default_factory=dict)
    granted: Allocation = field(default_factory=dict)
    reason: str = ""
    vetoes: tuple[str, ...] = ()
    settled: bool = False
    holds: bool = False
    alarm: bool = False
    restored: bool = False
    back: Return | None = None


def resolve(seen: Observation, policy: Policy, guard: Guard, net: Net, *, tune: bool) -> Resolution:
    """Return what is to be done after a window.

    Args:
        tune: False where nothing is going to be changed.
    """
    now = seen.allocation
    if (alarm := guard.alarm(seen)) is not None:
        return _alarmed(alarm, now)
    if tune and (back := net.back()) is not None:
        ruling = guard.check(back.allocation, seen, has_run=True)
        taken_back = getattr(policy, "taken_back", None)  # one of the user's own need not want to know
        if taken_back is not None:
            taken_back(back.failed, back.ratio)
        granted = changes(ruling.allocation, now)
        return Resolution(changes(back.allocation, now), granted, back.reason, ruling.vetoes, back=back)
    if tune and (alarm := guard.again(seen, net.permit.own)) is not None:
        return _alarmed(alarm, now)
    if tune and (restored := guard.restored(seen, net.permit.own)) is not None:
        changed = changes(restored.allocation, now)
        return Resolution(changed, changed, restored.vetoes[0], restored=True)
    if short := net.permit.why_too_short(seen):
        # The run may turn out to be long enough, and what was measured then need not be measured again.
        if (measured := getattr(policy, "measured", None)) is not None:  # one of the user's own need not want to learn
            measured(replace(seen, stages=movable(seen.stages), may_change=False))
        return Resolution(reason=f"only measuring: {short}")
    proposal = policy.decide(replace(seen, stages=movable(seen.stages)))
    if (again := net.again()) is not None:
        proposal = Proposal(*again)
    settled = proposal.settled
    proposed = changes(clamp(proposal.allocation, movable(seen.stages)), now)
    permitted, why = net.permit.grant(proposed, seen)
    vetoes = (why,) if why else ()
    if not permitted:
        return Resolution(proposed, {}, proposal.reason, vetoes, settled, holds=settled or bool(proposed))
    ruling = guard.check(permitted, seen)
    granted = changes(ruling.allocation, now)
    return Resolution(proposed, granted, proposal.reason, (*vetoes, *ruling.vetoes), settled, holds=settled)


def movable(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return the stages with what is the user's to change held where it is."""
    return tuple(replace(s, low=s.current, high=s.current) if s.when == "user" else s for s in stages)


def capped(stages: tuple[Stage, ...], most: int | None) -> tuple[Stage, ...]:
    """Return the stages with at most so many workers each, but not fewer than a stage needs; None is no limit."""
    if most is None:
        return stages
    return tuple(replace(s, high=max(s.low, min(s.high, most))) if s.unit == "workers" else s for s in stages)


def changes(wanted: Mapping[str, int], now: Mapping[str, int]) -> Allocation:
    """Return the part of `wanted` that is not in force `now`."""
    return {name: value for name, value in wanted.items() if now.get(name) != value}


def _alarmed(alarm: Ruling, now: Allocation) -> Resolution:
    changed = changes(alarm.allocation, now)
    return Resolution(changed, changed, alarm.vetoes[0], alarm.vetoes, alarm=True)
