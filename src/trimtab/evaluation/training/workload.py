"""A workload's training, tried under other settings: from the same parameters, on the same batches, in this process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trimtab._internal.text import counted, of_type
from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.workload import Training, Workload, user_code
from trimtab.errors import CompileError, NonFiniteError, UsageError, WorkloadError
from trimtab.tensors.deepcopy import copied
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.auto_settings import OFF
from trimtab.train.autotune.shadow_run import candidate, rounded
from trimtab.train.data.loader_position import Seekable
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.loss.loss_parity import BaselineLosses, late, shaken
from trimtab.train.runtime.torch_settings import random_state
from trimtab.train.runtime.train_modes import Still, floats, gathered
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Event, Progressed
from trimtab.train.trainer import Trainer

SHAKEN = (11, 12)
"""Seeds of the runs whose parameters are shaken."""
REPEATS = 0.01
"""Relative difference between the first losses of two runs from the same seed that no rounding explains."""
EPOCHS_APART = 1000
"""Between the batches of one seed and those of the next, for a loader whose order is that of the epoch."""
_IN_PARTS = (
    "There is not enough memory for whole batches beside what other processes hold on the device, such as the other side of "
    "the comparison: an update was made in parts, whose time and losses say nothing of these settings. Give smaller batches."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSubject:
    """A training workload made ready to be tried."""

    workload: Workload
    training: Training
    settings: Settings
    """As written; what was ``"auto"`` is off, because whether it pays is what is to be found out."""
    batches: Sequence[Batch]
    """Of the first updates, in the order of the workload's seed."""
    updates: int
    """How many these are."""
    candidate: Candidate
    """What passes look at: the loss of the first batch as a model of its tensors, with the settings as written."""
    notes: tuple[str, ...]

    @property
    def examples(self) -> float:
        """Examples per update, on average."""
        return sum(map(examples, self.batches)) / self.updates

    def trainer(self, settings: Settings, seed: int, **more: Any) -> Trainer:
        """A new run from the parameters of ``seed``."""
        return _trainer(self.workload, self.training, settings, seed, **more)

    def settings_of(self, recipe: Recipe) -> Settings:
        """The settings that the passes of ``recipe`` make of those as written.

        Raises:
            CompileError: a pass cannot be used on what the ones before it made.
        """
        now = self.candidate
        for step in recipe.passes:
            if reason := step.blocked(now):
                raise CompileError(reason)
            now = step.apply(now)
        return now.settings

    @functools.cached_property
    def gathering(self) -> frozenset[str]:
        """The names of modules that gather statistics in training."""
        trainer = self.trainer(self.settings, self.workload.seed)
        before = floats(trainer.model)
        with user_code("The training failed"):
            trainer.fit(self.batches[: self.settings.data.accumulate], steps=1)
        return frozenset(gathered(trainer.model, before))

    def losses(self, settings: Settings, *, seed: int, shake: int | None = None, still: bool = False) -> list[float]:
        """The loss of each of the first updates under ``settings``.

        Args:
            settings: how to train.
            seed: of the parameters and of what is drawn.
            shake: the seed of a shake of the parameters.
            still: whether dropout and the like are off.

        Raises:
            WorkloadError: the model or the loss failed, or is not finite, or there is no memory for whole batches.
        """
        return self._run(settings, seed, shake, still)[0]

    def _run(self, settings: Settings, seed: int, shake: int | None = None, still: bool = False) -> tuple[list[float], bool]:
        """The losses, and whether torch's random numbers were drawn from for them."""
        found: list[float] = []

        def collect(trainer: Trainer, event: Event) -> None:
            if isinstance(event, Progressed):
                found.append(event.loss)

        trainer = self.trainer(settings, seed, callbacks=[collect], log_every=1)
        if shake is not None:
            shaken(trainer.model, shake)
        if still:
            trainer.context.modes = Still(trainer.model, self.gathering)
        seeded(seed)
        before = _generators()
        with user_code("The training failed"):
            summary = trainer.fit(self.batches, steps=self.updates)
        drew = any(not torch.equal(one, other) for one, other in zip(before, _generators(), strict=False))
        refuse_parts(trainer)
        if len(found) < self.updates:
            kind = NonFiniteError if settings.optimizer.nonfinite == "stop" and trainer.position.skipped else WorkloadError
            raise kind(
                f"The training ended after update {len(found)} of the {self.updates} that are compared. {summary.ended} Mend "
                "that, or compare fewer, with updates=..."
            )
        return found, drew

    def rounded(self, settings: Settings, limit: float) -> str | None:
        """Why outputs in the precision of ``settings`` cannot come close to the targets of the first batch, in a sentence."""
        trainer = self.trainer(settings, self.workload.seed)
        with user_code("The training failed"):
            return rounded(trainer.model, trainer.context.objective, settings, self.batches[0], limit)

    def written(self, *, seed: int) -> BaselineLosses:
        """The losses as written, and how far rounding alone would move them.

        Raises:
            WorkloadError: a run differs from another by more, from the very first update on, or ends with losses that are not
                finite.
        """
        losses, drew = self._run(self.settings, seed)
        last = late(losses)
        if sum(map(math.isfinite, last)) < (least := min(2, len(last))):
            raise NonFiniteError(
                f"Of the last {len(last)} losses as written fewer than {least} are finite, so that others cannot be "
                "compared with them. Lower the learning rate, or clip with OptimizerSettings(clip_norm=1.0)."
            )
        others = [self.losses(self.settings, seed=seed, shake=s) for s in SHAKEN]
        for other in others:
            if abs(other[0] - losses[0]) > REPEATS * abs(losses[0]):
                raise WorkloadError(
                    f"Two runs from the same seed begin with different losses, {losses[0]:.6g} and {other[0]:.6g}, so nothing "
                    "can be said of other settings. Something is kept from run to run, or has a generator of its own: make "
                    "the model, the loss and the data anew in the functions that give them."
                )
        return dataclasses.replace(BaselineLosses.of(losses, others), draws=drew)

    def written_still(self, *, seed: int) -> BaselineLosses | None:
        """The same for a training that draws nothing at random, if it can be kept from it."""
        try:
            losses, drew = self._run(self.settings, seed, still=True)
            shaken_too = [] if drew else [self.losses(self.settings, seed=seed, shake=s, still=True) for s in SHAKEN]
        except WorkloadError:  # some models do something else in evaluation mode, and are judged by what they draw
            return None
        return None if drew else BaselineLosses.of(losses, shaken_too)


