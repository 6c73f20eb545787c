"""Datasets of public packages whose last steps are known: in a worker they are given to `later`, without a word."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from intune_callbacks.pipelines.later import later, resolved

__all__ = ["hook_of"]

KEPT = "_intune_transform"

# webdataset's stages that make one sample of each, or raise; `map` leaves out a sample for which it gets None.
ONE_TO_ONE = ("_decode", "_rename", "_map_dict", "_to_tuple", "_map_tuple")


def hook_of(dataset: Any) -> Callable[[], None] | None:
    """Return what a worker does to its copy of a dataset, None where the last step is not known."""
    if _is_of(dataset, "streaming.base.dataset", "StreamingDataset", "__iter__"):
        return partial(_hook_mosaic, dataset)
    if _is_of(dataset, "litdata.streaming.dataset", "StreamingDataset", "__iter__", "__next__", "__getitem__"):
        return partial(_hook_litdata, dataset) if "transform" in vars(dataset) else None
    own = "__iter__", "_iter_pytorch", "_prepare_ex_iterable_for_iteration"
    with suppress(AttributeError):  # a version of the package that looks otherwise
        if _is_of(dataset, "datasets.iterable_dataset", "IterableDataset", *own):
            in_tables = getattr(dataset._formatting, "is_table", False)
            return partial(_hook_datasets, dataset) if _mapped(dataset._ex_iterable) and not in_tables else None
        if _is_of(dataset, "webdataset.pipeline", "DataPipeline", "__iter__", "iterator", "iterator1", "invoke"):
            return partial(_hook_webdataset, dataset) if _last_stages(dataset.pipeline) else None
    return None


def _is_of(dataset: Any, module: str, name: str, *own: str) -> bool:
    """Return whether this is a package's dataset which does in its own way what we rely on; nothing is imported."""
    kind, given = getattr(sys.modules.get(module), name, None), type(dataset)
    if not isinstance(kind, type) or not issubclass(given, kind):
        return False
    methods = [(getattr(given, method, None), getattr(kind, method, None)) for method in own]
    return all(mine is theirs is not None for mine, theirs in methods)


class Steps:
    """The last steps of a package's pipeline, which make one sample of each, for one sample at a time.

    Args:
        chain: samples -> what becomes of them, lazily.
    """

    def __init__(self, chain: Callable[[Iterator[Any]], Any]) -> None:
        self._chain, self._given = chain, list[Any]()
        self._made: Iterator[Any] | None = None

    def __call__(self, raw: Any) -> Any:
        self._given.append(raw)
        try:
            if self._made is None:
                self._made = iter(self._chain(self._source()))
            return next(self._made)
        except BaseException:
            self._made, self._given = None, []
            raise

    def _source(self) -> Iterator[Any]:
        while self._given:
            yield self._given.pop()


# Of the dataset in this process.
_steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()


# -- MosaicML --------------------------------------------------------------------------------------------------------


def _hook_mosaic(dataset: Any) -> None:
    # `__iter__` maps `self.__getitem__` over the numbers of its samples.
    vars(dataset)["__getitem__"] = partial(_mosaic, dataset)


@later
def _mosaic(dataset: Any, index: Any) -> Any:
    return type(dataset).__getitem__(dataset, index)


# -- LitData ---------------------------------------------------------------------------------------------------------


def _hook_litdata(dataset: Any) -> None:
    vars(dataset)[KEPT] = dataset.transform
    dataset.transform = partial(_litdata, dataset)


@later
def _litdata(dataset: Any, item: Any) -> Any:
    steps = vars(dataset).get(KEPT, vars(dataset)["transform"])
    for step in steps if isinstance(steps, list) else [steps]:
        item = step(item)
    return item


# -- Hugging Face `datasets`: the calls of `.map` behind everything else, and the format -----------------------------


def _mapped(top: Any) -> list[Any]:
    """Return the `.map` of single examples that come last, the last one first."""
    kind, found = getattr(sys.modules["datasets.iterable_dataset"], "MappedExamplesIterable", None), []
    while type(top) is kind and not (
        (top.batched or top.with_indices or top.iter_arrow or inspect.iscoroutinefunction(top.function))
        or getattr(top, "decoding_pool", None) is not None
    ):
        found.append(top)
        top = top.ex_iterable
    return found


def _in_format(prepared: Any) -> tuple[Any, ...]:
    """Return what sets the format of examples, if anything does, and what is below."""
    kind = getattr(sys.modules["datasets.iterable_dataset"], "FormattedExamplesIterable", None)
    return (prepared, prepared.ex_iterable) if type(prepared) is kind else (prepared,)


def _hook_datasets(dataset: Any) -> None:
    vars(dataset)["_prepare_ex_iterable_for_iteration"] = partial(_prepared, dataset)


