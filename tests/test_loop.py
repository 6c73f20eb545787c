"""A loop of the user's own: `live(loader)` delivers what the loader delivers, and stands for it."""

from __future__ import annotations

import copy
import errno
import gc
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from loop_loaders import (  # noqa: E402
    BATCH,
    EAGER,
    LOADERS,
    ROWS,
    Moved,
    Slow,
    assert_nothing_is_left,
    slow,
    trained,
    values,
)
from restless import Restless  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader  # noqa: E402

from intune_callbacks import ConfigError, live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.session.live import Live  # noqa: E402


@pytest.mark.parametrize("stop", [None, 30], ids=["whole", "left early"])
@pytest.mark.parametrize("name", LOADERS)
def test_it_delivers_what_the_loader_delivers(
    name: str, stop: int | None, capsys: pytest.CaptureFixture[str], restless: type[Restless]
) -> None:
    make, arguments, changes = LOADERS[name]
    torch.manual_seed(3)
    expected = trained(make(), stop)
    torch.manual_seed(3)
    loader = make()
    before = dict(vars(loader)) if hasattr(loader, "__dict__") else {}
    wrapped = live(loader, **EAGER | arguments)
    assert trained(wrapped, stop) == expected
    report = wrapped.close()
    if arguments.get("mode") == "off":
        assert report == {}
        return
    assert report["frozen"] is None
    assert report["samples"] == sum(len(batch) for batch in expected[:-1])
    assert (restless.resizes > 1) == changes
    assert "samples/s" in capsys.readouterr().out
    if isinstance(loader, DataLoader):
        assert vars(loader).keys() - {"_iterator"} == before.keys() - {"_iterator"}
    del wrapped, loader
    gc.collect()
    assert_nothing_is_left()


def test_closed_in_the_middle_the_loop_gets_all_its_batches(restless: type[Restless]) -> None:
    loader = live(slow(num_workers=1), show_card=False, **EAGER)
    torch.manual_seed(1)
    seen = []
    for number, batch in enumerate(loader):
        seen += values(batch)
        if number == 60:
            assert loader.close()["samples"] >= 60 * BATCH
            assert restless.resizes > 1
    assert sorted(seen) == [float(index) for index in range(ROWS)]
    del loader
    assert_nothing_is_left()


def test_who_asks_anew_in_each_epoch_goes_on_with_what_was_found() -> None:
    loader = slow(num_workers=1)
    tuned = live(loader, policy="even", show_card=False, **EAGER)
    for batch in tuned:
        assert len(batch) == BATCH
    (found,) = [stage["current"] for stage in tuned.close()["stages"] if stage["name"] == "load"]
    for _ in live(loader, mode="observe", show_card=False, **EAGER):
        pass  # what only looked on has found nothing
    again = live(loader, policy="even", show_card=False, **EAGER)
    assert sorted(value for batch in again for value in values(batch)) == [float(index) for index in range(ROWS)]
    report = again.close()
    assert report["frozen"] is None
    (load,) = [stage for stage in report["stages"] if stage["name"] == "load"]
    assert load["first"] == found > 1


def test_several_loaders_of_one_loop_have_one_tuner() -> None:
    one, two = live(slow(num_workers=1), DataLoader(Slow(), batch_size=BATCH, num_workers=1), **EAGER, show_card=False)
    torch.manual_seed(2)
    expected = list(zip(trained(slow()), trained(DataLoader(Slow(), batch_size=BATCH)), strict=True))[:10]
    assert len(expected) == 10
    pairs = [(values(first), values(second)) for first, second in zip(one, two, strict=True)]
    assert [second for _, second in pairs] == [[float(4 * k + j) for j in range(4)] for k in range(100)]
    assert sorted(value for first, _ in pairs for value in first) == [float(k) for k in range(ROWS)]
    report = one.close()
    assert two.report == report
    assert (report["samples"], report["steps"]) == (ROWS, len(pairs))
    assert {"0/load", "1/load"} <= report["before"]["allocation"].keys()


def test_what_is_live_is_not_looked_into_by_others() -> None:
    inner = slow(num_workers=1)
    loader = live(inner, show_card=False)
    assert find(loader).pipeline is None and find(Moved(loader)).pipeline is None
    assert find(Moved(inner)).pipeline is not None
    loader.close()