def prepared(workload: Workload, updates: int, *, seed: int | None = None) -> TrainingSubject:
    """Build the model and the loader, and take the batches of the first ``updates`` in the order of ``seed``.

    Raises:
        UsageError: the workload does not say how it is trained, or its model has parameters without a shape.
        WorkloadError: the user's own code raised, or the loader gives nothing.
    """
    training = workload.training
    if training is None:
        raise UsageError(
            f"The workload {workload.name!r} does not say how it is trained. Give it training=trimtab.Training(data=..., "
            "optimizer=..., loss=...)."
        )
    settings, notes = decided(training.settings)
    seeded(workload.seed if seed is None else seed)
    with user_code("The workload's data could not be loaded", "Go through the loader yourself once."):
        apart = 0 if seed is None else EPOCHS_APART * abs(seed - workload.seed)
        batches = first(loader(training), updates * settings.data.accumulate, epoch=apart)
    with user_code("The workload's model, loss or optimizer failed", "Make an update with them yourself."):
        trainer = _trainer(workload, training, settings, workload.seed)
        if lazy := [name for name, value in trainer.model.state_dict().items() if is_lazy(value)]:
            raise UsageError(
                f"{lazy[0]} has no shape before a forward pass, and what is compared must begin with the same parameters. Call "
                "the model on a batch in the function that builds it."
            )
        known = candidate(trainer.context, settings, batches[0])
    return TrainingSubject(
        workload=workload,
        training=training,
        settings=settings,
        batches=batches,
        updates=updates,
        candidate=dataclasses.replace(known, settings=settings),
        notes=(*workload.notes, *notes),
    )


