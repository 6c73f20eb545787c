"""What the agent is paid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from intune_callbacks.decide.view import Floats
from intune_callbacks.types import Resources, Stage

__all__ = ["utility", "worth"]

FREE_MEMORY = 0.08
"""Share of the memory that has to stay free for the full reward. A choice: a checkpoint may need it for a moment."""
CPU_PRICE = 0.015
"""Log throughput that holding all CPUs costs: the trainer and other jobs can use them too. A choice: less
than a worker that is needed brings."""
LEAST = 1e-3
"""Of the reward's factor for memory: its logarithm stays finite at the limit."""


def utility(rate: Floats, memory: Floats, used: Floats) -> Floats:
    """Return the log of what an allocation is worth, [N]; rewards are differences of it.

    ``ln(rate * min(1, (1 - memory) / FREE_MEMORY)) - CPU_PRICE * used``: as in the paper (section 4.2) the worth of any
    throughput falls to nothing as memory nears its limit. What the model cannot take is no throughput, earns nothing.

    Args:
        rate: delivered batches per second, cost of a change included.
        memory: share of the limit in use, 0..1.
        used: CPUs held / CPUs there.
    """
    part = np.clip((1.0 - memory) / FREE_MEMORY, LEAST, 1.0)
    return np.asarray(np.log(np.maximum(rate, 1e-12) * part) - CPU_PRICE * used)


def worth(
    batches_per_s: float, stages: Sequence[Stage], cpu_shares: Mapping[str, float], resources: Resources
) -> float:
    """Return the `utility` of what one live pipeline did, whatever policy decides.

    Args:
        batches_per_s: delivered.
        stages: with their values then.
        cpu_shares: worker stage -> CPU seconds / wall seconds of a busy worker, 0..1; what did nothing holds no CPU.
        resources: the machine then.
    """
    held = sum(s.current * min(1.0, cpu_shares.get(s.name, 0.0)) for s in stages)
    memory = resources.memory_used_bytes / max(1, resources.memory_limit_bytes)
    return float(utility(*np.array([[batches_per_s], [memory], [held / max(resources.cpus, 1e-9)]]))[0])
