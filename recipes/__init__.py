"""Recipes: one configuration file per setup, one runner for all of them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from intune_callbacks.config import nearest
from intune_callbacks.errors import ConfigError

__all__ = ["names", "needs", "source", "summary"]

CONFIGS = Path(__file__).parent / "configs"


def names() -> tuple[str, ...]:
    """Return the names of the recipes that come with the package, sorted."""
    return tuple(sorted(file.relative_to(CONFIGS).with_suffix("").as_posix() for file in CONFIGS.rglob("*.yaml")))


def source(name: str) -> Path:
    """Return the configuration file of a recipe.

    Args:
        name: a recipe's name, or the path of a configuration file.

    Raises:
        ConfigError: there is neither such a recipe nor such a file.
    """
    if name in names():
        return CONFIGS / f"{name}.yaml"
    with suppress(OSError):  # a name too long for a file
        if Path(name).is_file():
            return Path(name)
    raise ConfigError([f"{name!r} is neither a recipe ({', '.join(names())}) nor a file{nearest(name, names())}"])


def summary(name: str) -> str:
    """Return the first line of a recipe's header: what it trains."""
    first = source(name).read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").rstrip()


def needs(name: str) -> str:
    """Return what a recipe needs besides the package, from its header: an extra, such as ``[dlrm]``, and TorchRec."""
    told = "\n".join(line for line in source(name).read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    found = re.search(r"^# install .*\.(\[[\w,-]+\])", told, re.MULTILINE)
    assert found is not None, f"{name} does not say how it is installed"
    return found[1] + (", TorchRec" if "install --no-deps torchrec" in told else "")