def test_it_stands_for_the_loader() -> None:
    loader = slow(num_workers=1)
    wrapped = live(loader, show_card=False)
    assert isinstance(wrapped, DataLoader)
    assert len(wrapped) == len(loader)
    assert wrapped.sampler is loader.sampler
    wrapped.mine = 3
    assert loader.mine == 3
    del wrapped.mine
    assert not hasattr(loader, "mine")
    assert live(wrapped) is wrapped
    for copied in (copy.copy(wrapped), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(copied) is DataLoader
        assert sum(batch.numel() for batch in copied) == ROWS
        again = live(copied, show_card=False)
        assert sum(batch.numel() for batch in again) == ROWS
        assert again.close()["samples"] == ROWS
    assert issubclass(type(wrapped), Live)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        wrapped.nothing_like_it  # noqa: B018
    assert bool(wrapped)


def test_it_is_of_both_kinds_where_a_loader_says_that_it_is_of_another() -> None:
    """Accelerate's is a `DataLoaderShard` that says `DataLoader`: one that was none skipped batches in another way."""

    class Shard:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        @property
        def __class__(self) -> type:
            return DataLoader

        @__class__.setter
        def __class__(self, kind: type) -> None: ...

        def __iter__(self) -> Any:
            return iter(self.loader)

    shard = Shard(slow())
    wrapped = live(shard, show_card=False)
    assert isinstance(wrapped, DataLoader) and isinstance(wrapped, Shard)
    assert wrapped.__class__ is wrapped.__class__ and wrapped.__class__.__name__ == "DataLoader"
    assert type(wrapped.__class__([1], batch_size=1)) is DataLoader
    assert sum(len(batch) for batch in wrapped) == ROWS


def test_who_makes_the_loader_again_gets_one_of_the_users_class() -> None:
    """As Ignite's `update_dataloader`, and Lightning and Fabric where each rank gets a sampler of its own, do."""

    class Mine(DataLoader):  # type: ignore[type-arg]
        pass

    loader = Mine(range(12), batch_size=4, num_workers=1)
    wrapped: Any = live(loader, show_card=False)
    assert vars(wrapped) is vars(loader)
    assert inspect.signature(type(wrapped).__init__) == inspect.signature(Mine.__init__)
    left_out = ("batch_size", "sampler", "drop_last", "batch_sampler")
    given = {name: value for name, value in vars(wrapped).items() if name[0] != "_" and name not in left_out}
    again = type(wrapped)(**given, batch_sampler=BatchSampler(range(11, -1, -1), 3, False))
    assert type(again) is Mine
    assert torch.cat(list(again)).tolist() == list(range(11, -1, -1))
    assert torch.cat(list(wrapped)).tolist() == list(range(12))
    assert wrapped.close()["samples"] == 12
    # What has no attributes of its own has no `__dict__` here, either.
    assert not hasattr(live([1, 2], show_card=False), "__dict__")


def test_an_iterator_stays_one_and_a_list_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(range(12), batch_size=4, num_workers=1)
    batches = live(batch for _ in range(3) for batch in loader)
    assert [next(batches).sum().item() for _ in range(9)] == [6, 22, 38] * 3
    assert next(batches, None) is None
    assert batches.close()["samples"] == 36
    assert "generator is an iterator, which hides what makes its batches" in " ".join(capsys.readouterr().out.split())
    rows = live([1, 2, 3], show_card=False)
    assert rows[1:] == [2, 3]
    for wrapped in (rows, live(loader, show_card=False)):
        with pytest.raises(TypeError, match="not an iterator"):
            next(wrapped)
    with pytest.raises(TypeError, match="not subscriptable"):
        wrapped[0]


def test_bad_arguments_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        live(slow(), mode="fast", cpus=-1.0)
    assert "mode='fast'" in str(caught.value)
    assert "cpus=-1.0" in str(caught.value)
    with pytest.raises(TypeError, match="workers"):
        live(slow(), workers=3)
    with pytest.raises(ConfigError, match="live already"):
        live(live(slow(), show_card=False), mode="observe")


@pytest.mark.parametrize("kind", ["process", "iterable"])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EMFILE])
def test_where_proc_cannot_be_read_it_is_tuned_all_the_same(
    number: int, kind: str, monkeypatch: pytest.MonkeyPatch, restless: type[Restless]
) -> None:
    # A service of systemd's with ProcSubset=pid has no /proc/stat and no /proc/meminfo; EMFILE is `ulimit -n`.
    def unread(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), "/proc/stat")

    make = {"process": lambda: slow(num_workers=2), "iterable": LOADERS["iterable"][0]}[kind]
    torch.manual_seed(3)
    expected = trained(make())
    for name in ("create_time", "cpu_times", "memory_info"):
        monkeypatch.setattr(psutil.Process, name, unread)
    monkeypatch.setattr(psutil, "virtual_memory", unread)
    torch.manual_seed(3)
    loader = live(make(), **EAGER, show_card=False)
    assert trained(loader) == expected
    assert loader.close()["frozen"] is None
    assert restless.resizes > 1


def test_the_package_itself_stays_light() -> None:
    code = "import sys, intune_callbacks; "
    code += "print([name for name in ('torch', 'intune_callbacks.session.live') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_loader_that_was_not_asked_for_a_batch_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Frameworks make loaders anew from the dataset and the sampler of one: theirs is another one."""
    loader = live(slow())
    for _ in DataLoader(loader.dataset, batch_sampler=loader.batch_sampler):
        pass
    loader.close()
    card = capsys.readouterr().out
    assert card.startswith("InTune  NOT MEASURED") and "not asked for a batch" in card


def test_a_loader_that_gave_no_batch_was_asked_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> Iterator[int]:
        raise ValueError("the first batch")
        yield 0

    loaders = [live(fails()), live([])]
    with pytest.raises(ValueError, match="the first batch"):
        list(loaders[0])
    assert list(loaders[1]) == []
    for loader in loaders:
        report = loader.close()
        card = capsys.readouterr().out
        assert "nothing was changed" in card and "not asked for a batch" not in card + repr(report)


def test_a_callback_given_what_is_live_says_that_it_is_tuned_already() -> None:
    loader = live(slow(), show_card=False)
    assert find(loader).why.startswith("live() tunes this loader already")
    loader.close()
    assert "is not a loader InTune knows" in find(live(slow(), mode="off")).why
