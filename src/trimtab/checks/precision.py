"""Matrix products are in float32 on a machine with faster bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import on_gpu, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets that multiply bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Precision(ScriptCheck):
    """Matrix products are in float32 on a machine with faster bfloat16.

    CPUs with AVX-512 BF16 or AMX, and GPUs from compute capability 8.0 on, multiply bfloat16 several times as fast.
    Autocast keeps the weights in float32. The losses tell whether the training bears it.
    Source: https://docs.pytorch.org/docs/stable/amp.html
    """

    least: float = 0.3
    """Share of a step in forward and backward passes, from which on it is reported."""
    capability: float = 8.0
    """Compute capability of GPUs with bfloat16."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Modules with matrix products in float32, if this machine has instructions for bfloat16."""
        if on_gpu(subject):
            able = any(float(gpu.capability) >= self.capability for gpu in environment.gpus)
            by = "this GPU"
        else:
            able = not BF16.isdisjoint(environment.isa)
            by = "this CPU"
        time = share(subject, "forward", "backward")
        wide = [
            module for module in subject.modules if module.dtype == "float32" and module.matrix_products and not module.autocast
        ]
        wide = [module for module in wide if on_gpu(subject) or not module.recurrent]
        if not able or not wide or time < self.least:
            return []
        module = max(wide, key=lambda module: module.parameters)
        message = (
            f"{module.name} computes {counted(module.matrix_products, 'matrix product')} in float32, in {time:.0%} of a "
            f"step, and {by} has instructions for bfloat16. Run the forward pass under torch.autocast(dtype=torch.bfloat16)."
        )
        return [
            self.note(
                message,
                evidence={"matrix_products": module.matrix_products, "model_share": time},
                category="precision",
                settings=ScriptSettings(autocast="bfloat16"),
            )
        ]
