"""Loops and loaders people have, with items that take 10 ms to decode and one worker: stock against tuned, in turn.

The decode is a sleep, so that two cores are enough; default arguments throughout. What is not installed is named.
"""

from __future__ import annotations

import importlib.util
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks import reach_packages as packages
from benchmarks.output import arguments, write
from benchmarks.reach_packages import BATCH, DECODE_S, STEP_S
from intune_callbacks import later, live

__all__ = ["CASES", "main", "measured"]

ROWS, EPOCHS = 2000, 2


class Rows(Dataset[Any]):
    """Map-style rows, each slow to decode."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        time.sleep(DECODE_S)
        return {"x": torch.full((4,), index / self.rows)}


class Stream(IterableDataset[Any]):
    """The same as a stream, divided between the workers."""

    def __init__(self, rows: int) -> None:
        self.rows = Rows(rows)

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.rows[index] for index in range(first, len(self.rows), step))


class Later(IterableDataset[Any]):
    """The same, with the user's word that decoding may be done elsewhere."""

    def __init__(self, rows: int) -> None:
        self.rows, self.decode = rows, later(Rows(rows).__getitem__)

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.decode(index) for index in range(first, self.rows, step))


class Generating(DataLoader[Any]):
    """A subclass with an `__iter__` of its own, as third-party loaders have."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Model(torch.nn.Module):
    """One layer, and the time a larger model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(STEP_S)
        return {"loss": self.layer(x).square().mean()}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        loader, framework: in the rows.
        run: trains on so many rows in a mode, and returns the losses and the report.
        needs: packages, as they are imported.
    """

    loader: str
    framework: str
    run: Callable[[int, str], tuple[list[float], dict[str, Any]]]
    needs: tuple[str, ...] = ()


def map_style(rows: int) -> DataLoader[Any]:
    """Return what most people have."""
    return DataLoader(Rows(rows), batch_size=BATCH, shuffle=True, num_workers=1)


def plain(make: Callable[[int], Any]) -> Callable[[int, str], tuple[list[float], dict[str, Any]]]:
    """Return a loop of one's own over what `make` returns."""

    def run(rows: int, mode: str) -> tuple[list[float], dict[str, Any]]:
        model, losses = Model(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = live(make(rows), mode=mode, show_card=False)
        for _ in range(EPOCHS):
            for batch in loader:
                loss = model(batch["x"])["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, loader.close()

    return run


def accelerated(rows: int) -> Any:
    """Return a loader that Accelerate has prepared."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(map_style(rows))


def trainer(rows: int, mode: str) -> tuple[list[float], dict[str, Any]]:
    """Train with the Trainer of Hugging Face."""
    import transformers

    from intune_callbacks.transformers import InTuneCallback

    class Losses(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            losses.append(float(logs.get("loss", 0.0)))

    losses: list[float] = []
    transformers.utils.logging.set_verbosity_error()
    options = transformers.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, dataloader_num_workers=1,
        logging_steps=10, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = InTuneCallback(mode=mode, show_card=False)
    made = transformers.Trainer(Model(), options, train_dataset=Rows(rows), callbacks=[callback, Losses()])
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    return losses, callback.report


CASES: dict[str, Case] = {
    "plain": Case("DataLoader", "plain loop", plain(map_style)),
    "subclass": Case(
        "subclass with a generator",
        "plain loop",
        plain(lambda rows: Generating(Rows(rows), batch_size=BATCH, shuffle=True, num_workers=1)),
    ),
    "accelerate": Case("DataLoader", "Accelerate", plain(accelerated), ("accelerate",)),
    "transformers": Case("DataLoader", "Trainer", trainer, ("accelerate", "transformers")),
    "iterable": Case(
        "iterable-style: not live",
        "plain loop",
        plain(lambda rows: DataLoader(Stream(rows), batch_size=BATCH, num_workers=1)),
    ),
    "later": Case(
        "iterable-style, later(decode)",
        "plain loop",
        plain(lambda rows: DataLoader(Later(rows), batch_size=BATCH, num_workers=1)),
    ),
    "torchrec": Case("DataLoader", "TorchRec TrainPipelineBase", packages.torchrec_pipeline(map_style), ("torchrec",)),
    "pydataset": Case("PyDataset, 2 workers", "Keras", packages.pydataset, ("keras", "tensorflow")),
    "datasets": Case("datasets, table", "plain loop", plain(packages.datasets_table), ("datasets",)),
    "litdata": Case("LitData, 2 workers", "plain loop", plain(packages.litdata), ("litdata",)),
    "mosaic": Case("MosaicML, 2 workers", "plain loop", plain(packages.mosaic), ("streaming",)),
    "grain": Case("Grain, 1 thread", "plain loop", packages.grain_reader, ("grain",)),
    "datasets stream": Case(
        "datasets, stream, 2 workers", "plain loop", plain(packages.datasets_stream), ("datasets",)
    ),
    "webdataset": Case("webdataset, 2 workers", "plain loop", plain(packages.webdataset), ("webdataset",)),
}


def measured(case: Case, rows: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Return the row of one case.

    Args:
        case: what to train.
        rows: of the dataset.
        repeats: pairs of a stock and a tuned training, in turn.
        seed: of model and order.
    """
    missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
    if missing:
        return {"loader": case.loader, "framework": case.framework, "error": f"not installed: {', '.join(missing)}"}
    took: dict[str, list[float]] = {"off": [], "tune": []}
    seen: set[str] = set()
    changes = []
    for mode in [*took] * repeats:
        torch.manual_seed(seed)
        begin_s = time.perf_counter()
        try:
            losses, report = case.run(rows, mode)
        except ImportError as error:
            return {"loader": case.loader, "framework": case.framework, "error": str(error)}
        took[mode].append(time.perf_counter() - begin_s)
        seen.add(repr(losses))
        changes += [report["changes"]] if report else []
    ratios = [tuned / stock for stock, tuned in zip(took["off"], took["tune"], strict=True)]
    return {
        "loader": case.loader,
        "framework": case.framework,
        "stock_s": round(statistics.median(took["off"]), 2),
        "tuned_s": round(statistics.median(took["tune"]), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
        "changes": "/".join(str(number) for number in changes),
        "losses": "same" if len(seen) == 1 else "not the same",
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("reach", __doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5, help="pairs of each case (default 5)")
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows, repeats = (80, 1) if given.quick else (ROWS, given.repeats)
    made = [measured(CASES[name], rows, repeats, given.seed) for name in given.only]
    return write("reach", made, given.seed, given.json)


if __name__ == "__main__":
    main()
