"""What the callback adds to a batch, and what the resizable stage costs per item beside the stock machinery.

Ours and stock take turns in one run, so that a busy machine hits both; figures are medians, ratios medians of pairs.
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from benchmarks.output import arguments, write
from intune_callbacks.pipelines.find import find

__all__ = ["PAYLOADS", "callback_rows", "engine_rows", "main", "per_item_us", "side_by_side"]

WORKERS = 2
ENDLESS = 1 << 30
STEP_S = 0.010


@dataclass(frozen=True, slots=True)
class Payload:
    """What one item is.

    Args:
        name: in the rows.
        rows, columns: of a float32 tensor; 0 rows make it a plain integer.
        items: measured per turn.
    """

    name: str
    rows: int
    columns: int
    items: int

    def __call__(self, item: int) -> Any:
        return torch.zeros(self.rows, self.columns) if self.rows else item


PAYLOADS = (
    Payload("int", 0, 0, 4000),
    Payload("128x39 float32", 128, 39, 2000),
    Payload("6.3 MB float32", 24096, 65, 60),
)


class Made(Dataset[Any]):
    """A map-style dataset of `items` items that are batches."""

    def __init__(self, payload: Payload, items: int = ENDLESS) -> None:
        self.payload, self.items = payload, items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> Any:
        return self.payload(item)


class Source:
    """A running loader, stock or made elastic, with the same workers and window."""

    def __init__(self, loader: Any, ours: bool, kind: str) -> None:
        self._loader, self._live = loader, None
        if ours:
            found = find(loader, workers_kind=kind)
            if found.pipeline is None:
                raise RuntimeError(f"nothing to measure: {found.why}")
            self._live = found.pipeline
            self._live.prepare()
        self.iterator: Iterator[Any] = iter(loader)
        if self._live is not None:
            self.iterator = self._live.adopt(self.iterator)
            # One more than the stock window: with the user's own numbers a DataLoader's own workers go on delivering.
            windows = {s.name: 2 * WORKERS + 1 for s in self._live.stages() if s.window_of is not None}
            workers = {s.name: WORKERS for s in self._live.stages() if s.window_of is None and s.kind != "memory"}
            self._live.resize(workers | windows)

    def close(self) -> None:
        """Stop all workers, and wait for it: what lingers would be measured with the next turn."""
        if self._live is not None:
            self._live.close()
        else:
            running: Any
            for running in (self.iterator, *(getattr(node, "_it", None) for node in walk(self._loader))):
                if hasattr(running, "_shutdown_workers"):
                    running._shutdown_workers()
                elif hasattr(running, "_shutdown"):
                    running._shutdown()
        self.iterator, self._loader = iter(()), None
        gc.collect()


def walk(loader: Any) -> Iterator[Any]:
    """Yield the nodes of a torchdata graph; none for any other loader."""
    node = getattr(loader, "root", None)
    while node is not None:
        yield node
        node = getattr(node, "_it", None) if isinstance(node, ParallelMapper) else getattr(node, "source", None)


def mapper(payload: Payload, method: str, items: int = ENDLESS) -> Loader[Any]:
    """Return a torchdata graph with one ParallelMapper."""
    source: Any = IterableWrapper(range(items))
    context = "fork" if method == "process" else None
    return Loader(ParallelMapper(source, payload, num_workers=WORKERS, method=method, multiprocessing_context=context))


def loader(payload: Payload, items: int) -> DataLoader[Any]:
    """Return a DataLoader with worker processes whose items are whole batches."""
    return DataLoader(Made(payload, items), batch_size=None, num_workers=WORKERS, multiprocessing_context="fork")


def per_item_us(source: Source, items: int) -> float:
    """Return the wall microseconds per item in the steady state, read the source to its end, and close it."""
    with closing(source):
        for _ in itertools.islice(source.iterator, warm_up(items)):
            pass
        begin = time.perf_counter()
        for _ in itertools.islice(source.iterator, items):
            pass
        took_s = time.perf_counter() - begin
        # The stock mapper's sorting thread raises when its processes leave with a tensor under way.
        for _ in source.iterator:
            pass
        return took_s / items * 1e6


def warm_up(items: int) -> int:
    """Return how many items come before `items` measured ones."""
    return max(8, items // 10)


def side_by_side(ours: Callable[[], float], stock: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Let both take turns `repeats` times.

    Returns:
        The medians of ours and of stock, and the median of the ratios of the pairs.
    """
    pairs = []
    for number in range(repeats):
        if number % 2:
            b, a = stock(), ours()
        else:
            a, b = ours(), stock()
        pairs.append((a, b))
    mine, theirs = zip(*pairs, strict=True)
    return statistics.median(mine), statistics.median(theirs), statistics.median(a / b for a, b in pairs)


