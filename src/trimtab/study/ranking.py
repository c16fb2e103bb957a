"""Rank finished trials: which keep the limits, which is best, and which limit no trial keeps."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from trimtab._internal.text import listed
from trimtab.core.backend import Backend
from trimtab.core.limits import Limits
from trimtab.core.measurement import LEAST_GAIN, Drop, Interval, Measurement
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.errors import UsageError
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.evaluate import Objective

Status = Literal["improved", "kept_original", "limits_not_met"]
Rung = Literal["as_written", "tuned", "lossless", "best"]
LEAST_APPARENT = 1.05
"""Least apparent speed-up over the tuned original for a confirmation, if no speed-up is sure."""
LARGE_DROP = 0.2
"""A larger limit of drop or error is probably a missing percent sign."""
TINY_DROP, BEYOND_SHARES = 1e-3, 10.0
"""A limit below this share of a score above the second number is probably meant in percent."""
MOST_NAMED = 2
"""The largest number of recipes that a note names."""
LEAST_GROWTH = 1.1
"""Least growth of a time or memory limit for another try. Free memory varies from run to run."""
CLASS_MARGIN = 1.2
"""Factor on the longest trial of a cost class, as an estimate for another backend of that class."""
QUALITY = ("accuracy", "loss")
"""Names of the limits on the score of a model and the loss of a training."""
WORTH = 0.05
"""Least possible gain that is worth a comparison, and least gain that is worth a loss of score."""
HOPELESS = 0.5
"""A recipe surely below this share of the best speed ends after its first timing; later stages do not gain a factor of 2."""
MOST_CONTENDERS = 2
"""Largest number of recipes in a runoff against the first."""
KEEP = 3
"""Most of the fastest trials that are confirmed on the test data, one after the other, until one holds."""
LEAST_TIMING_S, TIMED, EARLY = 1.0, 0.1, 0.04
"""Least seconds of a timing, and its maximum share of the remaining budget: of any trial, and of those that the search begins
with."""
RUNGS: tuple[Rung, ...] = ("as_written", "tuned", "lossless", "best")


@dataclasses.dataclass(frozen=True)
class Miss:
    """A limit that a trial misses: its name, the factor, and a sentence."""

    limit: str
    excess: float
    words: str


def limit_warnings(limits: Limits, score: float | None, share: bool, least: Mapping[str, Drop]) -> list[str]:
    """Notes on the limits before the search, from :func:`limit_warning` and :func:`unprovable_drop`."""
    return [words for words in (limit_warning(limits, score, share), unprovable_drop(limits, score, least)) if words]


def limit_warning(limits: Limits, score: float | None, share: bool) -> str | None:
    """A note if the limit on the score seems to be in the wrong unit, or has no effect because there are no labels.

    Raises:
        UsageError: the limit allows any loss.
    """
    if score is None:
        return " ".join(words for words in (_unlabelled(limits), _missing_percent(limits)) if words) or None
    given = limits.max_drop
    if not isinstance(given, (int, float)) or (share and given < LARGE_DROP):
        return None
    if not share:
        return _meant_in_percent(given, score)
    meant = f"If {given:g}% was meant, write --max-drop {given:g}% or max_drop={given / 100:g}."
    if given >= 1:
        raise UsageError(
            f"max_drop is {given:g}, but the score is a share between 0 and 1 ({score:.4f} as written) and cannot drop by that "
            f"much. {meant}"
        )
    return f"max_drop allows the score to drop by {given:.0%} ({score:.4f} as written). {meant}"


def unprovable_drop(limits: Limits, score: float | None, least: Mapping[str, Drop]) -> str | None:
    """A note if no lossy recipe can pass, because the data are too few to prove so small a drop.

    Args:
        score: score of the model as written.
        least: drop of the model as written against itself, on the selection data and on the test data.
    """
    limit = None if score is None else limits.drop_limit(score)
    beyond = [(found.upper, where, found) for where, found in least.items() if limit is not None and 0 < limit < found.upper]
    if not beyond or limit is None:
        return None
    upper, where, found = max(beyond, key=lambda each: each[0])
    return (
        f"With {found.n} examples of {where} data no drop below {found.show(upper)} can be proven, and the limit is "
        f"{found.show(limit)}: what may lose accuracy is refused, unless it scores better than the original. About "
        f"{math.ceil(found.n * upper / limit)} examples would do, or a larger --max-drop."
    )


def _meant_in_percent(given: float, score: float) -> str | None:
    if abs(score) <= BEYOND_SHARES or not 0 < given < TINY_DROP * abs(score):
        return None
    return (
        f"max_drop allows the score to drop by {given:g}, in its own units ({score:.4g} as written). If {100 * given:.3g}% of "
        f"it was meant, give {given * abs(score):.3g}."
    )


def _unlabelled(limits: Limits) -> str | None:
    if limits.max_drop is None:
        return None
    if limits.max_drop == 0:
        return "There are no labels, so max_drop 0 cannot be looked at: it allows exact recipes only."
    return (
        f"There are no labels, so max_drop {limits.max_drop} cannot be looked at: the outputs of recipes that may lose "
        f"accuracy are held to max_error {limits.max_error:.3g} instead."
    )


def _missing_percent(limits: Limits) -> str | None:
    given = limits.max_error
    if given < LARGE_DROP:
        return None
    return (
        f"max_error allows the outputs to be off by {given:.0%} of what they vary by. If {given:g}% was meant, write "
        f"--max-error {given:g}% or max_error={given / 100:g}."
    )


def _user_limits(limits: Limits) -> dict[str, tuple[float, str]]:
    """The limits that the user gave on other things than accuracy, with their units, by name."""
    known = {
        "latency": (limits.latency_ms, "ms"),
        "memory": (limits.memory_mb, "MB"),
        "size": (limits.size_mb, "MB"),
        "throughput": (limits.throughput, "examples/s"),
    }
    return {name: (limit, unit) for name, (limit, unit) in known.items() if limit is not None}


def misses(trial: Trial, limits: Limits) -> list[Miss]:
    """The limits that a measured ``trial`` misses."""
    found = [miss for miss in (_accuracy(trial, limits),) if miss is not None]
    measured = {
        "latency": None if trial.latency_ms is None else trial.latency_ms.median,
        "memory": trial.peak_mb,
        "size": trial.size_mb,
        "throughput": None if trial.throughput is None else trial.throughput.median,
    }
    for name, (limit, unit) in _user_limits(limits).items():
        if (value := measured[name]) is None:
            words = f"Its {name} was not measured, so it cannot be said to keep {limit:g} {unit}."
            found.append(Miss(name, math.inf, words))
            continue
        excess, side = (limit / value, "below") if name == "throughput" else (value / limit, "above")
        if excess > 1:
            words = f"Its {name} of {value:.4g} {unit} is {side} the limit of {limit:g} {unit}."
            found.append(Miss(name, excess, words))
    return found


def _accuracy(trial: Trial, limits: Limits) -> Miss | None:
    drop = trial.drop
    if drop is None and limits.max_drop == 0 and trial.state is State.COMPLETE and not trial.recipe.exact:
        return Miss("accuracy", float("inf"), "It may lose accuracy, and without labels nobody sees that it keeps max_drop 0.")
    if drop is None or drop.limit is None or drop.decided or (drop.decided is None and trial.recipe.exact):
        return None  # exact recipes passed the stricter check against floating-point noise
    excess = drop.upper / drop.limit if drop.limit else float("inf")
    if drop.of == "loss":
        return Miss("loss", excess, _loss_miss(drop, drop.limit))
    if drop.decided is False:
        return Miss("accuracy", excess, f"Its drop of {drop.show(drop.value)} is beyond the limit of {drop.show(drop.limit)}.")
    return Miss("accuracy", excess, f"Undecidable {drop.unclear}.")


def _loss_miss(rise: Drop, limit: float) -> str:
    if rise.decided is False:
        return f"Its loss ends up {rise.value:.4g} higher, beyond the limit of {limit:.4g}."
    return (
        f"Undecidable with {rise.n} updates: its loss {rise.change()}, but up to {rise.upper:.4g} higher cannot be "
        f"excluded and the limit is {limit:.4g}; more of them, with updates=..., may tell."
    )


def ships(trial: Trial) -> bool:
    """Whether ``trial`` can become an artifact; the original need not."""
    return trial.size_mb is not None or trial.recipe.backend.name == "eager"


def feasible(trial: Trial, limits: Limits) -> bool:
    """Whether ``trial`` is measured, can ship, and keeps every limit."""
    return trial.state is State.COMPLETE and ships(trial) and not misses(trial, limits)


def with_confirmed_figures(trial: Trial, found: Confirmation) -> Trial:
    """``trial`` with the figures of its confirmation, as far as they were measured."""
    figures = ("speedup", "latency_ms", "throughput", "score", "drop", "peak_mb", "cold_s")
    again = {name: getattr(found, name) for name in figures}
    return dataclasses.replace(trial, **{name: figure for name, figure in again.items() if figure is not None})


def value(trial: Trial, objective: Objective) -> float | None:
    """The objective of ``trial``, higher is better; ``None`` if unmeasured."""
    if objective == "memory":
        return None if trial.peak_mb is None else -trial.peak_mb
    if objective == "size":
        return None if trial.size_mb is None else -trial.size_mb
    return None if trial.speedup is None else trial.speedup.low  # the lower end, lest a noisy trial win by luck


def ranked(trials: Iterable[Trial], limits: Limits, objective: Objective) -> list[Trial]:
    """The trials that keep the limits, best first. A lossy recipe precedes the best exact one only if it is surely better."""
    kept = [trial for trial in trials if feasible(trial, limits) and value(trial, objective) is not None]
    kept.sort(key=lambda trial: -(value(trial, objective) or 0.0))
    exact = next((trial for trial in kept if trial.recipe.exact), None)
    if exact is None:
        return kept
    paying = [trial for trial in kept if not trial.recipe.exact and surely_better(trial, exact, objective)]
    return [*paying, exact, *(trial for trial in kept if trial not in paying and trial is not exact)]


def to_confirm(best_first: Sequence[Trial]) -> list[Trial]:
    """The trials that may be confirmed, until one holds: the first few, each of another network if they are smaller ones; then
    the first of the whole network, if none of those is; then the first lossless one, because all others may lose too much on
    the test data."""
    found, networks = list[Trial](), set[tuple[object, ...]]()
    for trial in best_first:
        network = tuple(step for step in trial.recipe.passes if step.compresses)
        if len(found) < KEEP and not (network and network in networks):
            found.append(trial)
            networks.add(network)
    rest = [trial for trial in best_first if trial not in found]
    if all(trial.recipe.compresses for trial in found):
        found += [trial for trial in rest if not trial.recipe.compresses][:1]
    return found + [trial for trial in rest if trial.recipe.exact and trial not in found][:1]


def speed_thresholds(recipe: Recipe, trials: Iterable[Trial], limits: Limits, objective: Objective) -> dict[str, float]:
    """Thresholds for the first timing of ``recipe``: a speed below which the trial stops, and one below which timing is not
    extended. The latter is that of the best trial, for an exact recipe of the best exact trial."""
    if objective not in ("latency", "throughput"):
        return {}
    order = [trial for trial in ranked(trials, limits, objective) if trial.speedup is not None]
    peers = [trial for trial in order if trial.recipe.exact or not recipe.exact]
    floor, best = ([trial.speedup.low for trial in found if trial.speedup] or [0.0] for found in (order, peers))
    return {"floor": HOPELESS * floor[0], "best": best[0]}


def possibly_faster(ranked: Sequence[Trial]) -> list[Trial]:
    """The trials behind the first of ``ranked`` that may be faster, the likeliest first.

    A trial with a wide interval ranks low, because ranks go by the lower end.
    """
    if not ranked or (first := ranked[0].speedup) is None:
        return []
    found = [(trial.speedup.high, trial) for trial in ranked[1:] if trial.speedup is not None]
    able = [(high, trial) for high, trial in found if high > (1 + WORTH) * first.value]
    return [trial for _, trial in sorted(able, key=lambda each: -each[0])[:MOST_CONTENDERS]]


def threads(trial: Trial) -> int:
    """Threads of the trial's timed calls; 0 if unknown."""
    found = None if trial.comparison is None else trial.comparison.candidate.conditions.get("threads")
    return found if isinstance(found, int) else 0


