"""Learning rate schedules from torch's schedulers, made once the number of updates is known."""

from __future__ import annotations

import bisect
import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from trimtab._internal.text import of_type
from trimtab._internal.user_code import user_code
from trimtab._internal.validation import refuses
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim.optimizer_dict import OptimizerDict, SchedulerDict

Schedule = Callable[[Optimizer, int], LRScheduler]
"""``schedule(optimizer, updates)`` returns a scheduler, which the Trainer steps once per update, ``updates`` times in all."""

ENDLESS = 10**7
"""The number of updates of a timed run without a given end. A schedule may end before that: the rate then stays."""
_MIN_UPDATES, _NEGLIGIBLE = 100, 1e-3
"""Fewest updates of a run in which a schedule made for epochs is detected; the share of the rate that counts as 0."""


def one_cycle(max_lr: float | list[float], *, warmup: float = 0.3) -> Schedule:
    """Rise to ``max_lr`` in the first ``warmup`` share of the run, then fall to nearly 0.

    Source: Smith & Topin 2017, https://arxiv.org/abs/1708.07120
    """
    _check_share(warmup)
    return lambda optimizer, updates: OneCycleLR(optimizer, max_lr, total_steps=max(updates, 1) + 1, pct_start=warmup)


def cosine(*, warmup: float = 0.05, floor: float = 0.0) -> Schedule:
    """Rise to the optimizer's rate in the first ``warmup`` share of the run, then fall on a cosine to ``floor`` times that.

    Source: Loshchilov & Hutter 2016, https://arxiv.org/abs/1608.03983
    """
    return _with_warmup(warmup, floor, lambda done: (1 + math.cos(math.pi * done)) / 2)


def linear(*, warmup: float = 0.05, floor: float = 0.0) -> Schedule:
    """Rise to the optimizer's rate in the first ``warmup`` share of the run, then fall linearly to ``floor`` times that."""
    return _with_warmup(warmup, floor, lambda done: 1 - done)


def check_given(schedule: Any) -> None:
    """Check that ``schedule`` is a schedule.

    Raises:
        UsageError: it is neither a scheduler of torch nor callable as ``schedule(optimizer, updates)``.
    """
    if schedule is None or isinstance(schedule, LRScheduler):
        return
    if isinstance(schedule, Mapping):
        for each in schedule.values():
            check_given(each)
        return
    name = getattr(schedule, "__name__", None) or repr(schedule)
    fix = (
        "Give one such as trimtab.train.optim.schedules.cosine(), or a function: "
        "lambda optimizer, updates: StepLR(optimizer, updates // 3)."
    )
    if not callable(schedule):
        raise UsageError(f"schedule is {name}, {of_type(schedule)}, and no schedule. {fix}")
    if isinstance(schedule, type) and issubclass(schedule, LRScheduler):
        raise UsageError(f"schedule is {name}, a class, to which the updates of a run may mean anything. {fix}")
    if error := refuses(schedule, None, 1):
        raise UsageError(f"schedule is {name}, which cannot be called with (optimizer, updates): {error}. {fix}") from error


def by_name(schedule: Schedule | LRScheduler | Mapping[str, Schedule] | None, optimizer: Optimizer) -> Any:
    """``schedule``, with schedules by the name of their optimizer combined into one.

    Raises:
        UsageError: there is no optimizer of such a name; or a scheduler stands where a function that makes it is needed.
    """
    if not isinstance(schedule, Mapping):
        return schedule
    names = list(optimizer.optimizers) if isinstance(optimizer, OptimizerDict) else []
    for name, each in schedule.items():
        if name not in names:
            known = f"those are {', '.join(names)}" if names else "there is one, without a name: give schedule=cosine()"
            raise UsageError(f"schedule has {name!r}, and no optimizer is called that; {known}.")
        if isinstance(each, LRScheduler):
            raise UsageError(
                f"schedule {name!r} is a scheduler. By name, give functions that make them: "
                f"{{{name!r}: lambda optimizer, updates: {type(each).__name__}(optimizer, ...)}}."
            )
    parts = dict(schedule)

    def combined(optimizers: Optimizer, updates: int) -> LRScheduler:
        assert isinstance(optimizers, OptimizerDict)
        return SchedulerDict(optimizers, {name: build(each, optimizers[name], updates) for name, each in parts.items()})

    return combined


