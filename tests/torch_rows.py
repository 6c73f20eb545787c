"""Rows of a DataLoader that say which they are, and what runs beside the training."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import torch
from torch.utils.data import Dataset

ROWS, BATCH = 64, 4


class Rows(Dataset):
    """Row i is i; a few are slow."""

    def __init__(self, rows: int = ROWS, sleep_s: float = 0.0, spin_s: float = 0.0) -> None:
        self.rows, self.sleep_s, self.spin_s = rows, sleep_s, spin_s

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        until = time.process_time() + self.spin_s
        while time.process_time() < until:
            pass
        if i % 29 == 3:
            time.sleep(0.001)
        return torch.tensor([i])


class Noisy(Rows):
    def __getitem__(self, i: int):
        return torch.rand(1).item(), random.random(), float(np.random.rand())


class Eager:
    """A sampler that draws at `iter()`, twice for the stock iterator with workers."""

    def __iter__(self):
        return iter(torch.randperm(ROWS).tolist())

    def __len__(self) -> int:
        return ROWS


def plain(batch):
    return [part.tolist() for part in batch] if isinstance(batch, (list, tuple)) else batch.tolist()


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def engines() -> list[str]:
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("intune-")]
    # A timer that was cancelled is on its way out.
    return [thread.name for thread in ours if not (isinstance(thread, threading.Timer) and thread.finished.is_set())]
