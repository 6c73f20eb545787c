"""Versions of what a run uses."""

from __future__ import annotations

import functools
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["versions"]

FRAMEWORKS = ("torch", "pytorch_lightning", "lightning", "torchdata", "tensorflow", "keras", "jax")


def versions() -> dict[str, str]:
    """Versions of what is in use; a framework nobody imported is not imported for that."""
    found = {"python": platform.python_version()}
    found["intune_callbacks"] = str(sys.modules["intune_callbacks"].__dict__["__version__"])
    if (numpy := _numpy_version()) is not None:
        found["numpy"] = numpy
    for name in FRAMEWORKS:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            found[name] = str(module.__version__)
    return found


@functools.cache
def _numpy_version() -> str | None:
    """Asked for once: reading a package's metadata takes five milliseconds."""
    try:
        return version("numpy")
    except PackageNotFoundError:
        return None
