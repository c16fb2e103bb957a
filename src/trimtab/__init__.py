"""trimtab makes a PyTorch model fast, proves that it is still right, and ships it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.api.compare import compare
    from trimtab.api.doctor import doctor
    from trimtab.api.optimize import optimize
    from trimtab.api.profile import profile
    from trimtab.api.tune import tune
    from trimtab.api.verify import verify
    from trimtab.artifact.artifact import Artifact, load, open_artifact
    from trimtab.core.backend import BACKENDS, Backend, Executable
    from trimtab.core.candidate import Candidate
    from trimtab.core.check import CHECKS, Check
    from trimtab.core.finding import Finding
    from trimtab.core.limits import Limits
    from trimtab.core.measurement import Interval, Measurement
    from trimtab.core.recipe import Recipe
    from trimtab.core.settings import (
        CompilerSettings,
        DataSettings,
        DistributedSettings,
        MemorySettings,
        OptimizerSettings,
        PrecisionSettings,
        Settings,
    )
    from trimtab.core.signature import Dim
    from trimtab.core.technique import PASSES, Choice, Pass
    from trimtab.core.trial import State, Trial
    from trimtab.core.workload import Evaluation, Training, Workload
    from trimtab.errors import TrimtabError
    from trimtab.hardware.environment import Environment
    from trimtab.importers.load import load_workload
    from trimtab.study.progress import Progress
    from trimtab.study.study import Study
    from trimtab.train.trainer import Trainer

_HOMES = {
    "Artifact": "artifact.artifact",
    "BACKENDS": "core.backend",
    "Backend": "core.backend",
    "CHECKS": "core.check",
    "Candidate": "core.candidate",
    "Check": "core.check",
    "Choice": "core.technique",
    "CompilerSettings": "core.settings",
    "DataSettings": "core.settings",
    "Dim": "core.signature",
    "DistributedSettings": "core.settings",
    "Environment": "hardware.environment",
    "Evaluation": "core.workload",
    "Executable": "core.backend",
    "Finding": "core.finding",
    "Interval": "core.measurement",
    "Limits": "core.limits",
    "Measurement": "core.measurement",
    "MemorySettings": "core.settings",
    "OptimizerSettings": "core.settings",
    "PASSES": "core.technique",
    "Pass": "core.technique",
    "PrecisionSettings": "core.settings",
    "Progress": "study.progress",
    "Recipe": "core.recipe",
    "Settings": "core.settings",
    "State": "core.trial",
    "Study": "study.study",
    "Trainer": "train.trainer",
    "Training": "core.workload",
    "Trial": "core.trial",
    "TrimtabError": "errors",
    "Workload": "core.workload",
    "compare": "api.compare",
    "doctor": "api.doctor",
    "load": "artifact.artifact",
    "load_workload": "importers.load",
    "open_artifact": "artifact.artifact",
    "optimize": "api.optimize",
    "profile": "api.profile",
    "tune": "api.tune",
    "verify": "api.verify",
}
"""Public name -> the module that defines it. Loaded when first asked for, so that importing trimtab costs next to nothing."""

__all__ = [
    "BACKENDS",
    "CHECKS",
    "PASSES",
    "Artifact",
    "Backend",
    "Candidate",
    "Check",
    "Choice",
    "CompilerSettings",
    "DataSettings",
    "Dim",
    "DistributedSettings",
    "Environment",
    "Evaluation",
    "Executable",
    "Finding",
    "Interval",
    "Limits",
    "Measurement",
    "MemorySettings",
    "OptimizerSettings",
    "Pass",
    "PrecisionSettings",
    "Progress",
    "Recipe",
    "Settings",
    "State",
    "Study",
    "Trainer",
    "Training",
    "Trial",
    "TrimtabError",
    "Workload",
    "compare",
    "doctor",
    "load",
    "load_workload",
    "open_artifact",
    "optimize",
    "profile",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trimtab.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
