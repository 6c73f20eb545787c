"""Where the batches of a DataLoader come from: the one inside a wrapper, its next iterators, one that runs already."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from io import BufferedReader, FileIO, TextIOWrapper
from itertools import chain
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data.dataloader import DataLoader  # as it is there, whatever stands in its place in `torch.utils.data`

from intune_callbacks.pipelines.timed import within

__all__ = [
    "Seam",
    "attributes",
    "dataset_of",
    "fed_by",
    "has_own_iterator",
    "hidden_in",
    "is_loader",
    "is_of",
    "keeps_states",
    "open_file",
    "unwrapped",
    "why_several",
]

WRAPPED = 4
"""How many loaders are inside each other."""

FED = (
    "the dataset, {}, takes what it gives from a DataLoader of its own: the workers to set are those (num_workers={} "
    "now), and none in front of it"
)
"""TorchIO's `Queue`, which keeps patches that are cut from volumes."""

_MISSING = object()
MOST_LOADERS = 100
"""How many a list of loaders may hold. A choice."""
SEVERAL = (
    "{0} hands on the batches of {1} DataLoaders: give these to `live` instead, in one call, and what it returns to "
    "{0}; Lightning's Trainer takes them in a list, a dict or a CombinedLoader"
)
OURS = __name__.partition(".")[0]
"""What `live` returned tunes its DataLoader itself."""
# Without it there is no iterator to be found: `private.py` says so.
_STOCK: Any = getattr(dataloader, "_BaseDataLoaderIter", ())


def is_loader(value: object) -> bool:
    """Return whether this is a DataLoader, whatever it says of itself, and not only a shell that was never set up."""
    return issubclass(type(value), DataLoader) and "_iterator" in vars(value)


def unwrapped(loader: Any) -> Any:
    """Return the DataLoader that makes the batches of a wrapper: Accelerate's, Fabric's, timm's loaders, a WebLoader.

    Args:
        loader: any object; it is returned itself where no DataLoader is in one of the known places, nor a single one
            among its attributes.
    """
    found = loader
    for _ in range(WRAPPED):
        if is_loader(found):
            return found
        pipeline = _held(found, "pipeline")
        found = pipeline[0] if type(pipeline) is list and pipeline else _inside(found)
    return loader


def why_several(wrapper: Any) -> str:
    """Return what to do instead of giving InTune what hands on the batches of several DataLoaders, else nothing."""
    parts = _items(wrapper) or _values(wrapper)
    loaders = {id(part) for one in parts for part in (one, *_items(one)) if is_loader(part)}
    return SEVERAL.format(type(wrapper).__name__, len(loaders)) if len(loaders) > 1 else ""


def _items(value: Any) -> list[Any]:
    """Return what is in a small list, tuple or dict: a long one holds rows."""
    if type(value) not in (list, tuple, dict) or len(value) > MOST_LOADERS:
        return []
    return list(value.values() if type(value) is dict else value)


def _inside(wrapper: Any) -> Any:
    base = _held(wrapper, "base_dataloader")
    if base is not None:
        return base
    loaders = {id(part): part for part in _values(wrapper) if is_loader(part)}
    return next(iter(loaders.values())) if len(loaders) == 1 else None


def _values(wrapper: Any) -> list[Any]:
    """Return what is in the attributes of a wrapper that is none of ours."""
    held = _held(wrapper, "__dict__")
    return list(held.values()) if type(held) is dict and type(wrapper).__module__.partition(".")[0] != OURS else []


def _held(value: Any, name: str) -> Any:
    """Return an attribute, past a `__getattr__`, which may answer to every name."""
    try:
        return object.__getattribute__(value, name)
    except Exception:
        return None


