"""DLIO's own loaders under InTune, and its start without a tracer; run as ``python -m benchmarks.paper.judge_loaders``.

The plug-in that DLIO is told of in ``reader.data_loader_classname``: what `read` makes is handed to `live`.
"""

from __future__ import annotations

import importlib
import os
import sys

# DLIO's stand-in for a missing tracer cannot be called; the tracer's wheel has another layout than DLIO looks for.
sys.modules["dftracer.logger"] = importlib.import_module("dftracer.python")
os.environ.setdefault("DFTRACER_ENABLE", "0")

from dlio_benchmark.common.enumerations import DatasetType  # noqa: E402
from dlio_benchmark.data_loader.tf_data_loader import TFDataLoader  # noqa: E402
from dlio_benchmark.data_loader.torch_data_loader import TorchDataLoader  # noqa: E402

from intune_callbacks import live  # noqa: E402

__all__ = ["InTuneTFDataLoader", "InTuneTorchDataLoader"]


class InTuneTorchDataLoader(TorchDataLoader):  # type: ignore[misc]
    """The PyTorch loader, tuned."""

    def read(self) -> None:
        """Make the DataLoader as DLIO does."""
        super().read()
        if self.dataset_type is DatasetType.TRAIN:
            self._dataset = live(self._dataset, run_dir=os.environ["JUDGE_REPORT"])


class InTuneTFDataLoader(TFDataLoader):  # type: ignore[misc]
    """The tf.data loader, tuned."""

    def read(self) -> None:
        """Make the dataset as DLIO does."""
        super().read()
        if self.dataset_type is DatasetType.TRAIN:
            self._dataset = live(self._dataset, run_dir=os.environ["JUDGE_REPORT"])


if __name__ == "__main__":
    from dlio_benchmark.main import main

    main()
