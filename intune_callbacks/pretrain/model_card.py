"""What a trained agent is worth on machines it has never seen, and the model card that says so."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from intune_callbacks.decide.network import Network
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import Floats, View
from intune_callbacks.pretrain.machines import sample
from intune_callbacks.pretrain.oracle import trace
from intune_callbacks.pretrain.scenarios import SCENARIOS, Controller, Run, first_reach, make, play

__all__ = ["FILES", "held_out", "paired", "population", "score", "text", "versions", "write"]

FILES = CARD, NUMBERS = ("card.md", "card.json")
PACKAGES = ("intune-callbacks", "torch", "numpy")
RESAMPLES = 10_000
"""Of the bootstrap. A choice: enough that the ends of an interval hardly depend on the draws."""
_WHAT = """\
A deep Q-network that moves workers between the stages of a running input pipeline: in each decision every stage gives
up or takes 5 or 1 workers or stays (InTune, section 4.2). Three layers with one set of weights for all stages; it is
used inside a shell that jumps to a fitted model's allocation first, lets the network improve on it, and then holds the
best allocation measured. The weights say nothing about a machine: rates, costs and memory are measured on the run."""
_LIMITS = (
    "Trained and compared on simulated machines only. The comparison draws from the population it was trained on, with "
    "other seeds: it shows that nothing was learned by heart, not that the population is like yours.",
    "The population has 2-6 worker stages and 8-256 CPUs; nothing was measured beyond.",
    "Fractions are of the best allocation a search on the noise-free model finds, repeated every 30-40 decisions. "
    "What a change costs is charged to the policies and not to the search.",
    "The network is not meant to be used without its shell and the guard, which keep it below the memory limit.",
)


class _EvenSplit:
    """The same number of workers for every stage, again after every resize; windows of twice the workers."""

    def act(self, view: View) -> tuple[Floats, None]:
        """Return the split; buffers stay as they are."""
        each = np.maximum(1.0, np.floor(view.cpus / np.maximum(view.workers.sum(1), 1)))
        return np.where(view.workers, each[:, None], view.value), None


def score(run: Run, best: Floats) -> tuple[dict[str, Any], Floats]:
    """Return one row of the results table, and every machine's mean fraction of the oracle, [N].

    Args:
        best: rate of the oracle, [decisions, N].
    """
    fraction = run.rate / best
    mean = fraction.mean(0)
    row = {
        "mean": float(mean.mean()),
        "median": float(np.median(mean)),
        "p5": float(np.percentile(mean, 5)),
        **{f"decisions_to_{percent}": _reached(fraction, percent / 100.0) for percent in (90, 95)},
        "oom_share": float(run.ran_out.mean()),
        "move_share": float(run.moved.mean()),
    }
    return row, mean


def paired(ours: Floats, theirs: Floats) -> dict[str, float]:
    """Return the mean difference of two policies' fractions of the oracle, [N], and its 95 % bootstrap interval."""
    difference = ours - theirs
    rows = np.random.default_rng(0).integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.percentile(difference[rows].mean(1), [2.5, 97.5])
    return {"mean": float(difference.mean()), "low": float(low), "high": float(high)}


def _compare(policies: Mapping[str, Controller], scenario: str, machines: int, seed: int) -> dict[str, Any]:
    """Return the results of policies on the same machines; the first is paired with every other.

    Args:
        policies: name -> policy that has not decided yet.
        scenario: one of `SCENARIOS`.
        seed: of the machines, their drift and their noise.
    """
    drawn, of = make(scenario, machines, seed), SCENARIOS[scenario]
    best, _ = trace(drawn, seed + 1, of.decisions, of.sizes, of.every)
    scored = {name: score(play(policy, drawn, scenario, seed + 1), best) for name, policy in policies.items()}
    first, *others = scored
    return {
        "scenario": scenario,
        "machines": machines,
        "seed": seed,
        "rows": [{"method": name, **row} for name, (row, _) in scored.items()],
        "paired": [{"against": name, **paired(scored[first][1], scored[name][1])} for name in others],
    }


