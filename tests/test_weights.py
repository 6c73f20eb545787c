"""The weights that come with the package; they need no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from intune_callbacks.decide import network as weights
from intune_callbacks.decide.network import Network
from intune_callbacks.errors import InTuneError

FOLDER = Path(weights.__file__).parent / "weights"
here = pytest.mark.skipif(not (FOLDER / "dqn.npz").exists(), reason="this checkout has no trained weights yet")


@here
def test_shipped_weights_fit_the_agent_and_are_small() -> None:
    network = weights.shipped()
    assert weights.shipped() is network
    assert all(np.isfinite(getattr(network, name)).all() for name in ("w1", "b1", "w2", "b2", "w3", "b3"))
    assert (FOLDER / "dqn.npz").stat().st_size < 100_000


@here
def test_shipped_card_is_that_of_the_weights() -> None:
    import hashlib

    card = (FOLDER / "dqn.md").read_text(encoding="utf-8")
    assert hashlib.sha256((FOLDER / "dqn.npz").read_bytes()).hexdigest() in card


def test_files_are_found_by_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w1": (39, 4), "b1": (4,), "w2": (12, 4), "b2": (4,), "w3": (4, 5), "b3": (5,)}
    network = Network.of({name: rng.normal(size=shape) for name, shape in shapes.items()})
    (tmp_path / "weights").mkdir()
    network.save(tmp_path / "weights" / "dqn.npz")
    monkeypatch.setattr(weights, "files", lambda package: {"intune_callbacks.decide": tmp_path}[package])
    weights.shipped.cache_clear()
    assert (weights.shipped().w2 == network.w2).all()
    weights.shipped.cache_clear()


def test_missing_weights_name_the_way_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "files", lambda package: tmp_path)
    weights.shipped.cache_clear()
    with pytest.raises(InTuneError, match="intune pretrain --out DIR"):
        weights.shipped()
