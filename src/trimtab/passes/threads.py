"""Number of intra-operator threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trimtab.core.technique import Choice, SettingPass
from trimtab.errors import UsageError
from trimtab.hardware import system


@dataclass(frozen=True, kw_only=True)
class Threads(SettingPass):
    """Compute each operator with this many threads.

    Most runtimes use all cores by default. Fewer threads pay off for small networks, where distributing the work costs more
    than doing it, and if several models share a machine.
    Source: https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html
    """

    modes = frozenset({"infer", "train"})
    sets = frozenset({"threads"})

    count: Annotated[int, Choice(1, 2, 4, 8)] = 1
    """Threads per operator."""

    def describe(self) -> str:
        """Names the number."""
        return f"{self.count} thread{'s' if self.count != 1 else ''}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise UsageError(f"threads: count is {self.count}; it is at least 1.")

    def why_not_here(self) -> str | None:
        """Needs as many usable cores: more threads than cores only wait for each other."""
        if self.count > (cores := system.usable_cores()):
            return f"threads asks for {self.count} threads, and the cores that this process may use are {cores}."
        return None
