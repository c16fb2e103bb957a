"""Evaluate one recipe of a training (settings, losses, paired timing), and confirm the winner."""

from __future__ import annotations

import dataclasses
from typing import Any

from trimtab.core.measurement import Comparison, Drop, Interval, Parity
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.errors import NonFiniteError
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.evaluate import Plan, as_trial, own_pids, per_second, stage
from trimtab.evaluation.training.timer import Updates
from trimtab.evaluation.training.workload import TrainingSubject
from trimtab.measure.memory import PeakMemory
from trimtab.measure.pairs import compare
from trimtab.measure.timer import Runner
from trimtab.train.loss.loss_parity import BaselineLosses, final, increase, parity

WORTH = 1.05
"""Least apparent gain that is timed again if the first timing does not show it surely."""
STILL = (
    "Random numbers, as those of dropout, fall differently under it, so that each of its losses is another: they were held to "
    "those as written with dropout and the like off."
)


def try_recipe(recipe: Recipe, subject: TrainingSubject, reference: BaselineLosses, baseline: Runner, *, plan: Plan) -> Trial:
    """Train under the settings of ``recipe`` in this process, which should end afterwards. Errors become the trial's state.

    ``baseline`` makes updates as written, in a process of its own.
    """
    return as_trial(recipe, lambda figures: _pipeline(recipe, subject, reference, baseline, plan, figures))


def _pipeline(
    recipe: Recipe, subject: TrainingSubject, reference: BaselineLosses, baseline: Runner, plan: Plan, figures: dict[str, Any]
) -> tuple[State, str | None]:
    settings, seed = subject.settings_of(recipe), subject.workload.seed
    try:
        with stage("losses"):
            figures |= judged(recipe, subject, reference, plan, seed=seed)
    except NonFiniteError as error:
        return State.MISMATCH, str(error)
    if not figures["parity"].ok:
        return State.MISMATCH, figures["parity"].reason
    if not recipe.exact and (coarse := subject.why_too_coarse(settings, plan.limits.max_error)):
        return State.MISMATCH, coarse
    if figures["drop"].decided is False:
        return State.STOPPED, f"Rule 'loss': {loss_too_high(figures['drop'], reference)}"
    with stage("first updates"), PeakMemory() as peak:
        runner = Updates(subject, settings, seed=seed)
        runner.block(2)
    notes = (*((STILL,) if figures["parity"].still else ()), *runner.notes)
    figures |= {"cold_s": runner.first_s, "peak_mb": _peak_mb(peak), "notes": notes}
    with stage("first timing"):
        first = compare(
            runner, baseline, width=2 * plan.width, seconds=plan.quick_s, min_quads=4, pids=own_pids(baseline), keep_slowed=True
        )
    figures |= timing(first, subject)
    if first.ratio.high < plan.floor:
        return State.STOPPED, (
            f"Rule 'hopeless': after a first timing it runs at {_times(first.ratio)} of the settings as written, surely below "
            f"{plan.floor:.2f}, which is what it would need to come near the best so far."
        )
    with stage("timing"):
        found, remark = trial_timing(runner, baseline, plan)
    figures |= timing(found, subject)
    figures["notes"] += tuple(words for words in (remark, found.doubt) if words is not None)
    return State.COMPLETE, None


def trial_timing(runner: Runner, baseline: Runner, plan: Plan) -> tuple[Comparison, str | None]:
    """The timing of a trial, and a sentence if it is the second one.

    A timing that leaves an apparent gain of :data:`WORTH` over ``plan.over`` open is made again, for ``plan.again_s``, if an
    interval half as wide would show it. Only the second counts, so that the luck of the first is not in its figures.
    """
    found = compare(runner, baseline, width=plan.width, seconds=plan.seconds, pids=own_pids(baseline), keep_slowed=True)
    before, over = found.ratio, plan.over
    open_yet = before.low <= over < before.value / WORTH and before.low * before.value > over * over
    if plan.again_s <= plan.seconds or not open_yet:
        return found, None
    found = compare(runner, baseline, width=plan.width, seconds=plan.again_s, pids=own_pids(baseline), keep_slowed=True)
    return found, f"It was timed again for longer, because a first timing left open whether it gains: {before.multiple()}."


