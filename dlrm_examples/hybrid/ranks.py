"""Start the ranks of a run as processes of this machine, and end them all as soon as one fails."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from intune_callbacks.errors import InTuneError

__all__ = ["RankFailed", "run_ranks"]

GRACE_S = 3.0
FAILED, DONE = "failed-", "done-"


class RankFailed(InTuneError, RuntimeError):
    """A rank ended before its work was done; the message names the first one that did, and says why."""


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, limit_s: float | None = None) -> Any:
    """Call a function on every rank, each in a fresh process, and return what rank 0 returned.

    The ranks find each other by torch's environment variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...), which
    are set; the process group is the function's to make. No rank outlives this call or this process.

    Args:
        function: of a module, so that it can be pickled; called with the rank and `arguments`.
        world: how many ranks.
        arguments: picklable.
        limit_s: seconds after which the ranks are ended; None for no limit.

    Raises:
        RankFailed: a rank raised an exception or died, or the limit was reached.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        shared = (world, _free_port(), folder, function, arguments)
        ranks: list[BaseProcess] = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(world)]
        try:
            for process in ranks:
                process.start()
            _supervise(ranks, limit_s, Path(folder))
        finally:
            _end(ranks)
        return pickle.loads((Path(folder) / "result").read_bytes())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(
    rank: int, world: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    try:
        result = function(rank, *arguments)
        if rank == 0:
            (Path(folder) / "result").write_bytes(pickle.dumps(result))
        (Path(folder) / f"{DONE}{rank}").touch()
    except BaseException:
        # Now: the others fail in turn when this process is gone, and the first is the one to blame.
        (Path(folder) / f"{FAILED}{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _supervise(ranks: list[BaseProcess], limit_s: float | None, folder: Path) -> None:
    """Wait until all ranks are done, or until one has failed."""
    end_s = None if limit_s is None else time.monotonic() + limit_s
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), None if end_s is None else max(0.0, end_s - time.monotonic()))
        if not ended:
            raise RankFailed(f"the {len(ranks)} ranks were not done after {limit_s:g} s, and were ended")
        for sentinel in ended:
            # The sentinel tells a little before the exit code is known.
            ranks[running.pop(sentinel)].join()
        # gloo's threads now and then abort an interpreter that ends: what was done before that is done.
        died = {rank for rank, of in enumerate(ranks) if of.exitcode and not (folder / f"{DONE}{rank}").exists()}
        if died:
            raise RankFailed(f"{_first_failure(ranks, died, folder)}; all {len(ranks)} ranks were ended")


def _first_failure(ranks: list[BaseProcess], died: set[int], folder: Path) -> str:
    """Return which rank failed, and how: those that lost it while they waited for it fail as well."""
    told = {int(file.name.removeprefix(FAILED)): file for file in folder.glob(f"{FAILED}*")}
    if silent := died - told.keys():
        return f"rank {min(silent)} died with exit code {ranks[min(silent)].exitcode}"
    rank = min(told, key=lambda number: told[number].stat().st_mtime_ns)
    return f"rank {rank} failed:\n{told[rank].read_text(encoding='utf-8')}"


def _end(ranks: list[BaseProcess]) -> None:
    # Lightning takes SIGTERM as a wish, so those that are still there are killed.
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        process.terminate()
    end_s = time.monotonic() + GRACE_S
    for process in started:
        process.join(max(0.0, end_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
