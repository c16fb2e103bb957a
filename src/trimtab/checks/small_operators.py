"""Many operators are so short that calling them costs as much as they do."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import on_gpu, share
from trimtab.checks.debug_left_on import ANOMALY
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class SmallOperators(ScriptCheck):
    """Many operators are so short that calling them costs as much as they do.

    Each call of an operator from Python takes some microseconds. ``torch.compile`` fuses them into fewer kernels, and
    replays their launches on a GPU. Compilation takes seconds to minutes, which the steps that follow must pay back.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """

    least: float = 0.3
    """Share of a step in forward and backward passes, from which on it is reported."""
    short: float = 0.25
    """Share of the operators' time in short ones, from which on it is reported."""
    calls: float = 100.0
    """Operators per step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Operators per step and the share of those below ten microseconds, unless a debugging switch adds its own."""
        compiled = any(module.compiled for module in subject.modules)
        time = share(subject, "forward", "backward")
        short, calls = subject.small_operators, subject.operator_calls
        if not subject.flags.keys().isdisjoint((ANOMALY, "profiler")):
            return []
        if compiled or short < self.short or calls < self.calls or time < self.least or not subject.modules:
            return []
        idle = "" if subject.gpu_share is None else f" The GPU is idle for {1 - subject.gpu_share:.0%} of it."
        message = (
            f"A step calls {calls:.0f} operators, and {short:.0%} of their time is in calls below 10 us.{idle} Compile the "
            "model: model = torch.compile(model)."
        )
        able = on_gpu(subject) or environment.compiler is not None
        return [
            self.note(
                message,
                evidence={"operators_per_step": calls, "short_share": short},
                category="step",
                settings=ScriptSettings(compile=True) if able else None,
                share=short * time,
            )
        ]
