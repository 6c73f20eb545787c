"""Pipelines of five stages for the policies."""

from __future__ import annotations

import math
from dataclasses import replace

from fakes import FakeLoop, FakeMachine, FakePipeline, Work, best_static

from intune_callbacks.config import TunerConfig
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Policy

FIVE = {"read": 0.14, "shuffle": 0.117, "decode": 0.423, "batch": 0.28, "copy": 0.04}


def five_stages(cpus: float, seconds: float = 0.5, cv: float = 0.9, **changes: float) -> FakePipeline:
    """Five stages, evenly split over `cpus`, with the shares of a recommendation pipeline."""
    each = max(1, int(cpus // 5))
    work = {
        name: Work(seconds * share, cv=cv if name == "decode" else 0.1, workers=each, window=each, high=256)
        for name, share in FIVE.items()
    }
    return FakePipeline({n: replace(w, **changes) for n, w in work.items()}, FakeMachine(cpus))  # type: ignore[arg-type]


def tuner_of(pipeline: FakePipeline, policy: Policy | None = None, **config: object) -> Tuner:
    machine = pipeline.machine
    config = {"policy": "model-jump"} | config
    return Tuner(pipeline, TunerConfig(**config), policy=policy, probe=machine, clock=machine.clock())  # type: ignore[arg-type]


def fraction_of_best(loop: FakeLoop) -> float:
    demand = 1.0 / loop.model_s if loop.model_s else math.inf
    return loop.throughput / min(best_static(loop.pipeline), demand)
