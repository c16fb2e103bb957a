"""trimtab makes a PyTorch model fast, proves that it is still right, and ships it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.artifact import Artifact, load, open_artifact
    from trimtab.candidate import Candidate, Settings
    from trimtab.contracts import BACKENDS, CHECKS, PASSES, Backend, Check, Choice, Executable, Pass
    from trimtab.environment import Environment
    from trimtab.errors import TrimtabError
    from trimtab.finding import Finding
    from trimtab.intake.load import load_workload
    from trimtab.measurement import Interval, Measurement
    from trimtab.optimizing import optimize
    from trimtab.recipe import Recipe
    from trimtab.signature import Dim
    from trimtab.study.compare import compare
    from trimtab.study.progress import Progress
    from trimtab.study.study import Study
    from trimtab.study.verify import verify
    from trimtab.train.trainer import Trainer
    from trimtab.trial import State, Trial
    from trimtab.tuning import tune
    from trimtab.workload import Evaluation, Limits, Training, Workload

_HOMES = {
    "Artifact": "artifact",
    "BACKENDS": "contracts",
    "Backend": "contracts",
    "CHECKS": "contracts",
    "Candidate": "candidate",
    "Check": "contracts",
    "Choice": "contracts",
    "Dim": "signature",
    "Environment": "environment",
    "Evaluation": "workload",
    "Executable": "contracts",
    "Finding": "finding",
    "Interval": "measurement",
    "Limits": "workload",
    "Measurement": "measurement",
    "PASSES": "contracts",
    "Pass": "contracts",
    "Progress": "study.progress",
    "Recipe": "recipe",
    "Settings": "candidate",
    "State": "trial",
    "Study": "study.study",
    "Trainer": "train.trainer",
    "Training": "workload",
    "Trial": "trial",
    "TrimtabError": "errors",
    "Workload": "workload",
    "compare": "study.compare",
    "load": "artifact",
    "load_workload": "intake.load",
    "open_artifact": "artifact",
    "optimize": "optimizing",
    "tune": "tuning",
    "verify": "study.verify",
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
    "Dim",
    "Environment",
    "Evaluation",
    "Executable",
    "Finding",
    "Interval",
    "Limits",
    "Measurement",
    "Pass",
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
    "load",
    "load_workload",
    "open_artifact",
    "optimize",
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
    return sorted({*globals(), *_HOMES})