def fewer_threads(trial: Trial, other: Trial) -> bool:
    """Whether both are of one kind, exact or not, and ``trial`` used fewer threads than ``other``."""
    return trial.recipe.exact == other.recipe.exact and 0 < threads(trial) < threads(other)


def with_fewer_threads(ranked: Sequence[Trial]) -> list[Trial]:
    """The best of ``ranked`` with fewer threads than the first, if it may be at most :data:`WORTH` slower; empty if none."""
    if not ranked or (first := ranked[0].speedup) is None:
        return []
    near = [trial for trial in ranked if trial.speedup is not None and trial.speedup.high > (1 - WORTH) * first.value]
    return [trial for trial in near if fewer_threads(trial, ranked[0])][:1]


def surely_better(trial: Trial, other: Trial, objective: Objective) -> bool:
    """Whether ``trial`` is better than ``other`` by more than chance; false if either is unmeasured.

    Memory and size have no interval: the gain must exceed their variation between processes.
    """
    one, than = value(trial, objective), value(other, objective)
    if one is None or than is None:
        return False
    if objective in ("latency", "throughput"):
        return other.speedup is not None and one > other.speedup.value
    return -one <= (1 - LEAST_GAIN) * -than


def ahead(
    trials: Iterable[Trial], limits: Limits, objective: Objective, eager: Trial | None, *, tuned: bool = True
) -> list[Trial]:
    """The trials that keep the limits and seem to beat ``eager``, best first.

    ``eager`` is the tuned original, or without ``tuned`` the original as written. If no trial is surely better, the list
    has the trial with the largest apparent gain, if that exceeds :data:`LEAST_APPARENT`: the confirmation measures for longer.
    """
    order = ranked(trials, limits, objective)
    found = order[: order.index(eager)] if eager in order else order
    if found or eager is None or eager.speedup is None or objective not in ("latency", "throughput"):
        return found
    bar = LEAST_APPARENT * eager.speedup.value
    others = [t for t in order if t != eager and not (tuned and t.recipe.backend.name == "eager" and t.recipe.exact)]
    behind = [trial for trial in others if trial.speedup is not None and trial.speedup.value > bar]
    return sorted(behind, key=lambda trial: -(trial.speedup.value if trial.speedup else 0.0))[:1]