def confirm(
    recipe: Recipe, subject: TrainingSubject, baseline: Runner, *, plan: Plan, seed: int, must_win: bool
) -> Confirmation:
    """Judge and time ``recipe`` again in this fresh process, from other parameters and in another order of the data.

    With ``must_win`` it is confirmed only if the lower end of its speed-up is above 1.
    """
    settings, reference = subject.settings_of(recipe), subject.reference(seed=seed)
    figures = judged(recipe, subject, reference, plan, seed=seed)
    if recipe.exact and reference.draws and not figures["parity"].ok:
        reference = dataclasses.replace(reference, still=subject.reference_still(seed=seed))
        figures = judged(recipe, subject, reference, plan, seed=seed)
    with PeakMemory() as peak:
        runner = Updates(subject, settings, seed=seed)
        runner.block(2)
    found = compare(runner, baseline, width=plan.width, seconds=plan.seconds, pids=own_pids(baseline), keep_slowed=True)
    figures |= timing(found, subject) | {"cold_s": runner.first_s, "peak_mb": _peak_mb(peak), "baseline_score": reference.final}
    reason = _loss_problem(recipe, figures["parity"], figures.get("drop"), reference)
    reason = reason or _memory_problem(figures["peak_mb"], plan) or (_gain_problem(found) if must_win else None)
    undecided = reason is not None and must_win and found.ratio.doubtful
    return Confirmation(recipe=recipe, ok=reason is None, reason=reason, loaded=False, undecided=undecided, **figures)


def judged(recipe: Recipe, subject: TrainingSubject, reference: BaselineLosses, plan: Plan, *, seed: int) -> dict[str, Any]:
    """Compare the losses of a run with ``reference``.

    They may differ only because random numbers fall differently. So an exact recipe is then compared in a training without
    random numbers, and with them its loss must only not surely end up higher.
    """
    settings = subject.settings_of(recipe)
    losses = subject.losses(settings, seed=seed)
    found = parity(reference, losses, exact=recipe.exact)
    if not found.ok and reference.draws and reference.still is not None and parity(reference, losses, exact=False).ok:
        found = parity(reference.still, subject.losses(settings, seed=seed, still=True), exact=True, still=True)
    limit = plan.limits.drop_limit(reference.final)
    return (
        {"parity": found, "score": final(losses), "drop": increase(reference, losses, limit)} if found.ok else {"parity": found}
    )


def timing(found: Comparison, subject: TrainingSubject) -> dict[str, Any]:
    """The figures of a comparison for a trial."""
    return {
        "comparison": found,
        "speedup": found.ratio,
        "latency_ms": found.candidate,
        "throughput": per_second(found.candidate, subject.examples),
    }


def loss_too_high(drop: Drop, reference: BaselineLosses) -> str:
    """A sentence about a loss that ends up above the limit."""
    return (
        f"The loss ends up {drop.value:.4g} (at least {drop.low:.4g}) above the {reference.final:.4g} as written, over the "
        f"last {drop.n} updates; the limit is {drop.limit:.4g}."
    )


def _loss_problem(recipe: Recipe, found: Parity, drop: Drop | None, reference: BaselineLosses) -> str | None:
    if not found.ok:
        return f"From other parameters: {found.reason}"
    if drop is not None and (drop.decided is False or (drop.decided is None and not recipe.exact)):
        return (
            f"From other parameters, its loss {drop.change()} ({drop.bound()}), compared with {reference.final:.4g} as "
            f"written; the limit is {drop.limit:.4g}."
        )
    return None


def _memory_problem(peak_mb: float, plan: Plan) -> str | None:
    limit = plan.limits.memory_mb
    if limit is None or peak_mb <= limit:
        return None
    return f"Measured again, its peak memory is {peak_mb:.4g} MB; the limit is {limit:g} MB."


def _gain_problem(found: Comparison) -> str | None:
    ratio = found.ratio
    if ratio.doubtful:
        cause = "the updates are too slow to tell in the time for it" if found.few else "the machine was too busy to tell"
        way_out = "give it more, with timing_seconds=60" if found.few else "run it when the machine is quiet"
        return (
            f"Measured again, it is between {ratio.low:.2f} and {ratio.high:.3g} times as fast as written: {cause}. The same "
            f"call measures it once more; {way_out}."
        )
    return (
        None
        if ratio.low > 1
        else f"Measured again, it runs at {_times(ratio)} of the settings as written, which proves nothing."
    )


def _peak_mb(peak: PeakMemory) -> float:
    """Peak memory in MB: of the GPU's allocator if there is one, else of the process."""
    used = peak.result
    return used.device_mb if used.device_mb else used.host_mb


def _times(ratio: Interval) -> str:
    return f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"
