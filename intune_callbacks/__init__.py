"""InTune: callbacks that keep the accelerator fed by re-sizing the running input pipeline."""

from typing import TYPE_CHECKING, Any

from intune_callbacks.config import TunerConfig
from intune_callbacks.errors import ConfigError, InTuneError, MissingPackage, PipelineError, WorkerDied
from intune_callbacks.types import (
    Allocation,
    Clock,
    Observation,
    Pipeline,
    PipelineStats,
    Policy,
    Probe,
    Proposal,
    Resources,
    Stage,
    StageRates,
    StageStats,
)

__all__ = [
    "Allocation",
    "Clock",
    "ConfigError",
    "InTuneError",
    "MissingPackage",
    "Observation",
    "Pipeline",
    "PipelineError",
    "PipelineStats",
    "Policy",
    "Probe",
    "Proposal",
    "Resources",
    "Stage",
    "StageRates",
    "StageStats",
    "TunerConfig",
    "WorkerDied",
    "__version__",
    "later",
    "live",
    "pure",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from intune_callbacks.cache.pure import pure
    from intune_callbacks.pipelines.later import later
    from intune_callbacks.session.live import live


def __getattr__(name: str) -> Any:
    if name == "live":  # the loop and all it needs, only for those who have one
        from intune_callbacks.session.live import live

        return live
    if name == "later":  # whoever has it, has asked for it: see `pipelines.torch.helped`
        from intune_callbacks.pipelines.later import later

        return later
    if name == "pure":  # whoever marks a function, has one that is slow
        from intune_callbacks.cache.pure import pure

        return pure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
