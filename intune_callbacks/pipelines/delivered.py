"""Which workers of an iterable-style DataLoader deliver, read from its running iterator; nothing in it is changed.

Such workers own shards: those without one end at once, and those with fewer leave the rest to the others.
"""

from __future__ import annotations

import os
from typing import Any

from intune_callbacks.pipelines.epochs import Epochs
from intune_callbacks.types import Clock, Hint
from intune_callbacks.words import count, percent

__all__ = ["Delivery", "Followed"]

UNEVEN_FRAC = 0.2
"""From this share of an epoch with fewer than all workers on, shards are uneven. A choice: as much waiting makes a run
input-bound, see `measure.verdict`; at the end of any epoch the last batches are made by fewer."""
UNEVEN_BATCHES = 2
"""From this difference in batches on. Equal shards differ by one batch, which is much of a short epoch."""
READ = (
    *("_workers_status", "_task_info", "_send_idx", "_rcvd_idx", "_num_yielded"),
    *("_dataset_kind", "_prefetch_factor"),
)
ITERABLE = 1
"""`_DatasetKind.Iterable`. Torch is not imported here: loaders are also watched where it is not there."""


class Delivery:
    """What the workers of one loader have delivered in the last epochs that had a batch for each of them.

    Args:
        dataset: asked for the number of its shards.
        clock: its `wall` times the epochs.
    """

    def __init__(self, workers: int, dataset: object, clock: Clock) -> None:
        self._workers, self._dataset, self.wall = workers, dataset, clock.wall
        self.epochs = Epochs()
        self.last: Epoch | None = None
        self.whole: Epoch | None = None

    @property
    def delivering(self) -> int | None:
        """How many workers deliver: all but those that ended without a batch; None while that is not known."""
        last = self.last
        return None if last is None or not last.is_followed else self._workers - len(last.without)

    @property
    def hints(self) -> tuple[Hint, ...]:
        """What is odd about the epochs, about the shards, and the number of workers that is enough for them."""
        return (*self.epochs.hints, *self._of_shards())

    def _of_shards(self) -> tuple[Hint, ...]:
        last, whole = self.last, self.whole
        if last is not None and last.is_followed and last.without:
            return (self._starved(last),)
        if whole is not None and whole.fewer_frac > UNEVEN_FRAC:
            least, most = min(whole.batches), max(whole.batches)
            if most - least >= UNEVEN_BATCHES:
                return (self._uneven(whole.fewer_frac, least, most),)
        return ()

    def _starved(self, epoch: Epoch) -> Hint:
        workers, shards = self._workers, _shards_of(self._dataset)
        left = workers - len(epoch.without)
        too_few = shards is not None and shards < workers
        who = f"{len(epoch.without)} of {workers} workers ended without a batch"
        if left == 1 and too_few:
            who = f"worker {epoch.batches.index(max(epoch.batches))} of {workers} delivered everything"
        if shards is not None and too_few:
            who += f": {count(shards, 'shard')} for {workers} workers"
        # Each shard its worker is enough, and so is one worker where only one had anything. Who would own what among
        # some others is not known.
        enough = 1 if left == 1 else shards if too_few else None
        if enough is None:
            return Hint(f"{who}: shards of equal size, one for each worker, keep all busy", "", "shards", "load")
        line = f"DataLoader(num_workers={enough})  # was {workers}"
        if enough > 1:
            line += "; the samples' order may change"
        more = "reshard" if too_few else "give each worker a shard"
        return Hint(f"{who}; num_workers={enough} is enough, or {more}", line, "shards", "load")

    def _uneven(self, fewer_frac: float, least: int, most: int) -> Hint:
        workers, shards = self._workers, _shards_of(self._dataset)
        what = f"the shards are uneven: for {percent(fewer_frac)} of an epoch fewer than {workers} workers had any left"
        mend = "shards of equal size keep all busy"
        if shards is not None and shards % workers:
            mend = f"{count(shards, 'shard')} for {workers} workers, a multiple of {workers} keeps all busy"
        return Hint(f"{what} ({least} to {most} batches each); {mend}", "", "shards", "load")


