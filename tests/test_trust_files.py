"""What an audit broke in DataLoaders: open files and connections that workers would share."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_trust_loader import Bound, pushed

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning.pytorch")

from torch.utils.data import DataLoader, Dataset, Subset  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402


class Records(Dataset[Any]):
    """One open file, as of h5py, lmdb or tar: seek and read."""

    def __init__(self, path: Path, count: int = 800) -> None:
        path.write_bytes(b"".join(i.to_bytes(8, "little") * 8 for i in range(count)))
        self.file, self.count = path.open("rb", buffering=0), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.file.seek(64 * i)
        return torch.frombuffer(bytearray(self.file.read(64)), dtype=torch.int64)


def test_an_open_file_is_not_shared_behind_the_users_back(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    batches = list(pushed(DataLoader(records, batch_size=8)))
    records.file.close()
    assert [int(row) for batch in batches for row in batch[:, 0]] == list(range(800))


class Pages(Records):
    """Between seek and read comes the turn of others; what the training has read before is in Python's own buffer."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file.close()
        self.file = path.open("rb")
        self[0]

    def __getitem__(self, i: int) -> Any:
        self.file.seek(64 * i)
        time.sleep(0.0005)
        return torch.frombuffer(bytearray(self.file.read(128)), dtype=torch.int64)[[0, -1]]


@pytest.mark.parametrize("kind", [Records, Pages])
def test_each_worker_reads_an_open_file_at_places_of_its_own(kind: type[Records], tmp_path: Path) -> None:
    """The one worker of the user's is right to use it: several that have inherited it would move its place."""
    records, order = kind(tmp_path / "records"), [*range(700, 708), *range(700)]
    batches = list(pushed(DataLoader(records, batch_size=8, num_workers=1, sampler=order)))
    records.file.close()
    assert [int(row) for batch in batches for row in batch[:, 0]] == order
    assert kind is Records or [int(row) for batch in batches for row in batch[:, 1]] == [i + 1 for i in order]


class Served(Dataset[Any]):
    """Asks a server for each item, through one connection."""

    def __init__(self, address: Any, again: bool) -> None:
        self.address, self.again = address, again
        self.connection = socket.create_connection(address, timeout=20.0)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> Any:
        for _ in range(2):
            with contextlib.suppress(OSError):
                self.connection.sendall(i.to_bytes(8, "little"))
                answer = self.connection.recv(8)
                if answer:
                    return int.from_bytes(answer, "little")
            if not self.again:
                break
            self.connection = socket.create_connection(self.address, timeout=20.0)
        raise ConnectionError("the server has hung up")


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while question := self.request.recv(8):
                time.sleep(0.0005)
                self.request.sendall(question)


@pytest.mark.parametrize("again", [True, False])
def test_a_connection_is_not_shared_behind_the_users_back(again: bool) -> None:
    """Where nobody makes it anew, the items stay with the worker that has it."""
    with socketserver.ThreadingTCPServer(("localhost", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        dataset = Served(server.server_address, again)
        try:
            batches = list(pushed(DataLoader(dataset, batch_size=8, num_workers=1)))
        finally:
            server.shutdown()
            dataset.connection.close()
    assert [int(i) for batch in batches for i in batch] == list(range(400))


class Headed(Records):
    """Reads from the head of the file on: what Python's own buffer has, and the rest from where the file stands."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file.close()
        self.file = path.open("rb")
        self.file.read(1)

    def __getitem__(self, i: int) -> Any:
        self.file.seek(0)
        time.sleep(0.0005)
        row = 200 + i % 500
        return torch.frombuffer(bytearray(self.file.read(64 * (row + 1))[-64:]), dtype=torch.int64)


def test_an_open_file_stands_where_pythons_buffer_expects_it(tmp_path: Path) -> None:
    records = Headed(tmp_path / "records")
    batches = list(pushed(DataLoader(records, batch_size=2, num_workers=1)))
    records.file.close()
    assert [int(row) for batch in batches for row in batch[:, 0]] == [200 + i % 500 for i in range(len(records))]


def test_who_is_told_to_set_workers_is_told_of_an_open_file(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    for dataset, said in ((records, True), (Subset(records, [1]), True), (Bound(), False)):
        pipeline: Any = find(DataLoader(dataset, batch_size=8)).pipeline
        assert ("open 'file' in each worker" in pipeline.stages()[0].knob) is said
    records.file.close()
    assert "#" not in find(DataLoader(records)).pipeline.stages()[0].knob  # type: ignore[union-attr]
