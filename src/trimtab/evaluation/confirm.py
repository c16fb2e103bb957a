"""Confirmation: the winner measured again in fresh processes, with fresh inputs, the files that ship, and the test data.

The fastest of many noisy measurements is partly lucky (the winner's curse). The confirmation is not selected by luck, so its
figures are the headline.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.core.backend import Executable
from trimtab.core.candidate import Candidate
from trimtab.core.measurement import LEAST_GAIN, Comparison, Drop, Interval, Measurement, Parity
from trimtab.core.recipe import Recipe
from trimtab.evaluation.evaluate import BUILT, Plan, apply_passes, build, load_saved, own_pids, runner_for, timing_figures
from trimtab.evaluation.fidelity import output_parity, write_mismatch
from trimtab.evaluation.prepared_workload import Subject, fresh_inputs
from trimtab.evaluation.reference import Reference, drop, predict, reference_of, score
from trimtab.measure.pairs import compare
from trimtab.measure.pooled import FEWEST_STARTS, pooled, usual_starts
from trimtab.measure.timer import Runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The figures of the second measurement. ``reason`` says why the winner was refused; ``None`` if it was confirmed."""

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
    """Peak memory of a fresh process that loads the files, measured as in the search; ``None`` without files."""
    original_mb: float | None = None
    """Peak memory of the tuned original, if memory is the objective."""
    loaded: bool = True
    """Whether the files that ship were measured; ``False`` for a build in memory because there are no such files."""
    again: bool = True
    """Whether anything was measured again; ``False`` if the settings of a training stay: the figures are then the search's."""

    measured_at: str | None = None
    """Date and time in UTC, ISO 8601. A study that is resumed later keeps the confirmation."""
    undecided: bool = False
    """Whether only a busy machine caused the refusal, so that the confirmation may be repeated."""
    log: str | None = None
    """The log of its process, as a path in the run folder."""
    traceback: str | None = None
    """Traceback of the exception that ended it, if any."""

    @property
    def before(self) -> float | None:
        """The baseline's score on the data of the confirmation; ``None`` without a score, or if the search saw that data."""
        return self.baseline_score if self.again and self.score is not None else None


def confirm(
    recipe: Recipe,
    files: pathlib.Path,
    subject: Subject,
    rivals: Mapping[str, Runner],
    *,
    plan: Plan,
    must_win: bool,
    costs: Mapping[str, float | None] | None = None,
    earlier: Mapping[str, Sequence[Comparison]] | None = None,
    seen: Sequence[Comparison] = (),
    judged: Confirmation | None = None,
    reference: Reference | None = None,
) -> tuple[Confirmation, Executable]:
    """Measure ``recipe`` from its saved ``files`` against ``rivals`` (``as_written`` and, if there is one, ``tuned``); without
    rivals it is judged and not timed.

    ``costs`` come from other processes: ``cold_s``, ``peak_mb``, and ``original_mb``, the peak memory of the tuned original.
    With ``must_win`` the winner is confirmed only if it is surely faster than the tuned original and not surely slower than as
    written; if memory is the objective, only if it needs less memory than the tuned original. ``earlier`` are comparisons with
    each rival in starts of other processes, which count as much as those timed now. ``judged`` is the result of :func:`judge`
    in the first of these starts. ``seen`` are the comparisons of the search with the model as written. ``reference`` is
    that of the test data; without it, the original is run.
    """
    figures: dict[str, Any] = {"loaded": (files / BUILT).exists(), **(costs or {})}
    executable, candidate = load(recipe, files, fresh_inputs(subject))
    found = judged or judge(recipe, executable, candidate, subject, plan, reference)
    reason = found.reason
    if reason is None and rivals:
        reason = _speed_problem(executable, candidate, subject, rivals, plan, must_win, figures, earlier or {}, seen)
    return dataclasses.replace(found, ok=reason is None, reason=reason, **figures), executable


def load(recipe: Recipe, files: pathlib.Path, candidate: Candidate) -> tuple[Executable, Candidate]:
    """The executable of ``recipe`` after its first call, from its saved ``files`` or built, and the inputs that it runs on."""
    if not (files / BUILT).exists():
        candidate = apply_passes(recipe, candidate)
        return build(recipe, candidate)[0], candidate
    executable = load_saved(recipe, files)
    candidate = _resized(recipe, candidate)
    args, kwargs = candidate.own_inputs()  # copies, because the call may write to them
    executable(*args, **kwargs)
    return executable, candidate


def _resized(recipe: Recipe, candidate: Candidate) -> Candidate:
    """The candidate with the inputs that ``recipe`` runs on; passes are not applied to the model again."""
    for step in recipe.passes:
        if "data.batch" in step.sets:
            candidate = step.apply(candidate)
    return candidate


def judge(
    recipe: Recipe,
    executable: Executable,
    candidate: Candidate,
    subject: Subject,
    plan: Plan,
    reference: Reference | None = None,
) -> Confirmation:
    """Compare outputs and score on the test data with ``reference`` or, without it, those of the original; nothing is timed."""
    figures: dict[str, Any] = {}
    reference = reference or _test_reference(subject)
    reason = _quality_problem(recipe, executable, candidate, subject, plan, reference, figures)
    return Confirmation(recipe=recipe, ok=reason is None, reason=reason, **figures)