def other_runtimes(trials: Iterable[Trial]) -> list[Trial]:
    """The trials of other runtimes than that of the original, without those that could not begin or for which the time was too
    short."""
    begun = [trial for trial in trials if trial.state is not State.SKIPPED and trial.recipe.backend.name != "eager"]
    return [trial for trial in begun if trial.state is not State.STOPPED or trial.ended_by != "time"]


def surely_ahead(trial: Trial, eager: Trial, objective: Objective) -> bool:
    """Whether ``trial`` surely beats ``eager``, and is in :func:`ahead` for more than its apparent gain."""
    one, other = value(trial, objective), value(eager, objective)
    return one is not None and (other is None or one >= other)


def best_eager(trials: Iterable[Trial], limits: Limits | None = None, objective: Objective = "latency") -> Trial | None:
    """The tuned original: the fastest exact eager trial that keeps ``limits`` and has a known ``objective``.

    If none does, the fastest of all exact eager trials. For memory and size, only trials that no other surely undercuts count.
    """
    found = [t for t in trials if t.recipe.backend.name == "eager" and t.recipe.exact and t.state is State.COMPLETE]
    found = [trial for trial in found if feasible(trial, limits or Limits())] or found
    found = [trial for trial in found if value(trial, objective) is not None] or found
    least = [trial for trial in found if not any(surely_better(other, trial, objective) for other in found)]
    return max(least, key=lambda trial: trial.speedup.low if trial.speedup else 0.0, default=None)


