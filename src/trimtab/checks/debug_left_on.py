"""A switch for debugging is on during the steps."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

ANOMALY = "anomaly mode"
OFF = {
    "CUDA_LAUNCH_BLOCKING": {"CUDA_LAUNCH_BLOCKING": "0"},
    "TORCH_DISTRIBUTED_DEBUG": {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    "TORCH_SHOW_CPP_STACKTRACES": {"TORCH_SHOW_CPP_STACKTRACES": "0"},
}
COSTS = {
    ANOMALY: "It keeps a traceback for every operator and tests every gradient for NaN.",
    "profiler": "It records every operator.",
    "deterministic algorithms": "Some operators then run slower kernels.",
    "CUDA_LAUNCH_BLOCKING": "The host then waits for every kernel.",
    "TORCH_DISTRIBUTED_DEBUG": "Every collective is then checked on all ranks.",
}


@dataclass(frozen=True, kw_only=True)
class DebugLeftOn(ScriptCheck):
    """A switch for debugging is on during the steps.

    Anomaly mode keeps a traceback per operator and tests every gradient for NaN. A profiler records every operator.
    Blocking launches and detailed checks of collectives serialize a GPU.
    Source: https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
    """

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Each switch that was on, with the line that set it."""
        found = []
        for flag, site in subject.flags.items():
            where = site if site in subject.texts or ":" in site else None
            off = OFF.get(flag)
            settings = (
                ScriptSettings(debug_off=True) if flag == ANOMALY else None if off is None else ScriptSettings(environment=off)
            )
            at = f" ({where})" if where else ""
            cost = COSTS.get(flag, "It slows every step.")
            message = (
                f"{flag[0].upper()}{flag[1:]} is on during the steps{at}. {cost} Turn it off except when looking for an error."
            )
            change = {"set_detect_anomaly": {"": "False"}, "use_deterministic_algorithms": {"": "False"}}
            able = {name: new for name, new in change.items() if name in subject.texts.get(where or "", "")}
            found.append(
                self.note(
                    message,
                    evidence={"flag": flag},
                    where=where,
                    category="run",
                    settings=settings,
                    share=share(subject, "forward", "backward") if flag == ANOMALY else None,
                    edit=edit(subject, where, "Turn it off except when looking for an error.", **able),
                )
            )
        return found
