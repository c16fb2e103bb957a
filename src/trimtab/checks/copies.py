"""Batches are copied to the GPU from memory that is not pinned."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit, on_gpu, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Copies(ScriptCheck):
    """Batches are copied to the GPU from memory that is not pinned.

    A copy from pageable memory goes through a buffer of the driver and blocks the host. From pinned memory it runs beside
    the GPU's work if it is asked for with ``non_blocking=True``.
    Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """

    least: float = 0.02
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The share of copies on a GPU, with loaders that do not pin memory."""
        taken = share(subject, "copy")
        pageable = [loader for loader in subject.loaders if loader.batches and not loader.pin_memory]
        if not on_gpu(subject) or not pageable or taken < self.least:
            return []
        loader = pageable[0]
        message = (
            f"Copies to {subject.device} take {taken:.0%} of a step, from memory that the loader at {loader.site} does not "
            "pin. Give it pin_memory=True, and copy with .to(device, non_blocking=True). The gain was not measured."
        )
        advice = "Pin the loader's memory, and copy with non_blocking=True."
        return [
            self.note(
                message,
                evidence={"copy_share": taken, "batch_mb": loader.batch_bytes / 1e6},
                where=loader.site,
                category="data",
                edit=edit(subject, loader.site, advice, DataLoader={"pin_memory": "True"}),
                share=taken,
            )
        ]
