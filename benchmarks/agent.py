"""The agent against all baselines on simulated machines it has never seen, each as a fraction of the oracle's rate."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agent_methods import BASE, DQN, METHODS, OPTIONAL, Missing, build, named
from benchmarks.output import arguments, table, words, write
from intune_callbacks.config import nearest
from intune_callbacks.decide.view import Bools, Floats
from intune_callbacks.pretrain.machines import Machines
from intune_callbacks.pretrain.model_card import paired, score
from intune_callbacks.pretrain.oracle import trace
from intune_callbacks.pretrain.scenarios import SCENARIOS, Run, make, play

__all__ = ["Setting", "differences", "main", "oracle", "run", "situations"]

ORACLE_PARTS = 4
LONGEST_S = 7200.0
QUICK_MACHINES = 8
SLOW = ("model-jump", "hill climb", "even split")
"""One Python object per machine: these go first, or the others wait for them in the end."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared on: `seed` draws the machines, `seed` + 1 their drift and noise.

    Args:
        scenario: one of `SCENARIOS`.
        machines: how many.
        seed: of everything.
    """

    scenario: str
    machines: int
    seed: int

    def make(self) -> Machines:
        """Return the machines."""
        return make(self.scenario, self.machines, self.seed)


def oracle(setting: Setting, part: slice) -> Floats:
    """Return the oracle's rate on some of the machines, [decisions, machines of the part]."""
    of = SCENARIOS[setting.scenario]
    return trace(setting.make(), setting.seed + 1, of.decisions, of.sizes, of.every, part)[0]


def run(setting: Setting, names: Sequence[str], files: Mapping[str, Path], jobs: int) -> dict[str, Any]:
    """Compare methods on the same machines.

    Args:
        setting: machines and scenario.
        names: methods, of `METHODS`, `OPTIONAL` or `files`.
        files: row name -> weights of a network.
        jobs: processes side by side; 0 stays in this process.

    Returns:
        ``rows``, one per method; ``paired``, see `differences`; ``situations``, see `situations`.
    """
    cuts = np.linspace(0, setting.machines, min(ORACLE_PARTS, setting.machines) + 1).astype(int)
    parts = [slice(int(a), int(b)) for a, b in pairwise(cuts)]
    order = sorted(names, key=lambda name: name not in SLOW)
    tasks = [(oracle, (setting, part)) for part in parts] + [(_play, (setting, name, files)) for name in order]
    done = _all(tasks, jobs)
    best = np.concatenate(done[: len(parts)], 1)
    runs: dict[str, Run] = dict(zip(order, done[len(parts) :], strict=True))
    scored = {name: score(runs[name], best) for name in names}
    means = {name: mean for name, (_, mean) in scored.items()}
    return {
        "rows": [{"method": name, **row} for name, (row, _) in scored.items()],
        "paired": differences(means),
        "situations": situations(setting.make(), means),
    }


def differences(means: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Return the first DQN minus each other method, and each further DQN minus jump + hold.

    Args:
        means: method -> every machine's mean fraction of the oracle, [N].
    """
    ours = _dqns(means)
    if not ours:
        return []
    others = [name for name in means if name not in ours]
    pairs = [(ours[0], name) for name in others] + [(name, BASE) for name in ours[1:] if BASE in means]
    return [{"method": a, "against": b, **paired(means[a], means[b])} for a, b in pairs]


def situations(machines: Machines, means: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Return mean and 5th percentile of jump + hold and of the DQN by what is special about a machine.

    Args:
        machines: N machines.
        means: method -> every machine's mean fraction of the oracle, [N].
    """
    m = machines
    lock, gil = (np.asarray(of_stages.any(1)) for of_stages in (m.lock > 0.0, m.mask & (m.serial > 0.15)))
    disk, model = (bound < 2.0 * m.nominal_rate for bound in (m.io_rate, m.demand))
    groups: dict[str, Bools] = {
        "all": np.ones(len(m), bool),
        "shared lock": lock,
        "GIL-like": gil,
        "I/O limited": disk,
        "interference > .2": m.interference > 0.2,
        "model-bound": model,
        "128 CPUs or more": m.cpus >= 128,
        "benign": ~lock & ~gil & ~disk & (m.interference < 0.05),
    }
    return [
        {
            "situation": situation,
            "machines": int(rows.sum()),
            "method": name,
            "mean": float(means[name][rows].mean()),
            "p5": float(np.percentile(means[name][rows], 5)),
        }
        for situation, rows in groups.items()
        for name in [name for name in means if name == BASE or name in _dqns(means)]
        if rows.any()
    ]


def _dqns(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name == DQN or name.startswith(f"{DQN} seed ")]


def _play(setting: Setting, name: str, files: Mapping[str, Path]) -> Run:
    begin = time.perf_counter()
    result = play(build(name, files), setting.make(), setting.scenario, setting.seed + 1)
    print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return result


def _all(tasks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], jobs: int) -> list[Any]:
    """Run the tasks, in fresh processes if `jobs`, and return their results in order."""
    if not jobs:
        return [task(*given) for task, given in tasks]
    # Every process has a core for itself: a second thread in it would only take another's.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        waiting = [pool.apply_async(task, given) for task, given in tasks]
        return [result.get(LONGEST_S) for result in waiting]


def _available(names: Sequence[str], files: Mapping[str, Path]) -> list[str]:
    found = []
    for name in names:
        try:
            build(name, files)
        except Missing as missing:
            print(f"{name} is left out: {missing}", flush=True)
        else:
            found.append(name)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("agent", __doc__.split("\n")[0])
    parser.add_argument("--machines", type=int, default=256, help="simulated machines (default 256)")
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="static", help="default static")
    parser.add_argument(
        "--methods", type=words, help=f"rows, separated by commas; of {', '.join((*METHODS, *OPTIONAL))}"
    )
    parser.add_argument(
        "--weights", metavar="FILE", type=Path, action="append", default=[], help="a network's .npz; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default 2)")
    given = parser.parse_args(argv)
    known = (*METHODS, *OPTIONAL)
    for name in given.methods or []:
        if name not in known:
            parser.error(f"--methods: {name!r} is none of {', '.join(known)}{nearest(name, known)}")
    if given.machines < 1:
        parser.error(f"--machines {given.machines}: expected 1 or more")
    files = named(given.weights)
    chosen = given.methods or known
    rows = [row for name in known if name in chosen for row in (list(files) if name == DQN and files else [name])]
    setting = Setting(given.scenario, QUICK_MACHINES if given.quick else given.machines, given.seed)
    begin = time.perf_counter()
    result = run(setting, _available(rows, files), files, 0 if given.quick else given.jobs)
    shown = [{k: "never" if v is None else v for k, v in row.items()} for row in result["rows"]]
    written = write("agent", shown, given.seed, None)
    for part in ("paired", "situations"):
        print(f"\n{part}\n{table(result[part])}")
    written |= {"scenario": setting.scenario, "machines": setting.machines, **result}
    written["wall_s"] = round(time.perf_counter() - begin, 1)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(written, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return written


if __name__ == "__main__":
    main()
