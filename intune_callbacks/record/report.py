"""What a run found: `report.json` and the card printed at its end."""

from __future__ import annotations

import functools
import json
import platform
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from intune_callbacks.record.files import write_whole
from intune_callbacks.record.findings import as_json, findings
from intune_callbacks.record.whole_run import whole_run
from intune_callbacks.words import (
    SLOWER,
    allocation,
    amount,
    headline,
    in_short,
    memory,
    number,
    percent,
    ratio,
    reason_why,
    warm_start,
)

__all__ = ["also", "build_report", "card_rows", "end_card", "versions", "write_report"]

FOUND = "found.yaml"
FILES = ("report.html", "report.json", "history.jsonl", FOUND)
# Rows of words, folded at this width; numbers, paths and what is to be pasted stay in one line.
WORDS, WIDTH = ("why", "cause", "also", "next"), 108
# Below this share of wait the model takes what it gets.
WAITS = 0.05
BESIDE, MOST_BESIDE = ("startup", "shuffle", "prefetch", "memory", "loader"), 2
FRAMEWORKS = ("torch", "pytorch_lightning", "lightning", "torchdata", "tensorflow", "keras", "jax")


def build_report(
    summary: Mapping[str, Any],
    *,
    mode_source: str = "default",
    auc: float | None = None,
    note: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the report of one run.

    Args:
        summary: what `Tuner.summary()` gave; ``whole``, the figures of the whole run, and ``hints`` may be missing.
        mode_source: where the mode came from: ``INTUNE_MODE``, ``command line``, ``argument``, ``recipe`` or
            ``default``.
        auc: test AUC of the trained model, if a recipe measured it.
        note: why nothing can be tuned and what would change that, if so.
        settings: each value of the tuner and where it came from; see `intune_callbacks.config.sourced`.

    Returns:
        The summary with ``verdict``, ``why``, ``cause``, ``next``, ``causes``, ``advice``, ``memory``, ``versions``,
        ``mode_source``, ``settings`` and ``auc``.
    """
    found = findings(summary, note)
    before, after = ({k: v for k, v in summary[side].items() if k != "measured"} for side in ("before", "after"))
    return {
        "verdict": found.verdict,
        "why": found.why,
        "cause": found.cause,
        "next": found.next,
        "causes": as_json(found.causes),
        "advice": found.advice,
        "hints": list(summary.get("hints") or ()),
        "whole": summary.get("whole"),
        "mode": summary["mode"],
        "mode_source": mode_source,
        "settings": dict(settings or {}),
        "policy": summary["policy"],
        "before": before,
        "after": after,
        "changes": summary["changes"],
        "settled_after_s": summary["settled_after_s"],
        "wall_s": summary["wall_s"],
        "steps": summary["steps"],
        "samples": summary["samples"],
        "stages": summary["stages"],
        "memory": {
            "before_bytes": before["memory_used_bytes"],
            "after_bytes": after["memory_used_bytes"],
            "limit_bytes": after["memory_limit_bytes"],
            "soft_limit_frac": summary["memory_soft_limit"],
        },
        "frozen": summary["frozen"],
        "auc": auc,
        "versions": versions(),
        "decisions": summary["decisions"],
    }


def write_report(directory: str | Path, report: Mapping[str, Any]) -> Path:
    """Write `report.json` as a whole or not at all, and return its path.

    Args:
        directory: made if it does not exist.
        report: what `build_report` gave.

    Raises:
        OSError: when it cannot be written.
    """
    path = Path(directory) / "report.json"
    write_whole(path, json.dumps(report, indent=2, allow_nan=False) + "\n")
    return path


def end_card(report: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return the card as plain text: verdict first, then why, before, after and what to do next, a row each.

    Args:
        report: what `build_report` gave.
        folder: where the run wrote its files, if it did.
    """
    (name, head), *rows = card_rows(report, folder)
    verdict, _, facts = head.partition("  ")
    lines = [f"{f'{name}  {verdict}':<34}  {facts}"]
    for label, text in rows:
        first, *code = text.splitlines()
        folded = textwrap.wrap(first, WIDTH, break_on_hyphens=False) if label in WORDS else [first]
        lines.append(f"{label:<6}  " + ("\n" + 8 * " ").join([*folded, *code]))
    return "\n".join(lines)


def card_rows(report: Mapping[str, Any], folder: Path | None = None) -> list[tuple[str, str]]:
    """Return the rows of the end card: a label, and a text that may have several lines.

    Args:
        report: what `build_report` gave.
        folder: where the run wrote its files, if it did.
    """
    before, after, changes = report["before"], report["after"], report["changes"]
    rows = [("InTune", f"{headline(report)}  {in_short(report)}"), ("why", reason_why(report))]
    if report.get("cause"):
        rows.append(("cause", report["cause"]))
    last = f"{_line(after, report['stages'], 'current')}{_alone(after)}"
    rows += [("before", _line(before, report["stages"], "first")), ("after", last)] if changes else [("now", last)]
    if whole := whole_run(report):
        rows.append(("whole", whole))
    rows += [("also", text) for text in also(report)]
    if warm := warm_start(report.get("warm_start")):
        rows.append(("warm", warm))
    if report.get("ranks"):
        rows.append(("ranks", report["ranks"]["line"]))
    if report["frozen"]:
        rows.append(("frozen", report["frozen"]))
    if report["mode_source"] != "default":
        rows.append(("mode", f"{report['mode']}, from {_where(report['mode_source'])}"))
    written = [name for name in FILES if folder is not None and (folder / name).is_file()]
    if written:
        rows.append(("files", f"{', '.join(written)} in {folder}"))
    told = report["next"]
    if FOUND in written and changes and not report["frozen"] and report.get("verdict") != SLOWER:
        told += f"\nor begin it where this one ended: warm_start={json.dumps(str(folder))}"
    return [*rows, ("next", told)]


def _alone(side: Mapping[str, Any]) -> str:
    """What the model would take if its input were free, where that is more than it gets."""
    rate, idle = side["throughput_samples_per_s"], side.get("exposed_wait_frac")
    wait = number(side["wait_frac"] if idle is None else idle)
    if rate is None or wait is None or not WAITS <= wait < 1.0:
        return ""
    return f"   the model alone would take {amount(rate / (1.0 - wait))} samples/s"


def also(report: Mapping[str, Any]) -> list[str]:
    """Return the causes not told of yet that gain something or do harm for certain, two at most.

    Args:
        report: what `build_report` gave.
    """
    told = f"{report.get('cause')}\n{report['next']}"
    others = [c for c in report.get("causes") or () if c["kind"] in BESIDE and c["sentence"] not in told]
    return [
        cause["sentence"] + (f" (expected {ratio(cause['gain'])})" if cause["gain"] > 1.0 else "")
        for cause in others[:MOST_BESIDE]
    ]


def _line(side: Mapping[str, Any], stages: list[Mapping[str, Any]], which: str) -> str:
    rate = side["throughput_samples_per_s"]
    parts = [f"{amount(rate)} samples/s" if rate is not None else "not measured", _wait(side)]
    parts.append(_allocation(stages, which))
    used, limit = side["memory_used_bytes"], side["memory_limit_bytes"]
    if used is not None and limit:
        parts.append(f"RAM {memory(used, limit)}")
    return "   ".join(part for part in parts if part)


def _wait(side: Mapping[str, Any]) -> str:
    if side["wait_frac"] is None:
        return ""
    idle = side.get("exposed_wait_frac")
    # A blocked loop does no harm while the GPU still has work, and the verdict goes by the GPU.
    return f"wait {percent(side['wait_frac'])}" + (f" (GPU idle {percent(idle)})" if idle is not None else "")


def _allocation(stages: list[Mapping[str, Any]], which: str) -> str:
    """Workers and depths; a window only where it changed while its workers did not."""
    moved = {entry["name"] for entry in stages if entry["first"] != entry["current"]}
    windows = {
        entry["window_of"]: entry[which]
        for entry in stages
        if entry["name"] in moved and entry["window_of"] is not None and entry["window_of"] not in moved
    }
    return allocation({entry["name"]: entry[which] for entry in stages if entry["window_of"] is None}, windows)


def _where(source: str) -> str:
    return {"argument": "the argument", "recipe": "the recipe", "command line": "the command line"}.get(source, source)


def versions() -> dict[str, str]:
    """Versions of what is in use; a framework nobody imported is not imported for that."""
    found = {"python": platform.python_version()}
    found["intune_callbacks"] = str(sys.modules["intune_callbacks"].__dict__["__version__"])
    if (numpy := _numpy_version()) is not None:
        found["numpy"] = numpy
    for name in FRAMEWORKS:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            found[name] = str(module.__version__)
    return found


@functools.cache
def _numpy_version() -> str | None:
    """Asked for once: reading a package's metadata takes five milliseconds."""
    try:
        return version("numpy")
    except PackageNotFoundError:
        return None
