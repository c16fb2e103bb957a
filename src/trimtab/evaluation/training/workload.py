"""Try a workload's training under other settings: from the same parameters, on the same batches, in this process."""

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
from trimtab._internal.user_code import user_code
from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.technique import Pass
from trimtab.core.workload import Training, Workload
from trimtab.errors import CompileError, NonFiniteError, UsageError, WorkloadError
from trimtab.tensors.deepcopy import copied
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.auto_settings import OFF, shapes
from trimtab.train.autotune.shadow_run import candidate, why_too_coarse
from trimtab.train.data.loader_position import is_seekable
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.loss.loss_parity import BaselineLosses, late, perturb
from trimtab.train.runtime.torch_settings import random_state
from trimtab.train.runtime.train_modes import DropoutOff, changed_modules, float_buffers
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Event, Progressed
from trimtab.train.trainer import Trainer

PERTURBATION_SEEDS = (11, 12)
"""Seeds of the runs whose parameters are perturbed."""
MAX_DIFFERENCE = 0.01
"""Relative difference between the first losses of two runs from one seed that rounding cannot explain."""
EPOCH_OFFSET = 1000
"""Distance between the epochs of one seed and of the next, for a loader whose order depends on the epoch."""
_SPLIT_BATCHES = (
    "There is not enough memory for whole batches beside what other processes hold on the device, such as the other side of "
    "the comparison: an update was made in parts, whose time and losses say nothing of these settings. Give smaller batches."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSubject:
    """A prepared training workload."""

    workload: Workload
    training: Training
    settings: Settings
    """Settings as written, with every ``"auto"`` turned off, because the search decides them."""
    batches: Sequence[Batch]
    """The batches of the first updates, in the order of the workload's seed."""
    updates: int
    """Number of these updates."""
    candidate: Candidate
    """Candidate that passes inspect: the loss of the first batch as a model of its tensors, with the settings as written."""
    notes: tuple[str, ...]

    @property
    def examples(self) -> float:
        """Examples per update, on average."""
        return sum(map(examples, self.batches)) / self.updates

    def trainer(self, settings: Settings, seed: int, **more: Any) -> Trainer:
        """A new run from the parameters of ``seed``, with ``settings``."""
        return _trainer(self.workload, self.training, settings, seed, **more)

    def settings_of(self, recipe: Recipe) -> Settings:
        """The settings as written, changed by the passes of ``recipe``.

        Raises:
            CompileError: a pass cannot be used on the result of those before it.
        """
        now = self.candidate
        for step in recipe.passes:
            if reason := step.blocked(now):
                raise CompileError(reason)
            now = step.apply(now)
        return now.settings

    def blocked(self, step: Pass) -> str | None:
        """Why ``step`` cannot be tried on this training, or is of no use; ``None`` if it can."""
        if getattr(step, "dynamic", False) and len(shapes(self.batches)) == 1:
            return "Code for all sizes at once is of no use where all batches have one size."
        return step.blocked(self.candidate)

    @functools.cached_property
    def statistics_modules(self) -> frozenset[str]:
        """The names of modules that update statistics in training."""
        trainer = self.trainer(self.settings, self.workload.seed)
        before = float_buffers(trainer.model)
        with user_code("The training failed"):
            trainer.fit(self.batches[: self.settings.data.accumulate], steps=1)
        return frozenset(changed_modules(trainer.model, before))

    def losses(self, settings: Settings, *, seed: int, perturbation: int | None = None, still: bool = False) -> list[float]:
        """The loss of each of the first updates under ``settings``.

        Args:
            settings: how to train.
            seed: of the parameters and of random numbers.
            perturbation: seed of a perturbation of the parameters; none if ``None``.
            still: whether dropout and the like are off.

        Raises:
            WorkloadError: the model or the loss failed, or is not finite, or there is no memory for whole batches.
        """
        return self._run(settings, seed, perturbation, still)[0]

    def _run(
        self, settings: Settings, seed: int, perturbation: int | None = None, still: bool = False
    ) -> tuple[list[float], bool]:
        """The losses, and whether torch's random numbers were used for them."""
        found: list[float] = []

        def collect(trainer: Trainer, event: Event) -> None:
            if isinstance(event, Progressed):
                found.append(event.loss)

        trainer = self.trainer(settings, seed, callbacks=[collect], log_every=1)
        if perturbation is not None:
            perturb(trainer.model, perturbation)
        if still:
            trainer.context.modes = DropoutOff(trainer.model, self.statistics_modules)
        seed_all(seed)
        before = _generators()
        with user_code("The training failed"):
            summary = trainer.fit(self.batches, steps=self.updates)
        used_rng = any(not torch.equal(one, other) for one, other in zip(before, _generators(), strict=False))
        refuse_split_batches(trainer)
        if len(found) < self.updates:
            kind = NonFiniteError if settings.optimizer.nonfinite == "stop" and trainer.position.skipped else WorkloadError
            raise kind(
                f"The training ended after update {len(found)} of the {self.updates} that are compared. {summary.ended} Mend "
                "that, or compare fewer, with updates=..."
            )
        return found, used_rng

    def why_too_coarse(self, settings: Settings, limit: float) -> str | None:
        """Why outputs in the precision of ``settings`` cannot come close to the targets of the first batch, in a sentence."""
        trainer = self.trainer(settings, self.workload.seed)
        with user_code("The training failed"):
            return why_too_coarse(trainer.model, trainer.context.objective, settings, self.batches[0], limit)

    def reference(self, *, seed: int) -> BaselineLosses:
        """The losses as written, and how much rounding alone changes them.

        Raises:
            WorkloadError: two runs differ by more, from the first update on, or a run ends with losses that are not finite.
        """
        losses, used_rng = self._run(self.settings, seed)
        last = late(losses)
        if sum(map(math.isfinite, last)) < (least := min(2, len(last))):
            raise NonFiniteError(
                f"Of the last {len(last)} losses as written fewer than {least} are finite, so that others cannot be "
                "compared with them. Lower the learning rate, or clip with OptimizerSettings(clip_norm=1.0)."
            )
        others = [self.losses(self.settings, seed=seed, perturbation=s) for s in PERTURBATION_SEEDS]
        for other in others:
            if abs(other[0] - losses[0]) > MAX_DIFFERENCE * abs(losses[0]):
                raise WorkloadError(
                    f"Two runs from the same seed begin with different losses, {losses[0]:.6g} and {other[0]:.6g}, so nothing "
                    "can be said of other settings. Something is kept from run to run, or has a generator of its own: make "
                    "the model, the loss and the data anew in the functions that give them."
                )
        return dataclasses.replace(BaselineLosses.of(losses, others), draws=used_rng)

    def reference_still(self, *, seed: int) -> BaselineLosses | None:
        """The losses of a training without random numbers; ``None`` if the model cannot train so."""
        try:
            losses, used_rng = self._run(self.settings, seed, still=True)
            perturbed = []
            if not used_rng:
                perturbed = [self.losses(self.settings, seed=seed, perturbation=s, still=True) for s in PERTURBATION_SEEDS]
        except WorkloadError:  # some models fail or differ in evaluation mode, and are judged with random numbers
            return None
        return None if used_rng else BaselineLosses.of(losses, perturbed)


def prepared(workload: Workload, updates: int, *, seed: int | None = None) -> TrainingSubject:
    """Build the model and the loader, and read the batches of the first ``updates`` in the order of ``seed``.

    Raises:
        UsageError: the workload does not say how it is trained, or its model has parameters without a shape.
        WorkloadError: the user's own code raised, or the loader is empty.
    """
    training = workload.training
    if training is None:
        raise UsageError(
            f"The workload {workload.name!r} does not say how it is trained. Give it training=trimtab.Training(data=..., "
            "optimizer=..., loss=...)."
        )
    if training.optimizer is None:
        raise UsageError(
            f"The training of the workload {workload.name!r} has no optimizer=..., which only compression can do without: give "
            "a function of the parameters, such as torch.optim.AdamW."
        )
    settings, notes = without_auto(training.settings)
    seed_all(workload.seed if seed is None else seed)
    with user_code("The workload's data could not be loaded", "Go through the loader yourself once."):
        offset = 0 if seed is None else EPOCH_OFFSET * abs(seed - workload.seed)
        batches = first_batches(loader(training), updates * settings.data.accumulate, epoch=offset)
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


def without_auto(settings: Settings) -> tuple[Settings, list[str]]:
    """``settings`` without ``"auto"`` and ``adjust``, and a note if there were any."""
    off = {**OFF, "data.micro_batch": None}
    auto = {name: value for name, value in off.items() if settings.value(name) == "auto"}
    if settings.adjust:
        auto["adjust"] = False
    if not auto:
        return settings, []
    names = ", ".join(sorted(auto))
    return settings.replaced(auto), [f"What would decide itself is off in the settings as written: {names}."]


class _Reiterable:
    """Batches from a function whose result can be iterated only once: the function is called again for each epoch.

    Args:
        made: its first result, for the first epoch.
    """

    def __init__(self, make: Callable[[], Iterable[Batch]], made: Iterator[Batch]) -> None:
        self._make, self._made = make, [made]

    def __iter__(self) -> Iterator[Batch]:
        return self._made.pop() if self._made else iter(self._make())


def loader(training: Training) -> Iterable[Batch]:
    """The workload's loader; made again if there is a function for it."""
    if not callable(training.data):
        given: Iterable[Batch] = training.data
        return given
    made: Iterable[Batch] = training.data()
    return _Reiterable(training.data, made) if isinstance(made, Iterator) else made


def first_batches(batches: Iterable[Batch], count: int, *, epoch: int = 0) -> list[Batch]:
    """The first ``count`` batches from the beginning of ``epoch`` on, over as many epochs as needed.

    ``set_epoch`` is called on a loader whose order depends on the epoch. Other orders come from the random generators.

    Raises:
        WorkloadError: an epoch has no batches.
    """
    found: list[Batch] = []
    while len(found) < count:
        if is_seekable(batches):
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
    """A trainer of this process alone, even under a launcher: single-process trainings are compared."""
    seed_all(seed)
    assert training.optimizer is not None, "checked in prepared"
    return Trainer(
        new_model(workload),
        loss=copied(training.loss) if isinstance(training.loss, nn.Module) else training.loss,  # may have trained parameters
        optimizer=training.optimizer,
        schedule=training.schedule,
        settings=settings,
        **{"world": World(), **more},
    )


def refuse_split_batches(trainer: Trainer) -> None:
    """Refuse to time a run whose batches were split because memory was short."""
    if trainer.context.fit.memory_plan.sizer.limit is not None:
        raise WorkloadError(_SPLIT_BATCHES)


def new_model(workload: Workload) -> nn.Module:
    """A new model in training mode."""
    model = workload.build_model()
    if model is not workload.model:
        return model
    try:
        return copied(model)
    except MODEL_ERRORS as error:
        raise WorkloadError(f"The model cannot be copied: {error}. Give a function that builds it instead.") from error


def _generators() -> list[torch.Tensor]:
    """The states of the random generators that models use."""
    state = random_state()
    return [state["torch"], *state["cuda"], *([] if state["mps"] is None else [state["mps"]])]


def seed_all(seed: int) -> None:
    """Seed every generator that a model, a loader or an augmentation may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
