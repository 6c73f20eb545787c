"""The `intune` command: what it prints, what it writes, how it exits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dlrm_examples import recipes
from intune_callbacks import __version__, cli
from intune_callbacks.errors import install_line
from intune_callbacks.words import COLUMNS


def test_ls_names_every_recipe_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    *lines, empty, told = lines
    lines = re.sub(r"\n +", " ", "\n".join(lines)).splitlines()
    assert [line.split()[0] for line in lines] == list(recipes.names())
    needed = {line.split()[0]: line for line in lines}
    assert " [dlrm-keras] " in needed["dlrm-keras"] and " [dlrm], TorchRec " in needed["dlrm-lightning-hybrid"]
    assert not empty and "python -m pip install '.[dlrm]'" in told
    assert "Criteo" in lines[recipes.names().index("dlrm-lightning")]


def test_cp_copies_and_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "mine.yaml"
    assert cli.main(["cp", "dlrm-lightning", str(copy)]) == 0
    assert copy.read_bytes() == recipes.source("dlrm-lightning").read_bytes()
    copy.write_text("mine")
    assert cli.main(["cp", "dlrm-lightning", str(copy)]) == 1
    assert "--force" in capsys.readouterr().err
    assert copy.read_text() == "mine"
    assert cli.main(["cp", "dlrm-lightning", str(copy), "--force"]) == 0
    assert copy.read_text() != "mine"


def test_unknown_recipe_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "dlrm-lighting"]) == 2
    assert "did you mean 'dlrm-lightning'" in capsys.readouterr().err


def test_dry_run_prints_what_is_in_force(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    monkeypatch.setenv("INTUNE_MODE", "observe")
    assert cli.main(["run", "dlrm-lightning", "intune.mode=advise", "batch_size=96", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "mode in force: observe (from INTUNE_MODE)" in printed
    assert "batch_size: 96" in printed


@pytest.mark.parametrize(
    ("variable", "words", "told"),
    [
        (None, ["--mode", "off"], "off (from command line)"),
        (None, ["intune.mode=advise", "--mode", "observe", "batch_size=96"], "observe (from command line)"),
        (None, ["intune.mode=advise"], "advise (from command line)"),
        (None, [], "tune (from recipe)"),
        ("advise", ["--mode", "off"], "advise (from INTUNE_MODE)"),
    ],
)
def test_environment_then_command_line_then_recipe(
    variable: str | None,
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("yaml")
    if variable:
        monkeypatch.setenv("INTUNE_MODE", variable)
    assert cli.main(["run", "dlrm-lightning", "--dry-run", *words]) == 0
    printed = capsys.readouterr().out
    assert f"mode in force: {told}" in printed
    assert ("batch_size: 96" in printed) == ("batch_size=96" in words)


def test_wrong_keys_end_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    assert cli.main(["run", "dlrm-lightning", "batchsize=96", "seed=x", "--dry-run"]) == 2
    printed = capsys.readouterr().err
    assert "2 problems" in printed
    assert "did you mean 'batch_size'" in printed
    assert "Traceback" not in printed


def test_without_yaml_the_error_is_the_line_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert cli.main(["run", "dlrm-lightning", "--dry-run"]) == 2
    assert install_line("dlrm") in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["tune"],
        ["run"],
        ["cp", "dlrm-lightning"],
        ["ls", "more"],
        ["run", "dlrm-lightning", "--mode", "tun"],
        ["run", "dlrm-lightning", "--dry-run", "--no-such-option"],
    ],
)
def test_wrong_command_line_exits_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2


def test_what_may_be_left_out_is_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run"])
    assert capsys.readouterr().err.endswith("the following arguments are required: NAME|FILE\n")


@pytest.mark.parametrize("command", ["demo", "report", "watch"])
def test_the_help_of_a_command_says_what_it_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = re.search(rf"^    {command} +(.+)$", capsys.readouterr().out, re.MULTILINE)
    assert said is not None
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert f"\n\n{said[1].capitalize()}.\n\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["cp", "dlrm-lightning", "gone/mine.yaml"], 1, "gone/mine.yaml cannot be written"),
        (["run", "bytes.yaml", "--dry-run"], 2, "bytes.yaml: cannot be read as text"),
        (["watch", ".", "--wait", "nan"], 2, "--wait=nan: expected a number from 0.0 to inf\n"),
        (["watch", ".", "--wait", "-1"], 2, "--wait=-1.0: expected a number"),
        (["pretrain", "--out", "bytes.yaml", "--decisions", "10"], 2, "bytes.yaml is not a folder"),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback(
    words: list[str],
    code: int,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in {"run": ("yaml",), "pretrain": ("torch",)}.get(words[0], ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    assert cli.main(words) == code
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["report", ".", "--out", ""], "--out: expected a path, got an empty word"),
        (["compare", ".", ".", "--html", ""], "--html: expected a path, got an empty word"),
        (["cp", "dlrm-lightning", ""], "FILE: expected a path, got an empty word"),
        (["report", "x" * 5000], "DIR: expected a path, got a word of 5000 letters"),
        (["watch", "x" * 5000, "--wait", "0"], "DIR: expected a path, got a word of 5000 letters"),
        (["cp", "dlrm-lightning", "x" * 300], "FILE: expected a path, got a word of 300 letters"),
    ],
)
def test_a_word_that_names_no_path_is_said_without_a_traceback(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "demo"])
def test_a_recipe_of_a_name_too_long_for_a_file_is_none(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "x" * 5000]) == 2
    assert "is neither a recipe" in capsys.readouterr().err


def test_what_stdout_cannot_write_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"why": "expected \u00d7 2", "next": "go on"}')
    code = f"from intune_callbacks import cli; raise SystemExit(cli.main(['compare', *2 * [{str(tmp_path)!r}]]))"
    given = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=given)
    assert (run.returncode, run.stderr) == (0, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert __version__ in capsys.readouterr().out


def test_a_shell_is_told_what_to_complete(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["complete", "bash"]) == 0
    script = capsys.readouterr().out
    assert "complete -o" in script and "doctor" in script and "--warm" not in script
    told = 'source /dev/stdin; COMP_WORDS=(intune do); COMP_CWORD=1; _shtab_intune; echo "${COMPREPLY[@]}"'
    ended = subprocess.run(["bash", "-c", told], input=script, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.split() == ["doctor"]


def test_without_what_writes_completions_the_error_is_the_line_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["complete", "zsh"]) == 2
    assert install_line("report") in capsys.readouterr().err


def test_interrupt_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("dlrm_examples.recipes.commands.source", interrupted)
    assert cli.main(["run", "dlrm-lightning"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_nobody_has_to_read_to_the_end() -> None:
    code = "import sys; from intune_callbacks.cli import main; sys.exit(main(['ls']))"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    with run.stderr as said:
        assert said.read() == b""
    assert run.wait(60) == 1


def test_a_closed_stdout_is_no_error() -> None:
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'intune_callbacks', 'ls'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_package_whose_commands_are_broken_breaks_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = cli.entry_points(group=cli.COMMANDS)
    broken = EntryPoint("theirs", "no_such_package:add", cli.COMMANDS)
    monkeypatch.setattr(cli, "entry_points", lambda group: [broken, *installed])
    assert cli.main(["ls"]) == 0
    told = capsys.readouterr()
    assert "dlrm-lightning" in told.out
    assert told.err.startswith("intune: no commands of no_such_package:add: ModuleNotFoundError")
