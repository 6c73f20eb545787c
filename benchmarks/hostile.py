"""Datasets that are hard to move between threads and processes, and the whole content of whatever they yield.

Each kind is legal: a stock DataLoader with workers delivers it. What a kind yields depends on the index alone.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import hashlib
import os
import sqlite3
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from benchmarks.hostile_items import RECORD, RECORDS, Colour, Handle, Pair, Prickly, Row, Slotted, Tagged

__all__ = ["FORK_ONLY", "KINDS", "Hostile", "HostileStream", "as_is", "identity"]

SEEN: dict[str, int] = {}
"""State of the module that items fill and read."""
CONNECTION = threading.local()


class Hostile(Dataset[Any]):
    """A map-style dataset of one kind.

    Args:
        kind: of `KINDS`.
        items: how many.
    """

    def __init__(self, kind: str, items: int) -> None:
        self.kind, self.items = kind, items
        self.path = _records()
        self.handle: Handle | None = None
        self.lock: Any = threading.Lock() if kind == "lock" else None
        self.descriptor = os.open(self.path, os.O_RDONLY) if kind == "descriptor" else -1
        self.running = (i for i in range(10)) if kind == "generator" else None
        self.mapped = np.memmap(self.path, dtype=np.uint8, mode="r") if kind == "memory map" else None
        self.made = (lambda i: {"made": i}) if kind == "closure" else None

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        if index >= self.items:
            raise IndexError(index)
        return KINDS[self.kind](self, int(index))

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)


class HostileStream(IterableDataset[Any]):
    """The same, iterable-style; each worker owns every n-th item."""

    def __init__(self, kind: str, items: int) -> None:
        self.data = Hostile(kind, items)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return (self.data[index] for index in range(first, self.data.items, step))


def _records() -> str:
    path = Path(tempfile.gettempdir()) / f"intune-hostile-{os.getuid()}.bin"
    if not path.exists() or path.stat().st_size != RECORD * RECORDS:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(b"".join(hashlib.sha256(b"%d" % n).digest()[:RECORD] for n in range(RECORDS)))
        os.replace(file.name, path)
    return str(path)


def _handle(data: Hostile, index: int) -> Any:
    if data.handle is None:
        data.handle = Handle(data.path)
    return data.handle[index]


def _descriptor(data: Hostile, index: int) -> Any:
    return os.pread(data.descriptor, RECORD, RECORD * (index % RECORDS))


def _database(data: Hostile, index: int) -> Any:
    # A connection is for one thread of one process.
    if getattr(CONNECTION, "owner", None) != os.getpid():
        CONNECTION.owner, CONNECTION.database = os.getpid(), sqlite3.connect(":memory:")
    return CONNECTION.database.execute("select ? * 7", (index,)).fetchone()


def _state(data: Hostile, index: int) -> Any:
    SEEN[f"{data.kind} {index}"] = index
    return {"number": SEEN[f"{data.kind} {index}"], "many": len(SEEN) > 0}


def _generator(data: Hostile, index: int) -> Any:
    assert data.running is not None
    return [i * index for i in range(index % 5)]


def _lock(data: Hostile, index: int) -> Any:
    with data.lock:
        return torch.tensor([index])


def _sizes(data: Hostile, index: int) -> Any:
    # One item far beyond a pipe's buffer, then many that are nearly nothing.
    if index % 11 == 3:
        return torch.full((300_000 + index,), float(index))
    return (index, None, True, "", b"", torch.empty(0), torch.tensor(index), [], {}, ())[index % 10]


def _sparse(data: Hostile, index: int) -> Any:
    dense = torch.zeros(4, 5)
    dense[index % 4, index % 5] = index + 1.0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "empty": torch.zeros(3, 3).to_sparse()}


def _ragged(data: Hostile, index: int) -> Any:
    rows = [torch.arange(n) + index for n in range(index % 4)]
    return {"rows": rows, "lengths": [len(row) for row in rows], "deep": [[rows], ({"a": rows[:1]},)]}


def _views(data: Hostile, index: int) -> Any:
    base = torch.arange(240.0).reshape(2, 3, 5, 8) + index
    whole = base.clone()
    return [
        base.contiguous(memory_format=torch.channels_last),
        base.transpose(1, 3),
        base[:, :, ::2, 1:],
        base[:1, :1, :1, :1].expand(2, 3, 5, 8),
        whole,
        whole[1],
        base.to(torch.complex64),
    ]


def _types(data: Hostile, index: int) -> Any:
    return {
        "bf16": torch.full((3,), index, dtype=torch.bfloat16),
        "half": torch.full((2, 2), index, dtype=torch.half),
        "bool": torch.tensor([index % 2 == 0]),
        "f8": torch.full((4,), 1.0).to(torch.float8_e4m3fn),
        "grad": torch.full((2,), float(index), requires_grad=True),
        "parameter": torch.nn.Parameter(torch.full((2,), float(index))),
        "subclass": torch.full((2,), float(index)).as_subclass(Tagged),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.arange(3) + index, torch.arange(2)]),
    }


def _numpy(data: Hostile, index: int) -> Any:
    record = np.zeros(2, dtype=[("id", "i8"), ("name", "U5")])
    record["id"], record["name"] = index, f"n{index % 100}"
    return [
        record,
        np.array([index, None, "x"], dtype=object),
        np.datetime64("2026-01-01") + index,
        np.asfortranarray(np.arange(6).reshape(2, 3) + index),
        np.arange(10)[::-2] + index,
        np.float16(index % 100),
        np.array(["a" * (index % 4)]),
    ]


def _objects(data: Hostile, index: int) -> Any:
    return Row(
        index,
        torch.full((2,), index),
        {
            "pair": Pair(index, [decimal.Decimal(index), 3 + 2j]),
            "when": datetime.datetime(2026, 1, 1) + datetime.timedelta(days=index),
            "colour": Colour.RED if index % 2 else Colour.GREEN,
            "slots": Slotted(torch.tensor([index]), "s"),
            "deque": collections.deque([index], maxlen=3),
            "ordered": collections.OrderedDict(b=index, a=1),
            "set": frozenset({index, index + 1}),
            "path": Path(f"/data/{index}"),
            "error": ValueError("an item, not a failure", index),
        },
    )


def _prickly(data: Hostile, index: int) -> Any:
    return [Prickly(index), {"deep": Prickly(index + 1)}]


def _mapped(data: Hostile, index: int) -> Any:
    at = RECORD * (index % RECORDS)
    return data.mapped[at : at + RECORD]  # type: ignore[index]


KINDS: Mapping[str, Callable[[Hostile, int], Any]] = {
    "handle": _handle,
    "descriptor": _descriptor,
    "database": _database,
    "state": _state,
    "generator": _generator,
    "lock": _lock,
    "closure": lambda data, index: data.made(index),  # type: ignore[misc]
    "sizes": _sizes,
    "sparse": _sparse,
    "ragged": _ragged,
    "views": _views,
    "types": _types,
    "numpy": _numpy,
    "objects": _objects,
    "prickly": _prickly,
    "memory map": _mapped,
}
"""What `Hostile` can be: name -> (dataset, index) -> item."""

FORK_ONLY = frozenset({"generator", "lock", "closure", "descriptor"})
"""Kinds whose dataset means something only in this process and in those forked from it."""


def as_is(batch: Any) -> Any:
    """Return the batch as it is: the collate function where torch's own would refuse it."""
    return batch


