"""An allocation in the words of the user's pipeline, for every adapter."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from intune_callbacks.measure.advice import to_set
from intune_callbacks.pipelines.find import find
from intune_callbacks.pipelines.look import is_installed
from intune_callbacks.pipelines.pydataset.pydataset import knobs
from intune_callbacks.types import Stage

LOADER = Stage("load", "cpu", "workers", 1, 64, 2, knob="DataLoader(num_workers={})")
WINDOW = Stage("load.window", "memory", "items", 1, 64, 4, window_of="load", knob="prefetch_factor={}")


def told(stages: Any, wanted: Mapping[str, int]) -> tuple[list[str], list[str]]:
    return to_set(wanted, [asdict(stage) | {"first": stage.current} for stage in stages])


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ({"load": 6}, "DataLoader(num_workers=6)  # was 2"),
        ({"load": 6, "load.window": 12}, "DataLoader(num_workers=6)  # was 2"),
        ({"load": 6, "load.window": 13}, "DataLoader(num_workers=6, prefetch_factor=3)  # was 2 and 2"),
        ({"load.window": 10}, "DataLoader(num_workers=2, prefetch_factor=5)  # was 2 and 2"),
    ],
)
def test_a_window_is_an_argument_beside_the_workers(wanted: dict[str, int], code: str) -> None:
    assert told((LOADER, WINDOW), wanted) == ([code], [])


@pytest.mark.parametrize(
    ("kind", "first", "wanted", "code"),
    [
        ("thread", 2, {"load": 6}, "PyDataset(workers=6)  # was 2"),
        ("thread", 2, {"load": 6, "load.window": 10}, "PyDataset(workers=6)  # was 2"),
        ("thread", 2, {"load": 16, "load.window": 20}, "PyDataset(workers=16, max_queue_size=20)  # was 2 and 10"),
        # With one that is no process Keras computes in the training loop, which is its `workers=1`.
        ("thread", 0, {"load": 1}, "PyDataset(workers=2)  # was 1"),
        ("thread", 3, {"load": 1}, "PyDataset(workers=2)  # was 3"),
        ("process", 3, {"load": 1}, "PyDataset(workers=1, use_multiprocessing=True)  # was 3"),
    ],
)
def test_a_pydataset(kind: str, first: int, wanted: dict[str, int], code: str) -> None:
    workers, window = knobs(kind)
    stages = (
        Stage("load", "cpu", "workers", 0, 64, first, knob=workers),
        Stage("load.window", "memory", "items", 1, 64, 10, window_of="load", knob=window),
    )
    assert told(stages, wanted) == ([code], [])


def test_workers_that_shall_live_on() -> None:
    stages = [asdict(stage) | {"first": stage.current} for stage in (LOADER, WINDOW)]
    kept = "DataLoader(num_workers={}, persistent_workers=True)  # was 2 and False"
    assert to_set({}, stages, ["load"]) == ([kept.format(2)], [])
    assert to_set({"load": 6, "load.window": 12}, stages, ["load"]) == ([kept.format(6)], [])
    wide = "DataLoader(num_workers=6, prefetch_factor=3, persistent_workers=True)  # was 2 and 2 and False"
    assert to_set({"load": 6, "load.window": 18}, stages, ["load"]) == ([wide], [])
    assert to_set({}, stages) == ([], [])


def test_what_has_no_place_in_the_users_code_is_said_in_words() -> None:
    mapper = Stage("decode", "cpu", "workers", 1, 64, 1, knob="ParallelMapper(map_fn=decode, num_workers={})")
    window = Stage("decode.window", "memory", "items", 1, 64, 2, window_of="decode")
    other = Stage("read", "io", "workers", 1, 64, 3)
    assert told((other, mapper, window), {"decode": 4, "decode.window": 9, "read": 5, "gone": 1}) == (
        ["ParallelMapper(map_fn=decode, num_workers=4)  # was 1"],
        ["read 5 (was 3)", "gone 1 (was ?)"],
    )
    assert told((mapper, window), {"decode.window": 9}) == ([], ["decode.window 9 (was 2)"])


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        ("/opt/venv/lib/python3.11/site-packages/keras/src/utils/text_dataset_utils.py", True),
        ("/usr/lib/python3/dist-packages/keras/fit.py", True),
        ("/home/me/my-packages/train.py", False),
        (None, False),
    ],
)
def test_what_is_installed_is_told_by_its_path(file: str | None, installed: bool) -> None:
    """Also in an environment that sees the packages of another one."""
    assert is_installed(file) == installed


def test_a_number_inside_a_package_has_no_line(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    for name in ("a/1.txt", "b/2.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("text")
    dataset = keras.utils.text_dataset_from_directory(str(tmp_path), batch_size=1, verbose=False)
    code, (words,) = told(stages_of(dataset), {"map": 9})
    assert code == []
    assert words.startswith("map 9 (was ") and words.endswith(", inside keras.src.utils.text_dataset_utils)")
    own = dataset.map(lambda text, label: (text, label + 1), num_parallel_calls=3)
    (line, *_), _ = told(stages_of(own), {"map#2": 9})
    assert line.startswith(".map(..., num_parallel_calls=9)  # was 3")


def test_the_line_of_an_interleave_keeps_the_order() -> None:
    tf = pytest.importorskip("tensorflow")

    def read(item: Any) -> Any:
        return tf.data.Dataset.range(item, item + 3)

    def line(**given: Any) -> str:
        (code, *_), _ = told(stages_of(tf.data.Dataset.range(8).interleave(read, **given)), {"read": 1})
        return code.partition("  #")[0]

    assert line(cycle_length=4, num_parallel_calls=2) == ".interleave(read, ..., cycle_length=4, num_parallel_calls=1)"
    # Of one that is not given tf.data makes as many as there are calls, if there are so many CPUs.
    (cycle,) = re.fullmatch(
        r"\.interleave\(read, \.\.\., cycle_length=(\d), num_parallel_calls=1\)", line(num_parallel_calls=2)
    ).groups()  # type: ignore[union-attr]
    ours = tf.data.Dataset.range(8).interleave(read, cycle_length=int(cycle), num_parallel_calls=1)
    stock = tf.data.Dataset.range(8).interleave(read, num_parallel_calls=2)
    assert list(ours.as_numpy_iterator()) == list(stock.as_numpy_iterator())


def test_what_tensorflow_has_and_the_user_names_is_the_users(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    files = tf.data.Dataset.from_tensor_slices([str(tmp_path / name) for name in "ab"])
    read = files.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=2)
    stages = stages_of(read.map(tf.io.decode_jpeg, num_parallel_calls=1))
    code, words = told(stages, {stage.name: 6 for stage in stages if stage.window_of is None})
    assert [line.partition("(")[0] for line in code[:2]] == [".interleave", ".map"]
    assert words == []


def test_two_that_are_written_alike_are_told_apart() -> None:
    twice = [Stage(f"{name}/load", "cpu", "workers", 1, 64, 2, knob=LOADER.knob) for name in ("left", "right")]
    code, _ = told(twice, {"left/load": 3, "right/load": 3})
    assert code == [f"DataLoader(num_workers=3)  # was 2 ({name}/load)" for name in ("left", "right")]


def stages_of(loader: Any, live: bool = False) -> tuple[Stage, ...]:
    pipeline = find(loader, live=live).pipeline
    assert pipeline is not None
    try:
        return pipeline.stages()
    finally:
        pipeline.close()


@pytest.mark.parametrize("live", [False, True])
def test_a_data_loader(live: bool) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    data = torch.zeros(8, 2)
    line = told(stages_of(DataLoader(data, num_workers=2), live), {"load": 6})[0]
    assert line == ["DataLoader(num_workers=6)  # was 2"]


def test_a_data_loader_without_workers_and_one_of_a_stream() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    line = told(stages_of(DataLoader(torch.zeros(8, 2))), {"load": 6, "load.window": 12})[0]
    assert line == ["DataLoader(num_workers=6)  # was 0"]
    # What `tune` would leave alone is the user's to change in the other modes, too.
    assert [stage.when for stage in stages_of(DataLoader(torch.zeros(8, 2)))] == ["user", "user"]
    assert [stage.when for stage in stages_of(DataLoader(Stream()))] == ["user", "user"]
    consents = find(DataLoader(torch.zeros(8, 2)), live=False, workers_kind="process").pipeline
    assert consents is not None and [stage.when for stage in consents.stages()] == ["epoch", "epoch"]
    line = told(stages_of(DataLoader(Stream(), num_workers=2)), {"load": 6})[0]
    assert line == ["DataLoader(num_workers=6)  # was 2; the samples' order follows the workers"]


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
@pytest.mark.parametrize("live", [False, True])
def test_a_torchdata_graph(live: bool) -> None:
    from torchdata import nodes

    def decode(item: int) -> int:
        return item

    node: Any = nodes.ParallelMapper(nodes.IterableWrapper(range(8)), decode, num_workers=2)
    stages = stages_of(nodes.Loader(nodes.Prefetcher(node, 3)), live)
    code, words = told(stages, {"decode": 6, "decode.window": 12, "prefetch": 5})
    assert code == ["ParallelMapper(map_fn=decode, num_workers=6)  # was 2", "Prefetcher(prefetch_factor=5)  # was 3"]
    assert words == []


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("threads", [2, 16])
def test_a_dataset(threads: int) -> None:
    import tensorflow as tf

    def parse(item: Any) -> Any:
        return item * 2

    data = tf.data.Dataset.range(64)
    data = data.interleave(lambda x: tf.data.Dataset.from_tensors(x), cycle_length=8, num_parallel_calls=2)
    data = data.map(parse, num_parallel_calls=2).batch(4, num_parallel_calls=tf.data.AUTOTUNE).prefetch(3)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    stages = stages_of(data.with_options(options))
    wanted = {stage.name: 6 for stage in stages if stage.window_of is None}
    code, words = told(stages, wanted)
    more = []
    if threads < 6:  # else no more calls would be at work at once
        more = [
            "options = tf.data.Options(); options.threading.private_threadpool_size = 6; "
            f"dataset = dataset.with_options(options)  # TensorFlow has {threads} threads for all calls"
        ]
    assert [line.split("(")[0] for line in code[:4]] == [".interleave", ".map", ".batch", ".prefetch"]
    assert code[1:] == [
        f".map(parse, num_parallel_calls=6)  # was 2{' on 2 threads' if more else ''}",
        ".batch(..., num_parallel_calls=6)  # was tf.data.AUTOTUNE",
        ".prefetch(6)  # was 3",
        *more,
    ]
    assert not any("options" in line for line in told(stages, {"prefetch": 6})[0])
    assert words == []