def _prepared(dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the dataset's own `_prepare_ex_iterable_for_iteration`, which `__iter__` begins with."""
    prepared = type(dataset)._prepare_ex_iterable_for_iteration(dataset, *args, **kwargs)
    # Of several nodes each may take every so many examples of what has been mapped: then the map is not the end.
    return Ends(dataset, prepared) if _mapped(_in_format(prepared)[-1]) else prepared


class Ends:
    """What `datasets` iterates over, its last maps given to `later`.

    Args:
        dataset: whose.
        ex_iterable: what it has prepared, and so named there: it is looked for by that name.
    """

    def __init__(self, dataset: Any, ex_iterable: Any) -> None:
        self._dataset, self.ex_iterable = dataset, ex_iterable

    def __iter__(self) -> Iterator[Any]:
        maps = _mapped(_in_format(self.ex_iterable)[-1])
        _steps[self._dataset] = _steps_of(self.ex_iterable)
        for key, example in maps[-1].ex_iterable:
            yield key, _datasets(self._dataset, example)

    def shard_data_sources(self, *args: Any, **kwargs: Any) -> Ends:
        return Ends(self._dataset, self.ex_iterable.shard_data_sources(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_dataset", "ex_iterable"):  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.ex_iterable, name)


def _steps_of(prepared: Any) -> Steps:
    *format_, top = _in_format(prepared)

    def chain(source: Iterator[Any]) -> Iterator[Any]:
        below: Any = ((0, example) for example in source)
        for step in (*reversed(_mapped(top)), *format_):
            step = copy.copy(step)
            step.ex_iterable, step._state_dict = below, None
            below = step
        return (example for _, example in below)

    return Steps(chain)


@later
def _datasets(dataset: Any, example: Any) -> Any:
    if dataset not in _steps:
        _steps[dataset] = _steps_of(type(dataset)._prepare_ex_iterable_for_iteration(dataset))
    return _steps[dataset](example)


# -- webdataset ------------------------------------------------------------------------------------------------------


def _batching(pipeline: list[Any]) -> dict[str, Any] | None:
    """Return the arguments of a `batched` that comes last, None where there is none."""
    filters, last = sys.modules["webdataset.filters"], pipeline[-1]
    if type(last) is not filters.FilterFunction or last.f is not filters._batched:
        return None
    bound = inspect.signature(filters._batched).bind(None, *last.args, **last.kw)
    bound.apply_defaults()
    given = dict(bound.arguments)
    # Another function may draw random numbers, which would come before those of the next sample and not behind.
    draws_none = given["collation_fn"] in (None, filters.default_collation_fn)
    return given if draws_none and set(given) == {"data", "batchsize", "collation_fn", "partial"} else None


def _last_stages(pipeline: list[Any]) -> list[Any]:
    """Return the stages at the end that make one sample of each, without a `batched` behind them."""
    filters, first = sys.modules["webdataset.filters"], len(pipeline)
    if _batching(pipeline) is not None:
        pipeline = pipeline[:-1]
        first -= 1
    known = [getattr(filters, name, None) for name in ONE_TO_ONE]
    while first > 1:
        stage = pipeline[first - 1]
        if type(stage) is not filters.FilterFunction or stage.f not in known:
            break
        if stage.kw.get("handler", filters.reraise_exception) is not filters.reraise_exception:
            break  # it leaves out what fails
        first -= 1
    return pipeline[first:]


def _hook_webdataset(dataset: Any) -> None:
    stages, batching = _last_stages(dataset.pipeline), _batching(dataset.pipeline)
    _steps[dataset] = _steps_in(stages)
    first = len(dataset.pipeline) - len(stages) - (batching is not None)
    last = partial(_each, dataset) if batching is None else partial(_batches, dataset, batching)
    dataset.pipeline = [*dataset.pipeline[:first], last]


def _each(dataset: Any, source: Iterator[Any]) -> Iterator[Any]:
    return (_webdataset(dataset, sample) for sample in source)


def _batches(dataset: Any, batching: dict[str, Any], source: Iterator[Any]) -> Iterator[Any]:
    """Do what `batched` does, but make something of the first sample of a batch behind the last batch, not before."""
    size, collation_fn, batch = batching["batchsize"], batching["collation_fn"], list[Any]()
    for sample in source:
        if len(batch) >= size:
            yield _webdataset_batch(collation_fn, batch)
            batch = []
        batch.append(_webdataset(dataset, sample))
    if batch and (len(batch) == size or batching["partial"]):
        yield _webdataset_batch(collation_fn, batch)


@later
def _webdataset_batch(collation_fn: Any, samples: list[Any]) -> Any:
    samples = resolved(samples)
    return samples if collation_fn is None else collation_fn(samples)


def _steps_in(stages: list[Any]) -> Steps:
    def chain(source: Iterator[Any]) -> Iterator[Any]:
        for stage in stages:
            source = stage(source)
        return source

    return Steps(chain)


@later
def _webdataset(dataset: Any, sample: Any) -> Any:
    if dataset not in _steps:
        _steps[dataset] = _steps_in(_last_stages(dataset.pipeline))
    # A stage may write into it, and what is sent elsewhere is to be as it came.
    return _steps[dataset](dict(sample) if type(sample) is dict else sample)
