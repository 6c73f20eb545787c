"""`later`: how a dataset says which function makes its samples, so that other processes than its own may call it."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

__all__ = ["UNTOUCHED", "Later", "Token", "call_of", "given", "hold", "known", "later", "made", "resolved", "swapped"]

P = ParamSpec("P")
R = TypeVar("R")

DEEPEST, LONGEST = 8, 4096
"""How deep in a sample, and in how long containers, tokens are looked for. A choice: every sample is walked."""

UNTOUCHED = object()
"""What `swapped` is told of a part that stays."""

_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Later[Any, Any]] = weakref.WeakValueDictionary()


class Holder(Protocol):
    """What decides in a worker of a loader of ours whether a call is made at once."""

    def call(self, later: Later[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def touched(self, token: Token) -> None: ...


_holder: Holder | None = None


def later(fn: Callable[P, R]) -> Later[P, R]:
    """Allow InTune to call the last function of a sample in other processes than the worker that reads it.

    ``decode = later(decode)``, or ``@later`` above it, and in the `__iter__` of the dataset ``yield decode(raw)`` as
    before. The call is made at once, unless the loader runs under InTune and another number of workers than its own is
    wanted: then a process beside its workers may do it, after `__iter__` has gone on.

    Args:
        fn: a function of its arguments, and of nothing that changes while the loader runs. Its result is yielded as it
            is, alone or in dicts, lists and tuples; an error in it comes out of the loader, not of `__iter__`.

    Returns:
        What is called in place of `fn`.

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"later({fn!r}): expected the function that makes a sample; write later(fn)(raw)")
    return fn if isinstance(fn, Later) else Later(fn)


class Later(Generic[P, R]):
    """A function that may be called later, and elsewhere.

    Args:
        fn: the user's.
    """

    def __init__(self, fn: Callable[P, R]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.number = next(_numbers)
        _known[self.number] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _holder is None:
            return self.fn(*args, **kwargs)
        return cast(R, _holder.call(self, args, kwargs))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        # What has taken the place of its function in a module is found there by that one's name.
        name = getattr(self, "__qualname__", "")
        try:
            is_there = attrgetter(name)(sys.modules[self.__module__]) is self
        except (AttributeError, KeyError):
            is_there = False
        return name if is_there else (later, (self.fn,))


def known(number: int) -> Later[Any, Any]:
    """Return what was made before the processes that speak of it were forked."""
    return _known[number]


def hold(holder: Holder | None) -> int:
    """Have calls in this process decided by `holder`, at once with None; return the first number it has not seen."""
    global _holder
    _holder = holder
    return next(_numbers)


class Token:
    """A call that has not been made. Whoever looks at it before its batch is collated gets what the function returns.

    Args:
        later: whose.
        args: of the call.
        kwargs: of the call.
        is_made: whether the call was made.
        made: what it returned.
    """

    __slots__ = ("_args", "_is_made", "_kwargs", "_later", "_made")

    def __init__(
        self,
        later: Later[Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_made: bool = False,
        made: Any = None,
    ) -> None:
        self._later, self._args, self._kwargs = later, args, kwargs
        self._is_made, self._made = is_made, made

    @property  # type: ignore[misc]  # what `isinstance` asks
    def __class__(self) -> Any:
        return type(_touched(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(_touched(self), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Where nobody has found it, it travels as what it stands for.
        return _itself, (_touched(self),)


def call_of(token: Token) -> tuple[Any, ...]:
    """Return what another process makes the token of: the call, and what it returned where that is known."""
    return token._later, token._args, token._kwargs, token._is_made, token._made


def given(token: Token, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Change the arguments of a call that was not made as a token's."""
    token._args = change(token._args)


def made(token: Token) -> Any:
    """Return what the function returns; it is called once."""
    if not token._is_made:
        token._made = token._later.fn(*token._args, **token._kwargs)
        token._is_made, token._args, token._kwargs = True, (), {}
    return token._made


def _touched(token: Token) -> Any:
    if _holder is not None:
        _holder.touched(token)
    return made(token)


def _itself(given: Any) -> Any:
    return given


def _asks(name: str) -> Callable[..., Any]:
    def ask(self: Token, *args: Any) -> Any:
        return getattr(_touched(self), name)(*args)

    return ask


_SPECIAL = (
    *("len", "iter", "next", "contains", "getitem", "setitem", "delitem", "call", "str", "repr", "format", "bytes"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "int", "float", "complex", "index", "abs", "neg", "pos", "invert"),
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *("radd", "rsub", "rmul", "rmatmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rand", "ror", "rxor"),
)
for _name in _SPECIAL:
    setattr(Token, f"__{_name}__", _asks(f"__{_name}__"))
Token.__bool__ = lambda self: bool(_touched(self))  # type: ignore[attr-defined]


def swapped(value: Any, swap: Callable[[Any], Any], depth: int = DEEPEST) -> Any:
    """Return a sample, or a list of them, with some of its parts replaced; what nothing is replaced in is not copied.

    Args:
        value: looked into are dicts, lists and tuples.
        swap: part -> what takes its place, `UNTOUCHED` where it stays and is looked into.
        depth: how deep.
    """
    new = swap(value)
    if new is not UNTOUCHED:
        return new
    kind = type(value)
    if not depth or not issubclass(kind, (dict, list, tuple)) or len(value) > LONGEST:
        return value
    parts = list(value.values()) if issubclass(kind, dict) else value
    others = [swapped(part, swap, depth - 1) for part in parts]
    if all(other is part for other, part in zip(others, parts, strict=True)):
        return value
    if issubclass(kind, tuple):
        return kind(*others) if hasattr(kind, "_fields") else kind(others)
    result = copy.copy(value)
    for key, other in zip(list(value) if issubclass(kind, dict) else range(len(others)), others, strict=True):
        result[key] = other
    return result


def resolved(value: Any) -> Any:
    """Return a sample, or a list of them, with every call in it made."""
    return swapped(value, lambda part: made(part) if type(part) is Token else UNTOUCHED)
