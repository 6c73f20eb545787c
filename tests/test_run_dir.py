"""A `run_dir` that cannot be written is said before the training, and never ends one."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from intune_callbacks.errors import ConfigError
from intune_callbacks.record.files import unwritable
from intune_callbacks.session.arguments import Settings
from intune_callbacks.session.fit import TunedFit

EAGER = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}


def settings(folder: object, mode: str = "tune") -> Settings:
    return Settings.checked(mode, folder, True)


def test_a_folder_that_is_there_or_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b", Path("a"), Path("a/b")):
        assert unwritable(folder) is None
        assert settings(str(folder)).run_dir == folder
    assert not list(tmp_path.iterdir()), "it was only looked at"


def test_a_file_is_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "runs" / "mine"):
        with pytest.raises(ConfigError, match=rf"run_dir='{folder}': {file} is not a folder; expected a folder"):
            settings(str(folder))
    assert settings(str(file), "off").run_dir == file, "off leaves no trace"


def test_this_process_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write everywhere, so the question itself is answered here.
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"this process may not write into {tmp_path}"):
        settings(tmp_path / "run")


@pytest.mark.parametrize("world", [1, 2])
def test_a_folder_that_is_lost_later_is_a_warning(world: int, tmp_path: Path) -> None:
    given = settings(tmp_path / "runs" / "mine")
    (tmp_path / "runs").write_text("")
    with pytest.warns(RuntimeWarning, match="InTune writes no files: run_dir=.*runs is not a folder.*Training goes on"):
        fit = TunedFit(given, 0, world)
    assert fit.run_dir is None
    (tmp_path / "runs").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TunedFit(given, 0, 1).run_dir == tmp_path / "runs" / "mine"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_trains_and_is_tuned_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    namespace = pytest.importorskip("pytorch_lightning")
    from intune_callbacks.lightning import InTuneCallback
    from tests.lightning_runs import make_model, make_trainer, shuffled

    callback = InTuneCallback(run_dir=str(tmp_path / "run"), **EAGER)
    (tmp_path / "run").write_text("")
    with pytest.warns(RuntimeWarning, match="InTune writes no files"):
        make_trainer(namespace, callback, max_epochs=3).fit(make_model(namespace), shuffled())
    assert callback.report["steps"] > 0 and callback.report["frozen"] is None
    assert capsys.readouterr().out.count("InTune") == 1, "the card is shown"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_found_but_cannot_be_written_froze_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    namespace = pytest.importorskip("pytorch_lightning")
    from intune_callbacks.lightning import InTuneCallback
    from tests.lightning_runs import make_model, make_trainer, shuffled

    (tmp_path / "found.yaml").mkdir()
    callback = InTuneCallback(run_dir=str(tmp_path), show_card=False, **EAGER)
    with pytest.warns(RuntimeWarning) as told:
        make_trainer(namespace, callback, max_epochs=3).fit(make_model(namespace), shuffled())
    ours = [str(warning.message) for warning in told if "InTune" in str(warning.message)]
    assert len(ours) == 1 and ours[0].startswith(f"InTune could not write to {tmp_path} what a later run can start")
    assert (tmp_path / "report.json").is_file() and callback.report["frozen"] is None


def test_keras_trains_and_is_tuned_without_it(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    from intune_callbacks.keras import InTuneCallback
    from tests.keras_runs import make_model, rows

    callback = InTuneCallback(run_dir=str(tmp_path / "run"), show_card=False, **EAGER)
    (tmp_path / "run").write_text("")
    with pytest.warns(RuntimeWarning, match="InTune writes no files"):
        make_model().fit(rows(), shuffle=False, verbose=0, callbacks=[callback])
    assert callback.report["frozen"] is None
    assert json.dumps(callback.report)
