"""Lines of the script outside of the passes take much of a step."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import BATCHES, LOGGING, LOSSES, METRICS, lines, matches, on_gpu, slow_between
from trimtab.checks.batch_loop import BatchLoop, near
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class SlowLines(ScriptCheck):
    """Lines of the script outside of the passes take much of a step.

    Between the passes a line of Python runs while the model waits. What the line computes may be needed more rarely, or
    as one operator over the batch.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    least: float = 0.05
    """Share of a step of all such lines, from which on they are reported."""
    line: float = 0.02
    """Share of a step from which on a line counts."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Sampled lines outside of the passes, without those that other checks know."""
        known = (LOGGING, LOSSES, METRICS, *(() if any(loader.batches for loader in subject.loaders) else (BATCHES,)))
        slow = [
            line
            for line in lines(subject, "other", "synchronization", least=self.line)
            if not any(matches(line, kind) for kind in known)
        ]
        loops = {finding.where for finding in BatchLoop().run(subject, environment)}
        slow = [line for line in slow if not any(near(line.site, where) for where in loops if where)]
        if on_gpu(subject):
            slow = [line for line in slow if line.phase == "other"]
        return slow_between(
            self,
            subject,
            slow,
            "{taken} of a step goes to lines between the passes: {listed}. Compute them more rarely, or with operators over "
            "the whole batch.",
            least=self.least,
            category="step",
            advice="Compute it more rarely, or with operators over the whole batch.",
        )
