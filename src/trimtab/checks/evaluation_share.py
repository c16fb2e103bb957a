"""Evaluation takes a large part of the run."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from trimtab.checks._script import edit, lines, run_share
from trimtab.checks.gradients_for_nothing import GradientsForNothing
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import Phase, ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class EvaluationShare(ScriptCheck):
    """Evaluation takes a large part of the run.

    An evaluation after every few steps costs as much as the training it judges. Evaluating more rarely, on a part of the
    data, or with a larger batch costs less.
    Source: https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
    """

    least: float = 0.25
    """Share of the run after its first step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The share of evaluation in the run after its first step."""
        taken = run_share(subject, "evaluation")
        if taken < self.least or GradientsForNothing().run(subject, environment):
            return []
        evaluating = [
            line
            for line in lines(subject, *typing.get_args(Phase))
            if "eval" in line.function or "valid" in line.function or "test" in line.function
        ]
        where = evaluating[0].site if evaluating else None
        message = (
            f"Evaluation takes {taken:.0%} of the run after its first step. Evaluate more rarely, with larger batches, or on "
            "a part of the data."
        )
        return [
            self.note(
                message,
                evidence={"run_share": taken, "seconds": subject.run_s.get("evaluation", 0.0)},
                where=where,
                category="run",
                edit=edit(subject, where, "Evaluate more rarely, or with larger batches."),
                ceiling=ScriptSettings(without="evaluation"),
                share=taken,
            )
        ]
