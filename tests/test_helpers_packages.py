"""Datasets of public packages get helpers without a word of the user; ``tox run -e reach`` installs them."""

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
from later_rows import Run  # noqa: E402

# What the packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = 400
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


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", [litdata, mosaic])
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
    from intune_callbacks.pipelines.torch_hooks import hook_of

    loader = litdata(tmp_path, num_workers=1)
    assert hook_of(loader.dataset) is not None
    del loader.dataset.transform
    assert hook_of(loader.dataset) is None
