"""Datasets of public packages whose last step is known: in a worker it is given to `later`; the user writes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from intune_callbacks.pipelines.later import later

__all__ = ["hook_of"]

KEPT = "_intune_transform"


def hook_of(dataset: Any) -> Callable[[], None] | None:
    """Return what a worker does to its copy of a dataset, None where the last step is not known."""
    if _is_of(dataset, "streaming.base.dataset", "StreamingDataset", "__iter__"):
        return partial(_hook_mosaic, dataset)
    if _is_of(dataset, "litdata.streaming.dataset", "StreamingDataset", "__iter__", "__next__", "__getitem__"):
        return partial(_hook_litdata, dataset) if "transform" in vars(dataset) else None
    return None


def _is_of(dataset: Any, module: str, name: str, *own: str) -> bool:
    """Return whether this is a package's dataset which does in its own way what we rely on; nothing is imported."""
    kind, given = getattr(sys.modules.get(module), name, None), type(dataset)
    if not isinstance(kind, type) or not issubclass(given, kind):
        return False
    return all(getattr(given, method, None) is getattr(kind, method, None) for method in own)


def _hook_mosaic(dataset: Any) -> None:
    # `__iter__` maps `self.__getitem__` over the numbers of its samples.
    vars(dataset)["__getitem__"] = partial(_mosaic, dataset)


@later
def _mosaic(dataset: Any, index: Any) -> Any:
    return type(dataset).__getitem__(dataset, index)


def _hook_litdata(dataset: Any) -> None:
    vars(dataset)[KEPT] = dataset.transform
    dataset.transform = partial(_litdata, dataset)


@later
def _litdata(dataset: Any, item: Any) -> Any:
    steps = vars(dataset).get(KEPT, vars(dataset)["transform"])
    for step in steps if isinstance(steps, list) else [steps]:
        item = step(item)
    return item
