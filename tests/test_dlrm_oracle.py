"""The model equals Meta's, and the check can tell when a model does not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dlrm_examples import check_oracle  # noqa: E402
from dlrm_examples.models.dlrm_torch import DLRM  # noqa: E402
from tests.dlrm_oracle import make_oracle  # noqa: E402
from tests.dlrm_rows import ROOT  # noqa: E402

SIZES = [
    {},
    {"itself": True},
    {"ids_per_bag": 3},
    {"ids_per_bag": 2, "ragged": True},
    {"tables": (7,), "dim": 1, "bottom": (2, 1), "top": (1,)},
    {"tables": (9, 1, 2, 30), "dim": 8, "bottom": (13, 20, 10, 8), "top": (11, 7, 1), "batch": 33},
]


@pytest.mark.parametrize("name", ["dlrm_meta_tiny.npz", "dlrm_meta_bags.npz"])
def test_metas_own_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(os.environ.get("INTUNE_ORACLE_DIR", ROOT.parent / "shared" / "oracle")) / name
    if not file.is_file():
        pytest.skip(f"no {name}: set INTUNE_ORACLE_DIR to the folder that holds it")
    assert check_oracle.main([str(file)]) == 0
    assert "within 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["torch", "keras"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_independent_model(tmp_path: Path, sizes: dict, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for package in {"torch": ("torch",), "keras": ("keras", "tensorflow")}[model]:
        pytest.importorskip(package)
    file = make_oracle(tmp_path / "o.npz", **sizes)
    status, table = check_oracle.main([str(file), "--model", model]), capsys.readouterr().out
    assert status == 0, table
    with np.load(file) as arrays:
        wanted = {n for n in arrays.files if n.startswith(("out.", "grad.", "sgd."))}
    assert wanted == {line.split()[0] for line in table.splitlines()[1:-1]}


@pytest.mark.parametrize("quantity", ["out.bot", "out.emb", "out.loss", "grad.emb.1", "grad.top.0.b", "sgd.bot.0.w"])
@pytest.mark.parametrize("wrong", [1e-4, float("nan")])
def test_any_wrong_quantity_fails(tmp_path: Path, quantity: str, wrong: float, capsys) -> None:
    with np.load(make_oracle(tmp_path / "good.npz")) as arrays:
        spoilt = np.array(arrays[quantity])
    spoilt.flat[np.abs(spoilt).argmax()] *= 1 + wrong
    assert check_oracle.main([str(make_oracle(tmp_path / "bad.npz", **{quantity: spoilt}))]) == 1
    failed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "above" in line]
    assert failed == [quantity]


@pytest.mark.parametrize("mistake", ["columns first", "upper triangle", "no relu", "tables swapped"])
def test_a_wrong_model_fails(tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    init = DLRM.__init__

    def wrong(self, config, generator=None):
        init(self, config, generator)
        features = 1 + len(config.table_rows)
        row, column = torch.tril_indices(features, features, -1)
        if mistake == "columns first":
            order = torch.argsort(column * features + row)
            self.pairs = self.pairs[order]
        elif mistake == "upper triangle":
            self.pairs = (torch.triu_indices(features, features, 1) * torch.tensor([[features], [1]])).sum(0)
        elif mistake == "no relu":
            del self.bottom[-1]
        else:
            self.embed = lambda *lookup: DLRM.embed(self, *lookup).flip(1)

    monkeypatch.setattr(DLRM, "__init__", wrong)
    assert check_oracle.main([str(make_oracle(tmp_path / "o.npz", tables=(5, 5, 5)))]) == 1
    assert "NOT within" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cfg": None}, ["cfg lacks d, tables, bot, top, lr"]),
        ({"cfg": np.array("no json")}, ["cfg no json cannot be read"]),
        ({"cfg": np.array("[]")}, ["cfg lacks d"]),
        ({"cfg": np.array(json.dumps({"d": 3, "tables": 5, "bot": [4], "top": [1], "lr": 1}))}, ["cannot be read"]),
        ({"grad.emb.0": None, "top.1.b": None, "labels": None}, ["labels", "top.1.b", "grad.emb.0"]),
        ({"dense": None}, ["missing dense"]),
        ({"dense": np.zeros((6, 9)), "emb.1": np.zeros(3)}, ["dense has shape [6, 9], expected [6, 4]", "emb.1"]),
        ({"idx": np.full((3, 6), 4)}, ["idx[1] runs from 4 to 4, expected 0 to 3", "idx[2]"]),
        ({"idx": np.zeros((3, 6))}, ["idx is float64"]),
        ({"off": np.full((3, 6), 1)}, ["off: expected each row to begin with 0"]),
        ({"off": np.array(3)}, ["off has shape []"]),
        ({"dense": np.array(3.0)}, ["dense has shape []"]),
    ],
    ids=str,
)
def test_a_bad_file_is_explained(tmp_path: Path, change: dict, words: list[str], capsys) -> None:
    assert check_oracle.main([str(make_oracle(tmp_path / "o.npz", **change))]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "o.npz") in message
    assert all(word in message for word in words), message


def test_no_file_and_no_archive(tmp_path: Path, capsys) -> None:
    (tmp_path / "text.npz").write_text("hello")
    for name, word in (("absent.npz", "no such file"), ("text.npz", "not a zip archive"), (".", "not a zip archive")):
        assert check_oracle.main([str(tmp_path / name)]) == 2
        assert word in capsys.readouterr().err
    for arguments in ([], ["f.npz", "--model", "abacus"]):
        with pytest.raises(SystemExit, match="2"):
            check_oracle.main(arguments)