def build(schedule: Schedule, optimizer: Optimizer, updates: int) -> LRScheduler:
    """Call ``schedule`` for a run of ``updates``.

    Raises:
        UsageError: it returns no scheduler, or a scheduler of another optimizer.
        WorkloadError: it raises.
    """
    with user_code("The schedule raised"):
        found = schedule(optimizer, updates)
    if not isinstance(found, LRScheduler):
        raise UsageError(f"The schedule returned {of_type(found)}, not one of torch.optim.lr_scheduler. Let it return one.")
    refuse_foreign(found, optimizer)
    return found


def refuse_foreign(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Check that ``scheduler`` belongs to ``optimizer``.

    Raises:
        UsageError: it belongs to another optimizer.
    """
    if scheduler.optimizer is not optimizer:
        raise UsageError("The schedule is of another optimizer than the one given. Make it from the same object.")


def advance(scheduler: LRScheduler) -> str | None:
    """Step ``scheduler`` after an update. At the end of the schedule the rate stays, and a sentence about it is returned.

    Raises:
        UsageError: the optimizer has a new parameter group for which the scheduler has no rate.
    """
    if isinstance(scheduler, ReduceLROnPlateau):  # stepped by the validation
        return None
    if isinstance(scheduler, SchedulerDict):
        return next(filter(None, [advance(each) for each in inner_schedulers(scheduler)]), None)
    if _ended(scheduler):
        return (
            f"The schedule ended after {scheduler.last_epoch} updates, and the run makes more, as where the loader gives more "
            "batches than its len() says: the learning rate stays as it is."
        )
    extend_to_new_groups(scheduler)
    scheduler.step()
    return None


def inner_schedulers(scheduler: LRScheduler) -> list[LRScheduler]:
    """The schedulers that ``scheduler`` is made of."""
    found: list[LRScheduler] = getattr(scheduler, "_schedulers", [])
    return found


def extend_to_new_groups(scheduler: LRScheduler) -> None:
    """Extend ``scheduler`` to parameter groups that were added after it was made, such as thawed layers.

    Raises:
        UsageError: the scheduler defines no rate for a new group.
    """
    for inner in inner_schedulers(scheduler):
        extend_to_new_groups(inner)
    groups, rates = scheduler.optimizer.param_groups, getattr(scheduler, "base_lrs", None)
    shapes: list[Any] = getattr(scheduler, "lr_lambdas", [])
    if rates is None or len(rates) >= len(groups):
        return
    kept_in_group = isinstance(scheduler, OneCycleLR) and "max_lr" not in groups[-1]
    if kept_in_group or isinstance(scheduler, CyclicLR) or (len(shapes) < len(groups) and len(set(map(id, shapes))) > 1):
        raise UsageError(
            f"The optimizer has {len(groups)} groups of parameters by now, and the {type(scheduler).__name__} was made for "
            f"{len(rates)}, so that it has no rate for the others. Give schedule=cosine(), which takes them in, or all groups "
            "from the start, with requires_grad=False on what is to be thawed."
        )
    rates += [group.setdefault("initial_lr", copy.deepcopy(group["lr"])) for group in groups[len(rates) :]]
    shapes += shapes[-1:] * (len(groups) - len(shapes))


def check(scheduler: LRScheduler | None, to_come: int | None, watched: EarlyStopping | None) -> None:
    """Check that ``scheduler`` lasts for the remaining updates, and that a plateau scheduler has a validation to follow.

    Args:
        to_come: the remaining updates, if known.
        watched: the metric of the validation; ``None`` without a validation.

    Raises:
        UsageError: the scheduler would fail, or do nothing.
    """
    if to_come == ENDLESS:
        to_come = None
    if isinstance(scheduler, SchedulerDict):
        for each in inner_schedulers(scheduler):
            check(each, to_come, watched)
        return
    if isinstance(scheduler, OneCycleLR) and to_come is not None and scheduler.last_epoch + to_come > scheduler.total_steps:
        raise UsageError(
            f"The OneCycleLR has {scheduler.total_steps} steps, of which {scheduler.last_epoch} are made, and the run has "
            f"{to_come} updates to come. Give schedule=one_cycle(...), which fits itself to the run, or fewer epochs."
        )
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if watched is None:
        raise UsageError("ReduceLROnPlateau goes by the validation, and there is none. Give fit(train, validate, ...).")
    if scheduler.mode != (mode := watched.mode or "min"):
        raise UsageError(
            f"ReduceLROnPlateau has mode={scheduler.mode!r}, but goes by the validation's {watched.metric}, which is watched "
            f"with mode={mode!r}. Give both one mode: EarlyStopping(metric=..., mode={scheduler.mode!r}) names the "
            "figure; with a large patience it ends nothing."
        )


def remark(scheduler: LRScheduler | None, updates: int | None, epoch: int | None) -> str | None:
    """A sentence if ``scheduler`` seems to be made for one step per epoch, while the Trainer steps it once per update.

    The sign is a schedule that is at its end in the first tenth of the run.

    Args:
        updates: updates of the run in all, if known.
        epoch: updates of one epoch, if known.
    """
    if scheduler is None or updates is None or not _MIN_UPDATES <= updates < ENDLESS:
        return None
    for each in _final_schedulers(scheduler):
        if 0 < (end := _end(each, updates)) < updates / 10:
            one = "updates" if epoch is None else f"{epoch:,} updates"
            return (
                f"The {type(each).__name__} is at its end after {end:.0f} updates, and the run has {updates:,}: it is stepped "
                f"once per update. If it was made for epochs, multiply lengths by the {one} of one, and take the root of that "
                "degree of what every step multiplies the rate by."
            )
    return None


def _final_schedulers(scheduler: LRScheduler) -> list[LRScheduler]:
    """The schedulers in ``scheduler`` that set the rate at the end of a run, or itself if it is made of none."""
    inner = inner_schedulers(scheduler)
    acting = inner[-1:] if isinstance(scheduler, SequentialLR) else inner
    return [each for one in acting for each in _final_schedulers(one)] or [scheduler]


def _ended(scheduler: LRScheduler) -> bool:
    """Whether one more step would raise."""
    if isinstance(scheduler, SequentialLR):
        coming, bounds = scheduler.last_epoch + 1, scheduler._milestones
        return coming not in bounds and _ended(inner_schedulers(scheduler)[bisect.bisect(bounds, coming)])
    if isinstance(scheduler, OneCycleLR):
        return scheduler.last_epoch >= scheduler.total_steps
    return any(map(_ended, inner_schedulers(scheduler)))


def _end(scheduler: LRScheduler, updates: int) -> float:
    """The update at which ``scheduler`` has no change left, or next to nothing of the rate; infinite if that is not known."""
    if isinstance(scheduler, (StepLR, ExponentialLR)) and 0 < scheduler.gamma < 1:
        every = scheduler.step_size if isinstance(scheduler, StepLR) else 1
        return every * math.log(_NEGLIGIBLE) / math.log(scheduler.gamma)
    if isinstance(scheduler, MultiStepLR):
        return max(scheduler.milestones, default=0)
    if isinstance(scheduler, CosineAnnealingLR):
        return scheduler.T_max
    if isinstance(scheduler, LinearLR) and scheduler.end_factor >= scheduler.start_factor:  # a warm-up
        return math.inf
    if isinstance(scheduler, (LinearLR, PolynomialLR)):
        return scheduler.total_iters
    if isinstance(scheduler, LambdaLR) and any(_decays_to_zero(shape, updates) for shape in scheduler.lr_lambdas):
        return updates * 9 // 100
    return math.inf


def _decays_to_zero(shape: Callable[[int], float], updates: int) -> bool:
    """Whether the factor ``shape`` stays nearly 0 from 9% of a run of ``updates`` on, compared to what it was before."""
    with contextlib.suppress(WorkloadError), user_code("The schedule raised"):  # raised when the run reaches that update
        factors = [shape(updates * share // 100) for share in range(100)]
        return max(factors[9:]) < _NEGLIGIBLE * max(factors[:9])
    return False


def _with_warmup(warmup: float, floor: float, shape: Callable[[float], float]) -> Schedule:
    _check_share(warmup)

    def schedule(optimizer: Optimizer, updates: int) -> LRScheduler:
        rise = round(warmup * updates)

        def factor(update: int) -> float:
            if update < rise:
                return (update + 1) / (rise + 1)
            done = min((update - rise) / max(updates - rise, 1), 1.0)
            return floor + (1 - floor) * shape(done)

        return LambdaLR(optimizer, factor)

    return schedule


def _check_share(warmup: float) -> None:
    if not isinstance(warmup, Real) or not 0 <= warmup < 1:
        raise UsageError(f"warmup is {warmup!r}; it is a share of the run: at least 0, below 1.")
