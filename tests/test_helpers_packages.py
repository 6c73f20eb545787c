"""Datasets of public packages get helpers without a word of the user; ``tox run -e reach`` installs them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning_runs as runs  # noqa: E402
import numpy as np  # noqa: E402
from later_rows import Run  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from intune_callbacks.pipelines.torch.hooks import hook_of  # noqa: E402

# What the packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, SHARDS = 400, 8
MANY = {"load": 5, "load.window": 24}


def twice(item: Any) -> Any:
    time.sleep(0.001)
    return 2.0 * torch.as_tensor(np.array(item["x"]))


def litdata(folder: Path, **options: Any) -> Any:
    package = pytest.importorskip("litdata")
    writer_of = pytest.importorskip("litdata.streaming.writer").BinaryWriter
    if not (folder / "lit").exists():
        writer = writer_of(str(folder / "lit"), chunk_size=50)
        for index in range(ROWS):
            writer[index] = {"x": np.array([float(index)], np.float32)}
        writer.done()
        writer.merge()
    data = package.StreamingDataset(str(folder / "lit"), shuffle=True, drop_last=False, transform=twice)
    return package.StreamingDataLoader(data, batch_size=4, **options)


def mosaic(folder: Path, **options: Any) -> Any:
    package = pytest.importorskip("streaming")
    out = str(folder / "mds")
    if not Path(out).exists():
        with package.MDSWriter(out=out, columns={"x": "ndarray"}, size_limit=1200) as writer:
            for index in range(ROWS):
                writer.write({"x": np.array([float(index)], np.float32)})

    class Doubled(package.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: Any) -> Any:
            return twice(super().__getitem__(index))

    data = Doubled(local=out, shuffle=True, shuffle_seed=3, batch_size=4)
    return package.StreamingDataLoader(data, batch_size=4, **options)


def numbered(shards: Any) -> Any:
    for shard in shards:
        for index in range(shard, ROWS, SHARDS):
            yield {"x": [float(index)], "y": index}


def streamed(**options: Any) -> Any:
    package = pytest.importorskip("datasets")
    data = package.IterableDataset.from_generator(numbered, gen_kwargs={"shards": list(range(SHARDS))})
    return data.shuffle(seed=3, buffer_size=20).map(lambda example: {"z": 2 * example["y"]}, **options)


def hugging_face(folder: Path, **options: Any) -> Any:
    data = streamed().map(lambda x: {"x": twice({"x": x})}, input_columns=["x"], remove_columns=["y"])
    return DataLoader(data.with_format("torch"), batch_size=4, **options)


def tars(folder: Path) -> Any:
    package = pytest.importorskip("webdataset")
    for shard in range(0 if (folder / "s-0000.tar").exists() else SHARDS):
        with package.TarWriter(str(folder / f"s-{shard:04d}.tar")) as writer:
            for index in range(shard, ROWS, SHARDS):
                writer.write({"__key__": f"{index:06d}", "a.npy": np.array([float(index)]), "b.cls": index})
    urls = str(folder / f"s-{{0000..{SHARDS - 1:04d}}}.tar")
    # It is shuffled by a generator of its own, seeded, as with webdataset's default no two epochs are the same.
    return package.WebDataset(urls, shardshuffle=False).shuffle(20, rng=random.Random(3))


def webdataset(folder: Path, **options: Any) -> Any:
    data = tars(folder).decode().rename(x="a.npy", y="b.cls").map_dict(x=lambda x: twice({"x": x})).to_tuple("x", "y")
    return DataLoader(data, batch_size=4, **options)


def webdataset_batches(folder: Path, **options: Any) -> Any:
    data = tars(folder).decode().to_tuple("a.npy", "b.cls").map_tuple(lambda x: twice({"x": x}))
    return pytest.importorskip("webdataset").WebLoader(data.batched(4), batch_size=None, **options).pipeline[0]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", [litdata, mosaic, hugging_face, webdataset, webdataset_batches])
def test_batches_are_the_stock_ones(make: Callable[..., Any], persistent: bool, tmp_path: Path) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}
    stock = Run(make(tmp_path, **options), epochs=2)
    before = runs.running()
    ours = Run(make(tmp_path, **options), [MANY], epochs=2, settle=True)
    assert ours.seen == stock.seen and len(stock.seen) > 150
    assert ours.helped > 0, ours.why_not
    assert ours.why_not == ""
    assert before


def test_no_transform_is_no_hook(tmp_path: Path) -> None:
    loader = litdata(tmp_path, num_workers=1)
    assert hook_of(loader.dataset) is not None
    del loader.dataset.transform
    assert hook_of(loader.dataset) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda _: streamed(batched=True),
        lambda _: streamed(with_indices=True),
        lambda _: streamed().with_format("arrow"),
        lambda _: streamed().filter(lambda example: example["z"] > 10),
        lambda _: streamed().map(lambda example: example).shuffle(seed=1),
        lambda folder: tars(folder).decode().map(lambda sample: sample if sample["b.cls"] % 2 else None),
        lambda folder: tars(folder).decode(handler=pytest.importorskip("webdataset").warn_and_continue),
        lambda folder: tars(folder).decode().to_tuple("a.npy").batched(4, collation_fn=list),
    ],
    ids=["batched", "numbers", "tables", "filter", "shuffle", "drops", "skips", "own collate"],
)
def test_steps_that_are_not_one_to_one_are_no_hook(make: Callable[..., Any], tmp_path: Path) -> None:
    assert hook_of(make(tmp_path)) is None


@pytest.mark.parametrize("make", [hugging_face, webdataset])
def test_an_error_in_a_step_is_the_loaders(make: Callable[..., Any], tmp_path: Path) -> None:
    def fails(example: Any) -> Any:
        if int(example["y"]) == 260:
            raise LookupError("no such row")
        return example

    def failing(folder: Path) -> Any:
        if make is webdataset:
            data = tars(folder).decode().rename(x="a.npy", y="b.cls")
            return data.map_dict(y=lambda y: fails({"y": y})["y"], x=lambda x: twice({"x": x})).to_tuple("x", "y")
        return streamed().map(fails).map(lambda example: {"x": twice(example)})

    def until_it_fails(*changes: Any) -> list[Any]:
        seen: list[Any] = []
        loader = DataLoader(failing(tmp_path), batch_size=4, num_workers=2)
        with pytest.raises(LookupError, match="no such row"):
            Run(loader, *changes, epochs=1, settle=True, hook=lambda run, _: seen.append(run.seen[-1]))
        return seen

    assert until_it_fails([MANY]) == until_it_fails()
