"""InTune: callbacks that keep the accelerator fed by re-sizing the running input pipeline."""

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
]

__version__ = "0.1.0"
