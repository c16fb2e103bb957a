"""Runs the checks of scripts on a record."""

from __future__ import annotations

from trimtab._internal.user_code import user_code
from trimtab.core.check import CHECKS
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.technique import install_hint, missing_package
from trimtab.errors import TrimtabError
from trimtab.hardware.environment import Environment

LEVELS = ("error", "warning", "note")
HEALTHY = "healthy"
"""The check that speaks only if no other does."""


def run_checks(record: ProbeRecord, environment: Environment) -> tuple[list[Finding], list[str]]:
    """The findings of all checks of scripts on ``record``, and a sentence for each check that could not run.

    Errors come first, then findings with a larger :attr:`Finding.share`. ``healthy`` is left out if another check found
    something. A check that raises, such as one of a plug-in, fails alone.

    Example::

        findings, failures = run_checks(observe(Command.of(["train.py"])), Environment.capture())
    """
    found, failures = list[Finding](), list(CHECKS.broken.values())
    for name, cls in CHECKS.items():
        if cls.about != "script":
            continue
        try:
            with user_code(f"The check {name} failed"):
                check = cls()
                if package := missing_package(check.requires):
                    failures.append(f"The check {name} needs {package}, which is not installed: {install_hint(package)}.")
                elif why := check.blocked_here():
                    failures.append(why)
                else:
                    found += check.run(record, environment)
        except TrimtabError as error:
            failures.append(str(error))
    found.sort(key=lambda finding: (LEVELS.index(finding.level), -(finding.share or 0.0)))
    return [finding for finding in found if finding.rule != HEALTHY] or found, failures
