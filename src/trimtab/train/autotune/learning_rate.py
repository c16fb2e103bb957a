"""Find a learning rate: the loss of a copy of the training while the rate rises from update to update."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trimtab._internal.files import path_of
from trimtab._internal.units import positive
from trimtab.core.technique import require
from trimtab.errors import CompileError, NonFiniteError, StorageError, UsageError, WorkloadError
from trimtab.train.autotune import auto_settings
from trimtab.train.autotune.batch_size import HasContext
from trimtab.train.autotune.shadow_run import copies, why_no_copy
from trimtab.train.data.micro_batches import check_loader
from trimtab.train.data.peek import peeking, preserved_random_state
from trimtab.train.engine import setup
from trimtab.train.engine.step import Step
from trimtab.train.loss.adapter import Batch
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import running
from trimtab.train.runtime.world import World

SMOOTHING, DIVERGED = 0.98, 4.0
"""As in fastai: the weight of past losses in the smoothed loss, and the multiple of the lowest loss that ends the sweep."""
_WIDTH, _HEIGHT, _MARGIN = 640, 360, 48


@dataclasses.dataclass(frozen=True)
class LearningRates:
    """The loss by learning rate, and the rate at which it falls fastest."""

    rate: float
    """The rate at which the smoothed loss falls most steeply over the logarithm of the rate."""
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """The loss of the update at each rate."""
    smoothed: tuple[float, ...]

    def __str__(self) -> str:
        ends = f"{self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        return f"The loss falls fastest at a learning rate of {self.rate:.2g} ({len(self.rates)} updates from {ends})."

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Write the curve as an SVG picture.

        Raises:
            StorageError: the file cannot be written.
        """
        place = path_of(path, "path", "rates.svg")
        try:
            place.write_text(self._repr_svg_(), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"The picture {place} cannot be written: {error.strerror}. Give another file.") from error

    def tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write ``find_lr/loss``, ``find_lr/smoothed`` and ``find_lr/rate`` by update for TensorBoard."""
        require("tensorboard")
        with require("torch.utils.tensorboard").SummaryWriter(str(path_of(folder, "folder", "runs/events"))) as writer:
            for update, figures in enumerate(zip(self.losses, self.smoothed, self.rates, strict=True)):
                for name, value in zip(("loss", "smoothed", "rate"), figures, strict=True):
                    writer.add_scalar(f"find_lr/{name}", value, update)

    def _repr_svg_(self) -> str:
        """The curve for notebooks: the smoothed loss over the logarithm of the rate."""
        low, high = math.log10(self.rates[0]), math.log10(self.rates[-1])
        least, most = min(self.smoothed), min(max(self.smoothed), DIVERGED * abs(self.smoothed[0]) + 1e-12)

        def at(rate: float, loss: float) -> tuple[float, float]:
            x = _MARGIN + (math.log10(rate) - low) / (high - low) * (_WIDTH - 2 * _MARGIN)
            share = (min(loss, most) - least) / ((most - least) or 1.0)
            return round(x, 1), round(_HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN), 1)

        points = " ".join(f"{x},{y}" for x, y in map(at, self.rates, self.smoothed))
        chosen, bottom = at(self.rate, least)[0], _HEIGHT - _MARGIN
        text = 'font-family="sans-serif" font-size="12" fill="#444"'
        ticks = [
            f'<text x="{at(10.0**power, least)[0]}" y="{bottom + 18}" text-anchor="middle" {text}>1e{power}</text>'
            for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        ]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
                f"<title>{self}</title>",
                f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
                f'<line x1="{chosen}" y1="{_MARGIN}" x2="{chosen}" y2="{bottom}" stroke="#c33" stroke-dasharray="4"/>',
                f'<text x="{chosen}" y="{_MARGIN - 8}" text-anchor="middle" {text}>{self.rate:.2g}</text>',
                f'<polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/>',
                f'<line x1="{_MARGIN}" y1="{bottom}" x2="{_WIDTH - _MARGIN}" y2="{bottom}" stroke="#444"/>',
                *ticks,
                f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle" {text}>learning rate</text>',
                f'<text x="4" y="{_MARGIN}" {text}>{most:.3g}</text><text x="4" y="{bottom}" {text}>{least:.3g}</text>',
                "</svg>",
            ]
        )


def find_lr(
    trainer: HasContext, batches: Iterable[Batch], *, lowest: float = 1e-7, highest: float = 10.0, updates: int = 100
) -> LearningRates:
    """The learning rate at which the loss falls fastest, from one sweep on a copy of the training.

    The rate of all parameter groups rises geometrically, one step per update. The sweep ends early when the smoothed loss is
    four times its lowest. The trainer, the loader and the random generators are as before.

    Source: Smith 2017, https://arxiv.org/abs/1506.01186; smoothing and the end as in fastai's ``lr_find``.

    Args:
        trainer: whose model, loss, optimizer and settings are copied.
        batches: a loader; it is begun anew at its end.
        lowest: the first rate.
        highest: the last rate.
        updates: how many updates the sweep has.

    Raises:
        UsageError: a number makes no sense, the training runs in several processes, cannot be copied, or makes its own steps.
        WorkloadError: the model, the loss or the loader failed, or the loss never fell.
    """
    check_loader(batches, "find_lr")
    for name, value in (("lowest", lowest), ("highest", highest)):
        positive(value, f"find_lr {name}")
    if not lowest < highest or not isinstance(updates, int) or updates < 10:
        raise UsageError(
            f"find_lr goes from {lowest:g} to {highest:g} in {updates} updates; give at least 10, and a higher end."
        )
    context = trainer.context
    if context.objective.manual:
        raise UsageError(
            "find_lr makes one backward pass and one step per update, and loss is a function that makes its own. Try several "
            "learning rates in short runs, and compare their losses: fit(train, steps=100).loss."
        )
    if context.world.processes > 1 or why_no_copy(context):
        raise UsageError(
            "find_lr trains a copy in one process. Call it in a script of its own, and give the rate that it finds."
        )
    settings = context.settings
    settings = settings.replaced({name: auto_settings.OFF[name] for name in auto_settings.undecided(settings)})
    settings = settings.replaced({"optimizer.nonfinite": "raise", "compile": False})
    try:
        model, objective, optimizer = copies(context.model, context.objective, context.optimizer)
    except CompileError as error:
        raise UsageError(f"find_lr trains a copy. {error}") from error
    context.modes.train(model)
    rates = [lowest * (highest / lowest) ** (index / (updates - 1)) for index in range(updates)]
    with preserved_random_state(), peeking(batches) as loader, running(settings):
        step = Step(model, objective, optimizer, settings, World(), HostClock())
        feed = setup.feed_for(loader, settings, HostClock(), setup.apply_memory_format(model, settings, context.device))
        losses = _sweep(step, optimizer, feed, rates)
    smoothed = _smoothed(losses)
    slopes = [_slope(rates, smoothed, index) for index in range(len(smoothed))]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    if not slopes[steepest] < 0:
        raise WorkloadError(
            f"The loss never fell between learning rates of {lowest:g} and {highest:g}, in {len(losses)} updates. Give other "
            "ends, or check that the training learns at all."
        )
    return LearningRates(rates[steepest], tuple(rates[: len(losses)]), tuple(losses), tuple(smoothed))


def _sweep(step: Step, optimizer: torch.optim.Optimizer, feed: Any, rates: Sequence[float]) -> list[float]:
    """The loss of an update at each of ``rates``, until the loss diverges."""
    losses: list[float] = []
    left = iter(rates)
    for epoch in itertools.count():
        feed.begin(epoch)
        for group in feed.groups():
            if (rate := next(left, None)) is None:
                return losses
            for options in optimizer.param_groups:
                options["lr"] = torch.full_like(options["lr"], rate) if isinstance(options["lr"], torch.Tensor) else rate
            try:
                losses.append(float(step(group).loss))
            except NonFiniteError:
                return losses
            past = _smoothed(losses)
            if len(past) > 10 and past[-1] > DIVERGED * min(past):
                return losses
    return losses


def _smoothed(losses: Sequence[float]) -> list[float]:
    """The exponential moving average of ``losses``, bias-corrected."""
    found, average = [], 0.0
    for index, loss in enumerate(losses, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        found.append(average / (1 - SMOOTHING**index))
    return found


def _slope(rates: Sequence[float], losses: Sequence[float], index: int) -> float:
    """The slope of the loss over the logarithm of the rate, between the neighbours of ``index``."""
    first, last = max(index - 1, 0), min(index + 1, len(losses) - 1)
    return (losses[last] - losses[first]) / math.log(rates[last] / rates[first]) if last > first else 0.0
