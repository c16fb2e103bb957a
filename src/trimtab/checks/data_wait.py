"""A step waits for its data, and no other check knows a closer reason."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import edit, share, slow_loaders
from trimtab.checks.one_by_one import OneByOne
from trimtab.checks.slow_example import SlowExample
from trimtab.checks.small_files import SmallFiles
from trimtab.checks.workers_few import WorkersFew
from trimtab.checks.workers_for_nothing import WorkersForNothing
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class DataWait(ScriptCheck):
    """A step waits for its data, and no other check knows a closer reason.

    The share of the wait is the most that any faster loading can save. A run that gets the same batches again measures
    it.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    least: float = 0.1
    """Share of a step that waits for the loader, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Loaders that a step waits for, if the checks of closer reasons have nothing to say."""
        closer = (OneByOne(), WorkersFew(), WorkersForNothing(), SlowExample(), SmallFiles())
        slow = slow_loaders(subject, self.least)
        if not slow or any(check.run(subject, environment) for check in closer):
            return []
        loader, waits, ms = slow[0], share(subject, "data"), subject.phases.get("data", 0.0)
        have = f"{counted(loader.workers, 'worker')}, {loader.batch_size or 1} per batch"
        message = (
            f"A step waits {waits:.0%} of its time, {ms:.1f} ms, for the loader at {loader.site} ({have}). Make reading "
            "faster: fewer conversions, and batches that are read at once."
        )
        return [
            self.note(
                message,
                evidence={"wait_share": waits, "wait_ms": loader.wait_ms, "workers": loader.workers},
                where=loader.site,
                category="data",
                edit=edit(subject, loader.site, "Convert the data once before the training, and read batches at once."),
                ceiling=ScriptSettings(without="data"),
                share=waits,
            )
        ]
