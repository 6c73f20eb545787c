"""Arrays that are made when somebody asks for them: of a single pipeline plain numbers are kept, which are faster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

__all__ = ["Lazy"]


class Lazy:
    """Has attributes, named in `ARRAYS`, that a subclass makes with `_made` at the first use."""

    ARRAYS: ClassVar[Iterable[str]] = ()

    def __getattr__(self, name: str) -> Any:
        """Return an array of `ARRAYS`, made now and kept until `_drop`."""
        if name not in type(self).ARRAYS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        array = self.__dict__[name] = self._made(name)
        return array

    def _made(self, name: str) -> Any:
        raise NotImplementedError

    def _drop(self) -> None:
        """Forget the arrays: the plain numbers are other ones now."""
        for name in type(self).ARRAYS:
            self.__dict__.pop(name, None)
