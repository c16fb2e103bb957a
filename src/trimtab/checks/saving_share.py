"""Checkpoints are written while the training waits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.checks._script import edit, lines, run_share, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

SAVES = re.compile(r"save", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class SavingShare(ScriptCheck):
    """Checkpoints are written while the training waits.

    ``torch.save`` copies, serializes and writes before the next step begins. Saved more rarely, or copied and then
    written by a thread, the steps go on meanwhile.
    Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    least: float = 0.02
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The share of saving in a step or in the run after its first step, with its line."""
        step, run = share(subject, "saving"), run_share(subject, "saving")
        taken = max(step, run)
        if taken < self.least:
            return []
        saves = sorted((call for call in subject.calls if SAVES.search(call.name)), key=lambda call: -call.ms)
        saving = lines(subject, "saving")
        where = saves[0].site if saves else saving[0].site if saving else None
        at = f" at {where}" if where else ""
        of = "a step" if step >= run else "the run after its first step"
        message = (
            f"Saving{at} takes {taken:.0%} of {of}, and the training waits for it. Save more rarely, or copy the state and "
            "write it in a thread (torch.distributed.checkpoint.async_save)."
        )
        return [
            self.note(
                message,
                evidence={"step_share": step, "run_share": run, "saves_per_step": sum(call.calls for call in saves)},
                where=where,
                category="run",
                edit=edit(subject, where, "Save more rarely, or write a copy of the state in a thread."),
                ceiling=ScriptSettings(without="saving"),
                share=taken,
            )
        ]
