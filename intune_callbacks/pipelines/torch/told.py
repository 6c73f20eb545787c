"""An error that the user's code raised in a worker, as torch's own loader tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._utils import ExceptionWrapper

from intune_callbacks.pipelines.torch.stock import Numbered
from intune_callbacks.pipelines.workers.worker import RemoteTraceback, is_of_worker

__all__ = ["WHERE", "fetched"]

WHERE = "in DataLoader worker process {}"  # torch's words


def fetched(engine: Iterator[Any], source: Numbered, workers: int) -> Any:
    """Return the next batch of ours.

    Args:
        source: the indices of the engine.
        workers: of the user's; with none, an error is one of the training process.

    Raises:
        Exception: what the user's code raised in a worker, made anew with torch's words: people match these.
    """
    try:
        return next(engine)
    except Exception as error:
        if not workers or not is_of_worker(error):
            raise
        # Stock deals the batches of an epoch out in turn; which of ours has made it says nothing.
        wrapper = _wrapped(error, source.last % workers)
    failed = _made(wrapper)  # behind the handler: it is told without ours
    try:
        raise failed
    finally:
        del failed  # its traceback has this frame


def _wrapped(error: Exception, worker: int) -> Any:
    remote = error.__cause__
    assert isinstance(remote, RemoteTraceback)
    wrapper: Any = ExceptionWrapper((remote.kind, error, None), WHERE.format(worker))  # type: ignore[no-untyped-call]
    wrapper.exc_msg = remote.text
    return wrapper


def _made(wrapper: Any) -> Exception:
    """Return what the wrapper raises, without the frames it came through: in torch's own it holds itself."""
    try:
        wrapper.reraise()
    except Exception as error:
        return error.with_traceback(None)
    return RuntimeError(wrapper.exc_msg)