def _test_reference(subject: Subject) -> Reference:
    def original(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return subject.model(*args, **kwargs)

    return reference_of(original, subject.splits.test, subject.workload.evaluation)


def _quality_problem(
    recipe: Recipe,
    executable: Executable,
    candidate: Candidate,
    subject: Subject,
    plan: Plan,
    reference: Reference,
    figures: dict[str, Any],
) -> str | None:
    evaluation, batches, most = subject.workload.evaluation, subject.splits.test, plan.limits.max_error
    full = subject.candidate.signature
    outputs = predict(PaddedExecutable(executable, full), batches, evaluation)
    parity = output_parity(reference, outputs, full, evaluation, exact=recipe.exact, max_error=most)
    figures["parity"] = parity
    if evaluation is not None and reference.scores is not None:
        scores = score(evaluation, outputs, batches)
        limit = plan.limits.drop_limit(reference.scores.value)
        lost = drop(evaluation, reference, scores, outputs, batches, limit)
        figures |= {"baseline_score": reference.scores.value, "score": scores.value, "drop": lost}
        if lost.decided is None and not recipe.exact:
            return f"On the test data it is undecidable {lost.unclear}."
        if lost.decided is False:
            return f"On the test data its score {lost.change()} ({lost.bound()}); the limit is {lost.show(limit)}."
    if not parity.ok:
        return f"On the test data: {parity.reason}"
    return write_mismatch(executable, subject.model, candidate, exact=recipe.exact, max_error=most)


def _speed_problem(
    executable: Executable,
    candidate: Candidate,
    subject: Subject,
    rivals: Mapping[str, Runner],
    plan: Plan,
    must_win: bool,
    figures: dict[str, Any],
    earlier: Mapping[str, Sequence[Comparison]],
    seen: Sequence[Comparison],
) -> str | None:
    runner = runner_for(executable, candidate, subject, plan.objective)
    starts = [*earlier.get("as_written", ()), time_start(runner, rivals["as_written"], plan)]
    found = pooled(starts, seen)
    figures |= timing_figures(found, executable, candidate, subject, plan.objective)
    if (tuned := rivals.get("tuned")) is not None:
        timed = [*earlier.get("tuned", ()), time_start(runner, tuned, plan)]
        counted = usual_starts(starts, seen)
        usual = [each for start, each in zip(starts, timed, strict=False) if start in counted]
        figures["against_tuned"] = pooled(usual if len(usual) >= FEWEST_STARTS else timed).ratio
    limits, latency = plan.limits, figures["latency_ms"].median
    if limits.latency_ms is not None and latency > limits.latency_ms:
        return f"Measured again, its latency is {latency:.4g} ms; the limit is {limits.latency_ms:g} ms."
    rate = figures.get("throughput")
    if limits.throughput is not None and rate is not None and rate.median < limits.throughput:
        found_again = f"{rate.median:.4g} examples/s; the limit is {limits.throughput:g} examples/s"
        return f"Measured again, its throughput is {found_again}."
    peak = figures.get("peak_mb")
    if limits.memory_mb is not None and peak is not None and peak > limits.memory_mb:
        return f"Measured again, its peak memory is {peak:.4g} MB; the limit is {limits.memory_mb:g} MB."
    return _gain_problem(found.ratio, plan, figures) if must_win else None


def time_start(runner: Runner, rival: Runner, plan: Plan) -> Comparison:
    """The comparison of one start, without noise between starts, which :func:`pooled` adds."""
    return compare(
        runner, rival, width=plan.width, seconds=plan.seconds, min_quads=plan.min_quads, pids=own_pids(rival), process_noise=0.0
    )


def _gain_problem(written: Interval, plan: Plan, figures: dict[str, Any]) -> str | None:
    """Why a gain is not proven: the ratio over the tuned original, then the ratio ``written`` over the model as written."""
    if plan.objective == "memory":
        return _memory_problem(figures.get("peak_mb"), figures.get("original_mb"))
    if plan.objective not in ("latency", "throughput"):
        return None
    ratio = figures.get("against_tuned", written)
    if ratio.unclear:
        figures["undecided"] = True
        said = f"Measured again, it is between {ratio.low:.2f} and {ratio.high:.3g} times as fast as the tuned original"
        if (comparison := figures["comparison"]).few:
            why = f"the calls are so slow that only {comparison.pairs} pairs were measured. Give it more time: --timing 60s."
        elif comparison.differs:
            why = f"{comparison.differs}. The same command measures it once more; longer with --timing 60s."
        else:
            why = "the machine was too busy to tell. The same command measures it once more; run it when the machine is quiet."
        return f"{said}: {why}"
    if not ratio.faster:
        found = f"{ratio.value:.2f}x the tuned original ({ratio.low:.2f} to {ratio.high:.2f})"
        if ratio.low <= 1:
            return f"Measured again, it is {found}, which does not prove that it is faster."
        return f"Measured again, it is {found}, less than the {LEAST_GAIN:.0%} that two processes of one program may differ by."
    if written.high < 1.0:
        figures["undecided"] = written.vague
        return (
            f"Measured again, it is {written.value:.2f}x as fast as written ({written.low:.2f} to {written.high:.2f}), which "
            "is slower, though the tuned original was slower still."
        )
    return None


def _memory_problem(peak: float | None, original: float | None) -> str | None:
    if peak is None or original is None:
        whose = "its peak memory" if peak is None else "the peak memory of the tuned original"
        return f"Measured again, {whose} is not known, which proves no gain."
    if peak < (1 - LEAST_GAIN) * original:
        return None
    return f"Measured again, its peak memory is {peak:.4g} MB and that of the tuned original {original:.4g} MB, no gain."
