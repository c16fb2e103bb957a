"""The losses of torch.nn: what each is a mean over, and which labels it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trimtab._internal.text import counted

IGNORED = -100
"""The label that torch and transformers leave out of the mean."""
CLASSES = (functional.cross_entropy, functional.nll_loss)
"""Losses whose targets are labels."""
ELEMENTWISE = (
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.poisson_nll_loss),
    *(functional.kl_div, functional.soft_margin_loss, functional.hinge_embedding_loss),
    functional.multilabel_soft_margin_loss,
)
"""Losses that compare each output with the target at its place."""
_MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.PoissonNLLLoss: functional.poisson_nll_loss,
    nn.KLDivLoss: functional.kl_div,
    nn.SoftMarginLoss: functional.soft_margin_loss,
    nn.HingeEmbeddingLoss: functional.hinge_embedding_loss,
    nn.MultiLabelSoftMarginLoss: functional.multilabel_soft_margin_loss,
}


def options(loss: Callable[..., Any] | None) -> dict[str, Any]:
    """The options of a loss of torch, given as a module or as ``functools.partial`` of a function; else none."""
    if isinstance(loss, functools.partial):
        return dict(loss.keywords)
    if isinstance(loss, nn.Module):
        return {name: getattr(loss, name, None) for name in ("reduction", "weight", "ignore_index")}
    return {}


def kind(loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The function of ``torch.nn.functional`` behind ``loss``, if it is one of torch's."""
    return _MODULES.get(type(loss)) if isinstance(loss, nn.Module) else getattr(loss, "func", loss)


def denominator(loss: Callable[..., Any], targets: Any) -> float | torch.Tensor | None:
    """The number that a loss of torch divides by: elements, labels, or their weights; ``None`` for other losses."""
    function = kind(loss)
    if not isinstance(targets, torch.Tensor) or function not in (*CLASSES, *ELEMENTWISE):
        return None
    if function in ELEMENTWISE:
        return float(len(targets) if options(loss).get("reduction") == "batchmean" else targets.numel())
    if targets.is_floating_point():  # probabilities: the mean is over all positions
        return float(targets.numel() / targets.shape[1 if targets.dim() > 1 else 0])
    labels: torch.Tensor = targets.long()  # 156 as a byte would equal the label -100
    classes, kept = options(loss).get("weight"), labels != _ignored(loss)
    if classes is None:
        return kept.sum()
    weights: torch.Tensor = classes[torch.where(kept, labels, 0)]
    return weights.mul(kept).sum()


def _ignored(loss: Callable[..., Any]) -> int:
    """The label that ``loss`` leaves out of the mean."""
    ignored = options(loss).get("ignore_index")
    return IGNORED if ignored is None else int(ignored)


def wrong_label(loss: Callable[..., Any], outputs: Any, targets: Any, error: IndexError) -> str:
    """A message for ``error``: it names the label that has no output, if there is one."""
    if isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor) and not targets.is_floating_point():
        classes = outputs.shape[1 if outputs.dim() > 1 else 0]
        targets = targets.long()
        wrong = targets[((targets >= classes) | (targets < 0)) & (targets != _ignored(loss))]
        if len(wrong):
            return (
                f"A label is {int(wrong[0])}, but the model has {counted(classes, 'output')}, for labels from 0 to "
                f"{classes - 1}. Number the labels from 0, or give the model more outputs."
            )
    return f"The loss raised: IndexError: {error}"
