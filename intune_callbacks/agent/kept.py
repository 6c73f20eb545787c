"""What the shell knows of a live pipeline, as it is written down and read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from intune_callbacks.agent.curves import COEFFICIENTS, TERMS
from intune_callbacks.agent.phases import BURST, CONFIRM, HOLD, JUMP
from intune_callbacks.agent.progress import FAILED
from intune_callbacks.agent.track import KEPT, MOMENTS
from intune_callbacks.agent.view import Floats

__all__ = ["taken"]

_SINGLE = ("phase", "left", "idle", "held", "wait", "trusted", "cpus", "noise", "age", "decisions", "scale")
_OF_SLOT = ("work_s", "cpu_share", "cv", "seen", "reference_s")


def taken(state: Mapping[str, Any], slots: int) -> dict[str, Floats]:
    """Return the arrays of what `Shell.state_dict` gave.

    Args:
        state: plain numbers, perhaps of another version of this package.
        slots: of the pipeline.

    Raises:
        KeyError: something is missing.
        ValueError: something has another shape, is no finite number, or is no phase.
    """
    allocations = KEPT + 1
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(_SINGLE, ()),
        **dict.fromkeys(_OF_SLOT, (slots,)),
        "failed": (FAILED, slots),
        "value": (allocations, slots),
        "mean": (allocations,),
        "count": (allocations,),
        "moves": (MOMENTS, slots),
        "theta": (COEFFICIENTS, slots),
        "precision": (TERMS, slots),
    }
    found = {name: np.array(state[name], float) for name in shapes}
    for name, shape in shapes.items():
        if found[name].shape != shape or not np.isfinite(found[name]).all():
            raise ValueError(f"{name}: expected finite numbers of shape {shape}")
    if int(found["phase"]) not in (JUMP, BURST, CONFIRM, HOLD):
        raise ValueError(f"phase: {state['phase']} is none")
    return found
