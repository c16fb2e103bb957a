"""A step spends its time outside of the script's lines and of torch."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import lines, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Framework(ScriptCheck):
    """A step spends its time outside of the script's lines and of torch.

    Trainers call hooks, build progress bars and check states between the passes. For steps of a few milliseconds that
    counts.
    Source: https://lightning.ai/docs/pytorch/stable/advanced/speed.html
    """

    least: float = 0.15
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Time between the passes in which no line of the script was seen."""
        other = share(subject, "other")
        own = sum(line.share for line in lines(subject, "other"))
        taken = other - own
        if taken < self.least or not subject.lines:
            return []
        message = (
            f"{taken:.0%} of a step, {taken * subject.step_ms:.1f} ms, is spent between the passes outside of the script's "
            "own lines: in the framework that runs them. Use larger batches, fewer callbacks, or a loop of your own."
        )
        return [
            self.note(
                message,
                evidence={"other_share": other, "own_lines_share": own},
                category="step",
                share=taken,
            )
        ]