def unmet(trials: Sequence[Trial], limits: Limits) -> str:
    """The sentence if no trial keeps the limits: the nearest recipe, the binding limit, and recipes that cannot ship."""
    complete = [t for t in trials if t.state is State.COMPLETE and t.latency_ms is not None]
    stopped = [t for t in trials if t.state is State.STOPPED and t.latency_ms is not None and t.ended_by != "time"]
    shipping = [t for t in complete if ships(t)]
    accurate = [t for t in shipping if not any(m.limit in QUALITY for m in misses(t, limits))]
    held = next((t for t in complete if not ships(t) and not misses(t, limits)), None)
    but = "" if held is None else f" {held.recipe} would keep them. {held.reason}"
    wishes = ", ".join(f"{name} {limit:g} {unit}" for name, (limit, unit) in _user_limits(limits).items())
    if not accurate:
        quality = "loss" if any(t.drop is not None and t.drop.of == "loss" for t in shipping) else "accuracy"
        return f"Nothing meets the limits ({wishes or quality}), and no recipe kept the {quality} limit.{but}"
    nearest = min(accurate, key=lambda trial: max((miss.excess for miss in misses(trial, limits)), default=0.0))
    worst = max(misses(nearest, limits), key=lambda miss: miss.excess, default=None)
    if worst is None:
        return f"Nothing was confirmed within the limits; {nearest.recipe} kept them in the search only.{but}"
    binding = _binding([*shipping, *stopped], limits)
    shortfall = f"{worst.words[0].lower()}{worst.words[1:]} {binding}"
    return f"Nothing meets {wishes}. The nearest is {nearest.recipe}: {shortfall}{but}"


