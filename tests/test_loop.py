"""A loop of the user's own: `live(loader)` delivers what the loader delivers, reports at its end and leaves nothing."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import inspect
import json
import multiprocessing
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from busy_machine import three_attempts  # noqa: E402
from restless import Restless  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info  # noqa: E402

from intune_callbacks import ConfigError, live  # noqa: E402
from intune_callbacks.loop import Live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

EAGER: dict[str, Any] = {"decide_every_s": 0.1, "decide_every_batches": 5, "warmup_batches": 3, "cpus": 8.0}
ROWS, BATCH = 400, 4


class Slow(Dataset):
    def __init__(self, row_s: float = 0.003) -> None:
        self.row_s = row_s

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.row_s)
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, ROWS, step):
            time.sleep(0.001)
            yield torch.tensor([float(index)])


class Doubling(DataLoader):
    """A subclass with a generator of its own, as third-party loaders have."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield 2.0 * batch


class Moved:
    """No DataLoader: what brings the batches of one to a device."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.device = loader, "cpu"

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield batch.to(self.device)


def slow(**arguments: Any) -> DataLoader:
    return DataLoader(Slow(), batch_size=BATCH, shuffle=True, **arguments)


def nodes() -> Any:
    torchdata = pytest.importorskip("torchdata.nodes")
    mapped = torchdata.ParallelMapper(
        torchdata.IterableWrapper(range(200)), Slow().__getitem__, num_workers=1, method="thread"
    )
    return torchdata.Loader(torchdata.Mapper(torchdata.Batcher(mapped, BATCH), torch.stack))


LOADERS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "one worker": (lambda: slow(num_workers=1), {}, True),
    "persistent workers": (lambda: slow(num_workers=1, persistent_workers=True), {}, True),
    "no workers": (slow, {}, False),
    "no workers, consent": (slow, {"workers_kind": "process"}, True),
    "threads": (lambda: slow(num_workers=1), {"workers_kind": "thread"}, True),
    "generator subclass": (lambda: Doubling(Slow(), batch_size=BATCH, shuffle=True, num_workers=1), {}, True),
    "wrapper": (lambda: Moved(slow(num_workers=1)), {}, True),
    "iterable": (lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2), {}, True),
    "observe": (lambda: slow(num_workers=1), {"mode": "observe"}, False),
    "off": (lambda: slow(num_workers=1), {"mode": "off"}, False),
    "torchdata nodes": (nodes, {}, True),
    "a list": (lambda: [torch.tensor([float(k)]) for k in range(50)], {}, False),
}


def values(batch: Any) -> Any:
    return [float(value) for value in (batch if isinstance(batch, (list, tuple)) else batch.flatten())]


def trained(loader: Any, stop: int | None = None) -> list[Any]:
    """Two epochs, each left early behind batch `stop`."""
    seen = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            seen.append(values(batch))
            time.sleep(0.001)
            if number == stop:
                break
    return [*seen, torch.get_rng_state().tolist()]


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> type[Restless]:
    """Have every number set anew at every look."""
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", Restless)
    monkeypatch.setattr(Restless, "resizes", 0)
    return Restless


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


def assert_nothing_is_left() -> None:
    until_s = time.monotonic() + 8.0
    while time.monotonic() < until_s and (multiprocessing.active_children() or ours()):
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    assert not ours()


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("intune")]


def test_the_card_comes_right_behind_the_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in live(slow(num_workers=1), run_dir=str(tmp_path), **EAGER):
        assert not (tmp_path / "report.json").exists()
    assert "InTune" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["samples"] == ROWS


def test_a_loop_left_early_reports_too(capsys: pytest.CaptureFixture[str]) -> None:
    for number, _ in enumerate(live(slow(num_workers=1), **EAGER)):
        if number == 40:
            break
    assert "InTune" in capsys.readouterr().out
    assert_nothing_is_left()


def test_as_a_context_manager(capsys: pytest.CaptureFixture[str]) -> None:
    with live(slow(num_workers=1), **EAGER) as loader:
        assert sum(batch.numel() for batch in loader) == ROWS
        assert loader.report == {}
    assert loader.report["samples"] == ROWS
    assert capsys.readouterr().out.count("InTune  ") == 1
    assert sum(batch.numel() for batch in loader) == ROWS  # as the loader itself, from now on
    assert loader.report["samples"] == ROWS


def test_after_an_error_in_the_block_there_is_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    given = slow(num_workers=1)

    def train() -> None:
        with live(given, **EAGER) as loader:
            for number, _ in enumerate(loader):
                if number == 20:
                    raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert "InTune" not in capsys.readouterr().out
    assert "_get_iterator" not in vars(given)
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
    assert (report["samples"], report["steps"]) == (ROWS, len(pairs) - 1)
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


def test_bad_arguments_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        live(slow(), mode="fast", cpus=-1.0)
    assert "mode='fast'" in str(caught.value)
    assert "cpus=-1.0" in str(caught.value)
    with pytest.raises(TypeError, match="workers"):
        live(slow(), workers=3)
    with pytest.raises(ConfigError, match="live already"):
        live(live(slow(), show_card=False), mode="observe")


def test_a_second_one_of_the_same_loader_ends_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    loader = slow(num_workers=1)
    first = live(loader, **EAGER)
    for _ in first:
        pass
    second = live(loader, **EAGER, show_card=False)
    assert first.report["samples"] == ROWS
    for _ in second:
        pass
    assert second.close()["samples"] == ROWS
    assert capsys.readouterr().out.count("InTune  ") == 1
    assert "_get_iterator" not in vars(loader)


def test_threads_may_begin_loops_at_once() -> None:
    failed: list[BaseException] = []

    def begin() -> None:
        try:
            held = [live([1, 2], mode="observe", show_card=False) for _ in range(60)]
            assert len(list(held[0])) == 2
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=begin) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    finally:
        sys.setswitchinterval(before)
    assert not failed


@pytest.mark.parametrize("end", ["closed", "broken"])
def test_a_card_that_nobody_can_read_costs_the_card(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stdout = os.fdopen(writing, "w", buffering=1)
    if end == "closed":
        with contextlib.suppress(BrokenPipeError):
            stdout.close()
    monkeypatch.setattr(sys, "stdout", stdout)
    loader = live(DataLoader(Slow(0.0), batch_size=BATCH))
    assert len(list(loader)) == ROWS // BATCH
    report = loader.close()
    with contextlib.suppress(OSError, ValueError):
        stdout.close()
    assert report["steps"] and report["frozen"] is None


def test_what_is_done_in_a_pause_or_behind_the_loop_is_no_step(tmp_path: Path) -> None:
    loader = live(slow(num_workers=1), show_card=False, run_dir=str(tmp_path), **EAGER)
    begin_s = time.monotonic()
    for number, _ in enumerate(loader):
        if number == 50:
            with loader.pause():
                time.sleep(1.0)
    took_s = time.monotonic() - begin_s
    time.sleep(1.0)
    assert loader.close()["whole"]["throughput_samples_per_s"] == pytest.approx(ROWS / took_s, rel=0.05)
    decisions = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert max(decision["observation"]["model_s"] for decision in decisions) < 0.05


def test_what_comes_behind_an_iterator_that_is_still_held_is_no_step() -> None:
    loader = live(slow(num_workers=1), show_card=False, mode="observe")
    for _ in range(2):
        batches = iter(loader)
        begin_s = time.monotonic()
        for _ in range(60):
            next(batches)
        took_s = time.monotonic() - begin_s
        time.sleep(5.0 * took_s)  # an evaluation
    whole = loader.close()["whole"]
    assert (whole["steps"], whole["samples"]) == (119, 120 * BATCH)
    assert whole["wait_frac"] * whole["wall_s"] > 0.5 * (whole["wall_s"] - whole["paused_s"])
    assert len(list(batches)) == ROWS // BATCH - 60


def test_what_cannot_be_tuned_is_timed_and_the_card_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in live((torch.zeros(4) for _ in range(60)), **EAGER):
        time.sleep(0.002)
    out = " ".join(capsys.readouterr().out.split())
    assert "generator is not a loader InTune knows" in out


def test_an_error_of_ours_freezes_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = live(slow(num_workers=1), show_card=False, **EAGER)
    monkeypatch.setattr("intune_callbacks.session.samples.Samples.count", lambda self, batch: 1 / 0)
    with pytest.warns(RuntimeWarning, match="InTune froze"):
        assert sum(batch.numel() for batch in loader) == ROWS
    assert "ZeroDivisionError" in loader.close()["frozen"]


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


def two_epochs(loader: Any) -> None:
    for _ in range(2):
        for _ in loader:
            pass


class Stopped(Exception):
    """What a handler of the user's raises."""


