"""The loaders of public packages for `benchmarks.reach`: each imported only where its case runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

__all__ = [
    *("BATCH", "DECODE_S", "STEP_S", "datasets_stream", "datasets_table", "grain_reader", "litdata", "mosaic"),
    *("pydataset", "torchrec_pipeline", "webdataset"),
]

DECODE_S, STEP_S, BATCH = 0.010, 0.002, 8
FEW_WORKERS, SHARDS = 2, 4
Losses = tuple[list[float], dict[str, Any]]


def decoded(item: Any) -> dict[str, torch.Tensor]:
    """Return a stored row after the time its decoding takes."""
    time.sleep(DECODE_S)
    return {"x": torch.as_tensor(np.array(item["x"], np.float32))}


def _row(index: int, rows: int) -> np.ndarray[Any, Any]:
    return np.full(4, index / rows, np.float32)


def litdata(rows: int) -> Any:
    """LitData's dataset and loader, decoded by `transform=`."""
    import litdata as package
    from litdata.streaming.writer import BinaryWriter

    folder = tempfile.mkdtemp()
    writer = BinaryWriter(folder, chunk_size=max(1, rows // SHARDS))
    for index in range(rows):
        writer[index] = {"x": _row(index, rows)}
    writer.done()
    writer.merge()
    data = package.StreamingDataset(folder, shuffle=False, drop_last=False, transform=decoded)
    return package.StreamingDataLoader(data, batch_size=BATCH, num_workers=FEW_WORKERS)


def mosaic(rows: int) -> Any:
    """MosaicML's dataset with a `__getitem__` that decodes."""
    import streaming as package

    class Decoding(package.StreamingDataset):  # type: ignore[misc, unused-ignore]
        def __getitem__(self, at: Any) -> Any:
            return decoded(super().__getitem__(at))

    folder = tempfile.mkdtemp()
    with package.MDSWriter(out=folder, columns={"x": "ndarray"}, size_limit=1 << 14) as writer:
        for index in range(rows):
            writer.write({"x": _row(index, rows)})
    package.base.util.clean_stale_shared_memory()
    data = Decoding(local=folder, shuffle=False, batch_size=BATCH)
    return DataLoader(data, batch_size=BATCH, num_workers=FEW_WORKERS)


def webdataset(rows: int) -> Any:
    """A webdataset of tar files, decoded by `.map_dict`."""
    import webdataset as package

    folder = Path(tempfile.mkdtemp())
    for shard in range(SHARDS):
        with package.TarWriter(str(folder / f"s-{shard:04d}.tar")) as writer:
            for index in range(shard, rows, SHARDS):
                writer.write({"__key__": f"{index:06d}", "x.npy": _row(index, rows)})
    urls = str(folder / f"s-{{0000..{SHARDS - 1:04d}}}.tar")
    data = package.WebDataset(urls, shardshuffle=False, empty_check=False).decode().rename(x="x.npy")
    data = data.map_dict(x=lambda x: decoded({"x": x})["x"])
    return package.WebLoader(data, batch_size=BATCH, num_workers=FEW_WORKERS)


def datasets_table(rows: int) -> Any:
    """A table of Hugging Face's `datasets`, decoded by `with_transform`."""
    import datasets as package

    def transform(found: Any) -> Any:
        return {"x": [decoded({"x": x})["x"] for x in found["x"]]}

    data = package.Dataset.from_dict({"x": [_row(index, rows).tolist() for index in range(rows)]})
    return DataLoader(data.with_transform(transform), batch_size=BATCH, shuffle=True, num_workers=1)


def datasets_stream(rows: int) -> Any:
    """A stream of Hugging Face's `datasets`, decoded by `.map`."""
    import datasets as package

    def numbered(shards: Any) -> Any:
        for shard in shards:
            for index in range(shard, rows, SHARDS):
                yield {"x": _row(index, rows).tolist()}

    data = package.IterableDataset.from_generator(numbered, gen_kwargs={"shards": list(range(SHARDS))})
    return DataLoader(data.map(decoded).with_format("torch"), batch_size=BATCH, num_workers=FEW_WORKERS)


def grain_reader(rows: int, mode: str) -> Losses:
    """A loop of JAX's kind over a Grain dataset that reads with one thread."""
    import grain

    from intune_callbacks import live

    def decode(index: int) -> Any:
        return decoded({"x": _row(index, rows)})["x"].numpy()

    source = grain.MapDataset.source(range(rows)).shuffle(seed=3).map(decode)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2 * BATCH)
    loader = live(source.to_iter_dataset(options).batch(BATCH), mode=mode, show_card=False)
    losses = []
    for _ in range(2):
        for batch in loader:
            time.sleep(STEP_S)
            losses.append(float(np.square(batch).mean()))
    return losses, loader.close()


def pydataset(rows: int, mode: str) -> Losses:
    """Keras's `model.fit` on a PyDataset with two workers."""
    import keras

    from intune_callbacks.keras import InTuneCallback

    class Pages(keras.utils.PyDataset):  # type: ignore[misc, name-defined, unused-ignore]
        def __len__(self) -> int:
            return rows // BATCH

        def __getitem__(self, page: int) -> Any:
            time.sleep(BATCH * DECODE_S)
            return np.stack([_row(page * BATCH + i, rows) for i in range(BATCH)]), np.zeros((BATCH, 1), np.float32)

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = InTuneCallback(mode=mode, show_card=False)
    history = model.fit(Pages(workers=FEW_WORKERS), epochs=2, verbose=0, callbacks=[callback])
    return history.history["loss"], callback.report


def torchrec_pipeline(make: Callable[[int], Any]) -> Callable[[int, str], Losses]:
    """TorchRec's `TrainPipelineBase` over a loader.

    Args:
        make: rows -> the loader.
    """

    def run(rows: int, mode: str) -> Losses:
        from torchrec.distributed.train_pipeline import TrainPipelineBase
        from torchrec.streamable import Pipelineable

        from intune_callbacks import live

        class Moved(Pipelineable):  # type: ignore[misc, unused-ignore]
            def __init__(self, batch: dict[str, torch.Tensor]) -> None:
                self.x = batch["x"]

            def to(self, device: torch.device, non_blocking: bool = False) -> Moved:
                return self

            def record_stream(self, stream: Any) -> None:
                return None

        class Stepping(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, batch: Any) -> Any:
                time.sleep(STEP_S)
                loss = self.layer(batch.x).square().mean()
                return loss, loss.detach()

        model = Stepping()
        pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), 0.1), torch.device("cpu"))
        loader, losses = live(make(rows), mode=mode, show_card=False), []
        for _ in range(2):
            batches = (Moved(batch) for batch in loader)
            try:
                while True:
                    losses.append(float(pipeline.progress(batches)))
            except StopIteration:
                pipeline._connected = False
        return losses, loader.close()

    return run
