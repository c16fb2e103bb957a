"""torch.compile is called again during the steps."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import edit, step_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class CompileRepeated(ScriptCheck):
    """torch.compile is called again during the steps.

    Each call makes a new wrapper, whose first call traces, checks its guards and may compile anew. Called once before the
    loop, the compiled function is kept.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """

    calls: float = 2.0
    """Calls during the measured steps, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Calls of ``torch.compile`` while steps were measured."""
        calls = [call for call in subject.calls if call.name == "torch.compile" and call.calls * subject.steps >= self.calls]
        if not calls:
            return []
        compiling = sum(each.ms for each in subject.recompiles) / max(subject.steps, 1)
        often = sum(call.calls for call in calls)
        taken = step_share(subject, max(compiling, sum(call.ms for call in calls)))
        call = calls[0]
        cost = f", and compiling takes {taken:.0%} of a step" if taken >= 0.005 else ""
        message = (
            f"torch.compile at {call.site} was called {often * subject.steps:.0f} times in "
            f"{counted(subject.steps, 'step')}{cost}. Compile once before the loop, and call the result in it."
        )
        return [
            self.note(
                message,
                evidence={"calls_per_step": often, "compile_share": taken},
                where=call.site,
                category="step",
                edit=edit(subject, call.site, "Move torch.compile before the loop, and keep its result."),
                share=taken,
            )
        ]
