"""Where an image dataset is cut without the user's doing: behind torchvision's own loader, before any transform."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

from intune_callbacks.cache.pure import pure

__all__ = ["NAME", "Cuts"]

FOLDER, LOADERS = "torchvision.datasets.folder", ("default_loader", "pil_loader", "accimage_loader")
MOST_DEPTH = 8  # datasets inside datasets that are looked into


def decoded(name: str, backend: str | None, path: Any, written_ns: int, size_bytes: int) -> Any:
    """Return what torchvision's loader makes of a file, as it was written last.

    Args:
        name: of the loader.
        backend: of torchvision's images.
        path: of the file.
        written_ns: when; a training may write its own images anew.
        size_bytes: of it.
    """
    return getattr(sys.modules[FOLDER], name)(path)


class _Loader:
    """In place of torchvision's loader, whose name it has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, path: Any) -> Any:
        import torchvision.datasets.folder  # in a spawned worker nobody may have done so

        try:
            seen = os.stat(path)
        except (OSError, TypeError, ValueError):
            return decoded(self._name, None, path, 0, 0)
        return _kept()(self._name, torchvision.get_image_backend(), path, seen.st_mtime_ns, seen.st_size)


@functools.cache
def _kept() -> Any:
    return pure(decoded)


NAME = f"{decoded.__module__}.{decoded.__qualname__}"


class Cuts:
    """The datasets whose images are kept; `undo` gives them their loaders back.

    Attributes:
        images: that they have.
    """

    def __init__(self) -> None:
        self.images = 0
        self._before: list[tuple[Any, Any]] = []

    def make(self, loader: Any) -> None:
        """Have the images of a loader's datasets kept where torchvision reads them.

        Args:
            loader: anything; what has no dataset of that kind is left alone.
        """
        if FOLDER not in sys.modules:
            return
        for dataset in _inside(getattr(loader, "dataset", None)):
            own = vars(dataset).get("loader")
            name = getattr(own, "__name__", "")
            if getattr(own, "__module__", "") == FOLDER and name in LOADERS:
                _kept()
                dataset.loader = _Loader(name)
                self._before.append((dataset, own))
                self.images += len(dataset)

    def undo(self) -> None:
        """Give each dataset its own loader back."""
        while self._before:
            dataset, own = self._before.pop()
            if type(vars(dataset).get("loader")) is _Loader:
                dataset.loader = own


def _inside(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a dataset and those inside it, as in torch's Subset and ConcatDataset."""
    if dataset is None or depth > MOST_DEPTH or not hasattr(dataset, "__dict__"):
        return
    yield dataset
    several = vars(dataset).get("datasets")
    for one in (vars(dataset).get("dataset"), *(several if isinstance(several, (list, tuple)) else ())):
        yield from _inside(one, depth + 1)