class Seam:
    """The one place where a loader makes its iterators, whoever asks for one: stands there for its `_get_iterator`.

    Args:
        make: a method, called instead; None for the loader's own way.
    """

    def __init__(self, loader: DataLoader[Any], make: Callable[[], Any] | None) -> None:
        # Weak, both: in a cycle a kept iterator would be finalised at some collection, perhaps in a forked child.
        self._held: Callable[[], Any] = weakref.ref(loader)
        self._made_by: Callable[[], Any] = (lambda: None) if make is None else weakref.WeakMethod(make)
        self._before: Any = _MISSING
        self._is_open = False

    def __call__(self) -> Any:
        make = self._made_by()
        return self.stock() if make is None else make()

    def __reduce__(self) -> Any:
        # A loader that was copied, be it into another process, is nobody's: it makes its iterators itself.
        return (Seam, (self._held(), None)) if self._before is _MISSING else (_itself, (self._before,))

    def open(self) -> None:
        """Have `make` called from now on; a seam that an earlier fit has left there is closed."""
        loader = self._held()
        if self._is_open or loader is None:
            return
        if type(vars(loader).get("_get_iterator")) is Seam:
            loader._get_iterator.close()
        self._before = vars(loader).get("_get_iterator", _MISSING)
        # Not by an assignment: while Lightning asks for its loaders it notes those, and makes them again at the copy
        # with a DistributedSampler, which would then deliver what this loader does.
        vars(loader)["_get_iterator"] = self
        self._is_open = True

    def close(self) -> None:
        """Give back what was there: nothing, or an attribute of the user's."""
        loader = self._held()
        if loader is not None and vars(loader).get("_get_iterator") is self:
            vars(loader).pop("_get_iterator")
            if self._before is not _MISSING:
                vars(loader)["_get_iterator"] = self._before
        self._is_open = False

    def stock(self) -> Any:
        """Return what the loader itself makes."""
        loader: Any = self._held()
        return type(loader)._get_iterator(loader) if self._before is _MISSING else self._before()


def _itself(given: Any) -> Any:
    return given


def dataset_of(loader: DataLoader[Any]) -> Any:
    """Return the dataset that a loader was made with: what it answers when it is asked may be another one (RecBole)."""
    try:
        return vars(loader)["dataset"]
    except KeyError:  # a property, which may be code of the user's
        return loader.dataset


def open_file(dataset: Any) -> str:
    """Return the name under which a dataset, or one inside it, holds an open file; empty where there is none."""
    for _, name, value in _nested(dataset):
        if isinstance(value, (BufferedReader, FileIO, TextIOWrapper)) and not value.closed:
            return name
    return ""


def fed_by(dataset: Any) -> str:
    """Return what is to be said where a dataset, or one inside it, holds a running DataLoader; empty for others."""
    for kind, _, value in _nested(dataset):
        if isinstance(value, _STOCK):
            return FED.format(kind, value._num_workers)
    return ""


def _nested(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield what a dataset and those inside it hold: its class, the name, the value."""
    for _ in range(WRAPPED):
        held = _held(dataset, "__dict__") or {}
        for name, value in held.items():
            yield type(dataset).__name__, str(name), value
        dataset = held.get("dataset")


def has_own_iterator(loader: DataLoader[Any]) -> bool:
    """Return whether a loader makes its iterators in a way of its own."""
    own = vars(loader).get("_get_iterator")
    return type(loader)._get_iterator is not DataLoader._get_iterator or not (own is None or type(own) is Seam)


def keeps_states(loader: DataLoader[Any]) -> bool:
    """Return whether its iterators keep a state per worker, as those of StatefulDataLoader do."""
    return has_own_iterator(loader) and hasattr(type(loader), "state_dict")


def attributes(loader: DataLoader[Any]) -> list[tuple[str, Any]]:
    """Return names and values of what a loader holds, also where its class has slots."""
    slots = [name for kind in type(loader).__mro__ for name in kind.__dict__.get("__slots__", ())]
    held = [(name, _held(loader, name)) for name in slots if name not in ("__dict__", "__weakref__")]
    return [*vars(loader).items(), *((name, value) for name, value in held if value is not None)]


def is_of(loader: DataLoader[Any], iterator: object) -> bool:
    """Return whether this is an iterator of torch's that draws from the dataset and the sampler of `loader`."""
    return (
        issubclass(type(iterator), _STOCK)
        and getattr(iterator, "_dataset", None) is dataset_of(loader)
        and getattr(iterator, "_index_sampler", None) is loader._index_sampler
    )


def hidden_in(iterator: Any, loader: DataLoader[Any], wanted: Callable[[object], bool]) -> Any:
    """Return the running iterator behind what a trainer holds, or None.

    It is looked for in the frames of generators, in what other iterators hold, and in the attributes of the loader.

    Args:
        iterator: what the trainer asks for batches.
    """
    around = chain(within(iterator, loader, _STOCK), within(loader, loader, _STOCK))
    return next((value for value in around if wanted(value)), None)
