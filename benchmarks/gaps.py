"""The longest wait of a training loop for a batch: stock, and where workers are taken over and added meanwhile.

A DataLoader of batches that take 20 ms in two workers (sleeps, so two cores are enough) and a step of 2 ms, for each
way to start a process. Ours starts as stock does, has 4 workers from a quarter of the epoch on, and 6 from its half on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.output import arguments, words, write
from intune_callbacks.pipelines.find import find

__all__ = ["main"]

BATCH, ITEM_S, STEP_S = 4, 0.005, 0.002
METHODS = ("fork", "forkserver", "spawn")


class Slow(Dataset[Any]):
    """Rows that take a while."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(ITEM_S)
        return torch.tensor([float(index)])


def gaps(method: str, batches: int, resized: bool) -> list[float]:
    """Return the seconds of each fetch of an epoch, but for the first, which starts the loader's own workers."""
    loader = DataLoader(Slow(batches * BATCH), batch_size=BATCH, num_workers=2, multiprocessing_context=method)
    pipeline = find(loader).pipeline if resized else None
    iterator: Any = iter(loader) if pipeline is None else pipeline.adopt(iter(loader))
    waits, rows = list[float](), list[float]()
    for number in range(batches):
        if pipeline is not None and number in (batches // 4, batches // 2):
            wanted = 4 if number == batches // 4 else 6
            pipeline.resize({"load": wanted, "load.window": 2 * wanted})
        begin_s = time.perf_counter()
        batch = next(iterator)
        waits.append(time.perf_counter() - begin_s)
        rows += batch.flatten().tolist()
        time.sleep(STEP_S)
    assert rows == [float(row) for row in range(batches * BATCH)]
    if pipeline is not None:
        assert pipeline.stages()[0].current == 6
        assert pipeline.why_not == ""
        pipeline.close()
    return waits[2:]  # one of each of the two workers


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns what was written."""
    parser = arguments("gaps", (__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", type=words, default=list(METHODS), help="ways to start a process, with commas")
    parser.add_argument("--batches", type=int, default=1500, help="of an epoch (default 1500)")
    parser.add_argument("--pairs", type=int, default=5, help="of each (default 5)")
    given = parser.parse_args(argv)
    batches, pairs = (400, 1) if given.quick else (given.batches, given.pairs)
    rows = []
    for method in given.methods:
        longest: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(pairs):
            for resized in (False, True) if turn % 2 else (True, False):
                longest[resized].append(max(gaps(method, batches, resized)))
        stock_s, ours_s = median(longest[False]), median(longest[True])
        rows.append(
            {
                "method": method,
                "stock_ms": round(1e3 * stock_s, 1),
                "resized_ms": round(1e3 * ours_s, 1),
                "ratio": round(ours_s / stock_s, 2),
                "stock_all_ms": [round(1e3 * one, 1) for one in longest[False]],
                "resized_all_ms": [round(1e3 * one, 1) for one in longest[True]],
            }
        )
        print(rows[-1], flush=True)
    return write("gaps", rows, given.seed, given.json)


if __name__ == "__main__":
    main()
