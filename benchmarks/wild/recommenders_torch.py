"""Recommender pipelines on torch, as their authors wrote them; where from: `benchmarks.wild.catalogue_clicks`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.iter import FileOpener, IterableWrapper, Mapper

from benchmarks.wild.data import clicks
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_torch import options

DENSE, CATEGORIES, WORDS = 13, 26, 1000


class Clicks(nn.Module):
    """An embedding per category, then two layers, on ``(labels, dense, ids)`` with ids of [categories, batch]."""

    def __init__(self, width: int = 16, units: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, width) for _ in range(CATEGORIES))
        self.top = nn.Sequential(
            nn.Linear(DENSE + CATEGORIES * width, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(),
            nn.Linear(units, 1),
        )  # fmt: skip

    def forward(self, batch: Any) -> torch.Tensor:
        labels, dense, ids = batch
        hidden = torch.cat([dense, *(table(column) for table, column in zip(self.tables, ids, strict=True))], -1)
        return nn.functional.binary_cross_entropy_with_logits(self.top(hidden).flatten(), labels.flatten())


def arrays_data(folder: Path, rows: int) -> None:
    table = np.array([[float(field) for field in row] for row in clicks(rows, DENSE, CATEGORIES, WORDS)])
    np.savez(
        folder / "train.npz",
        y=table[:, 0].astype(np.int32),
        X_int=np.expm1(table[:, 1 : 1 + DENSE]).astype(np.int32),
        X_cat=table[:, 1 + DENSE :].astype(np.int32),
    )


# -- facebookresearch/dlrm: rows of arrays in memory, no workers -------------------------------------------------------


class CriteoDataset(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self.dense, self.ids, self.labels = data["X_int"], data["X_cat"], data["y"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.dense[index], self.ids[index], self.labels[index]


def offset_collate(rows: Sequence[Any]) -> Any:
    dense, ids, labels = zip(*rows, strict=True)
    numbers = torch.log(torch.tensor(np.array(dense), dtype=torch.float) + 1)
    columns = torch.tensor(np.array(ids), dtype=torch.long)
    offsets = [torch.tensor(range(len(rows))) for _ in range(columns.shape[1])]
    each = [columns[:, i] for i in range(columns.shape[1])]
    return numbers, torch.stack(offsets), torch.stack(each), torch.tensor(labels, dtype=torch.float32).view(-1, 1)


class Dlrm(Clicks):
    def forward(self, batch: Any) -> torch.Tensor:
        dense, _, ids, labels = batch
        return super().forward((labels, dense, ids))


dlrm_data = arrays_data


def dlrm(folder: Path, numbers: Numbers, batch: int) -> Any:
    data = CriteoDataset(folder / "train.npz")
    return DataLoader(data, batch_size=batch, **options(numbers), collate_fn=offset_collate)


def dlrm_model() -> Any:
    return Dlrm()


# -- DeepCTR-Torch: a TensorDataset of one matrix ----------------------------------------------------------------------


class Matrix(Clicks):
    def forward(self, batch: Any) -> torch.Tensor:
        rows, labels = batch
        return super().forward((labels, rows[:, CATEGORIES:], rows[:, :CATEGORIES].long().t()))


deepctr_data = arrays_data


def deepctr(folder: Path, numbers: Numbers, batch: int) -> Any:
    with np.load(folder / "train.npz") as data:
        rows = np.concatenate([data["X_cat"], np.log1p(data["X_int"])], axis=-1).astype(np.float32)
        tensors = TensorDataset(torch.from_numpy(rows), torch.from_numpy(data["y"].astype(np.float32)[:, None]))
    return DataLoader(tensors, shuffle=True, batch_size=batch, **options(numbers))


def deepctr_model() -> Any:
    return Matrix()


# -- TorchRec: data pipes over TSV shards, a worker for each quarter of them -------------------------------------------


def torchrec_data(folder: Path, rows: int) -> None:
    shards, lines = 16, clicks(rows, DENSE, CATEGORIES, WORDS)
    for shard in range(shards):
        with (folder / f"shard_{shard:02d}.tsv").open("w") as file:
            for _ in range(rows // shards):
                label, *fields = next(lines)
                whole = [str(int(float(field))) for field in fields[:DENSE]]
                words = [f"{int(word):08x}" for word in fields[DENSE:]]
                file.write("\t".join([label, *whole, *words]) + "\n")


class ReadLinesFromCSV(IterDataPipe):  # type: ignore[type-arg]
    def __init__(self, files: Any) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        for _, file in self.files:
            yield from csv.reader(file, delimiter="\t")


class ParallelReadConcat(IterDataPipe):  # type: ignore[type-arg]
    def __init__(self, *pipes: Any) -> None:
        self.pipes = pipes

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for pipe in self.pipes if info is None else self.pipes[info.id :: info.num_workers]:
            yield from pipe


def row_mapper(row: Sequence[str]) -> Any:
    ids = torch.tensor([int(word or "0", 16) % WORDS for word in row[1 + DENSE :]])
    dense = torch.tensor([float(field or 0) for field in row[1 : 1 + DENSE]])
    return float(row[0]), torch.log1p(dense), ids


class Rows(Clicks):
    def forward(self, batch: Any) -> torch.Tensor:
        labels, dense, ids = batch
        return super().forward((labels.float(), dense, ids.t()))


def torchrec(folder: Path, numbers: Numbers, batch: int) -> Any:
    pipes = []
    for path in sorted(folder.glob("*.tsv")):
        lines = ReadLinesFromCSV(FileOpener(IterableWrapper([str(path)]), mode="r"))
        pipes.append(Mapper(lines, row_mapper).batch(batch).collate())
    return DataLoader(ParallelReadConcat(*pipes), **options(numbers), batch_size=None)


def torchrec_model() -> Any:
    return Rows()
