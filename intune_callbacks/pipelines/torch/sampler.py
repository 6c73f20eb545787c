"""Samplers whose next index depends on the training, or whose place does not stay theirs: read ahead as in stock."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import DataLoader

from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.look import SCALARS, plain_values
from intune_callbacks.pipelines.torch.reach import dataset_of

__all__ = ["SamplerWatch", "is_settled"]

SETTLED = frozenset({"torch", "torchdata", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate"})
"""Packages whose samplers settle an epoch at its start, if those in them do."""
ENOUGH = 8
"""Pulls that are looked at before a sampler is read further ahead. A choice: fewer than the batches of a warm-up."""
SHARE = 0.01
"""Of the time, most that later looks take: a curriculum may begin at any step. A choice."""

DRAWS = "draws from the global random state, as the training may"
KEEPS = "has a `state_dict`, which says how far it was read"
CHANGED = "gives what the training lets it: its values changed between two batches"


class SamplerWatch:
    """Looks at a loader's sampler around the pulls that follow on those before the first batch.

    Each index of a sampler may depend on when it is asked for: it draws from a global random state at each, or asks
    what the training has left in it (losses, priorities, a queue). Of torch's own only the `batch_size` is looked at,
    which a training may raise: it counts from the next batch on.

    Args:
        loader: the user's.
        ahead: indices that a stock iterator pulls before its first batch.
        found: a method, called once, when it is known that the sampler depends on the training.
        counters: where the time of the pulls is added up.
        period: batches after which it begins anew by itself, and may draw then; None for one that has an end.

    Attributes:
        why: what the sampler does, empty while nothing was seen.
        is_off: nothing is looked at any more.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ahead: int,
        found: Callable[[], None],
        counters: Counters,
        period: int | None,
    ) -> None:
        self._sampler: Any = loader._index_sampler
        # Weak: in a cycle a kept iterator would be finalised at some collection, when its queues may be gone.
        self._ahead, self._found, self.counters = max(1, ahead), weakref.WeakMethod(found), counters
        # What a sampler reads in the dataset is looked at elsewhere.
        self._but = (dataset_of(loader),)
        parts = list(_nest(self._sampler))
        given = (loader.generator, *(getattr(part, "generator", None) for part in parts))
        self._generators = [one for one in given if isinstance(one, torch.Generator)]
        keeping = [part for part in parts if callable(getattr(type(part), "state_dict", None))]
        self._open = keeping or [part for part in parts if not (_is_settled(part) or (period and _only_repeats(part)))]
        self._is_settled, self._period = not self._open, period
        held = [getattr(part, "__dict__", {}) for part in parts]
        self._sized = [values for values in held if "batch_size" in values]
        self._looks, self._due_s = 0, 0.0
        # A checkpoint holds how far it was read, and a resumed training begins there.
        self.why, self.is_off = KEEPS if keeping else "", False

    @property
    def is_held(self) -> bool:
        """True while it is to be read no further ahead than in stock: it depends on the training, or that is open."""
        return bool(self.why) or (not self._is_settled and self._looks < ENOUGH)

    @property
    def name(self) -> str:
        """The sampler's class, that of the one inside where the outer one only makes batches."""
        return type(self._open[0] if self._open else self._sampler).__name__

    def around(self, pulls: Iterator[Any], done: int = 0) -> Iterator[Any]:
        """Return an iterator of the sampler that is looked at.

        Args:
            done: indices that were pulled from it.
        """
        return pulls if type(pulls) is Pulls else Pulls(pulls, self, done)

    def pull(self, pulls: Iterator[Any], done: int, left: Any) -> tuple[Any, Any]:
        """Return the next index, and what the sampler held behind it where that is to be compared.

        Args:
            done: indices that were pulled from it.
            left: what the sampler held behind the one before, None where nobody looked.
        """
        begins_anew = self._period is not None and done % self._period == 0  # nobody pulls there sooner than stock
        if done < self._ahead or begins_anew or self.why or self.is_off:
            return next(pulls), None
        begin_s = time.perf_counter()
        numbers, values = left or (None, None)
        if numbers is not None and numbers != self._numbers():
            self._depends(CHANGED)
        is_due = not self._is_settled and (self._looks < ENOUGH or begin_s >= self._due_s)
        if not (is_due or values is not None):
            return next(pulls), (self._numbers(), None)
        if values is not None and values != self._values():
            self._depends(CHANGED)
        before = _states()
        spent_s = time.perf_counter() - begin_s
        item = next(pulls)
        begin_s = time.perf_counter()
        if before != _states():
            self._depends(DRAWS)
        values = self._values() if is_due else None
        self._looks += 1
        if is_due:
            end_s = time.perf_counter()
            self._due_s = end_s + 2.0 * (spent_s + end_s - begin_s) / SHARE  # the pull after it is looked at, too
        return item, (self._numbers(), values)

    def _numbers(self) -> list[Any]:
        """Return what costs so little that it is looked at around each pull: a schedule changes one of many."""
        sizes = [values.get("batch_size") for values in self._sized]
        held = [list(getattr(part, "__dict__", {}).values()) for part in self._open]
        return sizes + [value for values in held for value in values if type(value) in SCALARS]

    def _values(self) -> Any:
        held = plain_values(self._sampler, self._but, is_read_here=True)
        return held, [one.get_state().numpy().tobytes() for one in self._generators]

    def _depends(self, why: str) -> None:
        if not self.why:
            self.why = why
            found = self._found()
            if found is not None:
                found()


