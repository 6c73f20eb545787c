"""What a pre-training writes and tells: the model card, its numbers, and the command."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pretrain_toys import TINY, same, weights  # noqa: E402

from intune_callbacks import cli  # noqa: E402
from intune_callbacks.decide.learner import Learner  # noqa: E402
from intune_callbacks.decide.network import Network  # noqa: E402
from intune_callbacks.errors import ConfigError, install_line  # noqa: E402
from intune_callbacks.pretrain import model_card as card  # noqa: E402
from intune_callbacks.pretrain.scenarios import Run  # noqa: E402
from intune_callbacks.pretrain.training import CHECKPOINT, WEIGHTS, PretrainConfig, pretrain  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- what it writes --------------------------------------------------------------------------------------------------


def test_card_says_what_the_numbers_say(tmp_path: Path) -> None:
    network = pretrain(replace(TINY, eval_static=2), tmp_path, date="2026-01-31")
    assert same(network, Network.load(tmp_path / WEIGHTS))
    numbers, text = json.loads((tmp_path / "card.json").read_text()), (tmp_path / "card.md").read_text()
    assert numbers["date"] == "2026-01-31"
    assert numbers["training"]["seed"] == 3
    assert numbers["config"]["learner.hidden"] == 8
    assert set(numbers["versions"]) >= {"python", "torch", "numpy"}
    assert numbers["population"]["shares"]["several stages share one lock"] == pytest.approx(0.2, abs=0.04)
    (result,) = numbers["results"]
    assert (result["scenario"], result["machines"], result["seed"]) == ("static", 2, 5001)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["DQN", "jump + hold", "even split"]
    assert rows["even split"]["mean"] < rows["jump + hold"]["mean"] <= 1.0
    assert rows["even split"]["move_share"] == 0.0
    pairs = {pair["against"]: pair for pair in result["paired"]}
    assert pairs["even split"]["mean"] == pytest.approx(rows["DQN"]["mean"] - rows["even split"]["mean"])
    for value in (*(row["mean"] for row in rows.values()), pairs["jump + hold"]["low"]):
        assert f"| {value:.3f} |" in text
    assert card.text(numbers) == text


def test_fewer_than_100_kb() -> None:
    network = Learner().online.network()
    assert sum(values.nbytes for values in weights(network).values()) < 98_000


def test_score_by_hand() -> None:
    rate = np.zeros((20, 2))
    rate[:, 0] = 0.5
    rate[10:, 0], rate[:, 1] = 1.0, 0.8
    moved = np.zeros((20, 2), bool)
    moved[9, 0] = True
    row, mean = card.score(Run(rate, moved, np.array([False, True])), np.ones((20, 2)))
    assert mean == pytest.approx([0.75, 0.8])
    assert (row["mean"], row["median"], row["oom_share"], row["move_share"]) == pytest.approx(
        (0.775, 0.775, 0.5, 0.025)
    )
    # Only one of two machines gets there: the median is never.
    assert row["decisions_to_90"] is None
    rate = np.concatenate([rate, np.ones((20, 1))], 1)
    row, _ = card.score(Run(rate, moved, np.zeros(3, bool)), np.ones((20, 3)))
    # The mean of five counts; from the eleventh decision on the rate is the oracle's: (.5 + 4) / 5 is .9.
    assert (row["decisions_to_90"], row["decisions_to_95"]) == (14, 15)


def test_paired_interval_holds_the_difference() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.uniform(0.5, 1.0, 400)
    found = card.paired(theirs + rng.normal(0.02, 0.1, 400), theirs)
    assert found["low"] < 0.02 < found["high"]
    # Twice the standard error to each side.
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.15)
    assert card.paired(theirs, theirs) == {"mean": 0.0, "low": 0.0, "high": 0.0}


# -- configuration and command ---------------------------------------------------------------------------------------


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        PretrainConfig(seed=-1, eval_static=2.5, eval_resize=-1)  # type: ignore[arg-type]
    named = [problem.split("=")[0] for problem in error.value.problems]
    assert named == ["decisions", "seed", "eval_static", "eval_resize"]
    with pytest.raises(ConfigError, match="only one"):
        PretrainConfig(decisions=100, minutes=1.0)


def test_trained_names_every_setting_but_the_evaluation() -> None:
    named = TINY.trained()
    assert named["lessons.machines"] == 16
    settings = asdict(TINY)
    of_learner, of_lessons = settings.pop("learner"), settings.pop("lessons")
    assert len(named) == len(settings) - 3 + len(of_learner) + len(of_lessons)


def test_command_trains_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "--decisions", "512", "--seed", "7", "--eval-static", "0", "--eval-resize", "0"]
    assert cli.main([*words, "--out", str(tmp_path), "--date", "2026-01-31"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "512 decisions" in printed and "updates, loss" in printed and "min left" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "card.md", CHECKPOINT, WEIGHTS]
    assert json.loads((tmp_path / "card.json").read_text())["training"]["seed"] == 7
    assert cli.main([*words, "--out", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert cli.main([*words, "--out", str(tmp_path), "--resume"]) == 0


def test_without_torch_the_error_is_the_line_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "intune_callbacks.pretrain.training")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["pretrain", "--quick", "--out", str(tmp_path)]) == 2
    assert f"torch is not installed; run: {install_line('lightning')}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_a_problem_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To root every folder seems writable: a read-only disk, and /proc, say no only when they are asked."""

    def refuse(*given: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        pretrain(TINY, tmp_path / "out")
