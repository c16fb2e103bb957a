"""An optimizer updates its tensors with more kernels than it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab._internal.text import counted
from trimtab.checks._script import edit, step_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class OptimizerLoop(ScriptCheck):
    """An optimizer updates its tensors with more kernels than it needs.

    ``foreach`` runs each operation over lists of tensors, and the default on a CPU is a Python loop over the tensors.
    ``fused`` updates all of them in one kernel that reads and writes each element once. The gain grows with the number of
    tensors and with the share of the update.
    Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
    """

    least: float = 0.02
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Optimizers by the share of their updates and the kernel that torch runs."""
        found = []
        for optimizer in subject.optimizers:
            taken = step_share(subject, optimizer.ms * optimizer.steps)
            kernel: Literal["fused", "foreach"] | None = None
            if optimizer.kernel in ("single", "foreach") and optimizer.can_fuse:
                kernel = "fused"
            elif optimizer.kernel == "single" and optimizer.tensors > 1:
                kernel = "foreach"
            if kernel is None or taken < self.least:
                continue
            chosen = {str(kernel): "True"}
            loops = "in a Python loop" if optimizer.kernel == "single" else "with lists of tensors"
            message = (
                f"{optimizer.name} at {optimizer.site} updates {counted(optimizer.tensors, 'tensor')} {loops}, which takes "
                f"{taken:.0%} of a step. Give it {kernel}=True."
            )
            found.append(
                self.note(
                    message,
                    evidence={"optimizer_share": taken, "tensors": optimizer.tensors, "kernel": optimizer.kernel},
                    where=optimizer.site,
                    category="step",
                    settings=ScriptSettings(optimizer=kernel),
                    edit=edit(
                        subject,
                        optimizer.site,
                        f"Pass {kernel}=True to {optimizer.name}.",
                        **{optimizer.name: chosen},
                    ),
                    share=taken,
                )
            )
        return found