def decided(settings: Settings) -> tuple[Settings, list[str]]:
    """``settings`` with everything off that would decide itself, and a sentence if there was any."""
    off = {**OFF, "data.micro_batch": None}
    auto = {name: value for name, value in off.items() if settings.value(name) == "auto"}
    if settings.adjust:
        auto["adjust"] = False
    if not auto:
        return settings, []
    names = ", ".join(sorted(auto))
    return settings.replaced(auto), [f"What would decide itself is off in the settings as written: {names}."]


class _Anew:
    """Batches that a function gives which can be gone through once only: for each epoch it is called anew.

    Args:
        made: what it gave first, for the first epoch.
    """

    def __init__(self, make: Callable[[], Iterable[Batch]], made: Iterator[Batch]) -> None:
        self._make, self._made = make, [made]

    def __iter__(self) -> Iterator[Batch]:
        return self._made.pop() if self._made else iter(self._make())


def loader(training: Training) -> Iterable[Batch]:
    """The loader; made anew if there is a function for it."""
    if not callable(training.data):
        given: Iterable[Batch] = training.data
        return given
    made: Iterable[Batch] = training.data()
    return _Anew(training.data, made) if isinstance(made, Iterator) else made


def first(batches: Iterable[Batch], count: int, *, epoch: int = 0) -> list[Batch]:
    """The first ``count`` batches from the beginning of ``epoch`` on, over as many epochs as that takes.

    A loader whose order depends on the epoch alone is told it; the order of any other comes from the random generators.

    Raises:
        WorkloadError: an epoch has none.
    """
    found: list[Batch] = []
    while len(found) < count:
        if isinstance(batches, Seekable):
            batches.seek(epoch, 0)
            epoch += 1
        some = list(itertools.islice(iter(batches), count - len(found)))
        if not some:
            raise WorkloadError(
                f"The loader gave {counted(len(found), 'batch')} and then no more, but {count} are needed. Give one that "
                "can be gone "
                "through again and again, or a function that makes it."
            )
        found += some
    if not any(tensors_of(batch) for batch in found):
        raise WorkloadError(f"The loader's batches hold no tensor: the first is {of_type(found[0])}. Let them hold tensors.")
    return found


def _trainer(workload: Workload, training: Training, settings: Settings, seed: int, **more: Any) -> Trainer:
    """A trainer of this process alone, wherever it was started: what is compared is no training of several processes."""
    seeded(seed)
    return Trainer(
        built(workload),
        loss=copied(training.loss) if isinstance(training.loss, nn.Module) else training.loss,  # it may learn, too
        optimizer=training.optimizer,
        schedule=training.schedule,
        settings=settings,
        **{"world": World(), **more},
    )


def refuse_parts(trainer: Trainer) -> None:
    """Refuse figures of batches that were taken apart for want of memory."""
    if trainer.context.fit.memory_plan.fitting.limit is not None:
        raise WorkloadError(_IN_PARTS)


def built(workload: Workload) -> nn.Module:
    """A model of one's own, to be trained."""
    model = workload.build_model()
    if model is not workload.model:
        return model
    try:
        return copied(model)
    except MODEL_ERRORS as error:
        raise WorkloadError(f"The model cannot be copied: {error}. Give a function that builds it instead.") from error


def _generators() -> list[torch.Tensor]:
    """The states of those that models draw from."""
    state = random_state()
    return [state["torch"], *state["cuda"], *([] if state["mps"] is None else [state["mps"]])]


def seeded(seed: int) -> None:
    """Set every generator that a model, a loader or an augmentation may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
