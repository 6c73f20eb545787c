"""A loader or a `PyDataset` given to `model.fit`: what can be tuned of it, put where Keras takes its batches from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from intune_callbacks.config import TunerConfig
from intune_callbacks.pipelines.base import MAX_WINDOW
from intune_callbacks.pipelines.find import ONLY_MAP_STYLE, Found
from intune_callbacks.pipelines.pydataset.enqueuer import InLoop, LiveEnqueuer
from intune_callbacks.pipelines.pydataset.pydataset import PyDatasetPipeline, knobs
from intune_callbacks.pipelines.watched import WatchedLoader
from intune_callbacks.session.keras_hooks import GIVE_OTHER, NO_PYDATASET, TrainData
from intune_callbacks.session.loaders import GiveUp, found_in
from intune_callbacks.types import Clock, Hint

__all__ = ["take_over"]

LEFT_ALONE = (
    "workers=1: Keras makes one batch after the other, without workers, and it stays so, for the dataset may not be "
    "made for them; set workers=2, or give InTuneCallback workers_kind='thread' or 'process', to make its workers live"
)
# Keras prefetches what it makes a tf.data.Dataset of.
AHEAD = Hint("one thread of TensorFlow's makes the batches ahead, one after the other", kind="ahead", stage="load")
# What Keras asks its adapter for, without workers and with.
GENERATORS = (
    ("_finite_generator", "_infinite_generator"),
    ("_finite_enqueuer_generator", "_infinite_enqueuer_generator"),
)
ENQUEUER = ("py_dataset", "shuffle", "ready_queue", "future_queue", "start", "stop", "get", "is_running")


def take_over(data: TrainData, config: TunerConfig, clock: Clock, give_up: GiveUp) -> Found | None:
    """Return what can be tuned, which the training gets its batches from now on; None for what is none of the three.

    Args:
        data: of a fit whose epochs have not begun.
        config: mode, `workers_kind` and `max_workers`.
        give_up: told of an iterator that could not be taken over; the loop then gets it as it is.
    """
    if data.source is None:
        return None
    if data.pydataset is not None:
        return _pydataset(data, config, clock)
    found = found_in(data.source, config, clock=clock)
    if found.pipeline is None:
        return found
    found.pipeline.prepare()
    if data.loader is not None:
        data.in_adapter("_dataloader", Adopted(data.loader, found.pipeline, give_up))
    else:
        data.in_adapter("_dataset", getattr(found.pipeline, "dataset"))  # noqa: B009  # not of every pipeline
    return found


def _pydataset(data: TrainData, config: TunerConfig, clock: Clock) -> Found:
    dataset: Any = data.pydataset
    adapter = data.adapter
    if not _is_known(adapter):
        return Found(None, f"{NO_PYDATASET}; {GIVE_OTHER}")
    stock = adapter.enqueuer
    if config.workers_kind == "ray":
        return Found(None, ONLY_MAP_STYLE.format(type(dataset).__name__))
    kind = config.workers_kind or ("process" if dataset.use_multiprocessing else "thread")
    workers, window = 0, 1
    if stock is not None:
        places = stock.future_queue.maxsize
        workers, window = dataset.workers, places if places > 0 else MAX_WINDOW
    left_alone = stock is None and config.workers_kind is None
    if config.mode != "tune" or left_alone:
        when: Literal["epoch", "user"] = "user" if left_alone else "epoch"
        watched = WatchedLoader(workers, window, clock=clock, when=when, knobs=knobs(kind))
        for name in GENERATORS[stock is not None]:
            data.in_adapter(name, _wrapped(adapter, name, watched.adopt))
        why = LEFT_ALONE if config.mode == "tune" else "the PyDataset is only watched"
        return Found(watched, why, (AHEAD,) if stock is None and not data.in_python else ())
    pipeline = PyDatasetPipeline(
        dataset,
        workers=workers,
        window=window,
        kind=kind,
        clock=clock,
        max_workers=config.max_workers,
        in_order=config.order == "same",
    )
    ours: InLoop | LiveEnqueuer = InLoop(dataset, adapter.shuffle, pipeline, data.epoch_batches)
    if stock is not None:
        ours = LiveEnqueuer(stock, pipeline, data.epoch_batches)
    data.in_adapter("enqueuer", ours)
    return Found(pipeline, "workers and batches in flight are live")


def _is_known(adapter: Any) -> bool:
    """Whether this version of Keras has all that is read or replaced here."""
    if not hasattr(adapter, "shuffle") or not all(hasattr(adapter, name) for names in GENERATORS for name in names):
        return False
    stock = getattr(adapter, "enqueuer", adapter)
    return stock is None or (
        all(hasattr(stock, name) for name in ENQUEUER) and isinstance(getattr(stock.future_queue, "maxsize", None), int)
    )


def _wrapped(adapter: Any, name: str, wrap: Callable[[Any], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    # Not a bound method: a cycle would keep the adapter alive after its fit.
    stock, owner = getattr(type(adapter), name), weakref.ref(adapter)
    return lambda: wrap(stock(owner()))


class Adopted:
    """The user's loader, each of whose iterators the pipeline takes over; `give_up` is as for `take_over`."""

    def __init__(self, loader: Any, pipeline: Any, give_up: GiveUp) -> None:
        self._loader, self._pipeline, self._give_up = loader, pipeline, give_up

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._loader)
        try:
            return self._pipeline.adopt(iterator)  # type: ignore[no-any-return]
        except Exception as error:
            self._give_up("the start of an epoch", error)
            return iterator
