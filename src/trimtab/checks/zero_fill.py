"""Gradients are filled with zeros instead of freed."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class ZeroFill(ScriptCheck):
    """Gradients are filled with zeros instead of freed.

    ``zero_grad(set_to_none=False)`` writes every gradient, and the next backward pass reads and adds to it. Freed
    gradients are written once, by the backward pass.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    least: float = 0.005
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Calls of ``zero_grad`` that filled gradients, and their share."""
        taken, filled = share(subject, "zero_grad"), sum(optimizer.zero_filled for optimizer in subject.optimizers)
        if filled == 0 or taken < self.least:
            return []
        call = next((call for call in subject.calls if call.name.endswith("zero_grad")), None)
        where = subject.optimizers[0].site if call is None else call.site
        message = (
            f"zero_grad(set_to_none=False) fills the gradients with zeros {filled:.0f} times per step, {taken:.1%} of its "
            "time, and the backward pass adds to them. Let zero_grad() free them."
        )
        change = {"zero_grad": {"set_to_none": "True"}}
        return [
            self.note(
                message,
                evidence={"zero_grad_share": taken, "calls_per_step": filled},
                where=where,
                category="step",
                settings=ScriptSettings(set_to_none=True),
                edit=edit(subject, where, "Call zero_grad() without set_to_none=False.", **change),
                share=taken,
            )
        ]
