"""Forward passes record a graph that no backward pass uses."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import run_share, step_share, under_no_grad
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import CodeEdit, ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class GradientsForNothing(ScriptCheck):
    """Forward passes record a graph that no backward pass uses.

    Without ``torch.no_grad()`` each operator allocates a node and keeps its inputs, so that memory and time are spent for
    gradients that nobody asks for.
    Source: https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
    """

    least: float = 0.02
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Modules by the share of calls that kept a graph for nothing, and the time of these calls."""
        found = []
        for module in subject.modules:
            if not module.gradients_unused or module.unused_ms <= 0:
                continue
            inference = subject.anchor in ("batch", "forward")
            taken = step_share(subject, module.unused_ms) if inference else run_share(subject, "evaluation")
            if taken < self.least:
                continue
            where, of = module.unused_site, "a step" if inference else "the run after its first step"
            at = f" at {where}" if where else ""
            message = (
                f"{module.gradients_unused:.0%} of the calls of {module.name}{at} keep a graph that no backward pass uses, "
                f"in {taken:.0%} of {of}. Run them under torch.no_grad()."
            )
            change = None
            if where is not None:
                new = under_no_grad(subject.texts.get(where, ""))
                change = CodeEdit(site=where, advice="Run it under torch.no_grad().", replacement=new)
            found.append(
                self.note(
                    message,
                    evidence={"calls_share": module.gradients_unused, "unused_ms": module.unused_ms, "share": taken},
                    where=where,
                    category="step" if inference else "run",
                    settings=ScriptSettings(no_grad=True),
                    edit=change,
                    share=taken,
                )
            )
        return found
