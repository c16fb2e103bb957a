"""Lines outside of a loader make the batches."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import BATCHES, lines, matches, slow_between
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class DataByHand(ScriptCheck):
    """Lines outside of a loader make the batches.

    Without a ``DataLoader`` a batch is made between two steps, by the process that computes them.
    Source: https://docs.pytorch.org/docs/stable/data.html
    """

    least: float = 0.05
    """Share of a step of all such lines, from which on they are reported."""
    line: float = 0.02
    """Share of a step from which on a line counts."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Lines that make batches, in scripts whose steps take none from a loader."""
        if any(loader.batches for loader in subject.loaders):
            return []
        slow = [line for line in lines(subject, "other", "data", "copy", least=self.line) if matches(line, BATCHES)]
        return slow_between(
            self,
            subject,
            slow,
            "{taken} of a step makes its batch by hand: {listed}. Make the tensors once, and index them with the places of a "
            "batch, or let the workers of a DataLoader make it.",
            least=self.least,
            category="data",
            advice="Make the tensors once before the loop, and index them with the places of a batch.",
        )
