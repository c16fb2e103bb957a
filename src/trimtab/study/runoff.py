"""Runoff: time recipes directly against each other whose speed the search could not distinguish.

The search times each recipe against the model as written, at different times. Two such ratios differ by two errors and by the
load of the machine. A direct comparison has neither. It is made in several starts, because a process keeps its speed: two forms
of one small network ran at a ratio of 1.31 in one pair of processes, and of 0.96 in another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from trimtab._internal.serialization import from_json, to_json
from trimtab.core.measurement import Comparison, Interval
from trimtab.core.trial import Trial
from trimtab.errors import TrimtabError
from trimtab.evaluation.evaluate import Objective, Plan
from trimtab.measure.pooled import narrow, number_of_starts, pooled, start_timing
from trimtab.study.ranking import WORTH, fewer_threads, possibly_faster, threads, with_fewer_threads
from trimtab.study.study import Study

RUNOFF = "runoff"
NO_TIME = "the time was too short."
NEAR = 1.25
"""A lossy recipe is also timed against the best exact one if its speed-up over that is below this factor."""
FEW, MOST = 3, 6
"""Least number of starts of a comparison that agree, and the largest number."""
ENOUGH = 0.5
"""A comparison begins if this share of its expected duration is left."""


def contenders(ahead: Sequence[Trial], objective: Objective) -> list[Trial]:
    """The first of the ranked trials ``ahead``, and those behind it that may be faster.

    A lossy first is joined by the best exact trial, unless that is much slower: a loss must bring a gain. A first of several
    threads is joined by the best trial of fewer threads that may be nearly as fast: more threads must bring a gain, too.
    """
    if objective not in ("latency", "throughput") or not ahead or ahead[0].speedup is None:
        return list(ahead[:1])
    first, speed = ahead[0], ahead[0].speedup.value
    exact = None if first.recipe.exact else next((trial for trial in ahead if trial.recipe.exact), None)
    close = exact is not None and exact.speedup is not None and NEAR * exact.speedup.value > speed
    fewer = with_fewer_threads(ahead)
    others = [*fewer, *[trial for trial in possibly_faster(ahead) if trial is not exact and trial not in fewer]]
    # the exact trial meets the fastest lossy one, last and once
    return [first, *others, *([exact] if exact is not None and (close or exact in possibly_faster(ahead)) else [])]


def cost_s(study: Study) -> float:
    """Expected duration of one comparison in seconds: in each start two processes load a recipe and are timed in turns."""
    return MOST * study.runner.load_s + study.options.timing_s


def run_off(study: Study, ahead: Sequence[Trial], *, until: float | None = None) -> list[Trial]:
    """``ahead`` with the winner of the runoff in front. No comparison lasts beyond ``until`` (``time.monotonic``).

    If a comparison fails or there is no time for it, the order of the search stays, except that a trial of fewer threads goes
    ahead of one that the search did not see to be faster by :data:`~trimtab.study.ranking.WORTH`.
    """
    found = contenders(ahead, study.options.objective)
    if len(found) < 2:
        return list(ahead)
    first, *others = found
    for other in others:
        ratio = _stored_ratio(study, other, first)  # a later run must decide the same
        late = until is not None and time.monotonic() + ENOUGH * cost_s(study) > until
        if ratio is None and not late and not study.interrupted():
            ratio = _timed_ratio(study, other, first, until)
        if ratio is None:
            if fewer_threads(other, first) and _speed(other) > (1 - WORTH) * _speed(first):
                study.notes.append(
                    f"{other.recipe} goes before {first.recipe}, by the search alone.{_required_gain(first, other)}"
                )
                first = other
            continue
        wins, note = _displaces(other, first, ratio), f"{other.recipe} runs at {ratio.multiple()} of {first.recipe}."
        loser, winner = (first, other) if wins else (other, first)
        if (ratio.value > 1) is not wins and fewer_threads(winner, loser):
            note += _required_gain(loser, winner)
        study.notes.append(f"Timed against each other, {note}")
        first = other if wins else first
    return [first, *[trial for trial in ahead if trial is not first]]


def _displaces(other: Trial, first: Trial, ratio: Interval) -> bool:
    """Whether ``other``, with ``ratio`` times the speed of ``first``, is better.

    A lossy trial must surely be faster than an exact one. An exact trial displaces a lossy one that it may equal in speed,
    unless it seems slower by more than :data:`~trimtab.study.ranking.WORTH`; so does a trial of fewer threads displace one of
    more, even if the ratio is unclear. The speed of a short call on several threads depends on where the host runs its cores: a
    small network took 0.042 ms in some minutes and 0.070 ms in others, and 0.043 ms in all of them with one thread.
    """
    if fewer_threads(other, first):
        return ratio.value > 1 - WORTH
    if ratio.vague:
        return ratio.low > 1
    if fewer_threads(first, other):
        return ratio.value > 1 + WORTH
    if other.recipe.exact == first.recipe.exact:
        return ratio.value > 1
    return ratio.high >= 1 and ratio.value > 1 - WORTH if other.recipe.exact else ratio.low > 1


def _required_gain(more: Trial, fewer: Trial) -> str:
    return f" {threads(more)} threads in place of {threads(fewer)} must bring {WORTH:.0%}."


def _speed(trial: Trial) -> float:
    return 0.0 if trial.speedup is None else trial.speedup.value


def _stored_ratio(study: Study, other: Trial, first: Trial) -> Interval | None:
    """The ratio that an earlier run of this study measured; ``None`` if there is none."""
    known = study.storage.get(_key(other, first))
    return None if known is None else from_json(Comparison, known).ratio


def _timed_ratio(study: Study, other: Trial, first: Trial, until: float | None) -> Interval | None:
    """The speed-up of ``other`` over ``first``, from up to :data:`MOST` starts; ``None``, with a note, if one fails."""
    study.progress.stage("timing against each other what the search could not tell apart")
    seconds = study.options.timing_s
    other_s, first_s = (
        0.0 if trial.comparison is None else trial.comparison.candidate.median / 1e3 for trial in (other, first)
    )
    count = min(MOST, number_of_starts(other_s, first_s, seconds))
    plan = study.plan(**start_timing(seconds, count)._asdict(), width=0.02)
    starts, longest = list[Comparison](), 0.0
    while len(starts) < count and not study.interrupted():
        begun = time.monotonic()
        if starts and ((until is not None and begun + longest > until) or (len(starts) >= FEW and narrow(starts))):
            break
        found = _start(study, other, first, plan, until)
        if isinstance(found, str):
            if not study.interrupted() and not (starts and found == NO_TIME):
                study.notes.append(f"{other.recipe} and {first.recipe} could not be timed against each other: {found}")
            if found != NO_TIME:
                return None
            break
        starts.append(found)
        longest = max(longest, time.monotonic() - begun)
    if not starts:
        return None
    comparison = pooled(starts)
    if not comparison.ratio.vague:  # a later run may measure it again
        study.storage.put(_key(other, first), to_json(comparison))
    return comparison.ratio


def _start(study: Study, other: Trial, first: Trial, plan: Plan, until: float | None) -> Comparison | str:
    """The comparison of one start of both, or why there is none."""
    name, seconds = first.recipe.hash, study.options.trial_s
    job = study.runner.job() | {
        "kind": "against",
        "recipe": other.recipe.to_json(),
        "files": str(study.runner.files(other)),
        "plan": to_json(plan),
        "seconds": seconds,
    }
    with study.runner.servers(RUNOFF) as rivals:
        rivals.start_job(name, {"recipe": first.recipe.to_json(), "fresh": False, "files": str(study.runner.files(first))})
        job["address"] = rivals.addresses[name]
        try:
            with study.runner.worker(job, study.folder / RUNOFF / other.recipe.hash) as worker:
                left = seconds if until is None else min(seconds, until - time.monotonic())
                rivals.ready(name, seconds=left, interrupted=study.interrupted)
                outcome = study.runner.wait_for(worker, deadline=until)
        except TrimtabError as error:
            lines = str(error).splitlines()  # the log has the traceback
            return " ".join([lines[0], *lines[1:][-1:]])
    if outcome.result is not None:
        return from_json(Comparison, outcome.result)
    return NO_TIME if outcome.cut_off else str(outcome.reason)


def _key(other: Trial, first: Trial) -> str:
    return f"ran off {other.recipe.hash} {first.recipe.hash}"
