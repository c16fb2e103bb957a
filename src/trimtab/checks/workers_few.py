"""A step waits for examples that no process prepares meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import edit, slow_loaders, wait_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import LoaderRecord, ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import LoaderSettings, ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class WorkersFew(ScriptCheck):
    """A step waits for examples that no process prepares meanwhile.

    Without workers the main process reads a batch between two steps, and cores that the model leaves idle do nothing.
    Workers read the next batches while the model computes. They pay if reading takes longer than handing a batch over,
    which costs about a millisecond.
    Source: https://docs.pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading
    """

    least: float = 0.05
    """Share of a step that waits for the loader, from which on it is reported."""
    least_ms: float = 1.0
    """Milliseconds to read a batch, below which handing it over costs as much."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Loaders with fewer workers than reading needs and the cores allow."""
        found = []
        for loader in slow_loaders(subject, self.least):
            reads = loader.wait_ms * max(loader.workers, 1) if loader.read_ms is None else loader.read_ms
            workers = min(max(1, math.ceil(reads / self.rest_ms(subject, loader))), subject.cores)
            in_memory = loader.tensors or loader.batch_fetch
            if loader.iterable or in_memory or reads < self.least_ms or workers <= loader.workers or subject.cores < 2:
                continue
            waits, have = wait_share(subject, loader), counted(loader.workers, "worker") if loader.workers else "no workers"
            draws = " Its random numbers will then be drawn in the workers." if loader.draws else ""
            message = (
                f"A step waits {waits:.0%} of its time for the loader at {loader.site}, which has {have} and takes "
                f"{reads:.1f} ms to read a batch. Give it num_workers={workers} and persistent_workers=True.{draws}"
            )
            keywords = {"num_workers": str(workers), "persistent_workers": "True"}
            hidden_share = self.hidden_share(subject, loader, reads, workers)
            found.append(
                self.note(
                    message,
                    evidence={"wait_share": waits, "read_ms": reads, "workers": loader.workers, "cores": subject.cores},
                    where=loader.site,
                    category="data",
                    settings=ScriptSettings(loaders={loader.site: LoaderSettings(workers=workers, persistent=True)}),
                    edit=edit(subject, loader.site, f"Give the loader num_workers={workers}.", DataLoader=keywords),
                    ceiling=ScriptSettings(without="data"),
                    share=waits * hidden_share,
                )
            )
        return found

    @classmethod
    def hidden_share(cls, record: ProbeRecord, loader: LoaderRecord, reads: float, workers: int) -> float:
        """Upper bound of the share of the wait for ``loader``, 0 to 1, that ``workers`` hide. A batch takes at least the rest
        of a step, its part of reading, and the CPU time of both on all cores. So where reading dominates, a check that
        makes it cheaper ranks before this one."""
        rest, wait = cls.rest_ms(record, loader), max(loader.wait_ms, 1e-3)
        together = max(rest, reads / workers, record.cpu_share * (rest + wait))
        return min(1.0, max(0.0, rest + wait - together) / wait)

    @staticmethod
    def rest_ms(record: ProbeRecord, loader: LoaderRecord) -> float:
        """Milliseconds for which the main process is busy with something else, per batch of ``loader``."""
        per_batch = record.steps / loader.batches if loader.batches else 1.0
        return max(record.step_ms - record.phases.get("data", 0.0), 1e-3) * per_batch
