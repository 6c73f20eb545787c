"""One iterator of a loader in a loop of the user's own: it hands on the batches and tells of each fetch."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Fetches"]


class Told(Protocol):
    """Who is told of fetches."""

    is_closed: bool

    def fetch_begin(self, place: int) -> None: ...

    def fetch_end(self, place: int, batch: Any, delivered: bool) -> None: ...

    def epoch_end(self, place: int, token: object, is_dropped: bool = False) -> None: ...

    def again(self, place: int, token: object) -> None: ...


class Fetches:
    """One iterator of a loader, each fetch timed.

    Args:
        inner: the iterator.
        fit: what is told of each fetch.
        place: of the loader among those of the fit.
        owner: held as long as this is, such as the `Live`, which so ends behind it and not before.
    """

    def __init__(self, inner: Any, fit: Told, place: int, owner: Any) -> None:
        self.inner, self._fit, self._owner = inner, fit, owner
        self._place, self.token = place, object()

    def __iter__(self) -> Fetches:
        return self

    def __next__(self) -> Any:
        fit = self._fit
        if fit.is_closed:
            return next(self.inner)
        fit.fetch_begin(self._place)
        try:
            batch = next(self.inner)
        except BaseException as error:
            fit.fetch_end(self._place, None, False)
            if isinstance(error, StopIteration):
                fit.epoch_end(self._place, self.token)
            raise
        fit.fetch_end(self._place, batch, True)
        return batch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next epoch with the same workers, as a DataLoader asks of the iterator it keeps."""
        self._fit.again(self._place, self.token)
        self.inner._reset(loader, first_iter)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "_fit", "_owner", "_place", "token"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __del__(self) -> None:
        fit = vars(self).get("_fit")
        if fit is not None:
            fit.epoch_end(self._place, self.token, is_dropped=True)
