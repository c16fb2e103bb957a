"""Ranks reduce gradients more than once per update."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class AccumulationSync(ScriptCheck):
    """Ranks reduce gradients more than once per update.

    Under gradient accumulation only the last backward pass of an update needs the gradients of the other ranks.
    ``no_sync()`` leaves the reductions of the others out.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    reductions: float = 1.5
    """Reductions per update, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Reductions per update of a model in DistributedDataParallel."""
        ranks = subject.distributed
        if ranks is None or ranks.kind != "ddp" or ranks.reductions < self.reductions:
            return []
        taken = share(subject, "communication") * (1 - 1 / ranks.reductions)
        message = (
            f"Gradients are reduced {ranks.reductions:.0f} times per update among {ranks.ranks} ranks. Run all but the last "
            "backward pass of an update under model.no_sync()."
        )
        return [
            self.note(
                message,
                evidence={"reductions_per_update": ranks.reductions, "communication_share": share(subject, "communication")},
                where=subject.anchor_site,
                category="run",
                share=taken,
            )
        ]
