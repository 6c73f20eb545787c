"""Random resizes of every adapter, between batches and from a second thread, against the stock loader's sequence.

Every run must deliver the items of a stock loader that was never touched: ``num_workers=0``, or the same
``num_workers`` where the stock order depends on it (iterable datasets, StatefulDataLoader). Differences are counted.
"""

from __future__ import annotations

import faulthandler
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import exactness_cases, exactness_reach
from benchmarks.differences import Differences, compare, exact
from benchmarks.exactness_cases import Adapter, Subject
from benchmarks.hostile import identity
from benchmarks.output import arguments, words, write

__all__ = ["Churn", "main", "stress"]

ADAPTERS = (*exactness_cases.ADAPTERS, *exactness_reach.adapters())
ITEMS = (20, 240)
"""Fewest and most items of one epoch: short, so that starts and ends are met often."""
HANG_S = 120


@dataclass
class Churn:
    """Resizes at random, from the training loop and, started as a thread, from beside it."""

    subject: Subject
    seed: int
    budget: int
    made: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def once(self) -> None:
        """Change some of the numbers, if the budget allows."""
        with self._lock:
            if self.made >= self.budget:
                return
            self.made += 1
            choices = random.Random(self._random.getrandbits(32))
        self.subject.change(choices)

    def beside(self) -> None:
        """Resize until told to stop; the body of the second thread."""
        try:
            while not self.stop.is_set():
                self.once()
                self.stop.wait(self._random.random() * 0.01)
        except BaseException as error:
            self.failure = error


def stress(adapter: Adapter, resizes: int, seed: int) -> dict[str, Any]:
    """Return the row of one adapter after `resizes` random resizes over as many short epochs as they take.

    Args:
        adapter: what to stress.
        resizes: calls of resize to make.
        seed: of all choices.
    """
    total, made, runs, choices = Differences(), 0, 0, random.Random(seed)
    begin = time.perf_counter()
    while made < resizes:
        run_seed = choices.randrange(1 << 30)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        differences, used = _run(adapter, run_seed, resizes - made)
        total.add(differences)
        made, runs = made + used, runs + 1
    faulthandler.cancel_dump_traceback_later()
    return {
        "adapter": adapter.name,
        "resizes": made,
        "items": total.items,
        "lost": total.lost,
        "repeated": total.repeated,
        "out_of_order": total.out_of_order,
        "runs": runs,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _run(adapter: Adapter, seed: int, budget: int) -> tuple[Differences, int]:
    choices = random.Random(seed)
    items, epochs = choices.randint(*ITEMS), choices.choice((1, 1, 2))
    per_step = choices.choice((1, 1, 2))
    early = choices.choice((None, None, choices.randrange(items))) if adapter.ordered else None
    total = Differences()
    subject = adapter.build(items, seed)
    churn = Churn(subject, seed, budget)
    beside = adapter.beside and choices.random() < 0.5
    thread = threading.Thread(target=churn.beside, name="churn") if beside else None
    try:
        if thread is not None:
            thread.start()
        for epoch, expected in enumerate(adapter.expected(items, seed, epochs)):
            stop = early if epoch == epochs - 1 else None
            delivered = list(_deliver(subject, churn, per_step, stop))
            total.add(compare(delivered, expected[:stop], adapter.ordered))
    finally:
        churn.stop.set()
        if thread is not None:
            thread.join()
        subject.close()
    if churn.failure is not None:
        raise churn.failure
    return total, max(1, churn.made)


def _deliver(subject: Subject, churn: Churn, per_step: int, stop: int | None) -> Iterator[object]:
    iterator, number = subject.start(), 0
    while stop is None or number < stop:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield identity(batch)
        number += 1
        for _ in range(per_step):
            churn.once()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line; the exit code is 1 if anything was not exact."""
    parser = arguments("exactness", __doc__.split("\n")[0])
    parser.add_argument("--resizes", type=int, default=100_000, help="shared among the adapters (default 100000)")
    parser.add_argument("--adapters", type=words, default=[a.name for a in ADAPTERS], help="names, separated by commas")
    given = parser.parse_args(argv)
    chosen = [adapter for adapter in ADAPTERS if adapter.name in given.adapters]
    resizes = min(given.resizes, 40 * len(chosen)) if given.quick else given.resizes
    weights = sum(adapter.weight for adapter in chosen)
    shares: list[tuple[Adapter, int]] = [(a, max(1, math.ceil(resizes * a.weight / weights))) for a in chosen]
    rows = []
    for number, (adapter, share) in enumerate(shares):
        rows.append(stress(adapter, share, given.seed * 1000 + number))
        print(rows[-1], flush=True)
    return write("exactness", rows, given.seed, given.json)


if __name__ == "__main__":
    raise SystemExit(0 if exact(main()) else 1)
