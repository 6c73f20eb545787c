"""How a result is laid down and taken up again, and whether that gives the same."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from intune_callbacks.pipelines.workers.wire import Reducer, loaded, packed

__all__ = ["is_same", "laid_down", "random_states", "reducer", "taken_up"]

MT19937_BYTES = 624 * 4 + 4
"""``struct s_mt19937_state``, https://github.com/numpy/numpy/blob/main/numpy/random/src/mt19937/mt19937.h"""


def reducer() -> Reducer | None:
    """Return what pickles tensors and images, where there can be any."""
    kinds: list[Callable[[Any], Any]] = []
    if "torch" in sys.modules:
        from intune_callbacks.pipelines.torch.carry import Carry

        kinds.append(Carry())
    pil = sys.modules.get("PIL.Image")
    if pil is not None:
        kinds.append(functools.partial(_carried_image, pil.Image))
    return None if not kinds else lambda: functools.partial(_first_of, kinds)


def _first_of(kinds: list[Callable[[Any], Any]], value: Any) -> Any:
    for kind in kinds:
        carried = kind(value)
        if carried is not NotImplemented:
            return carried
    return NotImplemented


def _carried_image(kind: type, value: Any) -> Any:
    """Pickle a PIL image with its pixels out of band: they are copied once, not three times."""
    if type(value) is not kind:
        return NotImplemented
    state: Any = value.__getstate__()
    if type(state[-1]) is not bytes:  # a version that keeps it otherwise
        return NotImplemented
    return _image_of, (kind, state[:-1], pickle.PickleBuffer(state[-1]))


def _image_of(kind: Any, state: list[Any], pixels: Any) -> Any:
    image = kind.__new__(kind)
    image.__setstate__([*state, pixels])
    return image


def laid_down(value: object) -> list[memoryview]:
    """Return a value as bytes; raises what pickling raises."""
    return packed(value, reducer())


def taken_up(parts: Sequence[memoryview]) -> Any:
    """Return the value of these bytes, in memory of its own."""
    whole = memoryview(b"".join(parts))

    def read(memory: memoryview, at: int) -> None:
        memory[:] = whole[at : at + memory.nbytes]

    return loaded(read, whole.nbytes)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are of the same kinds and have the same bits."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in (list, tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    if kind is dict:
        return list(one) == list(other) and all(is_same(one[name], other[name]) for name in one)
    if kind is np.ndarray and not one.dtype.hasobject:
        alike = one.dtype == other.dtype and one.shape == other.shape and one.strides == other.strides
        return bool(alike and one.tobytes() == other.tobytes())
    # Not all that an object holds need be in its pickle.
    return _names(one) == _names(other) and _joined(one) == _joined(other)


def _names(value: Any) -> list[str]:
    return sorted(getattr(value, "__dict__", ()))


def _joined(value: Any) -> bytes:
    return b"".join(laid_down(value))


def random_states() -> tuple[Any, ...]:
    """Return the states of the generators that all of a process share, as they are now."""
    states: list[Any] = [random.getstate(), _numpy_state()]
    torch = sys.modules.get("torch")
    if torch is not None:
        states.append(torch.get_rng_state().numpy().tobytes())
    return tuple(states)


def _numpy_state() -> Any:
    """Return numpy's state by the bytes it has in memory: 1 us in place of 30."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return pickle.dumps(generator.state)
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
