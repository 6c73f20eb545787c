"""`intune watch`: a live view of a running job, from the history it writes; the job itself is not touched."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from intune_callbacks.config import number_problem
from intune_callbacks.errors import ConfigError
from intune_callbacks.record.files import nearest_folder
from intune_callbacks.record.running import Job
from intune_callbacks.show.watch_view import line, live, view
from intune_callbacks.words import wrapped

__all__ = ["watch"]

PERIOD_S = 0.5
"""Seconds between two looks at the files. A choice: a decision comes about once a second."""


def watch(folder: Path, *, wait_s: float = 300.0) -> int:
    """Show what a job's tuner sees and does until the job has written its report, its process is gone, or Ctrl+C.

    On a terminal the view is redrawn in place; elsewhere each new decision is one line. A decision is in the history
    when its effect is known, that is at the next one.

    Args:
        folder: the job's ``run_dir``; it need not exist yet, but what it will be in must.
        wait_s: seconds to wait for the first decision of a running job.

    Returns:
        0 when the job has ended or Ctrl+C was pressed, 1 when no running job was met in time.

    Raises:
        ConfigError: the folder cannot come: what it would be in is not there, or is a file; or `wait_s` is no time.
        MissingPackage: stdout is a terminal and rich is not installed.
    """
    if problems := list(number_problem("--wait", wait_s, 0.0, math.inf)):
        raise ConfigError(problems)
    there = nearest_folder(folder)
    if there not in (folder, folder.absolute().parent) or not there.is_dir():
        # A link that leads nowhere and a device are there, too.
        what = there if there in (folder, folder.absolute().parent) or there.is_file() else folder.absolute().parent
        why = "is a file" if there.is_file() else "is not there" if what != there else "is no folder"
        raise ConfigError([f"DIR={str(folder)!r}: {what} {why}; expected the run_dir of a job that runs or will run"])
    job = Job(folder)
    try:
        if not _met(job, wait_s):
            return 1
        (_show_live if sys.stdout.isatty() else _show_lines)(job)
        return 0
    except KeyboardInterrupt:
        return 0


def _met(job: Job, wait_s: float) -> bool:
    """Wait for a job that runs; say so once, and give up in the end."""
    until_s, said = time.monotonic() + wait_s, False
    while True:
        job.read()
        if job.has_begun:
            return True
        if not said:
            found = "only a run that has ended" if job.is_over else "no decision yet"
            _say(f"{found} in {job.folder}; waiting up to {wait_s:g} s for a running job, Ctrl+C ends")
            said = True
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            _say(
                f"no running job wrote a decision into {job.folder} within {wait_s:g} s. Is that its run_dir, and its "
                "mode not off? The first decision comes after warmup_batches; --wait S waits longer"
            )
            return False
        time.sleep(min(PERIOD_S, left_s))


def _show_lines(job: Job) -> None:
    for rank in job.ranks:
        print(wrapped(line(rank, rank.decisions[-1])), flush=True)
    while True:
        over = job.is_over  # asked first: what was written before the report is still read
        for rank, decision in job.read():
            print(wrapped(line(rank, decision)), flush=True)
        if over:
            _say_end(job)
            return
        time.sleep(PERIOD_S)


def _show_live(job: Job) -> None:
    with live() as screen:
        while True:
            over = job.is_over
            job.read()
            screen.update(view(job.ranks, time.time()), refresh=True)
            if over:
                break
            time.sleep(PERIOD_S)
    _say_end(job)


def _say_end(job: Job) -> None:
    written = [str(rank.folder / "report.json") for rank in job.ranks if rank.is_reported]
    told = f"the job has ended; its report is in {', '.join(written)}" if written else ""
    lost = len(job.ranks) - len(written)
    who = "its process" if len(job.ranks) == 1 else f"{lost} of its {len(job.ranks)} processes"
    ended = f"{who} ended without a report, as one that is killed does" if lost else ""
    _say("; ".join(filter(None, [told, ended])))


def _say(text: str) -> None:
    print(f"intune: {text}", file=sys.stderr, flush=True)
