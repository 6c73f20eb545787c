"""A small training for the Trainer of Hugging Face."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, IterableDataset, get_worker_info

ROWS = 320


class Slow(Dataset):
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        time.sleep(0.004)
        x = torch.full((4,), index / self.rows)
        return {"x": x, "labels": x.sum(), "input_ids": torch.zeros(3, dtype=torch.long)}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        rows = Slow()
        yield from (rows[index] for index in range(first, ROWS, step))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = torch.nn.Dropout(0.1), torch.nn.Linear(4, 1)

    def forward(self, x: Any, labels: Any = None, input_ids: Any = None) -> dict[str, Any]:
        time.sleep(0.002)
        out = self.layer(self.drop(x)).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def given() -> dict[str, Any]:
    """Return what the reader of a page has."""
    arguments = transformers.TrainingArguments(
        "runs/mine", max_steps=10, report_to=[], use_cpu=True, save_strategy="no", remove_unused_columns=False
    )
    return {"model": Model(), "arguments": arguments, "dataset": Slow(64)}
