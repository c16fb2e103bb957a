"""torch.compile cuts a function into several graphs."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class GraphBreaks(ScriptCheck):
    """torch.compile cuts a function into several graphs.

    At a call that it cannot trace, such as ``print`` or ``.item()``, a graph ends, Python runs, and another graph begins.
    Nothing is fused across the cut.
    Source: https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
    """

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The lines at which graphs end, with the reason and the time that compiling took."""
        found = []
        for each in subject.recompiles:
            if not each.graph_breaks:
                continue
            where = f" at {each.site}" if each.site else ""
            why = f" ({each.reason.splitlines()[0][:80].rstrip('. ')})" if each.reason else ""
            cost = f" Compiling all graphs took {each.ms / 1e3:.1f} s." if each.ms else ""
            message = (
                f"torch.compile ends a graph{where}{why} and begins another after it, so that nothing is fused across that "
                f"line. Move the call out of the compiled function, and check with fullgraph=True.{cost}"
            )
            found.append(
                self.note(
                    message,
                    evidence={"graph_breaks": each.graph_breaks, "compile_ms": each.ms, "reason": each.reason},
                    where=each.site or None,
                    category="step",
                    edit=edit(subject, each.site, "Move the call that breaks the graph out of the compiled function."),
                )
            )
        return found
