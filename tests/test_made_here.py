"""With `num_workers=0` and workers allowed: what only the training process can make is made there, and it stays so."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from restless import Restless  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.pydataset.pydataset import PyDatasetPipeline  # noqa: E402
from intune_callbacks.pipelines.workers.line import Hold  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402

ROWS, BATCH = 200, 4


class OnlyHere(Dataset):
    """As one whose rows are on a GPU: a forked process cannot read them."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def close(self) -> None:
        """Nothing is held here."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        if os.getpid() != self.process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nUse 'spawn'")
        return torch.tensor([float(index)])


class OneThread(OnlyHere):
    """As one that reads from SQLite, whose connections belong to a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table rows(value integer)")
        self.connection.executemany("insert into rows values(?)", [(index,) for index in range(ROWS)])

    def close(self) -> None:
        self.connection.close()

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        (value,) = self.connection.execute("select value from rows where rowid=?", (index + 1,)).fetchone()
        return torch.tensor([float(value)])


class Broken(OnlyHere):
    """A row that nobody can make; `made` is where its threads tried."""

    def __init__(self) -> None:
        super().__init__()
        self.tried_by: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 150:
            self.tried_by.append(threading.get_ident())
            raise KeyError("row 150 is broken")
        return super().__getitem__(index)


def loader(dataset: Any) -> DataLoader[Any]:
    torch.manual_seed(3)
    return DataLoader(dataset, batch_size=BATCH, shuffle=True)


@pytest.mark.parametrize(
    ("kind", "dataset", "said"),
    [("process", OnlyHere, "Cannot re-initialize CUDA"), ("thread", OneThread, "SQLite objects created in a thread")],
)
def test_the_training_goes_on_without_workers(kind: str, dataset: type[OnlyHere], said: str) -> None:
    rows = dataset()
    expected = [[batch.tolist() for batch in one] for one in [loader(rows)] for _ in range(2)]
    given = loader(rows)
    pipeline = find(given, workers_kind=kind).pipeline
    pipeline.prepare()
    seen: list[Any] = []
    for _ in range(2):
        seen.append([])
        for number, batch in enumerate(given):
            seen[-1].append(batch.tolist())
            if number == 10:
                pipeline.resize({"load": 3, "load.window": 6})
    assert seen == expected
    (stage, *_) = pipeline.stages()
    assert (stage.low, stage.current, stage.high) == (0, 0, 0)
    assert said in pipeline.why_not and "\n" not in pipeline.why_not
    pipeline.close()
    rows.close()


def test_the_batches_of_a_pydataset_too() -> None:
    class Batches:
        process = os.getpid()

        def __getitem__(self, number: int) -> int:
            if os.getpid() != self.process:
                raise RuntimeError("not here")
            return number

    pipeline = PyDatasetPipeline(Batches(), workers=0, window=10, kind="process", clock=Clock())
    run = pipeline.begin(lambda: iter(range(30)), Hold())
    seen = [next(run) for _ in range(3)]
    pipeline.resize({"load": 2})
    assert [*seen, *run] == list(range(30))
    assert pipeline.why_not == "RuntimeError: not here"
    load, window = pipeline.stages()
    assert load.high == 0 and window.low == window.high
    pipeline.close()


def test_the_card_says_why(restless: type[Restless], capsys: pytest.CaptureFixture[str]) -> None:
    eager: dict[str, Any] = {"decide_every_s": 0.05, "decide_every_batches": 5, "warmup_batches": 3, "cpus": 8.0}
    with live(loader(OnlyHere()), workers_kind="process", **eager) as tuned:
        assert sum(len(batch) for _ in range(3) for batch in tuned) == 3 * ROWS
    assert restless.resizes > 0
    assert tuned.report["frozen"] is None
    card = " ".join(capsys.readouterr().out.split())
    assert "in a worker one raised RuntimeError: Cannot re-initialize CUDA" in card, card


def test_what_nobody_can_make_raises_as_in_stock() -> None:
    given = loader(Broken())
    pipeline = find(given, workers_kind="thread").pipeline
    pipeline.prepare()
    batches = iter(given)
    next(batches)
    pipeline.resize({"load": 2, "load.window": 4})
    with pytest.raises(KeyError, match=r"^'row 150 is broken'$"):
        list(batches)
    # By a worker, and then by the training: what that raises is the user's own.
    first, last = given.dataset.tried_by  # type: ignore[attr-defined]
    assert first != last == threading.get_ident()
    assert pipeline.why_not == ""
    pipeline.close()


class Queued(Dataset):
    """TorchIO's Queue: patches of the volumes that a DataLoader of its own loads."""

    def __init__(self) -> None:
        self.volumes = iter(DataLoader(range(2 * ROWS), num_workers=1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return next(self.volumes)


@pytest.mark.parametrize("mode", ["tune", "advise"])
def test_a_dataset_that_a_loader_of_its_own_feeds_is_given_no_workers_of_ours(mode: str) -> None:
    queued = Queued()
    assert "set num_workers=1" not in find(DataLoader(queued)).why
    loader = live(DataLoader(queued, batch_size=BATCH), mode=mode, show_card=False, warmup_batches=5)
    for epoch in range(2):
        assert [int(value) - epoch * ROWS for batch in loader for value in batch] == list(range(ROWS))
    report = loader.close()
    queued.volumes._shutdown_workers()
    said = "the dataset, Queued, takes what it gives from a DataLoader of its own: the workers to set are those"
    assert said in report["cause"] and "num_workers=1 now" in report["cause"]
    assert said in report["next"] and not report["advice"]
