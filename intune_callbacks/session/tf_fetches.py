"""An iterator of a `tf.data.Dataset` in a loop of the user's own: it stays one of TensorFlow's and tells of fetches.

A wrapper around it would not do: `tf.train.Checkpoint` refuses what is no iterator of TensorFlow's, and a `tf.function`
is traced anew for each one it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.distribute import input_lib

from intune_callbacks.session.loop_fetches import Telling

if TYPE_CHECKING:
    from intune_callbacks.session.loop_fit import Fit

__all__ = ["is_plain", "told"]

_ENDS = (StopIteration, tf.errors.OutOfRangeError)


def is_plain(iterator: Any) -> bool:
    """Return whether it is what `iter()` gives of a dataset, or of what a strategy made of one; nobody's subclass."""
    return type(iterator) in (iterator_ops.OwnedIterator, input_lib.DistributedIterator)


def told(iterator: Any, fit: Fit, place: int, owner: Any) -> object:
    """Let the iterator tell of its fetches, and return its token; arguments are those of `loop_fetches.told`."""
    iterator.__class__ = _Iterator if type(iterator) is iterator_ops.OwnedIterator else _Spread
    iterator._fit, iterator._owner, iterator._place, iterator.token = fit, owner, place, object()
    token: object = iterator.token
    return token


class _Handed(Telling):
    __slots__ = ()

    def _eagerly(self, fetch: Any) -> Any:
        # While a function is traced nothing is fetched.
        return self._fetched(fetch, _ENDS) if tf.executing_eagerly() else fetch()

    def _asked(self) -> None:
        # Of each argument at each call of a compiled function, which may then fetch.
        if tf.executing_eagerly():
            self._fit.handed_over(self._place)


# TensorFlow's class goes first: else an iterator of it could not become one of these.
class _Iterator(iterator_ops.OwnedIterator, _Handed):  # type: ignore[misc]
    def __next__(self) -> Any:
        return self._eagerly(super().__next__)

    def get_next(self) -> Any:
        return self._eagerly(super().get_next)

    def __tf_tracing_type__(self, context: Any) -> Any:
        self._asked()
        return super().__tf_tracing_type__(context)


class _Spread(input_lib.DistributedIterator, _Handed):  # type: ignore[misc]
    def get_next(self, name: str | None = None) -> Any:  # which `next` calls
        return self._eagerly(lambda: super(_Spread, self).get_next(name))

    def __tf_tracing_type__(self, context: Any) -> Any:
        self._asked()
        return super().__tf_tracing_type__(context)
