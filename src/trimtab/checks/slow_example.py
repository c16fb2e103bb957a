"""A step waits for lines of the data set, of a transform or of the collate function."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import FILES, batch_size, edit, joined_sites, matches, reading_lines, share
from trimtab.checks.workers_few import WorkersFew
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class SlowExample(ScriptCheck):
    """A step waits for lines of the data set, of a transform or of the collate function.

    Python that treats one example at a time, and a conversion that could be done once, cost their time for every example
    of every epoch.
    Source: https://docs.pytorch.org/docs/stable/data.html#working-with-collate-fn
    """

    least: float = 0.1
    """Share of a step of all such lines, from which on they are reported."""
    line: float = 0.02
    """Share of a step from which on a line counts."""
    loops: float = 8.0
    """Times that a line runs per example, from which on it is in a loop within the example."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The lines that ran while a step waited for data, without those that open files.

        Lines that ran a few times per example are left to workers if more of these would help.
        """
        slow = [line for line in reading_lines(subject, self.line) if not matches(line, FILES)]
        examples = (batch_size(subject) or 1) * sum(loader.batches for loader in subject.loaders) / max(subject.steps, 1)
        looping = [line for line in slow if line.runs >= self.loops * max(examples, 1)]
        counted = any(line.runs for line in slow)
        if counted and not looping and WorkersFew().run(subject, environment):
            return []
        slow = looping or slow
        taken = sum(line.share for line in slow)
        if taken < self.least or any(loader.tensors or loader.batch_fetch for loader in subject.loaders):
            return []
        often = f" The first runs {slow[0].runs / max(examples, 1):.0f} times per example." if looping else ""
        message = (
            f"{taken:.0%} of a step goes to lines that make examples: {joined_sites(slow)}.{often} Compute them once "
            "before the training, or with operators over whole arrays."
        )
        advice = "This line runs for every example: compute it once before the training, or for a batch in one call."
        return [
            self.note(
                message,
                evidence={"lines_share": taken, "first_runs": slow[0].runs, "wait_share": share(subject, "data")},
                where=slow[0].site,
                category="data",
                edit=edit(subject, slow[0].site, advice),
                ceiling=ScriptSettings(without="data"),
                share=taken,
            )
        ]
