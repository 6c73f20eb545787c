"""A tuner that sets every stage to another number at every look, whatever the machine is busy with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from intune_callbacks.record.history import Decision
from intune_callbacks.session.tuner import Tuner


class Restless(Tuner):
    """In place of `Tuner`; what it does besides is what that does."""

    resizes: ClassVar[int] = 0
    restored: ClassVar[int] = 0
    numbers: ClassVar[random.Random] = random.Random(0)

    def batch(self, *given: Any, **named: Any) -> Decision | None:
        decision = super().batch(*given, **named)
        if self.config.mode == "tune":
            stages = self._pipeline.stages()
            wanted = {stage.name: self.numbers.randint(stage.low, max(stage.low, 5)) for stage in stages}
            applied = self._pipeline.resize(wanted)
            Restless.resizes += any(applied[stage.name] != stage.current for stage in stages)
        return decision

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        Restless.restored += 1
        super().load_state_dict(state)
