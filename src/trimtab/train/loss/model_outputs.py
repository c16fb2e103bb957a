"""Sentences on what a model returned, where the loss needs something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trimtab._internal.text import of_type


def kind(outputs: Any) -> str:
    """``outputs`` in words: ``a tuple of 2: Tensor of shape (8, 3), Tensor of shape ()``."""
    if isinstance(outputs, Mapping):
        return f"{of_type(outputs)} with {', '.join(map(repr, list(outputs)[:6]))}"
    if isinstance(outputs, (tuple, list)):
        return f"{of_type(outputs)} of {len(outputs)}: {', '.join(map(_one, outputs[:4]))}"
    return of_type(outputs)


def unusable(loss: Any, outputs: Any) -> str | None:
    """A sentence for ``loss(outputs, targets)`` that failed because ``outputs`` is no tensor; ``None`` if it is one."""
    if isinstance(outputs, torch.Tensor):
        return None
    name = getattr(loss, "__name__", None) or type(loss).__name__
    part = f"outputs[{_first(outputs)!r}]" if isinstance(outputs, (Mapping, tuple, list)) and outputs else "outputs.logits"
    if isinstance(outputs, (tuple, list)) and (place := _scalar(outputs)) is not None:
        return (
            f"The model returned {kind(outputs)}; number {place} of it looks like a loss that it computed. Use that: "
            f"loss=lambda model, batch: model(*batch)[{place}]."
        )
    return (
        f"The model returned {kind(outputs)}, and {name} was given all of it. Give it the part that it compares: "
        f"loss=lambda outputs, targets: loss({part}, targets)."
    )


def without_loss(found: Any) -> str:
    """A sentence for a model that was to compute its loss, and answered ``found`` without one."""
    if isinstance(found, (tuple, list)) and (place := _scalar(found)) is not None:
        return (
            f"The model returned {kind(found)}, and without loss=... an answer with a 'loss' in it is needed. Take the one "
            f"that it computed: loss=lambda model, batch: model(**batch)[{place}]."
        )
    return "The model answered without a loss. Give loss=..., or batches with the labels it asks for."


def logits_and_loss(loss: Any, weight: Any) -> str | None:
    """A sentence if a loss returned ``(logits, loss)``, as some models do, in place of ``(mean, weight)``."""
    if isinstance(loss, torch.Tensor) and loss.dim() and isinstance(weight, torch.Tensor) and not weight.dim():
        return (
            f"The loss returned a tensor of shape {tuple(loss.shape)} and a scalar, as models do that return (logits, loss). "
            "Return the loss alone: loss=lambda model, batch: model(*batch)[1]."
        )
    return None


def _one(value: Any) -> str:
    return f"Tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _first(outputs: Any) -> Any:
    return next(iter(outputs)) if isinstance(outputs, Mapping) else 0


def _scalar(found: Any) -> int | None:
    """The place of the only scalar with a gradient, beside something else; ``None`` without one."""
    places = [
        place
        for place, value in enumerate(found)
        if isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
    ]
    return places[0] if len(places) == 1 and len(found) > 1 else None
