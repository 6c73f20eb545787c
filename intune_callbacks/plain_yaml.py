"""The part of YAML `found.yaml` is written in, without a YAML library: block mappings, each value JSON on its line.

Any YAML library reads what is written here. What is read here may have been edited by hand: comments, empty lines and
plain words are understood, anything beyond is an error that names its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["dump", "load"]

WIDTH = 2
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_WORDS = {"null": None, "~": None, "true": True, "false": False}
# Written as plain words these would be read as something else (YAML 1.1, https://yaml.org/type/bool.html).
_NOT_PLAIN = {*_WORDS, "y", "n", "yes", "no", "on", "off"}


def dump(tree: Mapping[str, Any], depth: int = 0) -> str:
    """Return `tree` as lines; a mapping without mappings in it stays on one line.

    Args:
        tree: text -> plain JSON types, mappings among them; keys of up to a thousand characters.
        depth: how deep it is indented.

    Raises:
        ValueError: for a number that is infinite or none.
    """
    lines = []
    for key, value in tree.items():
        head = f"{' ' * WIDTH * depth}{_key(key)}:"
        if isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values()):
            lines.append(f"{head}\n{dump(value, depth + 1)}")
        else:
            lines.append(f"{head} {_value(value)}\n")
    return "".join(lines)


def load(text: str) -> dict[str, Any]:
    """Return what `dump` wrote, or what a hand made of it.

    Raises:
        ValueError: naming the line, for what is beyond this part of YAML.
    """
    tree: dict[str, Any] = {}
    open_: list[tuple[int, dict[str, Any] | None]] = [(-1, tree)]
    for number, line in enumerate(text.splitlines(), 1):
        rest = line.strip()
        if not rest or rest.startswith("#") or rest == "---":
            continue
        indent = len(line) - len(line.lstrip(" "))
        while indent <= open_[-1][0]:
            open_.pop()
        parent, (key, value) = open_[-1][1], _entry(rest, number)
        if parent is None or key in parent:
            raise ValueError(f"line {number}: {rest!r} is indented too far, or there twice")
        parent[key] = {} if value is _NOTHING else value
        open_.append((indent, parent[key] if value is _NOTHING else None))
    return tree


_NOTHING = object()
_DECODER = json.JSONDecoder()


def _entry(rest: str, number: int) -> tuple[str, Any]:
    problem = ValueError(f"line {number}: {rest!r}: expected 'key: value' with a number, a word, JSON or nothing")
    plain = _PLAIN.match(rest)
    try:
        key, end = _DECODER.raw_decode(rest) if rest[0] == '"' else (plain.group(), plain.end()) if plain else ("", 0)
        if not end or rest[end : end + 1] != ":" or rest[end + 1 : end + 2] not in ("", " "):
            raise problem
        value = rest[end + 1 :].strip()
        if not value or value.startswith("#"):
            return key, _NOTHING
        word = _PLAIN.match(value)
        if word is not None:
            found, end = _WORDS.get(word.group(), word.group()), word.end()
        else:
            found, end = _DECODER.raw_decode(value)
    except (json.JSONDecodeError, RecursionError):
        raise problem from None
    after = value[end:]
    if after.strip() and not re.match(r"\s+#", after):
        raise problem
    return key, found


def _key(key: str) -> str:
    return key if _PLAIN.fullmatch(key) and key.lower() not in _NOT_PLAIN else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(key))}: {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    if isinstance(value, str):
        return _text(value)
    text = json.dumps(value, allow_nan=False)
    # YAML 1.1 reads 1e-05 as text: it wants 1.0e-05.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)


def _text(text: str) -> str:
    # YAML knows no surrogate pairs: what JSON would write as one stays as it is.
    return '"' + "".join(c if ord(c) > 0xFFFF or c.isalpha() else json.dumps(c)[1:-1] for c in text) + '"'
