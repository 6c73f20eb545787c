"""Optimisers, learning rate and figures of merit are what their definitions say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_examples.models.metrics import evaluate
from dlrm_examples.models.schedule import LOWEST_RATE, Schedule

STEPS, ROWS, DIM = 6, 20, 4


def lookups(seed: int) -> np.ndarray:
    # Few rows, so that a step looks the same row up several times.
    return np.random.default_rng(seed).integers(0, ROWS, (STEPS, 16))


def trained(optimizer_class, sparse: bool, **options):
    torch = pytest.importorskip("torch")
    tables = torch.nn.Embedding(ROWS, DIM, sparse=sparse)
    with torch.no_grad():
        tables.weight.copy_(torch.from_numpy(np.random.default_rng(1).random((ROWS, DIM), np.float32)))
    optimizer = optimizer_class(tables.parameters(), lr=0.1, **options)
    for rows in lookups(3):
        optimizer.zero_grad()
        tables(torch.from_numpy(rows)).square().sum().backward()
        optimizer.step()
    return tables.weight.detach().numpy(), optimizer


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_adagrad_is_torchs(sparse: bool, eps: float) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.optimizers_torch import Adagrad

    np.testing.assert_allclose(
        trained(Adagrad, sparse, eps=eps)[0], trained(torch.optim.Adagrad, False, eps=eps)[0], rtol=1e-5
    )


@pytest.mark.parametrize("sparse", [True, False])
def test_rowwise_adagrad_is_its_definition(sparse: bool) -> None:
    pytest.importorskip("torch")
    from dlrm_examples.models.optimizers_torch import Adagrad

    weights = np.random.default_rng(1).random((ROWS, DIM), np.float32).astype(np.float64)
    sums = np.zeros(ROWS)
    for rows in lookups(3):
        gradient = 2 * weights * np.bincount(rows, minlength=ROWS)[:, None]
        sums += (gradient**2).mean(axis=1)
        weights -= 0.1 * gradient / (np.sqrt(sums) + 1e-3)[:, None]
    got, optimizer = trained(Adagrad, sparse, eps=1e-3, rowwise=True)
    np.testing.assert_allclose(got, weights, rtol=1e-4)
    (state,) = optimizer.state.values()
    assert state["sum"].shape == (ROWS,), "4 bytes a row"
    np.testing.assert_allclose(state["sum"].numpy(), sums, rtol=1e-4)


def test_an_optimizer_resumes() -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.optimizers_torch import optimizer_for

    def run(stop: int | None) -> list:
        weights = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(2))]
        optimizer = optimizer_for("rowwise-adagrad", weights[:1], weights[1:], 0.1, 1e-8)
        for step in range(6):
            if step == stop:
                state = optimizer.state_dict()
                optimizer = optimizer_for("rowwise-adagrad", weights[:1], weights[1:], 0.7, 1e-8)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            sum((w * (step + 1)).square().sum() for w in weights).backward()
            optimizer.step()
        return weights

    for one, other in zip(run(None), run(3), strict=True):
        assert torch.equal(one, other)


def test_the_rest_gets_plain_adagrad() -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.optimizers_torch import optimizer_for

    tables, rest = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(2, 3))
    for name, shapes in (("rowwise-adagrad", [(4,), (2, 3)]), ("adagrad", [(4, 3), (2, 3)])):
        optimizer = optimizer_for(name, [tables], [rest], 0.1, 1e-8)
        (tables.sum() + rest.sum()).backward()
        optimizer.step()
        assert [tuple(optimizer.state[weights]["sum"].shape) for weights in (tables, rest)] == shapes


@settings(max_examples=200)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.floats(1e-6, 20))
def test_schedule_is_metas(warmup: int, gap: int, decay: int, full: float) -> None:
    """LRPolicyScheduler keeps the last rate it computed; here that is replayed."""
    begin = warmup + gap
    schedule, last = Schedule(warmup, begin, decay), full
    for step in range(begin + decay + 3):
        count = step + 1
        if count < warmup:
            last = full * (1 - (warmup - count) / warmup)
        elif begin <= count < begin + decay:
            last = max(LOWEST_RATE, full * ((decay - (count - begin)) / decay) ** 2)
        elif not decay:
            last = full
        assert schedule.rate(step, full) == pytest.approx(last, rel=1e-12)
    assert not schedule.is_constant or {schedule.rate(step, full) for step in range(begin + 3)} == {full}


def test_schedule_in_keras() -> None:
    keras = pytest.importorskip("keras")
    from dlrm_examples.models.optimizers_keras import Rate

    for steps in ((0, 0, 0), (5, 0, 0), (0, 4, 6), (3, 4, 6), (3, 8, 1)):
        schedule, rate = Schedule(*steps), Rate(0.5, *steps)
        again = Rate.from_config(rate.get_config())
        for step in range(20):
            expected = pytest.approx(schedule.rate(step, 0.5), rel=1e-5)
            assert float(rate(keras.ops.convert_to_tensor(step, "int64"))) == expected
            assert float(again(step)) == expected


@given(st.lists(st.tuples(st.booleans(), st.floats(-30, 30)), min_size=1, max_size=40))
def test_figures_of_merit(pairs: list[tuple[bool, float]]) -> None:
    labels, logits = [int(label) for label, _ in pairs], [logit for _, logit in pairs]
    found = evaluate(labels, logits)
    losses = [-math.log(p if y else 1 - p) for y, x in pairs for p in [1 / (1 + math.exp(-x))] if 0 < p < 1]
    if len(losses) == len(pairs):
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3, abs=1e-12)
    assert found["accuracy"] == sum((x > 0) == y for y, x in pairs) / len(pairs)
    assert found["rows"] == len(pairs)
    assert math.isnan(found["auc"]) == (len(set(labels)) == 1)


def test_a_sure_prediction_has_a_finite_loss() -> None:
    assert evaluate([1, 0], [-1000.0, 1000.0])["loss"] == 1000.0
    assert evaluate([1, 0], [1000.0, -1000.0])["loss"] == 0.0
