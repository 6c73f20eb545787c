"""What runs on another machine: a Ray actor that does one item at a time, its answer packed as a child process's."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from intune_callbacks.pipelines.workers.child import Given, portable
from intune_callbacks.pipelines.workers.wire import OUT_OF_BAND_BYTES, Reducer, packed

__all__ = ["Worker"]

MAIN = "__main__"


class Worker:
    """One worker.

    Args:
        number: of workers that were started before, all told.
        directory: of the training process.
        path: where that process looks for modules.
    """

    def __init__(self, number: int, directory: str, path: Sequence[str]) -> None:
        self._number = number
        self._given: Given | None = None
        self._reducer: Reducer | None = None
        self._broken: tuple[Any, ...] = ()
        with suppress(OSError):  # it is not there on this machine
            os.chdir(directory)
        sys.path.extend(entry for entry in path if entry not in sys.path)

    def ready(self) -> str:
        """Return the id of the machine, once this worker can be given something."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def renew(self, given: Sequence[Any], again: bytes) -> None:
        """Take what to do from now on; what that raises is the answer to each item.

        Args:
            given: function, start and reducer; pickled, then the arrays in it.
            again: what belongs to the iterator, pickled.
        """
        self._given, self._broken = None, ()
        try:
            fn, start, self._reducer = pickle.loads(given[0], buffers=given[1:])
            self._given = fn, start
            if start is not None:
                start.again(*pickle.loads(again))
                start(self._number)
        except Exception as error:
            self._given, self._broken = None, portable(error)

    def run(self, task: bytes) -> list[Any]:
        """Return the parts of the answer to an item, as they are sent to the training process."""
        try:
            if self._given is None:
                return _parts((False, *(self._broken or portable(RuntimeError("nothing was given")))), self._reducer)
            fn, start = self._given
            item, told = pickle.loads(task)
            if start is not None:
                start.told = told
            begin_cpu_s = time.process_time()
            return _parts((True, fn(item), time.process_time() - begin_cpu_s), self._reducer)
        except Exception as error:
            return _parts((False, *portable(error)), None)


def _parts(answer: tuple[Any, ...], reducer: Reducer | None) -> list[Any]:
    """Return a message whose large parts are arrays, which Ray takes into its store without another copy."""
    parts = packed(answer, lambda: _Named(reducer))
    return [np.frombuffer(part, np.uint8) if part.nbytes >= OUT_OF_BAND_BYTES else bytes(part) for part in parts]


class _Named:
    """Pickles the classes of the user's script, which is not this process's, by their names."""

    def __init__(self, reducer: Reducer | None) -> None:
        self._reduce = None if reducer is None else reducer()

    def __call__(self, value: Any) -> Any:
        if isinstance(value, type) and value.__module__ == MAIN:
            return _of_script, (value.__qualname__,)
        return NotImplemented if self._reduce is None else self._reduce(value)


def _of_script(name: str) -> Any:
    found: Any = sys.modules[MAIN]
    for part in name.split("."):
        found = getattr(found, part)
    return found
