"""The sentences that state the outcome of a study."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.core.measurement import QUIET, Comparison, Interval
from trimtab.core.trial import Trial
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.evaluate import Objective
from trimtab.evaluation.fidelity import REINDEX
from trimtab.study import ranking
from trimtab.study.result import Best
from trimtab.study.samplers.ladder import as_written
from trimtab.study.study import Study

NOTED_SPREAD = 1.1
"""Factor between the longest and the shortest time of the model as written from which on a note says so."""


def improved(study: Study, found: Best, lost: Sequence[str], eager: Trial) -> str:
    """The sentence about a winner: its gain and its cost. ``lost`` has the reasons against better candidates; ``eager`` is the
    tuned original."""
    confirmation = found.confirmation
    ratio = confirmation.speedup
    assert ratio is not None
    missed = ranking.misses(eager, study.options.limits)
    words = (
        f"The original misses a limit ({missed[0].words.rstrip('.')}), which {found.trial.recipe} keeps. It" if missed else ""
    )
    words = f"{words or found.trial.recipe} is {_speed_text(study, confirmation)}"
    if confirmation.against_tuned is not None:
        tuned = confirmation.against_tuned
        words += f" and {tuned.single()} the tuned original"
        words += "" if tuned.unclear else f" ({tuned.bounds()})"
    words += _cost(study, found)
    words += "." + "".join(f" {note}" for note in found.trial.notes if note.endswith(REINDEX)) + interval_mismatch(found)
    return words + (f" Faster in the search, but not confirmed: {' '.join(lost)}" if lost else "")


def baseline_spread(study: Study, found: Comparison | None) -> list[str]:
    """A note if the time of the model as written differed by more than :data:`NOTED_SPREAD` between processes and minutes."""
    low, high = (None if found is None else found.rival_ms) or (1.0, 1.0)
    if found is None or study.task.mode != "infer" or high <= NOTED_SPREAD * low:
        return []
    slow = found.starts_left_out or found.starts_corrected
    allowed = "" if slow else ", which the interval allows for"
    words = f"The model as written took {low:.3g} to {high:.3g} ms, by process and minute{allowed}."
    if slow:
        used = "leaves these starts out" if found.starts_left_out else "uses the model's times in the search for these starts"
        words += (
            f" In {slow} of {found.starts + found.starts_left_out} starts its threads met more slowly than usual, because of "
            f"the machine: the speed-up {used}."
        )
    taken = found.foreign + found.stolen
    kept = _keep_memory_speedup(study.trials)
    if kept is not None and kept.low > 1 and kept.value >= NOTED_SPREAD:
        words += (
            " The cause is memory that it gives back to the system after each call and takes again: with keep_memory it is "
            f"{kept.times()} as fast."
        )
    elif kept is not None and kept.high < NOTED_SPREAD:
        words += f" The memory that it gives back is not the cause: with keep_memory it is {kept.times()} as fast."
    return [words + (f" Other processes used {taken:.0%} of the CPUs." if taken > QUIET else "")]


def _keep_memory_speedup(trials: Sequence[Trial]) -> Interval | None:
    """The speed-up of eager PyTorch that only keeps freed memory; ``None`` if no trial measured it."""
    eager = [trial for trial in trials if trial.recipe.backend.name == "eager"]
    return next((t.speedup for t in eager if [step.name for step in t.recipe.passes] == ["keep_memory"]), None)


def interval_mismatch(found: Best) -> str:
    """A sentence, with a space before it, if the intervals of the search and of the confirmation do not meet; else empty."""
    searched, again = found.trial.speedup, found.confirmation.speedup
    if searched is None or again is None or (searched.low <= again.high and again.low <= searched.high):
        return ""
    return (
        f" The search had measured {searched.times()}, an interval that does not meet the confirmed {again.times()}: quote the "
        "confirmed one, which rests on more starts."
    )


def _speed_text(study: Study, found: Confirmation) -> str:
    """The speed-up, and its conditions if other processes used the machine."""
    assert found.speedup is not None
    timed, one_thread = found.comparison, study.thread_limit is not None
    words = speed(found.speedup) + ", with one thread each" * one_thread
    if timed is not None and timed.disturbed:
        slow = f", and the cores were slower than usual for {timed.slowed:.0%} of the time" if timed.slowed > QUIET else ""
        return f"{words}, as things are ({timed.others if one_thread else timed.conditions}{slow})"
    if timed is not None and one_thread:
        return f"{words} ({timed.others})"
    return words


def _cost(study: Study, found: Best) -> str:
    """The loss of score, and the memory or size if the objective is one of them."""
    confirmation, limits, words = found.confirmation, study.options.limits, ""
    parity = confirmation.parity
    error = None if parity is None else parity.centred_error
    if confirmation.drop is not None:
        words += f"; its score {confirmation.drop.change()} ({confirmation.drop.bound()})"
    elif parity is not None and error is not None and not found.trial.recipe.exact:
        held = f" (limit {limits.max_error:.3g}; without labels max_drop {limits.max_drop} cannot be looked at)"
        shown = f"{error:.2%}" if error >= 1e-4 else f"{error:.1g}"
        words += f"; its outputs are off by {shown} of {parity.of}" + held * (limits.max_drop is not None)
    first = next((trial for trial in study.trials if trial.recipe == as_written()), None)
    if study.options.objective == "size" and first is not None and first.size_mb and found.trial.size_mb:
        words += f"; it has {found.trial.size_mb:.3g} MB, where the original has {first.size_mb:.3g} MB"
    if study.options.objective == "memory" and confirmation.peak_mb is not None:
        words += f"; it needs {confirmation.peak_mb:.3g} MB of memory"
        if confirmation.original_mb is not None:
            words += f", where the tuned original needs {confirmation.original_mb:.3g} MB"
    return words


def kept_original(study: Study, eager: Trial, original: Best, best: Best, lost: Sequence[str]) -> str:
    """Why nothing won, and what ships: the confirmed ``original``, or ``best``, which computes the same function."""
    ratio, own = best.confirmation.speedup, best.trial.recipe.backend.name == "eager"
    why = " ".join(lost).rstrip(".") or _nothing_won(study.trials, eager, study.options.objective)
    own_words = "The original ships" if best.artifact is not None else "The original stays, for which there is no artifact"
    words = f"{own_words if own else 'Nothing beats the original'}: {why}."
    if best.artifact is None or ratio is None:
        return words
    if best is not original and original.confirmation.speedup is not None:
        words += (
            f" The form of {original.trial.recipe} that stands alone runs at {original.confirmation.speedup.multiple()} of the "
            f"model as written, so {best.trial.recipe}, which computes the same, ships in its place, at {ratio.multiple()}."
        )
    elif ratio.high < 1:
        words += f" In the form that stands alone it runs at {ratio.multiple()} of the model as written."
    elif ratio.low > 1 and own and not best.trial.recipe.passes:
        words += (
            " In the form that stands alone, which leaves out the Python around its operators and whatever else that does, it "
            f"ran at {ratio.multiple()} of the model as written. It computes the same, and no tuning is behind it."
        )
    if ratio.high < 1:
        words += " Where its class is at hand, go on using the model itself."
    return words


def _nothing_won(trials: Sequence[Trial], eager: Trial, objective: Objective) -> str:
    others = ranking.other_runtimes(trials)
    if not others:
        return "no other runtime was measured; where the time was too short for that, the same command goes on from here"
    if ranking.value(eager, objective) is None:
        return f"its {objective} was not measured, so nothing is known to need less"
    timed = objective in ("latency", "throughput")
    better = "faster" if timed else f"better in {objective}"
    vague = sum(timed and t.speedup is not None and t.speedup.low <= 1 < t.speedup.high and t.speedup.doubtful for t in others)
    unknown = f"; of {vague} the machine was too busy to tell" if vague else ""
    return f"none of {len(trials)} trials was surely {better} than the tuned original within the limits{unknown}"


def speed(ratio: Interval) -> str:
    """Words for a speed-up ``ratio``: a figure, or a bound if the interval is wide; neither if the interval contains 1."""
    if ratio.unclear:
        return f"faster or slower than as written, which the timings leave unclear ({ratio.bounds()})"
    return f"{ratio.quoted()} as fast as written (95% interval {ratio.bounds()})"
