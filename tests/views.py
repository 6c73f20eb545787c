"""Views written by hand, networks that always want the same, and machines without noise."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT
from intune_callbacks.decide.network import Network, Values
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.machines import Machines, sample
from intune_callbacks.pretrain.oracle import best

SLOWEST = OF_SLOT.index("ln(capacity / capacity of the slowest slot) / 2, 0..1.5")
OF_ROWS = ("rate", "demand", "cpus", "budget", "memory", "noise", "alive")
# Seconds: constant, per worker more, per pair of workers.
SCALING = {
    "linear": (0.1, 0.0, 0.0),
    "serial": (0.1, 0.004, 0.0),
    "lock": (0.1, 0.1, 0.0),
    "quarrelling": (0.1, 0.001, 0.0002),
}


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


def service_s(scaling: tuple[float, float, float], n: Any) -> Any:
    a, b, d = scaling
    return a + b * (n - 1.0) + d * n * (n - 1.0)


def wants(move: int, *, slowest: bool = False) -> Values:
    """Return a network that wants one move above all, in every slot or in the slowest one only."""

    def values(slots: Any, pipeline: Any, mask: Any) -> Any:
        q = np.zeros((*mask.shape, 5), np.float32)
        q[..., move] = np.where((slots[..., SLOWEST] < 1e-6) & (slots[..., -1] != 0.0), 9.0, 0.0) if slowest else 9.0
        return q

    return values


class Seen:
    """Runs a shell on machines and keeps what happened, one row per decision."""

    def __init__(self, shell: Shell, machines: Machines, decisions: int, sizes: Any = None, seed: int = 0) -> None:
        self.shell, self.env = shell, Env(machines, np.random.default_rng(seed), sizes)
        self.views, self.values, self.windows, self.phases, self.rates = [], [], [], [], []
        for _ in range(decisions):
            value, window = shell.act(self.env.view)
            self.views.append(self.env.view)
            self.values.append(value)
            self.windows.append(window)
            self.phases.append(shell.phase.copy())
            self.env.step(value, window)
            self.rates.append(self.env.steady_rate.copy())

    def moved(self, row: int = 0) -> list[bool]:
        pairs = zip(self.values, self.views, strict=True)
        return [bool((value[row] != view.value[row]).any()) for value, view in pairs]

    def best(self) -> Any:
        """Batches per second of the best allocation for the machine as it is now."""
        return best(self.env.machines, self.env.work_s, self.env.base, self.env.cpus)[0]


def order(phases: list[Any]) -> list[int]:
    """Return the phases of one machine, each stretch once."""
    names = [int(phase[0]) for phase in phases]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
