"""Tuning for a training loop of your own: ``for batch in live(loader):``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import TracebackType
from typing import Any

from intune_callbacks.errors import ConfigError
from intune_callbacks.session.arguments import BaseCallback
from intune_callbacks.session.loop_fit import Fit

__all__ = ["Live", "live"]

_OWN = ("_loader", "_place", "_fit", "_end", "_running")


def live(loader: Any, *more: Any, **arguments: Any) -> Any:
    """Return the loader, measured and tuned while a loop iterates over it.

    Examples:
        >>> for batch in live(loader):
        ...     step(batch)

    Args:
        loader: a DataLoader, ``torchdata.nodes.Loader`` or ``tf.data.Dataset``; what ``accelerator.prepare`` returned,
            if you use that. Anything else that can be iterated over is measured, and the report says why no more; an
            iterator stays one.
        more: further loaders that the same steps draw from; they are tuned together.
        arguments: those of `InTuneCallback`: ``mode``, ``run_dir``, ``warm_start`` and so on.

    Returns:
        A `Live`, which stands for the loader; with `more`, a tuple of them in the order given.

    Raises:
        ConfigError: with all wrong arguments at once; or settings were given for a loader that is live already.
        TypeError: an argument `InTuneCallback` does not have.
    """
    given = (loader, *more)
    if any(issubclass(type(one), Live) for one in given):
        if len(given) > 1 or arguments:
            problem = f"loader={loader!r}: it is live already; expected the loader that live() was given first"
            raise ConfigError([problem])
        return loader
    settings = BaseCallback(**arguments).settings
    fit = None if settings.config.mode == "off" else Fit(settings, given)
    made = tuple(_made(one, fit, place) for place, one in enumerate(given))
    return made if more else made[0]


class Live:
    """A loader under tuning: whatever is asked of it, but to iterate, the loader answers.

    A step ends when the next batch is asked for. The report is made by `close`, at the end of a ``with`` block, or when
    nothing refers to the loader any more: behind the last batch of ``for batch in live(loader)``. From then on it
    iterates as the loader itself does. It is copied and pickled as that loader; its ``__dict__`` is that loader's, and
    to call its type makes another loader of the user's class.
    """

    __slots__ = ("__weakref__", *_OWN)

    _loader: Any
    _fit: Fit | None
    _place: int
    _running: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self._begun(self)

    def _begun(self, owner: Any) -> Iterator[Any]:
        if self._fit is None or self._fit.is_closed:
            stock: Iterator[Any] = iter(self._loader)
            return stock
        return self._fit.iterate(self._place, owner)

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __repr__(self) -> str:
        return f"live({self._loader!r})"

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._loader, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._loader,)

    @property
    def __class__(self) -> type:
        # Whoever looks for a DataLoader finds one: Accelerate leaves alone what is none, and each rank trains on all.
        kind: Any = type(self._loader)
        return _both(kind, self._loader.__class__)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self._loader.__class__ = kind

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        # Ignite makes the loader again of what is in here.
        held: dict[str, Any] = self._loader.__dict__
        return held

    @property
    def report(self) -> dict[str, Any]:
        """What ``report.json`` holds; empty before `close`."""
        return {} if self._fit is None else self._fit.report

    def pause(self) -> AbstractContextManager[None]:
        """Return a context manager: what is done inside, such as a validation, is neither data wait nor model time."""
        return nullcontext() if self._fit is None else self._fit.paused()

    def close(self) -> dict[str, Any]:
        """End the tuning, print the card, and return the report; a loop that is still running gets all its batches."""
        if self._fit is not None:
            self._fit.close(show_card=True)
        return self.report

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fit is not None:
            self._fit.close(show_card=kind is None or issubclass(kind, KeyboardInterrupt))


def _made(loader: Any, fit: Fit | None, place: int) -> Live:
    """Return the `Live` of a loader.

    Args:
        loader: the user's.
        fit: what is shared by the loaders of one loop; None leaves everything as it is.
        place: of the loader among those; the first one's batches are the steps.
    """
    made: Live = object.__new__(_class_for(type(loader)))
    end = None if fit is None else weakref.finalize(made, fit.abandoned, place)
    for name, value in {"_loader": loader, "_place": place, "_fit": fit, "_end": end}.items():
        object.__setattr__(made, name, value)
    return made


def _class_for(kind: type) -> type[Live]:
    def another(_: type, *given: Any, **named: Any) -> Any:
        return kind(*given, **named)

    # Whoever makes a loader again, with another sampler, asks `__init__` for its arguments first.
    own = {"__slots__": (), "__new__": another, "__init__": kind.__init__, "__module__": __name__}  # type: ignore[misc]
    # Many ask a type what it can do, so it has of these what the user's has.
    more = {
        "__next__": _next,
        "__getitem__": lambda itself, key: itself._loader[key],
        # The one method of a dataset that is a loop: it begins with `iter()` of what it is asked of.
        "as_numpy_iterator": lambda itself: kind.as_numpy_iterator(itself),  # type: ignore[attr-defined]
    }
    return type("Live", (Live,), own | {name: method for name, method in more.items() if hasattr(kind, name)})


def _next(itself: Live) -> Any:
    if not hasattr(itself, "_running"):
        # Not held by it in turn: the report is made when nothing refers to the `Live` any more.
        object.__setattr__(itself, "_running", itself._begun(None))
    return next(itself._running)


@lru_cache
def _both(kind: type, said: type) -> type:
    """Return what a loader is, or says it is; where these are two, as of Accelerate's, a class that is both."""
    if issubclass(kind, said) or issubclass(said, kind):
        return kind if issubclass(kind, said) else said
    try:
        made = type(said.__name__, (kind, said), {"__new__": lambda _, *given, **named: said(*given, **named)})
    except Exception:  # no class can be both
        return said
    made.__module__, made.__qualname__ = said.__module__, said.__qualname__
    return made


def _itself(loader: Any) -> Any:
    return loader
