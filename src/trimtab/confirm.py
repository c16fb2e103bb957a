"""The winner, measured again: fresh processes, fresh inputs, the files that ship, the test data. That number is the headline.

Whoever is picked as the fastest of many noisy measurements was lucky too (the winner's curse); luck does not reach this far.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from trimtab.candidate import Candidate
from trimtab.contracts import Executable
from trimtab.evaluate import BUILT, Plan, apply_passes, load_saved, ours, runner_for, start, timing
from trimtab.measure.memory import PeakMemory
from trimtab.measure.pairs import compare
from trimtab.measure.parity import compare_outputs
from trimtab.measure.timer import Runner
from trimtab.measurement import Comparison, Drop, Interval, Measurement, Parity
from trimtab.recipe import Recipe
from trimtab.reference import Fitted, drop, predict, refer, score
from trimtab.subject import Subject, fresh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What the winner showed when it was measured again. ``reason`` says why it did not hold, if it did not."""

    schema: ClassVar[int] = 1

    recipe: Recipe
    ok: bool
    reason: str | None = None
    speedup: Interval | None = None
    against_tuned: Interval | None = None
    comparison: Comparison | None = None
    latency_ms: Measurement | None = None
    throughput: Measurement | None = None
    baseline_score: float | None = None
    score: float | None = None
    drop: Drop | None = None
    parity: Parity | None = None
    cold_s: float | None = None
    peak_mb: float | None = None
    loaded: bool = True
    """Whether the files that ship were measured, and not a build in memory because no such files exist."""

    undecided: bool = False
    """Whether it was refused only because neighbours disturbed the measurement, so that another try is fair."""


def confirm(
    recipe: Recipe,
    files: pathlib.Path,
    subject: Subject,
    rivals: Mapping[str, Runner],
    *,
    plan: Plan,
    must_win: bool,
) -> tuple[Confirmation, Executable]:
    """Measure ``recipe`` from its saved ``files`` against ``rivals`` (``as_written`` and, if there is one, ``tuned``).

    With ``must_win`` it holds only if the lower end of its interval against the tuned original is above 1.
    """
    candidate = fresh(subject)
    loaded = (files / BUILT).exists()
    begun = time.perf_counter()
    with PeakMemory() as peak:
        if loaded:
            executable = load_saved(recipe, files)
            candidate = _resized(recipe, candidate)
            executable(*candidate.args, **candidate.kwargs)
        else:
            candidate = apply_passes(recipe, candidate)
            executable, _ = start(recipe, candidate)
    figures: dict[str, Any] = {"cold_s": time.perf_counter() - begun, "peak_mb": peak.result.host_mb, "loaded": loaded}
    reason = _faithful(recipe, executable, subject, plan, figures) or _fast(
        executable, candidate, subject, rivals, plan, must_win, figures
    )
    return Confirmation(recipe=recipe, ok=reason is None, reason=reason, **figures), executable


def _resized(recipe: Recipe, candidate: Candidate) -> Candidate:
    """The candidate with the inputs that ``recipe`` runs on; its model is not rewritten again."""
    for step in recipe.passes:
        if "batch" in step.sets:
            candidate = step.apply(candidate)
    return candidate


def _faithful(recipe: Recipe, executable: Executable, subject: Subject, plan: Plan, figures: dict[str, Any]) -> str | None:
    evaluation, batches = subject.workload.evaluation, subject.splits.test

    def original(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return subject.model(*args, **kwargs)

    reference = refer(original, batches, evaluation)
    outputs = predict(Fitted(executable, subject.candidate.signature), batches, evaluation)
    max_error = None if evaluation is not None or recipe.exact else plan.limits.max_error
    parity = compare_outputs(reference.nested(), outputs, exact=recipe.exact, max_error=max_error)
    figures["parity"] = parity
    if evaluation is not None and reference.scores is not None:
        scores = score(evaluation, outputs, batches)
        limit = plan.limits.drop_limit(reference.scores.value)
        lost = drop(evaluation, reference, scores, outputs, batches, limit)
        figures |= {"baseline_score": reference.scores.value, "score": scores.value, "drop": lost}
        if lost.decided is False or (lost.decided is None and not recipe.exact):
            return (
                f"On the test data its drop is {lost.show(lost.value)} (up to {lost.show(lost.upper)}); the limit is "
                f"{lost.show(limit)}."
            )
    return None if parity.ok else f"On the test data: {parity.reason}"


def _fast(
    executable: Executable,
    candidate: Candidate,
    subject: Subject,
    rivals: Mapping[str, Runner],
    plan: Plan,
    must_win: bool,
    figures: dict[str, Any],
) -> str | None:
    runner = runner_for(executable, candidate, subject, plan.objective)
    written = rivals["as_written"]
    found = compare(runner, written, width=plan.width, seconds=plan.seconds, pids=ours(written))
    figures |= timing(found, executable, candidate, subject, plan.objective)
    if (tuned := rivals.get("tuned")) is not None:
        against = compare(runner, tuned, width=plan.width, seconds=plan.seconds, pids=ours(tuned))
        figures["against_tuned"] = against.ratio
    limits, latency = plan.limits, figures["latency_ms"].median
    if limits.latency_ms is not None and latency > limits.latency_ms:
        return f"Measured again, its latency is {latency:.4g} ms; the limit is {limits.latency_ms:g} ms."
    if limits.memory_mb is not None and figures["peak_mb"] > limits.memory_mb:
        return f"Measured again, its peak memory is {figures['peak_mb']:.4g} MB; the limit is {limits.memory_mb:g} MB."
    ratio = figures.get("against_tuned", found.ratio)
    if must_win and plan.objective in ("latency", "throughput") and ratio.vague:
        figures["undecided"] = True
        return (
            f"Measured again, it is between {ratio.low:.2f} and {ratio.high:.3g} times as fast as the tuned original: the "
            "machine was too busy to tell. The same command measures it once more; run it when the machine is quiet."
        )
    if must_win and plan.objective in ("latency", "throughput") and ratio.low <= 1.0:
        return (
            f"Measured again, it is {ratio.value:.2f}x the tuned original ({ratio.low:.2f} to {ratio.high:.2f}), which does "
            "not prove that it is faster."
        )
    return None
