"""What this machine and the installed frameworks allow, and what is missing: the text of `intune doctor`."""

from __future__ import annotations

import multiprocessing
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from intune_callbacks.errors import MissingPackage, install_line, lower_bounds
from intune_callbacks.measure.cgroups import machine_memory
from intune_callbacks.measure.resources import MachineProbe
from intune_callbacks.pipelines.base import cpus_allowed
from intune_callbacks.pipelines.tf import build as tf_build
from intune_callbacks.types import Probe
from intune_callbacks.words import COLUMNS, percent

__all__ = ["Finding", "examine", "text"]

GB = 1e9
CLUSTER_S = 20.0  # as long as it is waited for; Ray takes some seconds to connect
LITTLE_SHM_BYTES = 1 << 30
"""Below this a stock DataLoader may run out of it. A choice: Docker gives 64 MB where nobody asked for more."""
HOLDS = {
    "fork": "a worker computes at once, and copies of the training process's memory what either of the two writes to",
    "forkserver": "a worker imports your modules first, and holds a dataset of its own",
    "spawn": "a worker imports your modules first, and holds a dataset of its own",
}
STATES = ("ok", "limited", "missing")

# Packages of which one is enough, what they bring, and the extra that installs them.
PACKAGES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("torch",), "DataLoader: workers and window change while it runs (num_workers >= 1)", "lightning"),
    (("torchdata",), "torchdata.nodes: workers, windows and depth change while it runs", "lightning"),
    (("pytorch-lightning", "lightning"), "InTuneCallback for a Lightning Trainer", "lightning"),
    (("keras",), "InTuneCallback for model.fit", "keras"),
    (("transformers",), "InTuneCallback for the Trainer of Hugging Face", "transformers"),
    (("tensorflow", "tensorflow-cpu"), "tf.data", "tensorflow"),
    (("ray",), "workers of a DataLoader on the machines of a Ray cluster", "ray"),
    (("nvidia-ml-py",), "how busy the GPU is", "gpu"),
    (("plotly",), "report.html, the page of a run", "report"),
    (("rich",), "the coloured card, and intune watch on a terminal", "report"),
    (("numba",), "the fast parser of Criteo text in dlrm_examples", "criteo"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: of the thing.
        state: ``ok``, ``limited`` or ``missing``.
        says: what there is, with units.
        remedy: what would mend it, for example a line of pip; None where there is nothing to mend.
    """

    name: str
    state: str
    says: str
    remedy: str | None = None


def examine(
    probe: Probe | None = None,
    version_of: Callable[[str], str] = version,
    library: Callable[[], tuple[bool, bool]] | None = None,
    oldest: Mapping[str, str] | None = None,
    cluster: Callable[[str], Finding] | None = None,
) -> list[Finding]:
    """Look at the machine, the installed packages, and the compiled tf.data operations.

    TensorFlow is imported, if it is installed, to ask for its compile flags; that takes seconds.

    Args:
        version_of: installed version of a package; raises `PackageNotFoundError`.
        library: whether the operations are compiled, and whether they can be.
        oldest: package -> the oldest version that is supported; by default as this package's own metadata say.
        cluster: what there is of the cluster that ``RAY_ADDRESS`` names.
    """
    found = _machine(probe or MachineProbe())
    bounds = lower_bounds() if oldest is None else oldest
    for names, brings, extra in PACKAGES:
        installed = {name: given for name in names if (given := _version(name, version_of)) is not None}
        if installed:
            found.append(_installed(names[0], installed, brings, bounds.get(names[0], "0")))
        else:
            found.append(Finding(names[0], "missing", f"not installed: {brings}", install_line(extra)))
    # What nobody misses is told only where it is too old.
    for name in sorted(bounds.keys() - {name for names, *_ in PACKAGES for name in names}):
        if (given := _version(name, version_of)) is not None:
            finding = _installed(name, {name: given}, "", bounds[name])
            found += [finding] if finding.state != "ok" else []
    if any(finding.name == "tensorflow" and finding.state != "missing" for finding in found):
        found.append(_operations(library or _library))
    address = os.environ.get("RAY_ADDRESS", "")
    if address and _version("ray", version_of) is not None:
        found.append((cluster or _cluster)(address))
    return found


def text(findings: Sequence[Finding]) -> str:
    """Return the findings as lines, each remedy below what it mends."""
    width = max(len(finding.name) for finding in findings)
    lines, indent = [], (8 + 1 + width + 2) * " "
    for finding in findings:
        begin = f"{finding.state:<8} {finding.name:<{width}}  "
        lines += textwrap.wrap(
            finding.says, COLUMNS, initial_indent=begin, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if finding.remedy is not None:
            lines.append(f"{indent}{finding.remedy}")
    counts = [(sum(finding.state == state for finding in findings), state) for state in STATES]
    return "\n".join([*lines, "", ", ".join(f"{count} {state}" for count, state in counts)])


def _machine(probe: Probe) -> list[Finding]:
    now = probe.read()
    found = [
        Finding("CPUs", "ok", f"{now.cpus:g} for the input pipeline, of {cpus_allowed()} this process may use")
        if now.cpus >= 1.0
        else Finding("CPUs", "limited", f"{now.cpus:g} for the input pipeline", "give the container more CPUs")
    ]
    whole, _ = machine_memory()
    limited = f", a limit of the container; the machine has {whole / GB:.1f}" if now.memory_limit_bytes < whole else ""
    memory = f"{now.memory_used_bytes / GB:.1f} of {now.memory_limit_bytes / GB:.1f} GB used{limited}"
    found.append(Finding("memory", "ok", memory))
    found.append(Finding("start method", "ok", _start_method()))
    if now.shm_free_bytes is not None:
        little = now.shm_free_bytes < LITTLE_SHM_BYTES
        remedy = "docker run --shm-size=8g, if workers of a stock DataLoader die with a bus error" if little else None
        shared = f"{now.shm_free_bytes / GB:.1f} GB free in /dev/shm; our own workers do not need it"
        found.append(Finding("shared memory", "limited" if little else "ok", shared, remedy))
    if now.gpu_utilisation is None:
        found.append(Finding("GPU", "ok", "none seen: data wait is measured, the GPU's idle time is not"))
    else:
        found.append(Finding("GPU", "ok", f"{percent(now.gpu_utilisation)} busy"))
    return found


def _start_method() -> str:
    """How worker processes begin where neither the script nor the loader says so, and what each then holds."""
    method = multiprocessing.get_all_start_methods()[0]  # asked in any other way, it would be fixed for this process
    return f"{method} by default: {HOLDS[method]}; the end card tells how much where it is much"


def _version(package: str, version_of: Callable[[str], str]) -> str | None:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return None


def _installed(name: str, versions: Mapping[str, str], brings: str, oldest: str) -> Finding:
    """Return what there is of packages of which one is enough."""
    told = ", ".join(f"{package} {given}" for package, given in versions.items()) + (f": {brings}" if brings else "")
    old = [package for package, given in versions.items() if _numbers(given) < _numbers(oldest)]
    if not old:
        return Finding(name, "ok", told)
    remedy = "python -m pip install " + " ".join(f"'{package}>={oldest}'" for package in old)
    return Finding(
        name, "limited", f"{told}; {', '.join(old)} is too old, {oldest} is the oldest that is supported", remedy
    )


def _numbers(given: str) -> tuple[int, ...]:
    """Return the numbers in front, without zeros at their end: what is behind them, as in ``2.13.0+cpu``, is no age."""
    found = [int(part) for part in re.split(r"[^\d.]", given)[0].split(".") if part]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def _library() -> tuple[bool, bool]:
    return tf_build.library_path().exists(), tf_build.available()


def _cluster(address: str) -> Finding:
    from intune_callbacks.pipelines.ray.cluster import Cluster

    name, seen = "Ray cluster", Cluster(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be reached is said below
        said = seen.look(CLUSTER_S)
    if seen.machines_seen:
        return Finding(name, "ok", f"{address}: {said}; only they get workers, and the CPUs here go first")
    return Finding(name, "limited", f"{address}: {said}", "docs/cluster.md says how a machine joins, and what it needs")


def _operations(library: Callable[[], tuple[bool, bool]]) -> Finding:
    name = "tf.data operations"
    try:
        built, possible = library()
    except (ImportError, MissingPackage) as error:
        return Finding(name, "missing", f"TensorFlow cannot be imported: {error}")
    if built:
        return Finding(name, "ok", "compiled: every stage's workers and window change while it runs")
    if possible:
        told = "compiled beside the first fit, which is tuned from a later epoch on"
        return Finding(name, "ok", told, "intune build-tf does it now")
    less = "no compiler: a tf.data pipeline is measured and left as it is"
    return Finding(name, "limited", less, "install g++ (Debian, Ubuntu: apt install g++)")
