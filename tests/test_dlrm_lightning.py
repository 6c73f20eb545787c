"""DLRM learns generated and real clicks under Lightning, and its AUC is the definition's."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_examples.criteo.tsv import hashed_table_rows
from dlrm_examples.generate import generate
from dlrm_examples.models.auc import auc
from tests.dlrm_rows import real_file

TABLE_ROWS = hashed_table_rows(100_000)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",  # Lightning 2.6 on torch 2.13
    "ignore:.*does not have many workers:UserWarning",
    "ignore:GPU available but not used:UserWarning",
)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=30))
def test_auc_is_the_share_of_ordered_pairs(pairs: list[tuple[bool, int]]) -> None:
    positive = [score for label, score in pairs if label]
    negative = [score for label, score in pairs if not label]
    labels, scores = np.array(pairs).T
    if not positive or not negative:
        with pytest.raises(ValueError, match="one class"):
            auc(labels, scores)
        return
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p, n in itertools.product(positive, negative)]
    assert auc(labels, scores) == pytest.approx(sum(wins) / len(wins), abs=1e-12)


def test_auc_refuses() -> None:
    with pytest.raises(ValueError, match=r"two vectors of one length.*only 0 and 1.*no NaN"):
        auc([0, 2], [math.nan])
    with pytest.raises(ValueError, match="one class"):
        auc([], [])


def test_auc_of_many() -> None:
    labels = np.arange(200_000) % 2
    assert auc(labels, labels) == 1.0
    assert auc(labels, -labels) == 0.0
    assert auc(labels, np.zeros(200_000)) == 0.5


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> list[Path]:
    return generate(tmp_path_factory.mktemp("clicks") / "data", rows=60_000, shards=3)


def trained(files: list[Path], batch_size: int, learning_rate: float, seed: int = 0, **trainer):
    lightning = pytest.importorskip("pytorch_lightning")
    pytest.importorskip("torchdata.nodes")
    from dlrm_examples.criteo.pipeline import build
    from dlrm_examples.criteo.reading import Reading
    from dlrm_examples.models.dlrm_torch import DLRMConfig
    from dlrm_examples.models.lightning_module import DLRMModule

    options = {"table_rows": TABLE_ROWS, "seed": seed}
    module = DLRMModule(DLRMConfig(TABLE_ROWS), learning_rate, seed)
    fit = lightning.Trainer(**{"max_epochs": 1, "accelerator": "cpu", **QUIET, **trainer})
    fit.fit(module, build(Reading(files, batch_size, **options)))
    (results,) = fit.test(module, build(Reading(files, 4096, split="test", **options)), verbose=False)
    return module, results


def test_learns_generated_clicks(generated: list[Path]) -> None:
    _, results = trained(generated, 128, 0.1)
    assert results["test_auc"] > 0.70
    assert results["test_loss"] < 0.56  # what always answering the click rate costs
    assert 0.75 < results["test_accuracy"] < 0.9


def test_learns_real_clicks() -> None:
    _, results = trained([real_file("criteo_kaggle_100k.tsv")], 64, 0.1)
    assert results["test_auc"] > 0.70


def test_same_seed_same_weights(generated: list[Path]) -> None:
    torch = pytest.importorskip("torch")
    runs = [trained(generated, 128, 0.1, seed, max_steps=20)[0] for seed in (1, 1, 2)]
    weights = [torch.cat([p.detach().flatten() for p in run.parameters()]) for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_resumes_at_the_very_batch(generated: list[Path], tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    torch = pytest.importorskip("torch")
    from dlrm_examples.criteo.pipeline import build
    from dlrm_examples.criteo.reading import Reading
    from dlrm_examples.models.dlrm_torch import DLRMConfig
    from dlrm_examples.models.lightning_module import DLRMModule

    class Seen(DLRMModule):
        def training_step(self, batch, batch_idx):
            seen.append(batch["dense"].sum().item())
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            if checkpoint and self.global_step == 23:  # in the first epoch of 34 batches
                self.trainer.save_checkpoint(checkpoint)

    def fit(resume: Path | None = None):
        module = Seen(DLRMConfig(small, bottom=(16,), top=(1,)))
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **QUIET)
        trainer.fit(module, build(Reading(generated[:1], 512, table_rows=small)), ckpt_path=resume, weights_only=True)
        return list(module.parameters())

    small = hashed_table_rows(1000)
    checkpoint: Path | None = tmp_path / "23.ckpt"
    seen: list[float] = []
    straight = fit()
    whole, seen, checkpoint = seen, [], None
    resumed = fit(tmp_path / "23.ckpt")
    assert seen == whole[23:]
    assert all(torch.equal(mine, other) for mine, other in zip(resumed, straight, strict=True))
    assert len(set(whole)) == len(whole)