class Epoch:
    """One epoch of one iterator.

    Attributes:
        status: of the workers, True until one has ended; torch makes a new list for each epoch.
        batches: delivered by each worker.
        without: the workers that ended without a batch.
        is_followed: False where not everything was seen, or somebody raised: then nothing is known.
    """

    def __init__(self, iterator: Any, now_s: float) -> None:
        self.status: list[bool] = iterator._workers_status
        workers = len(self.status)
        # One met in mid-epoch has delivered before; Lightning fetches a batch ahead. At first batches are asked of all
        # workers in turn. Later, or where some were skipped or the epoch was resumed, nobody knows whose they were.
        self.total: int = iterator._rcvd_idx
        is_known = iterator._num_yielded == self.total <= workers * iterator._prefetch_factor
        self.is_followed = is_known and iterator._dataset_kind == ITERABLE
        self.batches = [len(range(worker, self.total, workers)) for worker in range(workers)]
        self.without: list[int] = []
        self.sent: int = 0
        self.owners: dict[int, int] = {}
        self._begin_s = self._last_s = now_s
        self._fewer_s = 0.0
        self._has_all = True

    @property
    def fewer_frac(self) -> float:
        """Share of its seconds with fewer than all workers, 0..1."""
        return self._fewer_s / (self._last_s - self._begin_s) if self._last_s > self._begin_s else 0.0

    def look(self, now_s: float) -> None:
        """Add the time since the last look to where it belongs."""
        if not self._has_all:
            self._fewer_s += now_s - self._last_s
        self._last_s, self._has_all = now_s, all(self.status)

    def find_without(self) -> None:
        """See who has ended without a batch: kept, for all workers count as ended once the iterator is dropped."""
        self.without = [w for w, batches in enumerate(self.batches) if not batches and not self.status[w]]


class Followed:
    """One stock iterator, looked at when it has sent out work and when it has delivered.

    Args:
        delivery: what is learned is for it.
        iterator: not held; anything but a multiprocess iterator of torch's is left alone.

    Attributes:
        is_known: True for such an iterator.
    """

    def __init__(self, delivery: Delivery, iterator: Any) -> None:
        self._delivery = delivery
        self.is_known = all(hasattr(iterator, name) for name in READ)
        self._epoch: Epoch | None = None
        delivery.epochs.begins()
        self.sent(iterator)

    def sent(self, iterator: Any) -> None:
        """Note of which worker each new batch was asked."""
        epoch = self._of(iterator)
        if epoch is not None and epoch.sent < iterator._send_idx:
            for number in range(epoch.sent, iterator._send_idx):
                task = iterator._task_info.get(number)
                if task is not None:
                    epoch.owners[number] = task[0]
            epoch.sent = iterator._send_idx

    def delivered(self, iterator: Any) -> None:
        """Note who has made the batch that was handed out."""
        if self.is_known:
            self._delivery.epochs.delivered(iterator._send_idx - iterator._rcvd_idx)
        epoch = self._of(iterator)
        if epoch is None:
            return
        worker = epoch.owners.pop(self._number(iterator, epoch), None)
        if worker is None:
            epoch.is_followed = False
            return
        epoch.batches[worker] += 1
        epoch.total += 1
        epoch.look(self._delivery.wall())
        if epoch.total % len(epoch.batches) == 0:  # once a round: in the first one each had its turn
            epoch.find_without()
            self._delivery.last = epoch

    def stopped(self, iterator: Any, error: BaseException) -> None:
        """Note how a fetch without a batch ended.

        Args:
            error: a StopIteration at the end of an epoch.
        """
        if isinstance(error, StopIteration):
            self._delivery.epochs.ended(False)
        epoch = self._of(iterator)
        if epoch is None:
            return
        if not isinstance(error, StopIteration):
            epoch.is_followed = False
        elif epoch.total >= len(epoch.batches):
            epoch.look(self._delivery.wall())
            epoch.find_without()
            self._delivery.last = self._delivery.whole = epoch
            self._epoch = None

    def _of(self, iterator: Any) -> Epoch | None:
        """Return the epoch that the iterator is in, where it is followed."""
        if not self.is_known:
            return None
        epoch = self._epoch
        if epoch is None or epoch.status is not iterator._workers_status:
            epoch = self._epoch = Epoch(iterator, self._delivery.wall())
        return epoch if epoch.is_followed else None

    @staticmethod
    def _number(iterator: Any, epoch: Epoch) -> int:
        """Return the number of the batch that was handed out last."""
        if getattr(iterator, "_in_order", True):
            return int(iterator._rcvd_idx) - 1
        # Out of order a batch goes out as it comes, before its worker can have ended.
        tasks, status = iterator._task_info, epoch.status
        return next((k for k, worker in epoch.owners.items() if k not in tasks and status[worker]), -1)


def _shards_of(dataset: Any) -> int | None:
    """Return how many shards a dataset says it has: Hugging Face's, webdataset's; None where it does not say."""
    try:
        for name in ("num_shards", "n_shards"):
            shards = getattr(dataset, name, None)
            if type(shards) is int and shards > 0:
                return shards
        urls = dataset.pipeline[0].urls
    except Exception:  # no such attribute, or a property of the user's that raises
        return None
    # Those of all ranks, of which each has a part.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return len(urls) or None if type(urls) is list and alone else None
