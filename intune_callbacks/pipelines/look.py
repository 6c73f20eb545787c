"""What stands in an object of the user's and in all it holds, in a form in which two looks can be compared."""

from __future__ import annotations

import itertools
import marshal
import random
import sys
import threading
import weakref
import zlib
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["DRAWS", "SCALARS", "is_installed", "plain_values"]

NESTED, MOST_OBJECTS, MOST_PARTS, SAMPLED = 10, 1024, 64, 4096
"""How deep, and how many objects in all, are looked into; how many parts of each container are, and how many more, in
equal distances, are only told apart. A choice: all of it takes a few milliseconds at most, as long as a fork does."""

WHOLE_BYTES, ENTRY_BYTES = 8 << 20, 64
"""How much of arrays and other containers is looked at whole, where that is asked for, and for how much an entry of a
list counts, which takes that long. A choice: some milliseconds."""

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
NUMBERS = frozenset({type(None), bool, int, float, complex})
CONTAINERS = (list, tuple, dict, set, deque, Namespace, SimpleNamespace)
TELLING = frozenset({"logging", "tqdm"})
OPAQUE = TELLING | {"lightning", "pytorch_lightning", "lightning_fabric"}
"""Packages whose objects change with each step of a training; no sample is made of them, but by a sampler."""
KEPT = ("cache", "warning")
"""In names of attributes: what is kept to save work is the same when it is made again; what was said is no sample."""
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
DRAWS = object()
"""Stands in a look where there is a generator of random numbers."""


def plain_values(given: Any, but: Sequence[Any] = (), *, is_read_here: bool = False) -> Any:
    """Return what was found in an object and in what it holds, so that two such returns can be compared.

    Values are looked at, and what functions use besides their arguments: what stands in a closure, class or module.
    Of a large array or list only a part is. What is in memory shared by processes is no difference.

    Args:
        but: objects that are not looked into.
        is_read_here: this process reads the values, no worker: memory that processes share is a value like others, and
            one loss among many is a difference, so of what is not larger than `WHOLE_BYTES` together all is looked at.
    """
    return _Look(but, WHOLE_BYTES if is_read_here else 0).at(given, NESTED)


def is_installed(file: str | None) -> bool:
    """Return whether a source file is of a package that was installed, and not the user's own code.

    By its path: an environment that sees those of another one (`venv --system-site-packages`) has several places.
    """
    return file is not None and ("/site-packages/" in file or "/dist-packages/" in file)


