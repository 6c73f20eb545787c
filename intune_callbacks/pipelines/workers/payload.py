"""What a started worker process is given, pickled once for all of them.

`multiprocessing` pickles a process's arguments anew for each one, in the thread that starts it, and then waits until
the new interpreter has read them. Here they are pickled once and sent through the worker's own pipe, by whoever waits
for it. Only what belongs to the start of one process (descriptors, so tensors in shared memory) is pickled for each.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context as contexts
from multiprocessing import process, reduction
from typing import Any

from intune_callbacks.pipelines.workers.wire import ByType, packed

__all__ = ["Payload", "inherited"]

# What multiprocessing registers for other reasons than a descriptor: the same bytes are right for every process.
_FOR_ALL = (types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType, functools.partial)

# In a child, while its payload is unpickled: what came with its start.
_parts: Sequence[Any] = ()


class Payload:
    """An object in the form in which it is sent to any number of started processes.

    Attributes:
        parts: those that have to be pickled for each process, at its start.

    Raises:
        Exception: it cannot be pickled, or only inside the start of one process.
    """

    def __init__(self, value: object) -> None:
        self.parts: list[Any] = []
        by_type: ByType = dict(copyreg.dispatch_table)
        for kind, reduce in reduction.ForkingPickler._extra_reducers.items():  # type: ignore[attr-defined]
            by_type[kind] = reduce if kind in _FOR_ALL else self._part
        before = contexts.get_spawning_popen()
        # Locks and proxies ask whether a process is being started; what asks for more than that is refused, for there
        # is no descriptor to be had.
        contexts.set_spawning_popen(object())  # type: ignore[arg-type]
        try:
            self._message = packed(value, by_type=by_type)
        finally:
            contexts.set_spawning_popen(before)

    def message(self) -> list[memoryview]:
        """Return what `Wire.write` sends to one process."""
        return list(self._message)

    def _part(self, value: object) -> Any:
        self.parts.append(value)
        return _part_of_start, (len(self.parts) - 1,)


@contextmanager
def inherited(parts: Sequence[Any]) -> Iterator[None]:
    """Have a payload unpickled, in a child.

    Args:
        parts: as they came with the start of this process.
    """
    global _parts
    me: Any = process.current_process()
    _parts, me._inheriting = parts, True  # as while arguments are unpickled
    try:
        yield
    finally:
        _parts = ()
        del me._inheriting


def _part_of_start(number: int) -> Any:
    return _parts[number]
