"""TunerConfig: validated once, all problems reported together; environment > argument > recipe file > default."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from intune_callbacks.errors import ConfigError

__all__ = [
    "MODES",
    "POLICIES",
    "TunerConfig",
    "choice_problem",
    "is_address",
    "nearest",
    "number_problem",
    "resolve_mode",
    "sourced",
]

MODES = ("off", "observe", "advise", "tune")
POLICIES = ("dqn", "model-jump", "even")
WORKER_KINDS = ("process", "thread", "ray")
ORDERS = ("same", "any")
MODE_VARIABLE = "INTUNE_MODE"


@dataclass(frozen=True, slots=True)
class TunerConfig:
    """How the tuner behaves; every field has a safe default.

    Args:
        mode: ``off`` (no trace), ``observe`` (measure and report), ``advise`` (also say what it would do), ``tune``.
        policy: one of `POLICIES`, or the address of an agent service, ``http://host:port``.
        decide_every_s: shortest time between two decisions, seconds.
        decide_every_batches: fewest batches between two decisions.
        warmup_batches: first batches that are not judged (imports, caches, kernel selection).
        memory_soft_limit: share of the memory limit the guard lets the pipeline plan with, 0..1.
        cpus: CPUs the pipeline may use; None reads affinity and cgroup quota at each decision.
        trainer_cpus: CPUs left to the training loop itself.
        max_workers: upper limit of workers per stage; None lets the guard decide.
        workers_kind: what the workers of a map-style DataLoader or a Keras PyDataset are: ``process``, ``thread`` for
            a dataset that is thread-safe and releases the GIL, or None for what the user's has; with
            ``num_workers=0``, of a PyDataset ``workers=1``, none. Naming a kind allows workers there, too. ``ray``, for
            such a DataLoader, is processes here first, and then workers on the machines of a Ray cluster.
        order: ``same`` delivers what the loader would, in that order; ``any`` allows another order of the same samples,
            each once an epoch, where that is faster.
        fine_tune: let the policy ``dqn`` go on learning from this run, in a thread of its own; needs PyTorch.
        ray_address: of the head of that cluster, ``host:port``; None is what ``RAY_ADDRESS`` says. None is started.

    Raises:
        ConfigError: with all problems at once.
    """

    mode: str = "tune"
    policy: str = "dqn"
    decide_every_s: float = 1.0
    decide_every_batches: int = 10
    warmup_batches: int = 20
    memory_soft_limit: float = 0.90
    cpus: float | None = None
    trainer_cpus: float = 1.0
    max_workers: int | None = None
    workers_kind: str | None = None
    order: str = "same"
    fine_tune: bool = False
    ray_address: str | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> Iterable[str]:
        yield from choice_problem("mode", self.mode, MODES)
        yield from _policy_problem(self.policy)
        if self.workers_kind is not None:
            yield from choice_problem("workers_kind", self.workers_kind, WORKER_KINDS)
        yield from self._cluster_problem()
        yield from choice_problem("order", self.order, ORDERS)
        yield from number_problem("decide_every_s", self.decide_every_s, 0.0, 3600.0)
        yield from number_problem("decide_every_batches", self.decide_every_batches, 1, 1_000_000)
        yield from number_problem("warmup_batches", self.warmup_batches, 0, 1_000_000)
        yield from number_problem("memory_soft_limit", self.memory_soft_limit, 0.05, 0.99)
        yield from number_problem("trainer_cpus", self.trainer_cpus, 0.0, 4096.0)
        if not isinstance(self.fine_tune, bool):
            yield f"fine_tune={self.fine_tune!r}: expected True or False"
        elif self.fine_tune and self.policy != "dqn":
            yield f"fine_tune=True: policy={self.policy!r} does not learn; expected policy='dqn' or fine_tune=False"
        if self.cpus is not None:
            yield from number_problem("cpus", self.cpus, 0.1, 4096.0)
        if self.max_workers is not None:
            yield from number_problem("max_workers", self.max_workers, 1, 4096)

    @property
    def cluster_address(self) -> str:
        """Of the Ray cluster whose machines may have workers, empty where that is not wanted."""
        return (self.ray_address or os.environ.get("RAY_ADDRESS", "")) if self.workers_kind == "ray" else ""

    def _cluster_problem(self) -> Iterable[str]:
        expected = "expected the address of a cluster's head, such as ray_address='10.0.0.1:6379'"
        if self.workers_kind != "ray":
            if self.ray_address is not None:
                yield f"ray_address={self.ray_address!r}: expected workers_kind='ray' beside it, or None"
        elif not self.cluster_address:
            yield f"workers_kind='ray': {expected} or the variable RAY_ADDRESS; InTune starts none"
        elif not _is_head(self.cluster_address):
            source = "RAY_ADDRESS" if self.ray_address is None else "ray_address"
            yield f"{source}={self.cluster_address!r}: {expected}; not auto, not that of a client (ray://) or dashboard"


def _is_head(address: object) -> bool:
    host, _, port = str(address).rpartition(":")
    return isinstance(address, str) and bool(host) and "/" not in host and port.isdigit() and 0 < int(port) < 65536


def is_address(policy: object) -> bool:
    """Return whether a policy is the address of an agent service."""
    return isinstance(policy, str) and policy.startswith(("http://", "https://"))


def _policy_problem(policy: object) -> Iterable[str]:
    if not is_address(policy):
        yield from choice_problem("policy", policy, POLICIES)
        return
    expected = f"policy={policy!r}: expected the address of an agent service, http://host:port or https://host:port"
    try:
        at = urlsplit(str(policy))
        if not at.hostname or at.port == 0 or at.path not in ("", "/") or at.query or at.fragment or "@" in at.netloc:
            yield expected
    except ValueError as error:
        yield f"{expected}; {error}"


def choice_problem(name: str, given: object, allowed: tuple[str, ...]) -> Iterable[str]:
    """Yield the sentence that says `given` is not one of `allowed`, with the nearest valid value."""
    if given not in allowed:
        yield f"{name}={given!r}: expected one of {', '.join(allowed)}{nearest(str(given), allowed)}"


def number_problem(name: str, given: object, low: float, high: float) -> Iterable[str]:
    """Yield the sentence that says `given` is not a number in low..high."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        yield f"{name}={given!r}: expected a number from {low} to {high}, got {type(given).__name__}"
    elif not low <= given <= high:
        yield f"{name}={given!r}: expected a number from {low} to {high}"


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest allowed word, or an empty string."""
    close = difflib.get_close_matches(given.lower(), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def resolve_mode(argument: str | None) -> tuple[str, str]:
    """Return the mode and where it came from.

    Args:
        argument: the mode given in code or by a recipe, None if not given.

    Returns:
        ``(mode, source)`` with source ``INTUNE_MODE``, ``argument`` or ``default``.

    Raises:
        ConfigError: for a mode that does not exist.
    """
    mode, source = ("tune", "default") if argument is None else (argument, "argument")
    if given := os.environ.get(MODE_VARIABLE):
        mode, source = given, MODE_VARIABLE
    problems = list(choice_problem(MODE_VARIABLE if given else "mode", mode, MODES))
    if problems:
        raise ConfigError(problems)
    return mode, source


def sourced(config: TunerConfig, mode_source: str, sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return each value of the tuner and where it came from.

    Args:
        config: the values in force.
        mode_source: where the mode came from.
        sources: name -> where a value was given; what is not in it is a ``default``.

    Returns:
        Name -> ``{"value": ..., "source": ...}`` with source ``default``, ``argument``, ``recipe``, ``command line``
        or ``INTUNE_MODE``.
    """
    known = {**sources, "mode": mode_source}
    return {
        field.name: {"value": getattr(config, field.name), "source": known.get(field.name, "default")}
        for field in fields(config)
    }
