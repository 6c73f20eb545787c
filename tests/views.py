"""Views written by hand, networks that always want the same, and machines without noise."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT
from intune_callbacks.decide.network import Network
from intune_callbacks.decide.view import View
from intune_callbacks.pretrain.machines import Machines, sample

OF_ROWS = ("rate", "demand", "cpus", "budget", "memory", "noise", "alive")


def a_view(value: Any, work_s: Any = 0.1, cpus: float = 16.0, **given: Any) -> View:
    """Return pipelines whose stages all hold workers; any field can be given, as a number or an array.

    Args:
        value: units now, [N, S].
        work_s: worker seconds for one batch.
    """
    value = np.atleast_2d(np.array(value, float))
    work_s = np.broadcast_to(np.asarray(work_s, float), value.shape)
    values: dict[str, Any] = {
        "mask": True,
        "is_buffer": False,
        "value": value,
        "low": 1.0,
        "high": 512.0,
        "weight": 1.0,
        "work_s": work_s,
        "cpu_share": 1.0,
        "cv": 0.0,
        "work_noise": 0.0,
        "busy": 1.0,
        "fill": 0.0,
        "window": 2.0 * value,
        "unit_memory": 0.0,
        "item_memory": 0.0,
        "rate": (value / work_s).min(1),
        "demand": 1e6,
        "cpus": cpus,
        "budget": given.get("cpus", cpus),
        "memory": 0.3,
        "noise": 0.05,
        "alive": True,
    } | given
    truths = ("mask", "is_buffer", "alive")
    shapes = {name: value.shape[:1] if name in OF_ROWS else value.shape for name in values}
    return View(
        **{
            name: np.broadcast_to(np.asarray(of, bool if name in truths else float), shapes[name]).copy()
            for name, of in values.items()
        }
    )


def row_of(view: View, row: int, slots: Any = slice(None)) -> View:
    """Return one pipeline of a view, or some of its slots."""
    parts = {}
    for field in fields(View):
        part = getattr(view, field.name)[row : row + 1]
        parts[field.name] = part if field.name in OF_ROWS else part[:, slots]
    return View(**parts)


def a_network(seed: int = 0, size: float = 0.3, hidden: int = 16) -> Network:
    """Return a network whose wishes are random, and large enough for moves to be made."""
    rng, inputs = np.random.default_rng(seed), len(OF_SLOT) + len(OF_PIPELINE)
    shapes = {
        "w1": (inputs, hidden),
        "b1": (hidden,),
        "w2": (3 * hidden, hidden),
        "b2": (hidden,),
        "w3": (hidden, 5),
        "b3": (5,),
    }
    return Network.of({name: size * rng.normal(size=shape) for name, shape in shapes.items()})


def quiet(machines: Machines, **given: float) -> Machines:
    """Return the machines without noise, drift and leak; other fields can be set."""
    still = ("leak", "rate_noise", "stage_noise", "settle_noise", "drift", "jump", "resize_cost")
    wanted = dict.fromkeys(still, 0.0) | given
    return replace(machines, **{n: np.full(getattr(machines, n).shape, of) for n, of in wanted.items()})


def roomy(machines: Machines) -> Machines:
    """Return the machines with so much memory that it never matters."""
    names = ("worker_memory", "item_memory", "batch_memory")
    scaled = {name: 0.02 * getattr(machines, name) for name in names}
    return replace(machines, base=np.full(len(machines), 0.3), **scaled)


def plain(count: int, seed: int = 0, **given: Any) -> Machines:
    """Return machines where nothing is serial, shared, limited, drifting or noisy, with memory to spare."""
    return roomy(quiet(sample(count, np.random.default_rng(seed), plain=True, **given)))
