"""Number of threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, Pass
from trimtab.errors import UsageError
from trimtab.hardware import system


@dataclass(frozen=True, kw_only=True)
class Threads(Pass):
    """Share an operator between this many threads.

    The default of most runtimes is every core. Fewer threads pay on small networks, where handing out the work costs more than
    doing it, and wherever several copies of a model share a machine.
    Source: https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html
    """

    name = "threads"
    modes = frozenset({"infer", "train"})
    sets = frozenset({"threads"})

    count: Annotated[int, Choice(1, 2, 4, 8)] = 1
    """Threads within one operator."""

    def describe(self) -> str:
        """Says the number."""
        return f"{self.count} thread{'s' if self.count != 1 else ''}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise UsageError(f"threads: count is {self.count}; it is at least 1.")

    def why_not_here(self) -> str | None:
        """More threads than cores only wait for each other."""
        if self.count > (cores := system.usable_cores()):
            return f"threads asks for {self.count} threads, and the cores that this process may use are {cores}."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; whoever runs the settings sets the runtime's thread count."""
        return candidate.with_settings({"threads": self.count})
