"""An error that the user's code raised in a worker, as torch's own loader tells it, or a node of torchdata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper
from torch.autograd import profiler

from intune_callbacks.pipelines.torch.stock import Numbered
from intune_callbacks.pipelines.workers.worker import RemoteTraceback, is_of_worker

__all__ = ["APPLIED", "ENDED", "READ", "WHERE", "as_node", "fetched", "mapped", "untied"]

WHERE = "in DataLoader worker process {}"  # torch's words
# Those of torchdata.
APPLIED, READ = "in _apply_udf", "in _populate_queue"
ENDED = (
    "Tried to fast-forward {} items during init but hit StopIteration after {} items, this is likely a bug or "
    "malformed state_dict"
)


def fetched(engine: Iterator[Any], source: Numbered, workers: int, is_named: bool = False) -> Any:
    """Return the next batch of ours.

    Args:
        source: the indices of the engine.
        workers: of the user's; with none, an error is one of the training process.
        is_named: a stock iterator, which hands it on, tells a profiler of this fetch.

    Raises:
        Exception: what the user's code raised in a worker, made anew with torch's words: people match these.
    """
    try:
        if is_named or not getattr(profiler, "_is_profiler_enabled", False):
            return next(engine)
        # Who looks for what the training waits for, looks for torch's name in the trace.
        kind = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
        with profiler.record_function(f"enumerate(DataLoader)#{kind}.__next__"):
            return next(engine)
    except Exception as error:
        if not workers or not is_of_worker(error):
            raise
        # Stock deals the batches of an epoch out in turn; which of ours has made it says nothing.
        wrapper = _wrapped(error, WHERE.format(source.last % workers))
    return _raise(_made(wrapper))


class _Met(Exception):
    """What was raised in a thread of a node, on its way to who asks for the item."""


def as_node(fn: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return the function such that `mapped` raises its errors as torchdata does."""

    def call(*given: Any) -> Any:
        try:
            return fn(*given)
        except Exception as error:
            if fn is next and isinstance(error, StopIteration):
                raise
            raise _Met(ExceptionWrapper(where=where)) from None  # type: ignore[no-untyped-call]

    return call


def mapped(engine: Iterator[Any]) -> Any:
    """Return the next item of a node.

    Raises:
        Exception: what the user's code raised, made anew with torchdata's words.
    """
    try:
        return next(engine)
    except _Met as met:
        wrapper = met.args[0]
    except Exception as error:
        if not is_of_worker(error):
            raise
        wrapper = _wrapped(error, APPLIED)
    return _raise(_made(wrapper))


def untied(fetch: Callable[[], Any]) -> Any:
    """Return the stock loader's next batch, in a frame that an error of it does not keep.

    Raises:
        Exception: the loader's own. The frame in which torch raises it holds it, and with it all frames it came
            through: an engine of ours would live until the garbage collector comes.
    """
    try:
        return fetch()
    except Exception as error:
        failed = [error.with_traceback(None)]  # no name of this frame: the error's traceback has it
    return _raise(failed.pop())


def _raise(error: Exception) -> NoReturn:
    """Raise it behind the handler, so that it is told without ours."""
    try:
        raise error
    finally:
        del error  # its traceback has this frame


def _wrapped(error: Exception, where: str) -> Any:
    remote = error.__cause__
    assert isinstance(remote, RemoteTraceback)
    wrapper: Any = ExceptionWrapper((remote.kind, error, None), where)  # type: ignore[no-untyped-call]
    wrapper.exc_msg = remote.text
    return wrapper


def _made(wrapper: Any) -> Exception:
    """Return what the wrapper raises, without the frames it came through: in torch's own it holds itself."""
    try:
        wrapper.reraise()
    except Exception as error:
        return error.with_traceback(None)
    return RuntimeError(wrapper.exc_msg)