def _binding(trials: Sequence[Trial], limits: Limits) -> str:
    """Words for the single limit without which a trial would pass."""
    alone: dict[str, Trial] = {}
    for trial in trials:
        missed = {miss.limit for miss in misses(trial, limits)}
        if len(missed) == 1:
            alone.setdefault(missed.pop(), trial)
    quality = next((name for name in QUALITY if name in alone), None)
    if quality is not None or len(alone) == 1:
        name = quality or next(iter(alone))
        return f"The {name} limit is what binds: without it, {alone[name].recipe} would do."
    if alone:
        return f"Any of these limits binds alone: {', '.join(sorted(alone))}."
    return "No single limit binds: lifting any one of them would not be enough."


def entry(trial: Trial, limits: Limits, *, rung: Rung | None = None, confirmed: Confirmation | None = None) -> dict[str, Any]:
    """A trial as a rung in the JSON output; with ``confirmed``, the figures are those of the confirmation."""
    source = confirmed if confirmed is not None else trial
    reason = trial.reason or (" ".join(miss.words for miss in misses(trial, limits)) or None)
    head = {"rung": rung} if rung else {}
    return head | {
        "recipe": str(trial.recipe),
        "state": trial.state.value,
        "reason": reason,
        "speedup": _figures(source.speedup, "value", "low", "high"),
        "latency_ms": _figures(source.latency_ms, "median", "p90"),
        "score": {"value": source.score},
        "drop": _figures(source.drop, "value", "upper"),
        "size_mb": trial.size_mb,
        "peak_mb": trial.peak_mb if source.peak_mb is None else source.peak_mb,
        "cold_s": trial.cold_s if source.cold_s is None else source.cold_s,
    }


def _figures(source: Interval | Measurement | Drop | None, *names: str) -> dict[str, float | None]:
    """The figures ``names`` of ``source``; all ``None`` without one."""
    return {name: None if source is None else getattr(source, name) for name in names}


def limit_was_raised(trial: Trial, *, seconds: float, memory_mb: float) -> bool:
    """Whether a time or memory limit ended ``trial`` that is higher now."""
    now = {"time": seconds, "memory": memory_mb}.get(trial.ended_by or "", 0.0)
    return trial.limit is not None and now > LEAST_GROWTH * trial.limit


def likely_s(backend: Backend, trials: Sequence[Trial], original: Recipe, startup_s: float) -> float:
    """Expected duration of a trial of ``backend`` in seconds: from its own trials, from those of its cost class, or its usual
    cost. One that a limit of time ended needs more than it took, which says nothing of other backends."""
    timed = [trial for trial in trials if trial.seconds > 1]
    ended = [trial for trial in timed if trial.ended_by == "time"]
    same = [t.seconds * (LEAST_GROWTH if t in ended else 1) for t in timed if t.recipe.backend.name == backend.name]
    others = [trial for trial in timed if trial.recipe.backend.name != "eager" and trial not in ended]
    alike = [trial.seconds for trial in others if trial.recipe.backend.cost == backend.cost]
    least = min([startup_s, *[t.seconds for t in timed if t.recipe == original]])
    usual = max(alike) * CLASS_MARGIN if alike else least + {"seconds": 5.0, "minute": 45.0, "minutes": 150.0}[backend.cost]
    return max(same, default=usual)


def in_time(seconds: float, end: float | None, share: float = TIMED) -> float:
    """``seconds`` of timing, shortened to a ``share`` of the time until ``end`` (``time.monotonic``), but at least
    :data:`LEAST_TIMING_S`."""
    return seconds if end is None else min(seconds, max(LEAST_TIMING_S, share * (end - time.monotonic())))


def share_s(left_s: float, needed_s: Sequence[float]) -> float:
    """The part of ``left_s`` seconds that a trial may take, where others need ``needed_s``: the remainder, or half if that is
    larger. Equal shares that are too short for each would leave nothing that ends."""
    return max(left_s - sum(needed_s), left_s / 2)


def share_used_up(limit_s: float) -> str:
    """The reason of a first form that was ended after ``limit_s`` seconds, its part of the budget."""
    return (
        f"Rule 'share': it still ran after {limit_s:.0f} s, and the rest of the budget is for runtimes that were not tried yet "
        "and for the confirmation. The same command tries it again, for longer."
    )


def too_short(left_out: Sequence[Trial]) -> str:
    """A sentence about the recipes that the budget left no time for."""
    rest = ", which the report lists" if len(left_out) > MOST_NAMED else ""
    names = listed([str(trial.recipe) for trial in left_out], MOST_NAMED)
    slow = any(trial.recipe.backend.cost != "seconds" for trial in left_out)
    why = " Runtimes that compile in seconds come first." if slow else ""
    return f"The budget was too short to try {names}{rest}.{why} The same command goes on with them."
