"""Workers take longer to hand a batch over than reading it takes."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import edit, slow_loaders, wait_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import LoaderSettings, ScriptSettings
from trimtab.hardware.environment import Environment

IN_PROCESS = {"num_workers": "0"}


@dataclass(frozen=True, kw_only=True)
class WorkersForNothing(ScriptCheck):
    """Workers take longer to hand a batch over than reading it takes.

    A worker copies each batch into shared memory, sends its handle and is woken for the next. For data in memory that
    costs more than reading, and a step waits for the transport.
    Source: https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
    """

    least: float = 0.02
    """Share of a step that waits for the loader, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Loaders with workers whose batches are waited for longer than reading them takes."""
        found = []
        for loader in slow_loaders(subject, self.least):
            in_memory = loader.tensors or loader.batch_fetch
            costly = in_memory if loader.read_ms is None else loader.wait_ms > loader.read_ms
            if loader.workers == 0 or loader.iterable or not costly:
                continue
            waits = wait_share(subject, loader)
            reads = "is in memory" if loader.read_ms is None else f"is read in {loader.read_ms:.2f} ms"
            message = (
                f"A step waits {loader.wait_ms:.2f} ms for each batch of the loader at {loader.site}, though a batch "
                f"{reads}. Its {counted(loader.workers, 'worker')} cost more than they save: give it num_workers=0."
            )
            settings = LoaderSettings(workers=0, batch_fetch=in_memory)
            found.append(
                self.note(
                    message,
                    evidence={
                        "wait_share": waits,
                        "wait_ms": loader.wait_ms,
                        "read_ms": loader.read_ms,
                        "workers": loader.workers,
                    },
                    where=loader.site,
                    category="data",
                    settings=ScriptSettings(loaders={loader.site: settings}),
                    edit=edit(subject, loader.site, "Read in the main process: num_workers=0.", DataLoader=IN_PROCESS),
                    ceiling=ScriptSettings(without="data"),
                    share=waits,
                )
            )
        return found
