"""Reads the configuration of a recipe; all its problems are reported together."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from intune_callbacks.config import nearest, number_problem, resolve_mode, sourced
from intune_callbacks.errors import ConfigError, MissingPackage

from .schema import Config, Model, Pipeline, Trainer

__all__ = ["Config", "Model", "Pipeline", "Resolved", "Trainer", "dump", "load"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A valid configuration, and where its keys came from.

    Args:
        config: the configuration.
        sources: dotted key -> ``command line`` or ``recipe``; keys left at their default are absent.
    """

    config: Config
    sources: Mapping[str, str]

    @property
    def mode(self) -> tuple[str, str]:
        """The mode in force and where it came from: environment, then command line, then file, then default."""
        mode, source = resolve_mode(self.config.intune.mode)
        return mode, self.sources.get("intune.mode", "default") if source == "argument" else source

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Each value of the tuner and where it came from, as in the report."""
        mode, source = self.mode
        given = {key.removeprefix("intune."): where for key, where in self.sources.items() if key.startswith("intune.")}
        return sourced(replace(self.config.intune, mode=mode), source, given)


def load(file: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read a configuration file and put the overrides on top.

    Args:
        file: YAML, at most two levels deep.
        overrides: ``key=value``, the key dotted (``model.embedding_dim=8``), the value YAML.

    Raises:
        ConfigError: with every unknown key, wrong type and bad value of the file and the overrides.
        MissingPackage: PyYAML is not installed.
    """
    problems: list[str] = []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read as text: {error}"]) from None
    tree = _parse(text, str(file), problems)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError([f"{file}: expected 'key: value' lines, got {type(tree).__name__}"])
    sources = dict.fromkeys(_dotted(tree), "recipe")
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key:
            problems.append(f"{override!r}: expected key=value, for example batch_size=256")
        elif _put(tree, key, _parse(text, override, problems)):
            sources[key] = "command line"
        else:
            problems.append(f"{override}: {key.rpartition('.')[0]!r} holds a value, not further keys")
    config = _build(Config, tree, "", problems)
    if config.data is not None and not config.data.exists():
        problems.append(
            f"data={config.data}: no such file or directory; "
            "give a Criteo file (TSV, .gz, .zst, .parquet) or a directory of them"
        )
    if problems:
        raise ConfigError(problems)
    return Resolved(config, sources)


def dump(config: Config) -> str:
    """Return the whole configuration as YAML that `load` reads back to the same."""
    return str(_yaml().safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False, default_flow_style=None))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingPackage("pyyaml", "dlrm") from None
    return yaml


def _parse(text: str, where: str, problems: list[str]) -> Any:
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.append(f"{where}: not valid YAML: {' '.join(str(error).split())}")
        return None


def _put(tree: dict[str, Any], key: str, value: Any) -> bool:
    *parents, last = key.split(".")
    for parent in parents:
        inner = tree.setdefault(parent, {})
        if not isinstance(inner, dict):
            return False
        tree = inner
    tree[last] = value
    return True


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _build(kind: type[Any], given: Mapping[Any, Any], prefix: str, problems: list[str]) -> Any:
    """Return a `kind` made of the valid part of `given`; describe the rest in `problems`."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key not in fields:
            problems.append(f"{name}: no such key{nearest(name, _keys(Config))}")
        elif dataclasses.is_dataclass(hints[key]):
            section = typing.cast("type[Any]", hints[key])
            if isinstance(value, dict):
                values[key] = _build(section, value, f"{name}.", problems)
            else:
                problems.append(f"{name}={value!r}: expected a section with the keys {', '.join(_keys(section))}")
        else:
            before = len(problems)
            converted = _convert(value, hints[key], name, problems)
            limits = fields[key].metadata
            if len(problems) == before and limits and converted is not None:
                problems.extend(number_problem(name, converted, limits["low"], limits["high"]))
            if len(problems) == before:
                values[key] = converted
    try:
        return kind(**values)
    except ConfigError as error:
        problems.extend(f"{prefix}{problem}" for problem in error.problems)
        return kind()


def _keys(kind: Any, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        found += _keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{name}"]
    return found


def _convert(value: Any, hint: Any, name: str, problems: list[str]) -> Any:
    """Return `value` as `hint` wants it, or describe why that cannot be."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, list) and value and all(type(v) is int and v > 0 for v in value):
            return tuple(value)
        problems.append(f"{name}={value!r}: expected a list of positive integers such as [512, 256]")
        return None
    if wanted is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 as text: it wants 1.0e-3.
        try:
            return float(value)
        except ValueError:
            pass
    # YAML 1.1 reads a bare `off` as False, and `off` is one of our modes.
    if wanted is str and value is False and name.endswith("mode"):
        return "off"
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    if type(value) is wanted:
        return value
    words = {int: "an integer", float: "a number", str: "text", Path: "a path", bool: "true or false"}
    problems.append(f"{name}={value!r}: expected {words[wanted]}, got {type(value).__name__}")
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
