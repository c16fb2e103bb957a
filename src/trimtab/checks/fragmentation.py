"""The GPU's allocator has reserved much more memory than it uses."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Fragmentation(ScriptCheck):
    """The GPU's allocator has reserved much more memory than it uses.

    Blocks of changing sizes leave gaps that no later tensor fits in. Expandable segments grow one block instead.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf
    """

    least: float = 0.25
    """Share of the reserved memory that is not allocated, from which on it is reported."""
    least_mb: float = 512.0
    """MB (10**6 bytes) that are not allocated, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Reserved less allocated memory at the peak."""
        memory = subject.memory
        if memory is None or memory.reserved_mb is None or memory.allocated_mb is None or memory.reserved_mb <= 0:
            return []
        idle = memory.reserved_mb - memory.allocated_mb
        taken = idle / memory.reserved_mb
        if idle < self.least_mb or taken < self.least:
            return []
        message = (
            f"torch has reserved {memory.reserved_mb:,.0f} MB on {subject.device} and used {memory.allocated_mb:,.0f} MB of "
            f"them: {taken:.0%} lie in gaps. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
        return [
            self.note(
                message,
                evidence={"reserved_mb": memory.reserved_mb, "allocated_mb": memory.allocated_mb},
                category="memory",
                settings=ScriptSettings(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
            )
        ]
