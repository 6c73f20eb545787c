"""A fit whose workers have too few shards: said on the card, in the report, and logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from intune_callbacks.lightning import InTuneCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
ONE = "worker 0 of 3 delivered everything: 1 shard for 3 workers; num_workers=1 is enough, or reshard"


class OneShard(IterableDataset[torch.Tensor]):
    num_shards = 1

    def __iter__(self) -> Any:
        rows = 200 if get_worker_info().id == 0 else 0
        return (torch.full((2,), float(row)) for row in range(rows))


@pytest.mark.parametrize("mode", ["tune", "observe"])
def test_it_is_said_and_logged(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = runs.NAMESPACES["pytorch_lightning"]
    often: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}
    callback = InTuneCallback(mode=mode, **often)
    trainer = runs.make_trainer(namespace, callback, logger=CSVLogger(tmp_path), max_epochs=1)
    trainer.fit(runs.make_model(namespace), DataLoader(OneShard(), batch_size=1, num_workers=3))
    assert ONE in " ".join(capsys.readouterr().out.split())
    report = callback.report
    assert report["frozen"] is None and [cause["sentence"] for cause in report["causes"]].count(ONE) == 1
    assert report["stages"][0]["delivering"] == 1
    (metrics,) = tmp_path.rglob("metrics.csv")
    head, *lines = metrics.read_text().splitlines()
    column = head.split(",").index("intune/delivering/load")
    assert {line.split(",")[column] for line in lines} - {""} == {"1.0"}
