"""Versions of what a run uses."""

from __future__ import annotations

import platform
import sys

__all__ = ["versions"]

PACKAGES = ("numpy", "torch", "pytorch_lightning", "lightning", "torchdata", "tensorflow", "keras", "jax")


def versions() -> dict[str, str]:
    """Versions of what is in use; a framework nobody imported is not imported for that."""
    found = {"python": platform.python_version()}
    found["intune_callbacks"] = str(sys.modules["intune_callbacks"].__dict__["__version__"])
    for name in PACKAGES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            found[name] = str(module.__version__)
    return found
