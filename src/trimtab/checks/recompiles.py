"""torch.compile compiles again after the warm-up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.checks._script import edit, step_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

SIZES = re.compile(r"size mismatch|stride mismatch|\.size\(\)")
"""Reasons of torch for a recompilation that name a size of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Recompiles(ScriptCheck):
    """torch.compile compiles again after the warm-up.

    A new shape or a changed Python value fails a guard, and the function is compiled anew. After eight times it runs
    without being compiled.
    Source: https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
    """

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Compilations after the warm-up, by function, with the guard that failed."""
        found = []
        for each in subject.recompiles:
            if not each.recompiles:
                continue
            taken = step_share(subject, each.ms / max(subject.steps, 1))
            what = each.site or "the model"
            why = f" ({each.reason.splitlines()[0][:80].rstrip('. ')})" if each.reason else ""
            message = (
                f"torch.compile compiled {what} {each.recompiles} times after the warm-up, {each.ms / 1e3:.1f} s in "
                f"all{why}. Pad to few shapes, or mark the size with torch._dynamo.mark_dynamic or dynamic=True."
            )
            found.append(
                self.note(
                    message,
                    evidence={"recompiles": each.recompiles, "compile_ms": each.ms, "reason": each.reason},
                    where=each.site or None,
                    category="step",
                    settings=ScriptSettings(compile_dynamic=True) if SIZES.search(each.reason or "") else None,
                    edit=edit(subject, each.site, "Pad to few shapes, or compile with dynamic=True."),
                    share=taken,
                )
            )
        return found
