"""Distributed training runs with a flag or a wrapper that costs time for nothing."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import edit
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class DdpFlags(ScriptCheck):
    """Distributed training runs with a flag or a wrapper that costs time for nothing.

    ``find_unused_parameters`` walks the graph in each step. It is needed only if parameters get no gradient.
    ``DataParallel`` copies the model to each GPU in each step, from one process.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """``find_unused_parameters`` without unused parameters, and ``DataParallel``."""
        ranks = subject.distributed
        if ranks is None:
            return []
        if ranks.kind == "data_parallel":
            message = "DataParallel copies the model to each GPU in each step. Use DistributedDataParallel with torchrun."
            return [self.note(message, evidence={"kind": ranks.kind}, category="run")]
        if ranks.kind != "ddp" or not ranks.find_unused or ranks.unused_found:
            return []
        site = next((site for site, text in subject.texts.items() if "find_unused_parameters" in text), None)
        message = (
            f"find_unused_parameters=True walks the graph in each step, and none of {counted(subject.steps, 'step')} had an "
            "unused parameter. Leave it out."
        )
        name = "DistributedDataParallel" if "DistributedDataParallel(" in subject.texts.get(site or "", "") else "DDP"
        change = {name: {"find_unused_parameters": "False"}}
        return [
            self.note(
                message,
                evidence={"find_unused_parameters": True, "unused": False},
                where=site,
                category="run",
                edit=edit(subject, site, "Leave find_unused_parameters out.", **change),
            )
        ]
