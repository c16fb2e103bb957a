"""The check contract: a check inspects a workload and reports findings."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from trimtab._internal.registry import Registry
from trimtab.core.finding import Finding
from trimtab.core.measurement import Scalar
from trimtab.core.script_settings import CodeEdit, ScriptSettings
from trimtab.core.technique import Technique
from trimtab.hardware.environment import Environment


class Check(Technique):
    """One rule about workloads: what is slow or risky, with evidence and a remedy."""

    about: ClassVar[Literal["model", "script"]] = "model"
    """What :meth:`run` reads: a model's :class:`~trimtab.evaluation.prepared_workload.Subject`, or the
    :class:`~trimtab.core.evidence.ProbeRecord` of a script."""

    @abc.abstractmethod
    def run(self, subject: Any, environment: Environment) -> list[Finding]:
        """The findings for ``subject``, of the kind that :attr:`about` names; empty if there are none.

        Must not raise and must not measure. The caller measures the gain of a remedy, in fresh processes.
        """


class ScriptCheck(Check):
    """A check of scripts: :meth:`run` reads the :class:`~trimtab.core.evidence.ProbeRecord` of one."""

    about = "script"

    def note(
        self,
        message: str,
        *,
        evidence: Mapping[str, Scalar],
        category: Literal["data", "step", "precision", "memory", "run"],
        where: str | None = None,
        settings: ScriptSettings | None = None,
        edit: CodeEdit | None = None,
        ceiling: ScriptSettings | None = None,
        share: float | None = None,
    ) -> Finding:
        """A finding at the level that findings have before their gain is measured."""
        return Finding(
            rule=self.name,
            level="note",
            message=message,
            evidence=evidence,
            where=where,
            category=category,
            settings=settings,
            edit=edit,
            ceiling=ceiling,
            share=share,
        )


CHECKS: Registry[Check] = Registry("check", "trimtab.checks", Check)  # type: ignore[type-abstract]
