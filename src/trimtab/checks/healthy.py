"""The steps are spent in the passes, and nothing else takes a share worth saving."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Healthy(ScriptCheck):
    """The steps are spent in the passes, and nothing else takes a share worth saving.

    Data, copies, logging, saving and synchronisation together are what remedies outside of the model can save. If they
    take next to nothing, only another model, another machine or another precision makes the steps faster.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    least: float = 0.8
    """Share of a step in forward, backward and optimizer, from which on a script counts as healthy."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The share of forward, backward and optimizer. Left out if another check found something."""
        computing = share(subject, "forward", "backward", "optimizer")
        if computing < self.least or not subject.steps:
            return []
        message = (
            f"Nothing was found: {computing:.0%} of a step is the forward pass, the backward pass and the update. The script "
            "is bound by its computation."
        )
        return [self.note(message, evidence={"computing_share": computing}, category="step", share=0.0)]
