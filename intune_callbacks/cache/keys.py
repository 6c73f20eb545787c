"""What the result of a function depends on, as far as it can be told: its code, and what it is given, by value."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from intune_callbacks.cache.values import reducer

__all__ = ["KEY_BYTES", "Keys", "NoKey", "code_digest"]

KEY_BYTES = 16
PLAIN = (int, float, str, bytes, bool, complex, type(None))
MOST_STATE_BYTES = 1 << 28
"""Of an object that a function is given: more takes longer than .3 s to look through in each worker. A choice."""
MOST_CHANGES = 8
"""Changes of an object's attributes after which it is taken to change all the time. A choice: a few are epochs'."""
MOST_OBJECTS = 64  # that are known at once; a choice: a function is given its dataset, or a new object each time
LOOKED_AT = 8  # elements of a list or array whose change is noticed; one that is put in another order changes them all


class NoKey(Exception):
    """Why a call's result cannot be kept: one sentence."""


class Keys:
    """The keys of one function's results, in this process.

    Args:
        fn: the function.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        self._fn, self._code = fn, code_digest(fn)
        self._defaults = (*(fn.__defaults__ or ()), *sorted((fn.__kwdefaults__ or {}).items()))
        self._known: dict[int, _Seen] = {}  # by the id of an object

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Return the key of a call.

        Raises:
            NoKey: what it is given, or reads from around it, cannot be told by value.
        """
        digest = hashlib.blake2b(self._code, digest_size=KEY_BYTES)
        with suppress(OSError):  # it is gone
            digest.update(os.fsencode(os.getcwd()))  # a path may be a relative one
        for value in args:
            self._add(digest, value)
        for name in sorted(kwargs):
            self._add(digest, name)
            self._add(digest, kwargs[name])
        for value in self._defaults:
            self._add(digest, value)
        for cell in self._fn.__closure__ or ():
            self._add(digest, _inside(cell))
        return digest.digest()

    def _add(self, digest: Any, value: Any) -> None:
        kind = type(value)
        if kind in PLAIN:
            text = value if kind is bytes else repr(value).encode("utf-8", "surrogatepass")
            digest.update(f"{kind.__name__}:{len(text)}:".encode())
            digest.update(text)
        elif kind is types.FunctionType:
            digest.update(code_digest(value))
            for one in (*(value.__defaults__ or ()), *map(_inside, value.__closure__ or ())):
                self._add(digest, one)
        elif isinstance(value, type):
            digest.update(f"{value.__module__}.{value.__qualname__}".encode())
        elif _is_plain_object(value):
            digest.update(self._object(value))
        else:
            digest.update(_pickled(value))

    def _object(self, value: Any) -> bytes:
        """Return the digest of an object, made anew only where its attributes look otherwise than before."""
        looks, known = _looks(value), self._known.get(id(value))
        if known is not None and known.value() is not value:  # another one, which has got its number
            known = None
        if known is not None and known.looks == looks:
            return known.digest
        changes = 0 if known is None else known.changes + 1
        if known is not None and changes > MOST_CHANGES:
            name = next((name for name, look in looks.items() if known.looks.get(name) != look), "")
            raise NoKey(f"the attribute {name!r} of {type(value).__name__} changes while it is used")
        digest = _pickled(value)
        if len(self._known) >= MOST_OBJECTS:
            self._known.clear()
        with suppress(TypeError):  # an object without weak references is looked through each time
            self._known[id(value)] = _Seen(weakref.ref(value), looks, digest, changes)
        return digest


@dataclass(frozen=True, slots=True)
class _Seen:
    """An object that a function was given: how it looked, the digest of all it holds, how often that was made anew."""

    value: weakref.ref[Any]
    looks: dict[str, Any]
    digest: bytes
    changes: int


def code_digest(fn: types.FunctionType) -> bytes:
    """Return what tells a function from others in all processes of a run: where it stands, and its code."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)

    def add(code: types.CodeType) -> None:
        digest.update(repr((code.co_filename, code.co_firstlineno)).encode())
        digest.update(repr((code.co_name, code.co_names, code.co_varnames, code.co_freevars)).encode())
        digest.update(code.co_code)
        for one in code.co_consts:
            if isinstance(one, types.CodeType):
                add(one)
            else:
                digest.update(repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one).encode())

    add(fn.__code__)
    digest.update(fn.__qualname__.encode())
    return digest.digest()


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _is_plain_object(value: Any) -> bool:
    """Return whether all that an object holds are its attributes."""
    kind: Any = type(value)
    return (
        hasattr(value, "__dict__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not isinstance(value, (list, tuple, dict, set, frozenset, str, bytes, bytearray, int, float))
    )


def _looks(value: Any) -> dict[str, Any]:
    """Return what changes where an attribute is set, a list changes its length or order, or an array its values."""
    return {name: _look(one) for name, one in vars(value).items()}


def _look(value: Any) -> Any:
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, (list, tuple)):
        return id(value), len(value), [id(value[n]) for n in _places(len(value))]
    if isinstance(value, (dict, set, frozenset)):
        return id(value), len(value)
    if isinstance(value, np.ndarray) and value.flags.c_contiguous:
        flat = value.reshape(-1)
        return id(value), value.shape, [repr(flat[n]) for n in _places(value.size)]
    return id(value)


def _places(size: int) -> Sequence[int]:
    return range(0, size, max(1, size // LOOKED_AT))


class _Digest(io.RawIOBase):
    """A file that only takes the digest of what is written, up to a size."""

    def __init__(self) -> None:
        super().__init__()
        self.digest, self.size_bytes = hashlib.blake2b(digest_size=KEY_BYTES), 0

    def write(self, data: Any) -> int:
        size_bytes = memoryview(data).nbytes
        self.size_bytes += size_bytes
        if self.size_bytes > MOST_STATE_BYTES:
            raise OverflowError
        self.digest.update(data)
        return size_bytes


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.RawIOBase) -> None:
        super().__init__(file, protocol=5)
        made = reducer()
        if made is not None:
            self.reducer_override = made()  # type: ignore[method-assign]


def _pickled(value: Any) -> bytes:
    """Return the digest of a value's pickle: what has the same one is the same, not the other way round."""
    digest, name = _Digest(), type(value).__name__
    try:
        _Pickler(digest).dump(value)
    except OverflowError:
        raise NoKey(f"{name} holds more than {MOST_STATE_BYTES >> 20} MiB, too much to compare by value") from None
    except Exception as error:
        raise NoKey(f"{name} cannot be told by value: {type(error).__name__}: {error}") from None
    return digest.digest.digest()
