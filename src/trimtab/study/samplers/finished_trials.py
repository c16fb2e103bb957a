"""What finished trials show: their speed, whether they keep the accuracy limit, and whether they gain enough."""

from __future__ import annotations

from trimtab.core.trial import State, Trial
from trimtab.study.samplers.sampler import SearchState

PAYS = 1.15
"""Least gain of another form of the network, below which it is not trained."""


def speed(trial: Trial | None) -> float:
    """The speed-up of a trial that was timed; 0 for any other."""
    if trial is None or trial.speedup is None or trial.state not in (State.COMPLETE, State.STOPPED):
        return 0.0
    return trial.speedup.value


def loses_accuracy(trial: Trial) -> bool:
    """Whether less rounding could help the trial: it lost too much accuracy, or lost some and may have lost too much. A limit
    that the data cannot decide even without a loss does not count."""
    if trial.recipe.exact:
        return False
    lost = trial.drop
    if trial.state is State.MISMATCH or lost is None:
        return trial.state is State.MISMATCH
    return lost.decided is False or (lost.decided is None and lost.limit is not None and lost.value > 0)


def holds(trial: Trial) -> bool:
    """Whether the trial was measured to the end, and keeps the accuracy limit where it can be judged."""
    return trial.state is State.COMPLETE and (trial.drop is None or bool(trial.drop.decided))


def is_worthwhile(trial: Trial, over: Trial, facts: SearchState, least: float = PAYS) -> bool:
    """Whether ``trial`` is better than ``over`` in the objective by the factor ``least``, from which on it is worth a training,
    or one is unmeasured."""
    one, other = facts.value(trial), facts.value(over)
    if one is None or other is None:
        return True
    gain = other / one if one < 0 else speed(trial) / max(speed(over), 1e-9)  # memory and size are negated
    return gain >= least
