"""Say an allocation in the words of the user's own pipeline."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["PERSISTENT", "PROCESSES", "PYDATASET", "more_threads", "to_set"]

PERSISTENT = "persistent_workers=True"
PYDATASET, PROCESSES = "PyDataset(", "use_multiprocessing=True"
LEAST_THREADS = 2
"""With one worker that is no process, Keras computes in the training loop."""
TOTAL = "{total}"
"""In the knob of a window that is written in all, not per worker."""

POOL = (
    "options = tf.data.Options(); options.threading.private_threadpool_size = {}; "
    "dataset = dataset.with_options(options)  # TensorFlow has {} threads for all calls"
)


def to_set(
    wanted: Mapping[str, int], stages: Sequence[Mapping[str, Any]], persistent: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return what to write to get an allocation, for what has a place in the user's code, and in words for the rest.

    Args:
        wanted: stage name -> value.
        stages: the report's ``stages``, in pipeline order.
        persistent: stages whose workers shall live on from one epoch to the next.

    Returns:
        Lines to paste, such as ``DataLoader(num_workers=6)  # was 2``, and words such as ``decode 6 (was 2)``. The
        window of a stage that has a line is in that line or, where the user's framework ties it to the workers,
        nowhere.
    """
    pool = _pool(wanted, stages)
    windows = {entry["window_of"]: entry for entry in stages if entry["window_of"] is not None}
    known = [entry for entry in stages if entry["window_of"] is None and entry.get("knob")]
    inside = [entry for entry in known if entry["knob"].startswith("#")]
    written = [entry for entry in known if entry not in inside]
    knobs = [entry["knob"] for entry in written]
    lines: list[str] = []
    said = {windows[entry["name"]]["name"] for entry in inside if entry["name"] in windows}
    for entry in written:
        window = windows.get(entry["name"])
        beside = window is not None and window["name"] in wanted and bool(window.get("knob"))
        if entry["name"] in wanted or beside or entry["name"] in persistent:
            line = _line(entry, window if beside else None, wanted, entry["name"] in persistent)
            # Two stages that are written alike are told apart by their names.
            line = f"{line} ({entry['name']})" if knobs.count(entry["knob"]) > 1 else line
            lines.append(f"{line} on {entry['threads']} threads" if pool and entry.get("threads") else line)
            said |= {entry["name"], *([window["name"]] if window is not None else [])}
    lines += [pool] if pool else []
    was = {entry["name"]: f"was {entry['first']}" for entry in stages}
    was |= {entry["name"]: f"{was[entry['name']]}, {entry['knob'][1:].strip()}" for entry in inside}
    return lines, [f"{name} {value} ({was.get(name, 'was ?')})" for name, value in wanted.items() if name not in said]


def more_threads(calls: int, threads: int) -> str:
    """Return the line for as many threads of TensorFlow's as there are calls; empty where there are."""
    return POOL.format(calls, threads) if threads < calls else ""


def _pool(wanted: Mapping[str, int], stages: Sequence[Mapping[str, Any]]) -> str:
    """Return the line for more threads where those that stages share are too few for what is wanted of them."""
    sharing = [entry for entry in stages if entry.get("threads")]
    if not any(entry["name"] in wanted for entry in sharing):
        return ""
    calls = sum(wanted.get(entry["name"], entry["current"]) for entry in sharing)
    return more_threads(calls, min(entry["threads"] for entry in sharing))


def _line(
    entry: Mapping[str, Any], window: Mapping[str, Any] | None, wanted: Mapping[str, int], persistent: bool
) -> str:
    workers = wanted.get(entry["name"], entry["current"] if persistent else entry["first"])
    code, mark, remark = entry["knob"].partition("#")
    first = entry["first"]
    if code.startswith(PYDATASET) and PROCESSES not in code:
        workers, first = max(workers, LEAST_THREADS), max(first, 1)
    code, was = code.rstrip().format(workers), f"was {first}"
    if window is not None and TOTAL in window["knob"]:
        total = wanted[window["name"]]
        if total != window["first"]:
            code, was = (
                f"{code.removesuffix(')')}, {window['knob'].format(total=total)})",
                f"{was} and {window['first']}",
            )
    elif window is not None:
        each, each_first = (
            max(1, math.ceil(value / max(1, count)))
            for value, count in ((wanted[window["name"]], workers), (window["first"], first))
        )
        if each != each_first:
            code = f"{code.removesuffix(')')}, {window['knob'].format(each)})"
            was += f" and {each_first}"
    if persistent:
        code = f"{code.removesuffix(')')}, {PERSISTENT})"
        was += " and False"
    return f"{code}  # {remark.strip() if mark else was}"
