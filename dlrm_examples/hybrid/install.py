"""TorchRec: how to install it, and what is raised without it."""

from __future__ import annotations

import importlib.util

from intune_callbacks.errors import MissingPackage

__all__ = ["INSTALL", "MissingTorchRec", "require"]

INSTALL = (
    "python -m pip install fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions",
    "python -m pip install --no-deps torchrec==1.8.0",
)
"""For torch 2.13; with CUDA, fbgemm-gpu==1.8.0 instead of fbgemm-gpu-cpu.

Not an extra: TorchRec's metadata asks for the newest fbgemm-gpu, which is for another torch.
"""


class MissingTorchRec(MissingPackage):
    """TorchRec is not installed, or cannot be loaded with this torch.

    Args:
        why: in a few words.
    """

    def __init__(self, why: object) -> None:
        self.package, self.extra = "torchrec", ""
        lines = "\n".join(f"  {line}" for line in INSTALL)
        ImportError.__init__(self, f"torchrec cannot be imported ({why}); with torch 2.13, run:\n{lines}")


def require() -> None:
    """Look whether TorchRec is installed, without the seconds that its import takes.

    Raises:
        MissingTorchRec: it is not.
    """
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        if importlib.util.find_spec(name) is None:
            raise MissingTorchRec(f"there is no {name}")