@pytest.mark.parametrize(
    "where",
    [
        "intune_callbacks.session.loop_fit.StepTimer.fetch_begin",
        "intune_callbacks.measure.window.Window.observe",
        "intune_callbacks.pipelines.torch_engine.Engines.engine",
    ],
)
def test_what_a_signal_handler_raises_in_the_middle_of_our_code_is_the_users(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise Stopped

    calls: list[int] = []
    stock = pkgutil.resolve_name(where)

    def signalled(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return stock(*given, **named)

    before = signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", Restless)
    monkeypatch.setattr(where, signalled)
    try:
        data = slow(num_workers=1)
        with pytest.raises(Stopped):
            two_epochs(live(data, show_card=False, **EAGER | {"decide_every_s": 0.0}))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sum(batch.numel() for batch in data) == ROWS


def test_an_error_in_the_dataset_is_the_users() -> None:
    class Broken(Slow):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 100:
                raise ValueError("row 100")
            return super().__getitem__(index)

    loader = live(DataLoader(Broken(), batch_size=BATCH, num_workers=1), show_card=False, **EAGER)
    with pytest.raises(ValueError, match="row 100"):
        for _ in loader:
            pass
    assert loader.close()["samples"] <= 100


SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset
from intune_callbacks import live

class Slow(Dataset):
    def __len__(self): return 200
    def __getitem__(self, i): time.sleep(0.002); return torch.zeros(1)

loader = live(DataLoader(Slow(), batch_size=4, num_workers=1), decide_every_s=0.1, warmup_batches=3)
for batch in loader:
    pass
{end}
"""


@pytest.mark.parametrize(("end", "card"), [("", True), ("raise SystemError('mine')", False)])
def test_a_script_that_ends_reports(end: str, card: bool) -> None:
    script = SCRIPT.format(end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ("InTune" in done.stdout) == card, done.stderr
    assert ("SystemError" in done.stderr) == (not card)


def test_all_files_come_into_one_folder_wherever_the_training_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loader = live(slow(), run_dir="run", **EAGER)
    for batch in loader:
        if (batch == 0).any():
            os.chdir("elsewhere")
    loader.close()
    assert {"history.jsonl", "report.json"} <= {file.name for file in (tmp_path / "run").iterdir()}
    assert [*(tmp_path / "elsewhere").iterdir()] == []
    assert str(tmp_path / "run") in capsys.readouterr().out.replace("\n        ", "")


def test_the_package_itself_stays_light() -> None:
    code = "import sys, intune_callbacks; print([m for m in ('torch', 'intune_callbacks.loop') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@three_attempts
def test_at_a_quick_pace_the_workers_that_helped_stay() -> None:
    # Two epochs of 4 s each without us. It went 1 > 2 > 16 workers and back to 2, and stayed there.
    pace = {"decide_every_s": 0.15, "decide_every_batches": 3, "warmup_batches": 4, "cpus": 8.0, "trainer_cpus": 0.0}
    loader = live(DataLoader(Slow(0.01), batch_size=8, shuffle=True, num_workers=1), **pace, show_card=False)
    begin_s = time.monotonic()
    trained(loader)
    took_s = time.monotonic() - begin_s
    report = loader.close()
    assert report["frozen"] is None
    assert report["after"]["allocation"]["load"] >= 6
    assert took_s < 0.6 * 2 * ROWS * 0.01


@three_attempts
def test_it_becomes_faster() -> None:
    given = {"num_workers": 1, "batch_size": BATCH}
    seconds = []
    for loader in (DataLoader(Slow(0.01), **given), live(DataLoader(Slow(0.01), **given), **EAGER, show_card=False)):
        begin_s = time.monotonic()
        trained(loader)
        seconds.append(time.monotonic() - begin_s)
    assert seconds[1] < 0.6 * seconds[0]


@three_attempts
def test_what_a_batch_costs() -> None:
    batch = torch.zeros(4)
    loader = live([batch] * 20_000, show_card=False)
    best_s = 1.0
    for _ in range(5):
        begin_s = time.thread_time()
        for _ in loader:
            pass
        best_s = min(best_s, (time.thread_time() - begin_s) / 20_000)
    assert best_s < 10e-6
