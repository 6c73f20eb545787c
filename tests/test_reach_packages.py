"""The loaders of public packages, as `reach_classes` has copied them; ``tox run -e reach`` installs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning_runs as runs  # noqa: E402
import numpy as np  # noqa: E402
from reach_classes import Rows  # noqa: E402
from reach_patterns import of_class  # noqa: E402
from reach_runs import MOMENTS, compared  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

# What the packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, BATCH, SHARDS = 192, 4, 8
Make = Callable[..., Any]


def rows(item: Any) -> Any:
    """A batch without what else a package adds to it."""
    return torch.as_tensor(np.array(item["x"]))


def litdata(folder: Path) -> Make:
    package = pytest.importorskip("litdata")
    writer_of = pytest.importorskip("litdata.streaming.writer").BinaryWriter
    writer = writer_of(str(folder / "lit"), chunk_size=ROWS // SHARDS)
    for index in range(ROWS):
        writer[index] = {"x": np.array([float(index)], np.float32)}
    writer.done()
    writer.merge()

    def make(**options: Any) -> Any:
        data = package.StreamingDataset(str(folder / "lit"), shuffle=False, drop_last=False, transform=rows)
        return package.StreamingDataLoader(data, batch_size=BATCH, **options)

    return make


def mosaic(folder: Path) -> Make:
    package = pytest.importorskip("streaming")
    out = str(folder / "mds")
    with package.MDSWriter(out=out, columns={"x": "ndarray"}, size_limit=1200) as writer:
        for index in range(ROWS):
            writer.write({"x": np.array([float(index)], np.float32)})

    def make(**options: Any) -> Any:
        data = package.StreamingDataset(local=out, shuffle=False, batch_size=BATCH)
        return package.StreamingDataLoader(data, batch_size=BATCH, collate_fn=collate, **options)

    return make


def collate(items: Any) -> Any:
    return torch.stack([rows(item) for item in items])


def webdataset(folder: Path) -> Make:
    package = pytest.importorskip("webdataset")
    for shard in range(SHARDS):
        with package.TarWriter(str(folder / f"s-{shard:04d}.tar")) as writer:
            for index in range(shard, ROWS, SHARDS):
                writer.write({"__key__": f"{index:06d}", "x.npy": np.array([float(index)], np.float32)})

    def make(**options: Any) -> Any:
        urls = str(folder / f"s-{{0000..{SHARDS - 1:04d}}}.tar")
        data = package.WebDataset(urls, shardshuffle=False, empty_check=False).decode().to_tuple("x.npy")
        return package.WebLoader(data.batched(BATCH, collation_fn=stacked), batch_size=None, **options)

    return make


def stacked(items: Any) -> Any:
    return torch.stack([torch.as_tensor(np.array(item[0])) for item in items])


def accelerate(folder: Path, dispatch: bool = False) -> Make:
    package = pytest.importorskip("accelerate")

    def make(**options: Any) -> Any:
        accelerator = package.Accelerator(
            cpu=True, dataloader_config=package.DataLoaderConfiguration(dispatch_batches=dispatch)
        )
        return accelerator.prepare(of_class(DataLoader)(**options))

    return make


def map_style(folder: Path) -> Make:
    package = pytest.importorskip("datasets")

    def make(**options: Any) -> Any:
        data = package.Dataset.from_dict({"x": [[float(index)] for index in range(ROWS)]}).with_format("torch")
        return DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate, **options)

    return make


def numbered(shards: Any) -> Any:
    for shard in shards:
        for index in range(shard, ROWS, SHARDS):
            yield {"x": [float(index)]}


def iterable_style(folder: Path) -> Make:
    package = pytest.importorskip("datasets")

    def make(**options: Any) -> Any:
        data = package.IterableDataset.from_generator(numbered, gen_kwargs={"shards": list(range(SHARDS))})
        return DataLoader(data.with_format("torch"), batch_size=BATCH, collate_fn=collate, **options)

    return make


PACKAGES: dict[str, Callable[[Path], Make]] = {
    "litdata": litdata,
    "mosaicml-streaming": mosaic,
    "webdataset": webdataset,
    "accelerate": accelerate,
    "datasets": map_style,
    "datasets, iterable": iterable_style,
}


@pytest.fixture(scope="module", params=PACKAGES)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return PACKAGES[request.param](tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_the_stock_ones(package: Make, moment: str, persistent: bool) -> None:
    compared(package, "process", MOMENTS[moment], num_workers=2, persistent_workers=persistent)


def test_given_back_in_mid_epoch(package: Make) -> None:
    compared(package, "process", MOMENTS["late"], left=(1, 9), num_workers=2)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_fit_under_lightning(package: Make, persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*callbacks: Any) -> list[Any]:
        namespace = runs.NAMESPACES["lightning.pytorch"]

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            self.seen.append(runs.plain(batch))
            return self.layer.weight.sum() * batch.mean()

        torch.manual_seed(0)
        model = runs.make_model(namespace, training_step=training_step)
        loader = package(num_workers=2, persistent_workers=persistent)
        runs.make_trainer(namespace, *callbacks, use_distributed_sampler=False).fit(model, loader)
        return model.seen

    stock = fit()
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", runs.RestlessTuner)
    runs.RestlessTuner.made.clear()
    assert fit(InTuneCallback(decide_every_s=0.0)) == stock
    (tuner,) = runs.RestlessTuner.made
    assert tuner.pipeline.stats().delivered >= len(stock) - 1 > 10


def test_batches_that_one_process_dispatches() -> None:
    compared(accelerate(Path(), dispatch=True), "process", MOMENTS["before"], num_workers=2)


def test_a_prepared_loader_is_found_and_faster() -> None:
    """Before, `find` raised on it: it says that it is a DataLoader."""
    package = pytest.importorskip("accelerate")

    class Slow(Rows):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    loader = package.Accelerator(cpu=True).prepare(DataLoader(Slow(), batch_size=BATCH, num_workers=1))
    pipeline = find(loader).pipeline
    assert pipeline is not None
    pipeline.prepare()
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    pipeline.resize({"load": 4, "load.window": 12})
    assert len(list(iterator)) == len(loader) - 1
    assert pipeline.stats().delivered == len(loader)
    pipeline.close()
