"""Memory is given back to the system and asked for again in each step."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import step_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class PageFaults(ScriptCheck):
    """Memory is given back to the system and asked for again in each step.

    The C library returns large freed blocks to the system, and the next step faults every page of 4 kB in again. A fault
    costs at least a quarter of a microsecond, for its zeros alone. Huge pages of 2 MB need 512 times fewer faults; where the
    system does not offer them, the C library can keep what is freed.
    Source: https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html and
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """

    least: float = 0.02
    """Share of a step, from which on it is reported."""
    fault_us: float = 0.25
    """Microseconds that a fault costs at least."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Minor page faults per step."""
        memory = subject.memory
        if memory is None:
            return []
        faults, variable = memory.page_faults, memory.huge_pages
        taken = step_share(subject, faults * self.fault_us / 1e3)
        if taken < self.least:
            return []
        remedy = (
            f"Start the script with {' '.join(f'{name}={value}' for name, value in variable.items())}, for pages of 2 MB in "
            "place of 4 kB; trimtab run does so."
            if variable
            else "Keep freed memory in the process: trimtab run does so with keep_freed."
        )
        message = (
            f"A step faults {faults:,.0f} pages in, {faults * 4096 / 1e6:.0f} MB that the step before gave back to the "
            f"system, which takes at least {taken:.0%} of it. {remedy}"
        )
        return [
            self.note(
                message,
                evidence={"faults_per_step": faults, "share": taken},
                category="step",
                settings=ScriptSettings(environment=variable) if variable else ScriptSettings(keep_freed=True),
                share=taken,
            )
        ]
