"""Ranks wait for a slower one."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import step_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class UnevenRanks(ScriptCheck):
    """Ranks wait for a slower one.

    A reduction begins when the last rank comes to it. Longer examples, a slower disk or another machine make one rank
    late in each step.
    Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#skewed-processing-speeds
    """

    least: float = 0.05
    """Share of a step, from which on it is reported."""
    busy: float = 0.2
    """Share of the CPU time that other processes may use: they delay one rank or another."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The delay between the first and the last rank at a reduction."""
        ranks = subject.distributed
        late = 0.0 if ranks is None or ranks.skew_ms is None else ranks.skew_ms
        taken = step_share(subject, late)
        if ranks is None or taken < self.least or subject.others_share > self.busy:
            return []
        message = (
            f"The last of {ranks.ranks} ranks comes {late:.1f} ms after the first to a reduction, {taken:.0%} of a step. "
            "Give the ranks batches of equal cost: sort by length, and share the data evenly."
        )
        return [
            self.note(
                message,
                evidence={"skew_ms": late, "share": taken},
                category="run",
                share=taken,
            )
        ]
