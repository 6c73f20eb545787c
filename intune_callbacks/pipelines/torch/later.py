"""What runs in the workers of an iterable-style loader that may have helpers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from intune_callbacks.pipelines.later import UNTOUCHED, Later, Token, given, hold, swapped
from intune_callbacks.pipelines.length import restore, states
from intune_callbacks.pipelines.torch.calls import Batch, Shared, evaluated, packed
from intune_callbacks.pipelines.torch.workers import random_states, seed_all

__all__ = ["Begin", "Collate"]

# In how many batches of each worker the random states are watched around each call, before a call is made later. A
# choice: a source that draws from the global state mostly does so for each sample.
WATCHED = 2

STOCK, WATCH, PROVE, LATER = "stock", "watch", "prove", "later"
"""What a worker does: what the loader's own does; that, and watch the random states; make each call at once, and have a
helper make it again; make no call before the batch is whole."""

NONE_CAME = "no sample of a batch came by `later`"
NOT_AS_IT_IS = "{} of {} samples by `later` were not yielded as they are, in the batch they were made for"
BOTH_DRAW = (
    "the dataset's `__iter__` and the function given to `later` both draw from the global random state: give one of "
    "them a generator of its own"
)
IN_A_THREAD = "what `later` returned is called in a thread of the dataset's own"
LOOKED_AT = "a sample by `later` is looked at before it is yielded"
CAUGHT = "an error of the function given to `later` is caught in the dataset's `__iter__`"
NOT_SENT = "a sample by `later` cannot be sent to another process: {}"


class Begin:
    """In place of the user's `worker_init_fn`, which it calls first.

    Args:
        collate: in place of the loader's own.
        hook: what is done to the dataset, None for nothing.
    """

    def __init__(
        self,
        user: Callable[[int], None] | None,
        shared: Shared,
        collate: Collate,
        hook: Callable[[], None] | None = None,
    ) -> None:
        self._user, self._shared, self._collate, self._hook = user, shared, collate, hook

    def __call__(self, worker_id: int) -> None:
        if self._user is not None:
            self._user(worker_id)
        self._collate.worker = Worker(self._shared, worker_id)
        if self._hook is not None:
            self._hook()


class Collate:
    """In place of the user's `collate_fn`, at the end of each batch.

    Attributes:
        worker: the one this runs in.
    """

    def __init__(self, user: Callable[[Any], Any]) -> None:
        self._user = user
        self.worker: Worker | None = None

    def __call__(self, items: Any) -> Any:
        return self._user(items) if self.worker is None else self.worker.collate(self._user, items)


class Worker:
    """One worker of the loader's own, asked at each call by `later` whether to make it now."""

    def __init__(self, shared: Shared, worker_id: int) -> None:
        self._shared, self._board, self._id = shared, shared.board, worker_id
        self._unknown = hold(self)
        self._seeds, self._batches, self._watched = random_states(), 0, WATCHED if shared.is_known else 0
        self._thread, self._epoch = threading.get_ident(), self._board[Shared.EPOCH]
        # Where workers live on, what the source draws when an epoch begins follows on what the function drew before.
        self._begun = self._seeds if shared.persistent else None
        self._source_draws = self._fn_draws = self._is_inside = self._was_later = self._has_raised = False
        # The source's random state when it was last in force, None where nobody has looked; that of the batch's own
        # stream, None before its first draw.
        self._source_state: Any = None
        self._own_state: Any = None
        self._calls: list[tuple[Any, Token]] = []
        self._refused = self._told = ""
        self._cpu_s = time.process_time()
        first = PROVE if shared.is_known else WATCH
        self._mode = first if self._board[Shared.ON] else STOCK

    # -- within `__iter__` ---------------------------------------------------------------------------------------

    def call(self, later: Later[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call returns, or a token of it."""
        if self._begun is not None:
            self._source_draws |= random_states() != self._begun
            self._begun = None
        if self._is_inside or self._mode == STOCK:
            return later.fn(*args, **kwargs)
        if threading.get_ident() != self._thread:
            self._refuse(IN_A_THREAD)
            return later.fn(*args, **kwargs)
        if self._is_new_epoch() and self._mode == LATER:
            self._mode = PROVE
        token = Token(later, args, kwargs)
        return token if self._mode == LATER else self._at_once(later, token, args, kwargs)

    def _at_once(self, later: Later[Any, Any], token: Token, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._look_at_source()
        self._is_inside = True
        try:
            value = self._drawing(lambda: later.fn(*args, **kwargs))
        except BaseException:
            self._has_raised = True
            raise
        finally:
            self._is_inside = False
        self._calls.append((value, token))
        return value

    def _drawing(self, work: Callable[[], Any]) -> Any:
        """Return what function or `collate_fn` make, and see whether they draw: in a proof, from the batch's stream."""
        source = states() if self._mode == PROVE else None
        if source is not None and self._own_state is not None:
            restore(self._own_state)
        elif source is not None:
            seed_all(self._seeds, self._batches)
        before = random_states()
        try:
            return work()
        finally:
            after = random_states()
            self._fn_draws |= after != before
            if source is not None:
                self._own_state = states()
                restore(source)
            else:
                self._source_state = after

    def _look_at_source(self) -> None:
        now = random_states()
        self._source_draws |= self._source_state is not None and now != self._source_state
        self._source_state = now

    def touched(self, token: Token) -> None:
        """Note that somebody looks at what has not been made."""
        if not self._is_inside:
            self._refuse(LOOKED_AT)
            self._mode = STOCK

    def _refuse(self, why: str) -> None:
        self._refused = self._refused or why

    def _is_new_epoch(self) -> bool:
        before, self._epoch = self._epoch, self._board[Shared.EPOCH]
        return before != self._epoch

    # -- at the end of a batch -----------------------------------------------------------------------------------

    def collate(self, user: Callable[[Any], Any], items: Any) -> Any:
        """Return the batch of `items`, or what stands for it."""
        self._is_inside = True
        try:
            if self._mode == STOCK and not self._was_later and (self._refused or not self._board[Shared.ON]):
                return user(items)
            return self._collated(user, items)
        finally:
            self._is_inside = False
            self._batches += 1
            self._next()

    def _collated(self, user: Callable[[Any], Any], items: Any) -> Batch:
        value = raw = None
        seeds, proof = (self._seeds, self._batches), self._mode == PROVE
        if self._mode in (WATCH, PROVE) or (self._mode == LATER and self._fn_draws):
            self._look_at_source()
        if self._has_raised:
            self._refuse(CAUGHT)
        if self._mode == STOCK and not self._was_later:
            value = user(items)
        elif self._mode in (WATCH, PROVE):
            self._watched += 1
            raw = self._packed(self._with_tokens(items)) if proof else None
            value = self._drawing(lambda: user(items))
        else:
            raw = self._given(items)
            if raw is None:
                kept = states()
                try:
                    value = evaluated(user, items, seeds)
                finally:
                    restore(kept)
        if self._source_draws and self._fn_draws:
            self._refuse(BOTH_DRAW)
        cpu_s = time.process_time() - self._cpu_s
        new, self._told = ("" if self._told else self._refused), self._refused
        return Batch(self._id, self._epoch, value, raw, seeds, cpu_s, new, proof)

    def _given(self, items: Any) -> bytes | None:
        """Return what a helper is to make the batch of, None where none is free."""
        if self._mode != LATER or self._refused or not self._shared.credits.acquire(block=False):
            return None
        raw = self._packed(items)
        if raw is None:
            self._shared.credits.release()
        return raw

    def _packed(self, items: Any) -> bytes | None:
        if self._refused:
            return None
        try:
            return packed(items, self._unknown)
        except Exception as error:
            self._refuse(NOT_SENT.format(f"{type(error).__name__}: {error}"))
            return None

    def _with_tokens(self, items: Any) -> Any:
        """Return the items as they would be had no call been made: for each result there has to be a place."""
        waiting: dict[int, deque[Token]] = {}
        for value, token in self._calls:
            waiting.setdefault(id(value), deque()).append(token)
        found: set[int] = set()

        def token_of(part: Any) -> Any:
            tokens = waiting.get(id(part))
            if tokens is None:
                return UNTOUCHED
            token = tokens.popleft() if len(tokens) > 1 else tokens[0]
            if id(token) not in found:
                found.add(id(token))
                given(token, lambda args: swapped(args, token_of))  # it may have got what other calls returned
            return token

        replaced = swapped(items, token_of)
        missing = len(self._calls) - len(found)
        if missing or not self._calls:
            self._refuse(NOT_AS_IT_IS.format(missing, len(self._calls)) if missing else NONE_CAME)
        return replaced

    def _next(self) -> None:
        """Decide what to do in the next batch."""
        before, board = self._mode, self._board
        self._calls, self._own_state, self._has_raised = [], None, False
        if self._refused or not board[Shared.ON]:
            self._mode = STOCK
        elif self._watched < WATCHED:
            self._mode = WATCH
        elif board[Shared.PROVED + self._id]:
            self._mode = LATER
        else:  # one batch proves; until there is an answer, batches are made as before
            self._mode = PROVE if before == WATCH or self._is_new_epoch() else STOCK
        self._was_later |= self._mode == LATER
        if self._mode == STOCK or before == STOCK:
            self._source_state = None
        if self._mode != STOCK:
            self._cpu_s = time.process_time()