def held_out(network: Network, machines: Mapping[str, int], seed: int) -> list[dict[str, Any]]:
    """Return the agent compared with the shell alone and with an even split, once per scenario.

    Args:
        machines: scenario -> how many; 0 leaves it out.
        seed: see `_compare`.
    """
    return [
        _compare({"DQN": Shell(network), "jump + hold": Shell(None), "even split": _EvenSplit()}, scenario, count, seed)
        for scenario, count in machines.items()
        if count
    ]


def population() -> dict[str, Any]:
    """Return what the training draws from, as shares counted over a sample."""
    m = sample(2048, np.random.default_rng(0))
    nominal = m.nominal_rate
    shares = {
        "several stages share one lock": (m.lock > 0.0).any(1),
        "a stage as serial as under a GIL (serial fraction .15 or more)": (m.mask & (m.serial >= 0.15)).any(1),
        "the disk limits the throughput": m.io_rate < 2.0 * nominal,
        "stages slow each other down": m.interference > 0.0,
        "the model may be slower than the pipeline": m.demand < 2.0 * nominal,
        "the prefetch buffer can be changed": m.has_buffer,
    }
    return {
        "cpus": {f"{size:.0f}": float((m.cpus == size).mean()) for size in np.unique(m.cpus)},
        "worker_stages": {f"{count:.0f}": float((m.stages == count).mean()) for count in np.unique(m.stages)},
        "shares": {name: float(rows.mean()) for name, rows in shares.items()},
    }


def versions() -> dict[str, str]:
    """Return the versions a training depends on; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(out: Path, numbers: Mapping[str, Any]) -> None:
    """Write the card as text and as numbers, see `text`."""
    (out / NUMBERS).write_text(json.dumps(numbers, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (out / CARD).write_text(text(numbers), encoding="utf-8")


def text(numbers: Mapping[str, Any]) -> str:
    """Return the card, in Markdown.

    Args:
        numbers: ``date``, ``versions``, ``weights``, ``training``, ``config`` and ``population`` as mappings from names
            to values, and ``results``, one `_compare` per scenario.
    """
    drawn = numbers["population"]
    shares = {
        "CPUs": _shares(drawn["cpus"]),
        "worker stages": _shares(drawn["worker_stages"]),
        **{name: f"{share:.0%} of the machines" for name, share in drawn["shares"].items()},
    }
    parts = [
        f"# Model card: the agent of intune-callbacks, {numbers['date']}",
        _WHAT,
        f"## Results on machines not seen in training\n\n{_results(numbers['results'])}",
        f"## Training\n\n{_list(numbers['training'])}\n\nThe machines, counted over a sample:\n\n{_list(shares)}",
        f"## Hyper-parameters\n\n{_list(numbers['config'])}",
        f"## Files and versions\n\n{_list({**numbers['weights'], **numbers['versions']})}",
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in _LIMITS),
    ]
    return "\n\n".join(parts) + "\n"


def _results(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return "Not compared."
    parts = []
    for result in results:
        decisions = SCENARIOS[result["scenario"]].decisions
        parts += [
            f"`{result['scenario']}`: {result['machines']} machines, {decisions} decisions, seed {result['seed']}; "
            "throughput as a fraction of the oracle's over the whole run, cost of changes included; "
            "p5 is the 5th percentile of the machines, decisions to 90 % and 95 % are medians.",
            _table(result["rows"]),
            f"Difference in the mean of {result['rows'][0]['method']}, machine by machine, 95 % bootstrap interval:",
            _table(result["paired"]),
        ]
    return "\n\n".join(parts)


def _reached(fraction: Floats, threshold: float) -> float | None:
    decisions = float(np.median(first_reach(fraction, threshold)))
    return decisions if np.isfinite(decisions) else None


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_cell(column, row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "never"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if column.startswith("decisions") else f"{value:.3f}"


def _list(values: Mapping[str, Any]) -> str:
    told = {name: f"{value:,}" if type(value) is int and value >= 10_000 else value for name, value in values.items()}
    return "\n".join(f"- {name}: {value}" for name, value in told.items())


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} ({share:.0%})" for name, share in shares.items())
