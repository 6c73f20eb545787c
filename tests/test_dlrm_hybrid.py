"""Two ranks that divide the tables do what one process does with all of them, also through a checkpoint."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("torchrec") is None:  # imported by the ranks only
    pytest.skip("torchrec is not installed", allow_module_level=True)

from dlrm_examples import check_oracle  # noqa: E402
from dlrm_examples.hybrid.ranks import run_ranks  # noqa: E402
from dlrm_examples.models.dlrm_torch import DLRM  # noqa: E402
from dlrm_examples.models.schedule import Schedule  # noqa: E402
from dlrm_examples.oracle.file import load  # noqa: E402
from dlrm_examples.oracle.hybrid import of_ranks  # noqa: E402
from tests import hybrid_runs as runs  # noqa: E402
from tests.dlrm_oracle import make_oracle  # noqa: E402
from tests.dlrm_rows import ROOT  # noqa: E402

LIMIT_S = 100.0
META = Path(os.environ.get("INTUNE_ORACLE_DIR", ROOT.parent / "shared" / "oracle"))


def farthest(ours: Any, theirs: Any) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))


def agree(found: Any, expected: Any) -> None:
    losses, tables, rest, *_ = found
    assert len(losses) == len(expected[0])
    assert max(abs(a - b) for a, b in zip(losses, expected[0], strict=True)) < 1e-6
    assert farthest(tables, expected[1]) < 1e-5
    assert rest.keys() == expected[2].keys()
    assert farthest([rest[name] for name in expected[2]], expected[2].values()) < 1e-5
    first = DLRM(runs.SIZES, torch.Generator().manual_seed(runs.SEED))
    assert farthest(tables[:1], [first.table(0)]) > 1e-4, "nothing was learned"


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    assert sum(name.endswith(".momentum1") for name in one) == len(runs.TABLES)
    return all(torch.equal(value, other[name]) for name, value in one.items())


CROSSED = replace(runs.SIZES, interaction="dcn", dcn_layers=2, dcn_low_rank=8, bag_sizes=(3, 1, 2, 1, 5, 1))
RISING = Schedule(warmup_steps=20)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Files of numbers to reproduce, and how to divide the tables: Meta's own where they are at hand."""
    ragged = make_oracle(tmp_path_factory.mktemp("oracle") / "o.npz", ids_per_bag=2, ragged=True, batch=7, itself=True)
    metas = [META / f"dlrm_meta_{name}.npz" for name in ("tiny", "bags")]
    found = {file.name: file for file in metas if file.is_file()} | {"ragged": ragged}
    return {f"{name} {how}": (file, how) for name, file in found.items() for how in ("table_wise", "row_wise")}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, oracles: dict[str, tuple[Path, str]]) -> dict[str, Any]:
    """What two ranks found, all of it in one go: they take seconds to start."""
    path, half = str(tmp_path_factory.mktemp("hybrid") / "half"), runs.STEPS // 2
    jobs = {
        "sgd": (runs.divided, runs.SIZES, "sgd", "row_wise"),
        "rowwise-adagrad": (runs.divided, runs.SIZES, "rowwise-adagrad", "table_wise"),
        "by rows": (runs.divided, runs.SIZES, "rowwise-adagrad", "row_wise"),
        "first half": (runs.divided, runs.SIZES, "rowwise-adagrad", "row_wise", (0, half), None, path),
        "second half": (runs.divided, runs.SIZES, "rowwise-adagrad", "row_wise", (half, runs.STEPS), path),
        "crossed": (runs.divided, CROSSED, "sgd", "auto"),
        "rising": (runs.divided, runs.SIZES, "sgd", "auto", (0, 20), None, None, RISING),
        "drawn": (runs.drawn, runs.SIZES),
        **{name: (of_ranks, load(str(file)), how) for name, (file, how) in oracles.items()},
    }
    found = run_ranks(runs.together, 2, *jobs.values(), limit_s=LIMIT_S)
    return dict(zip(jobs, found, strict=True)) | {"path": path}


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise-adagrad"])
def test_two_ranks_equal_one_process(on_two: dict[str, Any], optimizer: str) -> None:
    found = on_two[optimizer]
    agree(found, runs.alone(runs.SIZES, optimizer))
    rows = [[sum(shape[0] for shape in parts) for parts in rank] for rank in found.shapes]
    for table, whole in enumerate(runs.TABLES):
        held = [rank[table] for rank in rows]
        assert sum(held) == whole
        assert (0 in held) == (optimizer == "rowwise-adagrad"), "one was divided by tables, the other by rows"


def test_a_checkpoint_goes_on_exactly_also_on_one_rank(on_two: dict[str, Any]) -> None:
    path = Path(on_two["path"])
    names = {file.name for file in path.iterdir()}
    assert {".metadata", "rank0.pt", "rank1.pt", "__0_0.distcp", "__1_0.distcp"} <= names
    whole, first, second = on_two["by rows"], on_two["first half"], on_two["second half"]
    assert not same(first.first, first.last), "nothing was learned"
    assert same(second.first, first.last)
    assert first.losses + second.losses == whole.losses
    assert same(second.last, whole.last)
    rest = (runs.divided, runs.SIZES, "rowwise-adagrad", "table_wise", (runs.STEPS // 2, runs.STEPS), str(path))
    third, problems = run_ranks(runs.together, 1, rest, (runs.misbuilt,), limit_s=LIMIT_S)
    assert same(third.first, first.last)
    agree((first.losses + third.losses, *third[1:]), runs.alone(runs.SIZES, "rowwise-adagrad"))
    assert [problem.split("=")[0] for problem in problems] == ["sharding", "batch_size", "embedding_dim"]


def test_cross_layers_and_bags(on_two: dict[str, Any]) -> None:
    agree(on_two["crossed"], runs.alone(CROSSED, "sgd"))


def test_a_learning_rate_is_that_of_its_own_step(on_two: dict[str, Any]) -> None:
    agree(on_two["rising"], runs.alone(runs.SIZES, "sgd", 20, RISING))


def test_the_first_weights_are_those_of_one_process(on_two: dict[str, Any]) -> None:
    tables, rest = on_two["drawn"]
    model = DLRM(runs.SIZES, torch.Generator().manual_seed(runs.SEED))
    assert farthest(tables, [model.table(index) for index in range(len(runs.TABLES))]) == 0.0
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in rest.items())


def test_numbers_of_other_models(on_two: dict[str, Any], oracles: dict[str, tuple[Path, str]]) -> None:
    for name, (file, _) in oracles.items():
        oracle = load(str(file))
        assert max(check_oracle.compare(oracle, on_two[name]).values()) <= check_oracle.TOLERANCE, name
        spoilt = {**on_two[name], "grad.emb.1": on_two[name]["grad.emb.1"] * 1.001}
        assert check_oracle.compare(oracle, spoilt)["grad.emb.1"] > 1e-4


@pytest.mark.parametrize("name", ["dlrm_meta_tiny.npz"])
def test_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not (META / name).is_file():
        pytest.skip(f"no {name}: set INTUNE_ORACLE_DIR to the folder that holds it")
    assert check_oracle.main([str(META / name), "--model", "hybrid", "--ranks", "99"]) == 2
    assert "expected 1 to 5" in capsys.readouterr().err
    assert check_oracle.main([str(META / name), "--model", "hybrid", "--ranks", "2"]) == 0
    assert "hybrid: largest" in capsys.readouterr().out
