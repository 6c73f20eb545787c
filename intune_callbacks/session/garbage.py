"""What our start adds to the heap does not bring the user's next full garbage collection forward."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

__all__ = ["uncounted"]

_starts = count()


@contextmanager
def uncounted() -> Iterator[None]:
    """Collect nothing inside, and leave what stays of it out of the count that makes Python walk the whole heap.

    Python does so once the new objects that survived are a quarter of the old ones. Where TensorFlow was just imported
    that is near: our start alone then cost .17 s, the walk over 380,000 objects (Keras, 7 s of training, 2 %).
    Objects that are frozen and thawed count as old ones (https://docs.python.org/3/library/gc.html#gc.freeze).

    So does what the user has just made, a model for one. In a loop of many fits none would be collected in the end, and
    only the first start in a process imports so much: the next ones change nothing.
    """
    if next(_starts) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else thawing would undo what somebody froze before a fork
            gc.collect(1)  # what is garbage now does not become old
            gc.freeze()
            gc.unfreeze()
        gc.enable()
