"""The host waits for the GPU within a step."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit, on_gpu, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

BLOCKING = (
    "Tensor.item",
    "Tensor.cpu",
    "Tensor.numpy",
    "Tensor.tolist",
    "float(tensor)",
    "int(tensor)",
    "bool(tensor)",
    "print",
    "torch.cuda.synchronize",
)


@dataclass(frozen=True, kw_only=True)
class SyncPoints(ScriptCheck):
    """The host waits for the GPU within a step.

    ``.item()``, ``.cpu()``, ``.tolist()`` and printing a tensor wait until the GPU has computed everything before. The
    GPU then idles until new kernels are launched. On a CPU they cost nothing, so that this check looks at GPUs only.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    least: float = 0.05
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The share of synchronisation on a GPU, by line."""
        taken = share(subject, "synchronization")
        if not on_gpu(subject) or taken < self.least:
            return []
        blocking = sorted((call for call in subject.calls if call.name in BLOCKING), key=lambda call: -call.ms)
        where = blocking[0].site if blocking else None
        at = f", most of it at {where} ({blocking[0].name})" if blocking else ""
        message = (
            f"The host waits for {subject.device} for {taken:.0%} of a step{at}. Keep the value as a tensor, and read it "
            "every n-th step. The gain was not measured."
        )
        return [
            self.note(
                message,
                evidence={"synchronization_share": taken, "calls_per_step": sum(call.calls for call in blocking)},
                where=where,
                category="step",
                edit=edit(subject, where, "Keep the value as a tensor (.detach()), and read it every n-th step."),
                ceiling=ScriptSettings(without="synchronization"),
                share=taken,
            )
        ]
