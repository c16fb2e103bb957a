"""A metric is computed on every step."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import METRICS, lines, matches, slow_between
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class MetricEveryStep(ScriptCheck):
    """A metric is computed on every step.

    A metric of a training batch is read by people, if at all, once in many steps. Its sorting and copying to numpy cost
    their time on each of them.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    least: float = 0.03
    """Share of a step of all such lines, from which on they are reported."""
    line: float = 0.01
    """Share of a step from which on a line counts."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Lines between the passes whose text or function names a metric."""
        slow = [
            line
            for line in lines(subject, "other", "synchronization", "copy", "logging", least=self.line)
            if matches(line, METRICS)
        ]
        return slow_between(
            self,
            subject,
            slow,
            "A metric takes {taken} of every step: {listed}. Compute it every n-th step, or once at the end of the epoch.",
            least=self.least,
            category="step",
            advice="Compute it every n-th step: `if step % 50 == 0:`.",
        )
