"""The learning rate of Meta's trainer: linear warm-up, a plateau, quadratic decay."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOWEST_RATE", "Schedule"]

LOWEST_RATE = 1e-7


@dataclass(frozen=True, slots=True)
class Schedule:
    """LRPolicyScheduler of facebookresearch/dlrm (dlrm_s_pytorch.py, torchrec_dlrm/lr_scheduler.py), number for number.

    Its plateau, if a decay follows, is the warm-up's last rate, which is one step short of the full one.

    Args:
        warmup_steps: steps of linear warm-up; 0 for none.
        decay_start_step: where the decay begins, counted from 1.
        decay_steps: length of the decay; 0 for none. The rate then stays at the last one, 1 / decay_steps ** 2 of it.
    """

    warmup_steps: int = 0
    decay_start_step: int = 0
    decay_steps: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether every step has the full rate."""
        return self.warmup_steps <= 1 and self.decay_steps == 0

    @property
    def plateau(self) -> float:
        """Share of the full rate between warm-up and decay."""
        return 1.0 - 1.0 / self.warmup_steps if self.decay_steps and self.warmup_steps > 1 else 1.0

    def rate(self, step: int, full: float) -> float:
        """Return the learning rate of one step.

        Args:
            step: counted from 0.
            full: the learning rate that is asked for.
        """
        count = step + 1
        if count < self.warmup_steps:
            return full * count / self.warmup_steps
        if not self.decay_steps or count < self.decay_start_step:
            return full * self.plateau
        decayed = min(count - self.decay_start_step, self.decay_steps - 1)
        return max(LOWEST_RATE, full * ((self.decay_steps - decayed) / self.decay_steps) ** 2)
