"""What an extra of this package brings, from the metadata that was installed with it, and the line of pip for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

__all__ = ["install_line", "lower_bounds", "requirements"]

NAME = "intune-callbacks"
REQUIREMENT = re.compile(r"([\w.-]+)[^;<>=~! ]*\s*([^;]*)")
EXTRA = re.compile(r"\bextra\s*==\s*['\"]([\w-]+)")
LOWEST = re.compile(r">=\s*([\w.]+)")


def requirements(extra: str | None = None) -> dict[str, str]:
    """Return what an extra asks for, or without one the package itself: name -> bounds, such as ``>=6.0``.

    Nothing where this package runs without having been installed.
    """
    found = {}
    for line in _metadata():
        of, asked = EXTRA.search(line), REQUIREMENT.match(line)
        if asked is not None and (of[1] if of else None) == extra:
            found[asked[1]] = asked[2].strip()
    return found


def install_line(extra: str) -> str:
    """Return the line of pip that installs what an extra brings.

    It names the packages, for `intune-callbacks` itself is not on PyPI; where they are not known, the extra of a clone.
    """
    packages = [f"{name}{bounds}" for name, bounds in requirements(extra).items()] or [f".[{extra}]"]
    return f"python -m pip install {shlex.join(packages)}"


def lower_bounds() -> dict[str, str]:
    """Return the oldest version of every package that is asked for, those of all extras as well."""
    found = {}
    for line in _metadata():
        asked, lowest = REQUIREMENT.match(line), LOWEST.search(line.partition(";")[0])
        if asked is not None and lowest is not None:
            found[asked[1]] = lowest[1]
    return found


def _metadata() -> Sequence[str]:
    # Here: with all it imports it would be a tenth of what importing this package takes.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return requires(NAME) or ()
    except PackageNotFoundError:
        return ()
