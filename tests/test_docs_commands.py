"""Every command in the documentation is one that exists: parsed by its own parser, and run where that does no harm."""

from __future__ import annotations

import argparse
import configparser
import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_examples import recipes
from intune_callbacks import cli
from tests.docs_pages import PAGES, ROOT, inline, lines, text_of

# What follows two spaces or a sharp says what the command does.
COMMENT = re.compile(r"\s{2,}.*|\s#.*")
VARIABLES = re.compile(r"^(\w+=\S+ )+")
EXTRAS = re.compile(r"(?:intune-callbacks|'\.)\[([a-z,-]+)\]")
# What stands for a name or a number of the reader's.
NAMES = {"NAME": "dlrm-lightning", "N": "1", "S": "static"}
HARMLESS = ("ls", "doctor", "plan", "cp", "run")


def commands(start: str) -> Iterator[tuple[str, str]]:
    """Yield (place, command) of every command that begins with `start`, in a block or between backticks."""
    spoken = ((page, code) for page in PAGES for code in inline(page))
    for place, line in (*lines(), *spoken):
        for part in re.split(r"&&|;", line.strip().removeprefix("$ ")):
            command = VARIABLES.sub("", part.strip())
            if command.startswith(f"{start} "):
                yield place, COMMENT.sub("", command)


class Parsed(Exception):
    """Ends a command once its arguments were understood."""


def parse(monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], object], words: list[str]) -> None:
    """Let a command take its arguments, and nothing else; the test fails if it does not take them."""
    Parser = argparse.ArgumentParser
    known, whole = Parser.parse_known_args, Parser.parse_args

    def end(*_: object) -> None:
        raise Parsed

    def parse_known_args(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        options, rest = known(self, *given, **named)
        if hasattr(options, "command"):  # of `intune`, which calls it when all is well
            options.command = end
        return options, rest

    def parse_args(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        options = whole(self, *given, **named)
        return options if hasattr(options, "command") else end()

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_known_args", parse_known_args)
        patch.setattr(Parser, "parse_args", parse_args)
        try:
            main(words)
        except Parsed:
            return
        except SystemExit as error:
            pytest.fail(f"{shlex.join(words)}: exit code {error.code}")
    pytest.fail(f"{shlex.join(words)}: nothing was parsed")


def subcommands(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the commands that `intune --help` lists."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    return set(re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE))


INTUNE = sorted({command for _, command in commands("intune")})


@pytest.mark.parametrize("command", INTUNE)
def test_intune_takes_it(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    if len(words) == 1 or words[0] == "COMMAND":  # the command is only spoken of
        assert words[0] in {*subcommands(capsys), "COMMAND"}
    else:
        parse(monkeypatch, cli.main, words)


def test_harmless_ones_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["cp", "dlrm-lightning", "mine.yaml"]) == 0
    ran = {"cp"}
    for command in ("intune ls", "intune doctor", *INTUNE):
        words = [NAMES.get(word, word.replace("PATH", str(tmp_path))) for word in shlex.split(command)[1:]]
        if words[0] not in HARMLESS or words == ["plan"] or words == ["run"] or "FILE" in words:
            continue
        words += {"run": ["--dry-run"], "cp": ["--force"]}.get(words[0], [])
        # docs/plan.md also shows what it says of a model that does not fit.
        assert cli.main(words) == (2 if "16GiB" in words else 0), f"{command}: {capsys.readouterr().err}"
        ran.add(words[0])
    assert ran == set(HARMLESS)


def test_every_command_is_on_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    told = {code.split()[1] for code in inline("docs/commands.md") if code.startswith("intune ")} - {"COMMAND"}
    assert told == subcommands(capsys)


def test_every_recipe_is_on_its_page() -> None:
    assert set(recipes.names()) <= set(inline("docs/recipes.md"))


MODULES = sorted({command for _, command in commands("python -m") if not command.startswith("python -m pip")})


@pytest.mark.parametrize("command", MODULES)
def test_modules_take_their_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, name, *words = shlex.split(command)
    if (ROOT / Path(*name.split("."))).is_dir():
        name += ".__main__"
    assert (ROOT / Path(*name.split("."))).with_suffix(".py").exists()
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} needs {error.name}")
    parse(monkeypatch, module.main, [NAMES.get(word, word) for word in words])


def test_tox_environments_exist() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read_string(text_of("tox.ini"))
    written = [section.removeprefix("testenv:") for section in tox.sections() if section.startswith("testenv:")]
    # `ship-tf{218,219}` are two.
    split = [(name.partition("{")[0], name.partition("{")[2].rstrip("}").split(",")) for name in written]
    there = {start + end for start, ends in split for end in ends}
    named = {
        name
        for _, command in commands("tox run")
        for names in re.findall(r"-e (\S+)", command)
        for name in names.split(",")
    }
    assert {"dlrm", "tests", "docs"} <= named <= there


def extras() -> set[str]:
    tomllib = pytest.importorskip("tomllib")
    return set(tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"])


def named(text: str) -> set[str]:
    return {extra for found in EXTRAS.findall(text) for extra in found.split(",")}


@pytest.mark.parametrize("file", [*PAGES, *(f"recipes/configs/{name}.yaml" for name in recipes.names())])
def test_extras_exist(file: str) -> None:
    assert named(text_of(file)) <= extras()


def test_every_extra_is_in_the_quickstart() -> None:
    assert named(text_of("docs/quickstart.md")) == extras()