def engine_rows(payloads: Sequence[Payload], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the resizable stage beside ParallelMapper and DataLoader.

    Args:
        payloads: what the items are.
        repeats: turns of each.
    """
    for payload in payloads:
        # More than a window of each stage stays behind the measured items: the last ones of a source come easier.
        items = warm_up(payload.items) + payload.items + 8 * WORKERS
        threads, processes = (partial(mapper, payload, method, items) for method in ("thread", "process"))
        stock = partial(loader, payload, items)
        yield _beside("ParallelMapper thread", threads, "thread", payload, repeats)
        yield _beside("ParallelMapper process", processes, "process", payload, repeats)
        yield _beside("DataLoader process", stock, "process", payload, repeats)
        yield _beside("DataLoader process -> thread", stock, "thread", payload, repeats)


def _beside(name: str, build: Callable[[], Any], kind: str, payload: Payload, repeats: int) -> dict[str, Any]:
    def turn(ours: bool) -> float:
        return per_item_us(Source(build(), ours, kind), payload.items)

    us, stock_us, ratio = side_by_side(partial(turn, True), partial(turn, False), repeats)
    return {"what": f"{name}, {payload.name}", "us": us, "ratio_to_stock": ratio, "stock_us": stock_us}


def callback_rows(batches: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield what the callback adds to a batch of a real Lightning fit, and its share of a 10 ms step.

    Args:
        batches: per fit; a tenth of it with 10 ms steps.
        repeats: fits with and without, in turns.
    """
    modes: tuple[tuple[str, str, Callable[[], Any]], ...] = (
        ("observe", "DataLoader num_workers=0", _in_memory),
        ("observe", "torchdata 2 threads", partial(mapper, PAYLOADS[1], "thread")),
        ("tune", "torchdata 2 threads", partial(mapper, PAYLOADS[1], "thread")),
    )
    for mode, name, build in modes:
        for step_s, count in ((0.0, batches), (STEP_S, max(30, batches // 10))):
            walls, threads = [], []
            ratios = []
            for number in range(repeats):
                turns = (mode, None) if number % 2 else (None, mode)
                took = {turn: _fit(turn, build(), step_s, count) for turn in turns}
                walls.append(took[mode][0] - took[None][0])
                threads.append(took[mode][1] - took[None][1])
                ratios.append(took[mode][0] / took[None][0])
            step = f"{step_s * 1e3:.0f} ms step" if step_s else "empty step"
            yield {
                "what": f"callback {mode}, {name}, {step}",
                "us": statistics.median(walls) * 1e6,
                "ratio_to_stock": statistics.median(ratios),
                "training_thread_cpu_us": statistics.median(threads) * 1e6,
            }


def _in_memory() -> DataLoader[Any]:
    return DataLoader(Made(PAYLOADS[1]), batch_size=None)


def _fit(mode: str | None, batches_from: Any, step_s: float, batches: int) -> tuple[float, float]:
    """Return wall and training-thread CPU seconds per batch of one fit, with the callback or (None) without."""
    import pytorch_lightning as lightning

    from intune_callbacks.lightning import InTuneCallback

    class Stopwatch(lightning.Callback):
        def __init__(self) -> None:
            self.marks: list[tuple[float, float]] = []

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.marks.append((time.perf_counter(), time.thread_time()))

    class Model(lightning.LightningModule):
        automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> None:
            if step_s:
                time.sleep(step_s)

        def configure_optimizers(self) -> None:
            return None

    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.ERROR)
    stopwatch = Stopwatch()
    callbacks: list[Any] = [stopwatch]
    if mode is not None:
        callbacks.insert(0, InTuneCallback(mode=mode, show_card=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1,
            limit_train_batches=batches,
            callbacks=callbacks,
            logger=False,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(), batches_from)
    begin = stopwatch.marks[len(stopwatch.marks) // 5]
    end, count = stopwatch.marks[-1], len(stopwatch.marks) - 1 - len(stopwatch.marks) // 5
    return (end[0] - begin[0]) / count, (end[1] - begin[1]) / count


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("overhead", __doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side (default 9)")
    given = parser.parse_args(argv)
    repeats, batches = given.repeats, 2000
    payloads: Sequence[Payload] = PAYLOADS
    if given.quick:
        repeats, batches, payloads = 1, 60, (Payload("int", 0, 0, 200), Payload("128x39 float32", 128, 39, 50))
    rows = []
    for row in itertools.chain(callback_rows(batches, repeats), engine_rows(payloads, repeats)):
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
        print(rows[-1], flush=True)
    return write("overhead", rows, given.seed, given.json)


if __name__ == "__main__":
    main()
