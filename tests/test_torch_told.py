"""What a dataset raises in a worker of ours is told in torch's words, as the loader's own workers tell it."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from busy_machine import eventually  # noqa: E402
from loop_loaders import EAGER  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torch_rows import engines  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

BATCH, BAD = 4, (21, 37)


class NeedsCode(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Prefixed(Exception):
    def __init__(self, path: str) -> None:
        super().__init__(f"cannot read {path}")


class Worded(Exception):
    message = "none"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


class Held(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held = lambda: text  # cannot be sent


ERRORS = {
    "value": ValueError("a bad row"),
    "key": KeyError("name"),
    "keywords": NeedsCode(code=3),
    "prefixed": Prefixed("a.jpg"),
    "message": Worded(message="a bad row"),
    "unpicklable": Held("a bad row"),
}


class Rows(Dataset):
    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 56

    def __getitem__(self, index: int) -> float:
        if index in BAD and self.what in ERRORS:
            raise ERRORS[self.what]
        return float(index)

    def collated(self, rows: list) -> object:
        if self.what == "collate" and BAD[0] in rows:
            raise ValueError("these do not fit together")
        return torch.tensor(rows)

    def begun(self, worker: int) -> None:
        if self.what == "init":
            raise ValueError("no worker can begin")


def told(what: str, ours: bool, resized: int) -> list:
    """Return the batches of an epoch, in place of each error what can be seen of it."""
    rows = Rows(what)
    init = rows.begun if what == "init" else None
    loader = DataLoader(rows, BATCH, num_workers=2, collate_fn=rows.collated, worker_init_fn=init)
    pipeline = find(loader, workers_kind="process").pipeline if ours else None
    got: list = []
    if pipeline is not None:
        pipeline.prepare()
        if resized == 0:
            pipeline.resize({"load": 3, "load.window": 3})
    iterator: Any = iter(loader)
    while len(got) < (2 if what == "init" else len(loader)):
        if pipeline is not None and len(got) == resized > 0:
            pipeline.resize({"load": 3, "load.window": 3})
        try:
            got.append(next(iterator).tolist())
        except Exception as error:
            text = str(error)
            first, second, last = text.split("\n")[0], text.split("\n")[1], text.rstrip().split("\n")[-1]
            of_error = type(error), type(error.args[0]), repr(error.__cause__), repr(error.__context__)
            got.append((*of_error, first, second, last, __file__ in text))
    if pipeline is not None:
        assert pipeline.stages()[0].current == 3
        pipeline.close()
    else:
        iterator._shutdown_workers()  # torch's errors hold themselves and their iterator until the collector comes
    return got


@pytest.mark.parametrize("resized", [0, 1])
@pytest.mark.parametrize("what", [*ERRORS, "collate"])
def test_an_error_of_a_worker_is_told_as_in_stock(what: str, resized: int) -> None:
    """It had its kind, but none of the words that people and frameworks match: which worker, and its traceback."""
    stock = told(what, False, resized)
    assert told(what, True, resized) == stock
    assert [type(batch) for batch in stock].count(tuple) == (1 if what == "collate" else 2)
    assert any("in DataLoader worker process 1" in batch[4] for batch in stock if type(batch) is tuple)


def test_an_error_of_worker_init_fn_is_told_as_in_stock() -> None:
    assert told("init", True, 0) == told("init", False, 0)


def test_an_error_that_cannot_be_sent_is_told_at_its_batch() -> None:
    """The loader's own workers print it, and the training waits for ever."""

    class Local(Exception):
        pass

    ERRORS["local"] = Local("of a function")
    try:
        kinds = [batch for batch in told("local", True, 0) if type(batch) is tuple]
    finally:
        del ERRORS["local"]
    assert [kind[0] for kind in kinds] == [RuntimeError] * 2 and "Local: of a function" in kinds[0][6]


def test_an_iterator_is_not_held_by_its_errors() -> None:
    loader = DataLoader(Rows("key"), BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    pipeline.resize({"load": 3, "load.window": 3})
    iterator = iter(loader)
    gc.disable()
    try:
        for _ in range(len(loader)):
            with suppress(KeyError):
                next(iterator)
        held = weakref.ref(iterator)
        del iterator
        assert held() is None
    finally:
        gc.enable()
    pipeline.close()


@pytest.mark.parametrize("bad", [1, 2])
def test_no_engine_lives_on_behind_an_error_that_stock_workers_had_under_way(bad: int, restless: Any) -> None:
    class Row(Dataset[Any]):
        def __len__(self) -> int:
            return 40 * BATCH

        def __getitem__(self, index: int) -> int:
            if index == bad * BATCH:
                raise ValueError("a bad row")
            return index

    def train() -> None:
        with pytest.raises(ValueError, match="a bad row"):
            for _ in live(DataLoader(Row(), BATCH, num_workers=1), show_card=False, **EAGER):
                pass

    gc.collect()
    gc.disable()
    try:
        train()
        assert restless.resizes
        assert eventually(lambda: not engines(), within_s=10.0)
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_profiler_is_told_of_each_fetch_by_torchs_name(workers: int, persistent: bool) -> None:
    loader: DataLoader = DataLoader(range(60), 4, num_workers=workers, persistent_workers=persistent and workers > 0)

    def told() -> dict[str, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                list(loader)
        return {event.key: event.count for event in profile.key_averages() if "DataLoader" in event.key}

    stock = told()
    pipeline: Any = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    pipeline.resize({"load": 2, "load.window": 4})
    ours = told()
    pipeline.close()
    assert ours.keys() == stock.keys() and len(ours) == 1
    (name,) = stock
    assert stock[name] - 3 <= ours[name] <= stock[name]  # the one with which ours take over an epoch is not told
