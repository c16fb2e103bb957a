"""A loop in Python calls an operator for each example of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import batch_size, edit, lines, per_example, step_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


def near(a: str, b: str, most: int = 10) -> bool:
    """Whether two sites are at most ``most`` lines apart in one file."""
    (file, _, line), (other, _, number) = a.rpartition(":"), b.rpartition(":")
    return file == other and line.isdigit() and number.isdigit() and abs(int(line) - int(number)) <= most


@dataclass(frozen=True, kw_only=True)
class BatchLoop(ScriptCheck):
    """A loop in Python calls an operator for each example of a batch.

    Each call of an operator from Python takes some microseconds, and works on an example's share of the data. One call
    over the batch does the work of the loop.
    Source: https://docs.pytorch.org/docs/stable/notes/broadcasting.html
    """

    least: float = 0.02
    """Share of a step, from which on it is reported."""
    examples: int = 4
    """Examples of a batch, from which on a loop over them can be told from a few calls."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Lines that call an operator a whole number of times per example of a batch; modules that are called so."""
        size = batch_size(subject)
        if size is None or size < self.examples:
            return []
        for module in subject.modules:
            taken = step_share(subject, module.forward_ms * module.calls)
            if per_example(module.calls, size) and taken >= self.least:
                message = (
                    f"{module.name} is called {module.calls:.0f} times per step, once for each of the {size} examples of a "
                    f"batch, {taken:.0%} of a step. Stack the examples and call it once."
                )
                evidence = {"calls_per_step": module.calls, "batch_size": size}
                return [self.note(message, evidence=evidence, category="step", share=taken)]
        calls = {each.site: each for each in subject.operators if per_example(each.site_calls, size)}
        # prefer counts of the line: one call of a model calls operators any number of times
        seen = lines(subject, "forward", "other", "copy", "synchronization")
        runs = {line.site: line.runs or (calls[line.site].site_calls if line.site in calls else 0.0) for line in seen}
        looping = [line for line in seen if per_example(runs[line.site], size)]
        if not looping:
            return []
        line = looping[0]
        loop = [other for other in looping if near(other.site, line.site) and other.function == line.function]
        rows = sum(other.share for other in loop)
        total = sum(each.ms for each in subject.operators)
        each_ms = sum(each.ms for each in subject.operators if per_example(each.calls, size))
        taken = max(rows, each_ms / total if total else 0.0)
        if taken < self.least:
            return []
        often = runs[line.site]
        what = f"calls {calls[line.site].name}" if line.site in calls else "runs"
        message = (
            f"The line {line.site} {what} {often:.0f} times per step, for each of the {size} examples of a batch. Its loop and "
            f"operators that are called as often take {taken:.0%} of a step. Write it as operations over the batch."
        )
        return [
            self.note(
                message,
                evidence={"runs_per_step": often, "batch_size": size, "lines_share": rows, "operators_share": taken},
                where=line.site,
                category="step",
                edit=edit(subject, line.site, "Write the loop as one operation over the batch."),
                share=taken,
            )
        ]
