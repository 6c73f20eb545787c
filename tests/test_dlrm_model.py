"""The torch model: its configuration, its two lookups, its initial weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dlrm_examples.models.dlrm_torch import DLRM, DLRMConfig  # noqa: E402
from intune_callbacks.errors import ConfigError  # noqa: E402

SMALL = {"table_rows": (50, 3, 700), "embedding_dim": 4, "dense_features": 5, "bottom": (8, 4), "top": (6, 1)}


def small(**changes) -> DLRM:
    return DLRM(DLRMConfig(**{**SMALL, **changes}), torch.Generator().manual_seed(1))


def batch(rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    ids = [torch.randint(n, (rows,), generator=random) for n in SMALL["table_rows"]]
    return torch.rand(rows, 5, generator=random), torch.stack(ids, dim=1)


def test_defaults_are_metas_kaggle_setting() -> None:
    config = DLRMConfig()
    assert sum(config.table_rows) == 33_762_577
    assert config.interaction_width == 367


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DLRMConfig(table_rows=(3, 0), embedding_dim=8, dense_features=True, bottom=(4, 5), top=())
    assert [p.split("=")[0] for p in caught.value.problems] == ["dense_features", "table_rows", "bottom", "top"]
    with pytest.raises(ConfigError, match="the last width must be 1"):
        DLRMConfig(top=(4, 2))
    with pytest.raises(ConfigError, match="expected a tuple"):
        DLRMConfig(table_rows=[3, 4])


@pytest.mark.parametrize("sparse", [True, False])
def test_one_id_per_table_is_a_bag_of_one(sparse: bool) -> None:
    dense, ids = batch()
    starts = torch.arange(len(ids)).expand(3, -1)
    outputs, gradients = [], []
    for arguments in ((ids,), (ids.int(),), (ids.T, starts)):
        model = small(sparse_gradients=sparse)
        logits = model(dense, *arguments)
        logits.square().sum().backward()
        outputs.append(logits)
        assert model.embeddings.weight.grad.is_sparse == sparse
        gradients.append([model.table_gradient(t) for t in range(3)])
    assert outputs[0].shape == (40,)
    for output, gradient in zip(outputs[1:], gradients[1:], strict=True):
        assert torch.equal(output, outputs[0])
        for mine, first in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(mine, first)
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])


def test_tables_do_not_overlap() -> None:
    model = small()
    for table in range(3):
        model.table(table).fill_(table + 1.0)
    assert torch.equal(model.embed(batch()[1]), torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1).expand(40, 3, 4))
    assert sum(len(model.table(t)) for t in range(3)) == len(model.embeddings.weight)
    assert not model.table_gradient(1).any()


def test_sparse_and_dense_gradients_train_alike() -> None:
    dense, ids = batch()
    models = [small(sparse_gradients=sparse) for sparse in (True, False)]
    for model in models:
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            optimiser.zero_grad()
            model(dense, ids).square().mean().backward()
            optimiser.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_initial_weights() -> None:
    model = DLRM(DLRMConfig(table_rows=(10_000, 100)), torch.Generator().manual_seed(0))
    for table, rows in enumerate((10_000, 100)):
        weights, bound = model.table(table), rows**-0.5
        assert weights.abs().max() <= bound
        assert weights.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    layer = model.bottom[2]  # 512 -> 256
    assert layer.weight.std().item() == pytest.approx((2 / 768) ** 0.5, rel=0.02)
    assert layer.bias.std().item() == pytest.approx((1 / 256) ** 0.5, rel=0.2)
    again = DLRM(model.config, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_state_holds_the_weights_only() -> None:
    model, other = small(), DLRM(DLRMConfig(**SMALL), torch.Generator().manual_seed(9))
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(*batch()), other(*batch()))
