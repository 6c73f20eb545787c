"""The patterns by their names, and what makes a loader of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reach_classes import (
    BATCH,
    Delegated,
    Generated,
    Infinite,
    Itself,
    Lazy,
    Mapped,
    Moved,
    Nested,
    Own,
    OwnGenerated,
    OwnTransformed,
    Pipe,
    Prepared,
    Renamed,
    Rows,
    Stream,
    Twice,
    Unsaid,
)
from torch.utils.data import DataLoader


def of_class(kind: type, dataset: Any = None) -> Callable[..., Any]:
    """Return what makes a loader of a class; it shuffles, with the random state of the training."""

    def make(**options: Any) -> Any:
        shuffle = {} if dataset is Stream else {"shuffle": True}
        return kind((dataset or Rows)(), batch_size=BATCH, **shuffle, **options)

    return make


def owned(**options: Any) -> Any:
    """A loader whose user has put something of his own in the place where iterators are made."""
    loader = of_class(DataLoader)(**options)
    loader._get_iterator = lambda: DataLoader._get_iterator(loader)
    return loader


PATTERNS: dict[str, Callable[..., Any]] = {
    "stock": of_class(DataLoader),
    "generated": of_class(Generated),
    "delegated": of_class(Delegated),
    "mapped": of_class(Mapped),
    "renamed": of_class(Renamed),
    "unsaid": lambda **options: DataLoader(Rows(), batch_sampler=Unsaid(), **options),
    "infinite": of_class(Infinite),
    "lazy": of_class(Lazy),
    "twice": of_class(Twice),
    "itself": of_class(Itself),
    "nested": of_class(Nested),
    "pipe": lambda **options: Pipe(of_class(DataLoader)(**options)),
    "pipe, generated": lambda **options: Pipe(of_class(Generated)(**options)),
    "prepared": lambda **options: Prepared(of_class(DataLoader)(**options)),
    "prepared, generated": lambda **options: Prepared(of_class(Generated)(**options)),
    "moved": lambda **options: Moved(of_class(DataLoader)(**options)),
    "moved, infinite": lambda **options: Moved(of_class(Infinite)(**options)),
    "own": of_class(Own),
    "own, generated": of_class(OwnGenerated),
    "own, transformed": of_class(OwnTransformed),
    "own attribute": owned,
    "stream": of_class(DataLoader, Stream),
    "stream, generated": of_class(Generated, Stream),
    "stream, own, generated": of_class(OwnGenerated, Stream),
    "stream, prepared": lambda **options: Prepared(of_class(DataLoader, Stream)(**options)),
}
WINDOW_ONLY = {name for name in PATTERNS if name.startswith("stream")}