class _Look:
    def __init__(self, but: Sequence[Any], whole_bytes: int) -> None:
        self._left, self._is_read_here, self._whole_bytes = MOST_OBJECTS, whole_bytes > 0, whole_bytes
        self._seen = {id(one) for one in but}

    def at(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        self._left -= 1
        if depth <= 0 or self._left < 0 or id(value) in self._seen:
            return None
        self._seen.add(id(value))
        try:
            return self._inside(value, kind, depth - 1), kind.__name__
        except Exception:  # anything may raise when it is looked at
            return None

    def _inside(self, value: Any, kind: type, depth: int) -> Any:
        if issubclass(kind, np.ndarray):
            return self._array(value)
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if torch is not None and issubclass(kind, torch.nn.Module) and not self._is_read_here and _is_elsewhere(value):
            return id(value)
        if issubclass(kind, np.generic):
            return value.tobytes()
        if issubclass(kind, (list, tuple, deque, set, frozenset)):
            return self._sequence(value, depth), self._attributes(value, kind, depth)
        if issubclass(kind, dict):
            return self._mapping(value, depth), self._attributes(value, kind, depth)
        if issubclass(kind, FUNCTIONS):
            return self._function(value, depth)
        if issubclass(kind, (*GENERATORS, *(() if torch is None else (torch.Generator,)))) and not self._is_read_here:
            return id(value), DRAWS, None
        raw = _buffer(value) if self._is_read_here else None
        if raw is not None:  # of an `array`, a `Value` or `Array` of multiprocessing
            return zlib.crc32(raw.tobytes()) if self._takes(raw.nbytes) else raw.nbytes
        if issubclass(kind, (weakref.ref, threading.local)):
            return None
        opaque = TELLING if self._is_read_here else OPAQUE
        if issubclass(kind, (type, ModuleType)) or kind.__module__.partition(".")[0] in opaque:
            return id(value)
        held = self._attributes(value, kind, depth)
        return (held, self._class(kind, depth)) if held is not None else id(value)

    def _sequence(self, value: Any, depth: int) -> Any:
        size = len(value)
        step = size // SAMPLED + 1
        sample = value[::step] if issubclass(type(value), (list, tuple)) else itertools.islice(value, SAMPLED)
        return size, self._entries(value), self._parts(sample, depth)

    def _mapping(self, value: dict[Any, Any], depth: int) -> Any:
        items = list(itertools.islice(dict.items(value), SAMPLED))
        values = self._entries(dict.values(value))
        return (
            len(value),
            values,
            self._parts((key for key, _ in items), depth),
            self._parts((v for _, v in items), depth),
        )

    def _takes(self, size: int) -> bool:
        """Return whether so many bytes are looked at whole, which leaves fewer for what comes later."""
        if size > self._whole_bytes:
            return False
        self._whole_bytes -= size
        return True

    def _entries(self, values: Any) -> Any:
        """Return a checksum of all entries, None where a sample has to do."""
        if not self._takes(ENTRY_BYTES * len(values)):
            return None
        held = list(values)
        # A number that was freed may have left its place to the next one.
        is_plain = NUMBERS.issuperset(map(type, held))
        return zlib.crc32(marshal.dumps(held, 2) if is_plain else array("Q", map(id, held)))

    def _parts(self, parts: Any, depth: int) -> list[Any]:
        found, looked_into = [], 0
        for part in parts:
            if type(part) in SCALARS:
                found.append(part)
            elif looked_into < MOST_PARTS:
                looked_into += 1
                found.append(self.at(part, depth))
            else:
                found.append(id(part))
        return found

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if not value.dtype.hasobject and self._takes(value.nbytes):
            return value.shape, value.dtype.str, zlib.crc32(value.tobytes())
        # What a large one stands on may be a file, of which each look would read.
        base: Any = value
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        if value.size > SAMPLED and not (isinstance(base, (np.ndarray, bytes)) and not isinstance(base, np.memmap)):
            return value.shape, value.__array_interface__["data"]
        sample = value.flat[:: value.size // SAMPLED + 1]
        if value.dtype.hasobject:
            return value.shape, [part if type(part) in SCALARS else id(part) for part in sample.tolist()]
        return value.shape, value.dtype.str, zlib.crc32(sample.tobytes())

    def _tensor(self, value: Any) -> Any:
        if value.is_shared() and not self._is_read_here:
            return value.data_ptr()
        if value.device.type == "cpu" and (value.numel() <= SAMPLED or self._takes(value.nbytes)):
            raw = value.detach().contiguous().flatten().view(sys.modules["torch"].uint8)
            return value.shape, value.dtype, zlib.crc32(raw.numpy())
        # Each change in its place counts up.
        return value.shape, value.dtype, value.data_ptr(), value._version

    def _attributes(self, value: Any, kind: type, depth: int) -> Any:
        """Return what an object holds; None where it cannot hold anything."""
        slots = [name for base in kind.__mro__ if "__slots__" in base.__dict__ for name in _names(base)]
        held = getattr(value, "__dict__", None)
        if held is None and not slots:
            return None
        parts = [*(held or {}).items(), *((name, _slot(value, name)) for name in slots)]
        kept = () if self._is_read_here else KEPT
        return [(name, self.at(part, depth)) for name, part in parts if not any(one in name.lower() for one in kept)]

    def _class(self, kind: type, depth: int) -> Any:
        """Return what the methods of a class of the user's use, and what else stands in it."""
        if id(kind) in self._seen:
            return None
        self._seen.add(id(kind))
        found = []
        for base in kind.__mro__:
            if _is_users(sys.modules.get(base.__module__)):
                for name, part in list(vars(base).items()):
                    if _may_hold(part) and name != "__slotnames__":  # pickling an object leaves it in the class
                        found.append((name, self.at(part, depth)))
        return found

    def _function(self, value: Any, depth: int) -> Any:
        if isinstance(value, partial):
            return self.at(value.func, depth), self.at(value.args, depth), self.at(value.keywords, depth)
        if isinstance(value, MethodType):
            return self.at(value.__func__, depth), self._used_of(value.__self__, value.__func__, depth)
        if isinstance(value, BuiltinFunctionType):
            return value.__name__, self.at(value.__self__, depth)
        cells = value.__closure__ or ()
        held = [self.at(cell.cell_contents, depth) if _is_filled(cell) else None for cell in cells]
        outside = value.__globals__
        used = [
            (name, self.at(outside[name], depth))
            for name in (() if is_installed(value.__code__.co_filename) else _used(value.__code__))
            if name in outside and _may_hold(outside[name])
        ]
        return value.__code__, held, self.at(value.__defaults__, depth), self.at(value.__kwdefaults__, depth), used

    def _used_of(self, owner: Any, fn: Any, depth: int) -> Any:
        """Return what a method uses of its object, which may be a whole model in training."""
        held = getattr(owner, "__dict__", {})
        known: dict[str, None] = {}
        waiting = [fn]
        while waiting:
            code = getattr(waiting.pop(), "__code__", None)
            for name in _used(code) if code is not None else ():
                if name not in known:
                    known[name] = None
                    waiting.append(getattr(type(owner), name, None))
        return [(name, self.at(held[name], depth)) for name in known if name in held]


def _is_elsewhere(module: Any) -> bool:
    """Return whether all weights are on an accelerator: a worker could compute nothing with them."""
    devices = {tensor.device.type for tensor in itertools.chain(module.parameters(), module.buffers())}
    return bool(devices) and "cpu" not in devices


def _buffer(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except TypeError:  # it has no bytes to show
        return None


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:  # nothing is in it, or it has another name outside its class
        return None


def _may_hold(value: Any) -> bool:
    return type(value) in SCALARS or isinstance(value, (*CONTAINERS, FunctionType))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _used(code: CodeType) -> Iterator[str]:
    """Yield the names a function uses that are none of its own, those in functions within it, too."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _used(part)


def _is_users(module: ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return file is not None and not is_installed(file)


def _names(base: type) -> tuple[str, ...]:
    slots = base.__dict__["__slots__"]
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
