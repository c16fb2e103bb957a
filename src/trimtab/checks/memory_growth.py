"""Memory grows with every step."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import detached
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import CodeEdit
from trimtab.hardware.environment import Environment

ADVICE = "Keep a number (.item()) or a detached tensor, not the graph."


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth(ScriptCheck):
    """Memory grows with every step.

    A list of losses that are still tensors keeps the graph of every step. The process ends without memory, sooner or
    later.
    Source: https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
    """

    least_mb: float = 0.1
    """Lower bound of the growth per step in MB (10**6 bytes), from which on it is reported."""
    rises: float = 0.8
    """Share of the steps that must add to it."""
    rises_held: float = 0.5
    """Share of the steps that must add to it if a line is known to keep objects. Memory is then requested in large pieces."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The slope of the memory over the steps, if nearly every step adds to it. Compiled code is left out."""
        memory = subject.memory
        if memory is None or memory.growth_low_mb < self.least_mb:
            return []
        where = memory.grows_at
        if memory.rises < (self.rises if where is None else self.rises_held):
            return []
        if where is None and any(each.recompiles for each in subject.recompiles):
            return []
        new = None if where is None else detached(subject.texts.get(where, ""), memory.graphs_kept)
        at = f", kept by {where}" if where else ""
        message = (
            f"Memory grows by {memory.growth_mb:.2f} MB per step{at}: {memory.rises:.0%} of {counted(subject.steps, 'step')} "
            "left more than they found. Keep numbers instead of tensors: loss.item() or loss.detach()."
        )
        return [
            Finding(
                rule=self.name,
                level="error",
                message=message,
                evidence={"mb_per_step": memory.growth_mb, "at_least_mb": memory.growth_low_mb, "rises": memory.rises},
                where=where,
                category="memory",
                edit=None if where is None else CodeEdit(site=where, advice=ADVICE, replacement=new),
            )
        ]