class Pulls:
    """An iterator of a sampler, looked at; the arguments are those of `SamplerWatch.around`."""

    def __init__(self, pulls: Iterator[Any], watch: SamplerWatch, done: int) -> None:
        self._pulls, self._watch, self._done = pulls, watch, done
        self._left: Any = None

    def __iter__(self) -> Pulls:
        return self

    def __next__(self) -> Any:
        left, self._left, begin_s = self._left, None, time.perf_counter()
        item, self._left = self._watch.pull(self._pulls, self._done, left)
        self._watch.counters.pulled_s += time.perf_counter() - begin_s
        self._done += 1
        return item


def is_settled(sampler: Any) -> bool:
    """Return whether a sampler and all inside it are lists, or of packages that are known."""
    return all(_is_settled(part) for part in _nest(sampler))


def _nest(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those inside it."""
    yield sampler
    for name, part in getattr(sampler, "__dict__", {}).items():
        if "sampler" in name and part is not sampler:
            yield from _nest(part)


def _only_repeats(sampler: Any) -> bool:
    """Return whether a sampler without a length has one inside, as what begins that one anew for ever."""
    return not hasattr(type(sampler), "__len__") and any(part is not sampler for part in _nest(sampler))


def _is_settled(sampler: Any) -> bool:
    """Return whether what a sampler gives in an epoch is known at its start, as far as it depends on none inside it."""
    if type(sampler) in (list, tuple, range):
        return True
    held = getattr(sampler, "__dict__", {})
    # As it goes, from what is the user's: with replacement in blocks, without it for each pass over the rows.
    draws_on = "replacement" in held and held.get("generator") is not None and _has_passes(sampler, held)
    return not draws_on and type(sampler).__module__.partition(".")[0] in SETTLED


def _has_passes(sampler: Any, held: Mapping[str, Any]) -> bool:
    try:
        return bool(held["replacement"]) or sampler.num_samples > len(held["data_source"])
    except Exception:  # of a sampler without a source; the length is the user's code
        return False


def _states() -> Any:
    numpy = np.random.get_state(legacy=False)
    held = {**numpy, **numpy["state"], "state": None}  # the state of a bit generator is a dict of numbers and arrays
    of_numpy = [value.tobytes() if isinstance(value, np.ndarray) else value for value in held.values()]
    return random.getstate(), of_numpy, torch.default_generator.get_state().numpy().tobytes()
