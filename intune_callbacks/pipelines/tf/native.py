"""Our own tf.data operations and what they are driven with: live workers per stage, live windows, counters.

`IntuneStage` goes right downstream of a stage, `IntuneSink` goes outermost; both pass elements through unchanged and
keep the names under which tf.data saves iterators. Values are set and counters are read through plain C functions of
the same library, in microseconds; no TensorFlow operation runs.

What a graph with these operations has to mind:

* `use_unbounded_threadpool` maps bring their own threads and never ask for ours: switch the attribute off.
* The workers of a parallel interleave are its own threads; put a second `IntuneStage` with ``role=INSIDE`` at the end
  of its function to time what they do, and to let `set_readers` say how many of them do so at once.
* Functions of stages without an operation of their own compute on the next stage downstream; an `IntuneStage` with an
  empty name in between sends them to TensorFlow's pool instead.
* tf.data does not fuse a map and a batch with an operation in between.
* With `options.experimental_optimization.inject_prefetch` tf.data puts a prefetch outside of the sink, which then
  no longer sees the consumer: switch the option off and put the prefetch inside.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from intune_callbacks.errors import BuildFailed, MissingPackage
from intune_callbacks.pipelines.tf import build as tf_build
from intune_callbacks.pipelines.tf.stats import SinkReading, StageReading

__all__ = ["BEFORE", "BEHIND", "INSIDE", "SINK_OP", "STAGE_OP", "Native", "load"]

STAGE_OP, SINK_OP = "IntuneStage", "IntuneSink"
BEHIND, INSIDE, BEFORE = 0, 1, 2
"""Where an `IntuneStage` is: behind its stage; inside, at the end of an interleave's function, to time and limit the
reading itself; before an interleave, to know when its input ends."""
STAGE_VALUES, SINK_VALUES = 14, 4


class Native:
    """The loaded library. Its methods know a pipeline by its key, and in it a stage by its name.

    Args:
        ops: the module of operations TensorFlow made of it.
        library: the same library, for its C functions.
    """

    def __init__(self, ops: Any, library: ctypes.CDLL) -> None:
        self.ops, self._library = ops, library
        text, values = ctypes.c_char_p, ctypes.POINTER(ctypes.c_double)
        signatures: dict[str, tuple[list[Any], Any]] = {
            "intune_set_workers": ([text, text, ctypes.c_int32], None),
            "intune_set_window": ([text, text, ctypes.c_int64], ctypes.c_int64),
            "intune_set_readers": ([text, text, ctypes.c_int64, ctypes.c_int64], ctypes.c_int64),
            "intune_follow_depth": ([text, text], None),
            "intune_stages": ([text, text, ctypes.c_int64], ctypes.c_int64),
            "intune_read_stage": ([text, text, values], ctypes.c_int32),
            "intune_read_sink": ([text, values], ctypes.c_int32),
            "intune_release": ([text], None),
        }
        for name, (arguments, result) in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result

    def read(self, pipeline: str) -> tuple[SinkReading, dict[str, StageReading]]:
        """Return all counters, the sink's and each stage's by name; empty ones if nothing is known of the pipeline."""
        key = pipeline.encode()
        values, stages = (ctypes.c_double * STAGE_VALUES)(), {}
        for name in self._stages(key):
            if self._library.intune_read_stage(key, name, values):
                stages[name.decode()] = StageReading.of(list(values))
        return self.read_sink(pipeline), stages

    def read_sink(self, pipeline: str) -> SinkReading:
        """Return only the counters at a pipeline's end: cheap enough for every batch."""
        values = (ctypes.c_double * SINK_VALUES)()
        if not self._library.intune_read_sink(pipeline.encode(), values):
            return SinkReading()
        delivered, wait_s, iterators, samples = values
        return SinkReading(int(delivered), wait_s, int(iterators), int(samples))

    def set_workers(self, pipeline: str, stage: str, workers: int) -> None:
        """Let at most `workers` closures of a stage compute at once, from now on and in later iterators.

        Args:
            workers: 1 or more; 0 gives the work back to TensorFlow's own pool. Fewer than now: running ones end.
        """
        self._library.intune_set_workers(pipeline.encode(), stage.encode(), workers)

    def set_window(self, pipeline: str, stage: str, window: int) -> int:
        """Set the parallelism or buffer size of the stage on every iterator alive and on later ones.

        tf.data's own tuner leaves the value alone from then on. An interleave takes at most its cycle length.

        Args:
            window: results in progress or finished ahead of the consumer; at least 1 is set.

        Returns:
            What is in force now; `window` itself, at least 1, where no iterator runs yet.
        """
        wanted = min(max(1, window), 2**53)
        in_force = int(self._library.intune_set_window(pipeline.encode(), stage.encode(), wanted))
        return in_force if in_force > 0 else wanted

    def set_readers(self, pipeline: str, stage: str, readers: int, ahead: int) -> int:
        """Let at most so many threads of an interleave read at once, from now on and in later iterators.

        More than there were so far begin now: each iterator is told of all the threads it can have, and ours hold back
        those that are not wanted yet. Fewer wait their turn at a gate, for TensorFlow would not start them again. With
        a warm start TensorFlow starts more as long as the interleave has input (`StageReading.ended`), else the next
        iterator has them. Threads that open files ahead are not counted, as TensorFlow does not.

        Args:
            readers: 1 or more; 0 for all it can have.
            ahead: elements of each of its datasets that may be read before their turn.

        Returns:
            What is in force; `readers` while no iterator runs.
        """
        wanted = max(0, min(readers, 2**30))
        return int(self._library.intune_set_readers(pipeline.encode(), stage.encode(), wanted, ahead))

    def follow_depth(self, pipeline: str, stage: str) -> None:
        """Let a prefetch, whose graph begins with 1, follow tf.data's own rule for AUTOTUNE until `set_window`."""
        self._library.intune_follow_depth(pipeline.encode(), stage.encode())

    def release(self, pipeline: str) -> None:
        """Forget a pipeline's counters and wanted values; iterators alive go on as they are to their end."""
        self._library.intune_release(pipeline.encode())

    def _stages(self, key: bytes) -> list[bytes]:
        size = 1024
        while True:
            names = ctypes.create_string_buffer(size)
            needed = int(self._library.intune_stages(key, names, size))
            if needed <= size:
                return names.value.split(b"\n")[:-1]
            size = needed


@functools.cache
def load() -> Native:
    """Load the library, compiling it first where that has not been done.

    Returns:
        The same object at each call.

    Raises:
        BuildFailed: it could not be compiled or loaded.
        MissingPackage: TensorFlow is not installed.
    """
    try:
        return _open(tf_build.build())
    except (BuildFailed, MissingPackage):
        raise
    except Exception:  # made on another machine, or broken since
        path = tf_build.build(force=True)
    try:
        return _open(path)
    except Exception as error:
        raise BuildFailed(f"{path} was compiled but does not load: {type(error).__name__}: {error}") from error


def _open(path: Path) -> Native:
    import tensorflow as tf

    return Native(tf.load_op_library(str(path)), ctypes.CDLL(str(path)))
