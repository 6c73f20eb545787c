"""The ways to decide how parallel each stage of an emulated pipeline is; knows no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.emulated import VirtualMachine
from benchmarks.live_loop import Case
from benchmarks.policies.hill_climb import HillClimb
from intune_callbacks.config import TunerConfig
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Pipeline

__all__ = ["System", "all_cpus", "even_start", "linear_program", "one_each", "tuner_for"]

Split = Callable[[Case], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class System:
    """One way to decide how parallel each stage is.

    Args:
        name: in the rows.
        ordered: elements leave in the order of the data.
        split: static parallelism by stage; None leaves it to AUTOTUNE.
        policy: of our tuner, which starts from `split`, or ``hill-climb``; None runs without it.
        algorithm: of AUTOTUNE, by its name in ``tf.data.experimental.AutotuneAlgorithm``.
        relaunched: built anew after each change of the machine, with what `split` or AUTOTUNE makes of that one.
    """

    name: str
    ordered: bool = True
    split: Split | None = None
    policy: str | None = None
    algorithm: str = "DEFAULT"
    relaunched: bool = False


def one_each(case: Case) -> dict[str, int]:
    """Return one worker for every stage: what the paper calls Unoptimized."""
    return dict.fromkeys(case.shares, 1)


def even_start(case: Case) -> dict[str, int]:
    """Return the workers each stage starts with: the CPUs divided evenly."""
    each, rest = divmod(case.cpus, len(case.shares))
    return {stage: max(1, each + (i < rest)) for i, stage in enumerate(case.shares)}


def linear_program(case: Case) -> dict[str, int]:
    """Return Plumber's parallelism: the linear program's shares rounded up (Kuchnik et al., MLSys 2022, section 4.2).

    Without sequential stages its solution is in closed form: CPUs in proportion to the cost.
    """
    whole = sum(case.shares.values())
    return {stage: max(1, math.ceil(case.cpus * share / whole - 1e-9)) for stage, share in case.shares.items()}


def all_cpus(case: Case) -> dict[str, int]:
    """Return as many workers as there are CPUs, in every stage."""
    return dict.fromkeys(case.shares, case.cpus)


def tuner_for(system: System, pipeline: Pipeline, machine: VirtualMachine) -> Tuner | None:
    """Return the tuner of a system, None if it has none.

    Args:
        system: whose.
        pipeline: what is tuned.
        machine: what it runs on.
    """
    if system.policy is None:
        return None
    climber = HillClimb() if system.policy == "hill-climb" else None
    config = TunerConfig(policy=system.policy) if climber is None else TunerConfig()
    return Tuner(pipeline, config, policy=climber, probe=machine.probe(), clock=machine.clock)