def identity(value: Any) -> Any:
    """Return the whole content of a batch as something that can be compared and hashed.

    Args:
        value: anything; what this does not know is compared by its type and attributes.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        content = tuple(map(identity, value.tolist())) if value.dtype.hasobject else value.tobytes()
        return "array", str(value.dtype), value.shape, content
    if isinstance(value, Mapping):
        return type(value).__name__, tuple((identity(key), identity(part)) for key, part in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, frozenset(map(identity, value))
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, tuple(map(identity, value))
    if isinstance(value, BaseException):
        return type(value).__name__, identity(value.args)
    if isinstance(value, Slotted):
        return "Slotted", identity(value.data), value.name
    if type(value).__module__ == Row.__module__ and not isinstance(value, enum.Enum):
        return type(value).__name__, identity(vars(value))
    return type(value).__name__, value


def _tensor(value: torch.Tensor) -> Any:
    kind = type(value).__name__, str(value.dtype), str(value.layout), tuple(value.shape), value.requires_grad
    if value.layout == torch.sparse_csr:
        return kind, *map(identity, (value.crow_indices(), value.col_indices(), value.values()))
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        return kind, identity(value.indices()), identity(value.values())
    dense = value.detach().as_subclass(torch.Tensor).resolve_conj().contiguous()
    # By its own strides a tensor of one element need not be a row.
    content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    return kind, content if len(content) < 256 else hashlib.sha256(content).hexdigest()
