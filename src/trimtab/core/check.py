"""Checks look at a workload and report findings."""

from __future__ import annotations

import abc
import typing
from typing import Any

from trimtab._internal.registry import Registry
from trimtab.hardware.environment import Environment

if typing.TYPE_CHECKING:
    from trimtab.core.finding import Finding
from trimtab.core.technique import Technique


class Check(Technique):
    """One finding about a workload: what is slow or risky, with evidence and a remedy."""

    @abc.abstractmethod
    def run(self, subject: Any, environment: Environment) -> list[Finding]:
        """The findings on ``subject``, a :class:`~trimtab.evaluation.prepared_workload.Subject`; empty if it is fine.

        It never raises, and looks without measuring: what a remedy gains is for whoever asked to find out, in fresh processes.
        """


CHECKS: Registry[Check] = Registry("check", "trimtab.checks", Check)  # type: ignore[type-abstract]
