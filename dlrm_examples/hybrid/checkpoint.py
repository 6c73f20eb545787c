"""Checkpoints of a divided model: a folder into which every rank writes its own part."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

__all__ = ["load", "save"]


def save(path: str | os.PathLike[str], state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write a checkpoint; every rank must call this.

    Args:
        path: the folder, on a file system that all ranks see.
        state: nested dictionaries with the tensors, divided or not.
        rest: what else to keep, small, of each rank on its own.

    Raises:
        OSError: when it cannot be written.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(rest), _rest(folder, distributed.get_rank()))
    # Last, as it writes `.metadata` at its end: a folder with that file is whole.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        save_parts(dict(state), checkpoint_id=str(folder))


def load(path: str | os.PathLike[str], state: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint into the tensors of `state`, and return this rank's rest; every rank must call this.

    The number of ranks may be another than when it was written; a rank that is new gets the rest of rank 0.

    Args:
        path: the folder.
        state: nested dictionaries as given to `save`, or a part of them.

    Raises:
        FileNotFoundError: there is no whole checkpoint.
    """
    folder = Path(path)
    if not (folder / ".metadata").is_file():
        raise FileNotFoundError(f"{folder} holds no whole checkpoint: there is no file .metadata in it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        load_parts(state, checkpoint_id=str(folder))
    own = _rest(folder, distributed.get_rank())
    rest: dict[str, Any] = torch.load(own if own.is_file() else _rest(folder, 0), weights_only=False)
    return rest


def _rest(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"
