"""Workers are started anew in each epoch."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import edit, run_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import LoaderSettings, ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class EpochStart(ScriptCheck):
    """Workers are started anew in each epoch.

    A worker imports the script, builds the data set and reads its first batches before it hands one out.
    ``persistent_workers`` keeps the workers from epoch to epoch.
    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
    """

    least: float = 0.05
    """Share of the run after its first step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Loaders whose workers were started several times, by the share of the run that the starts took."""
        taken = run_share(subject, "epoch start")
        slow = [loader for loader in subject.loaders if loader.workers and not loader.persistent and loader.iterators > 1]
        if not slow or taken < self.least:
            return []
        loader = max(slow, key=lambda loader: loader.start_ms * loader.iterators)
        message = (
            f"The {counted(loader.workers, 'worker')} of the loader at {loader.site} started {loader.iterators} times, "
            f"{loader.start_ms:.0f} ms each: {taken:.0%} of the run after its first step. Give it persistent_workers=True."
        )
        keep = {"persistent_workers": "True"}
        return [
            self.note(
                message,
                evidence={"run_share": taken, "start_ms": loader.start_ms, "starts": loader.iterators},
                where=loader.site,
                category="data",
                settings=ScriptSettings(loaders={loader.site: LoaderSettings(persistent=True)}),
                edit=edit(subject, loader.site, "Keep the workers: persistent_workers=True.", DataLoader=keep),
                share=taken,
            )
        ]
