"""Record the losses of the first steps from equal seeds; without backward passes, the size of each output."""

from __future__ import annotations

import atexit
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from trimtab.probe.inside import hooks, roots, steps
from trimtab.probe.inside.ending import end_process
from trimtab.probe.inside.plan import PLAN, rank, write_out
from trimtab.probe.inside.remedies import padding

PERTURBATION = 1e-6
"""As :data:`trimtab.train.loss.loss_parity.PERTURBATION`."""
FILE = "losses.json"


def start() -> None:
    """Record ``PLAN["steps"]`` steps, write ``losses.json`` into ``PLAN["out"]`` and end the process.

    ``PLAN["perturbation"]`` is the seed of a perturbation of the parameters, 0 for none; ``PLAN["no_dropout"]`` is a switch.
    """
    _seed()
    losses: list[float] = []
    outputs: list[float] = []
    if PLAN.get("no_dropout"):
        _without_dropout()
    hooks.on_backward(losses.append)
    roots.around_calls(_recording(outputs, int(PLAN.get("perturbation") or 0)))
    written = False

    def write() -> None:
        nonlocal written
        if written or rank() != 0:
            return
        written = True
        write_out(FILE, {"losses": losses, "outputs": outputs})

    def ended(number: int) -> None:
        if number >= int(PLAN.get("steps") or 40):
            write()
            end_process()

    steps.on_step_end(ended)
    atexit.register(write)


def _seed() -> None:
    """Seed all generators. Seeds that the script sets later take precedence."""
    torch.manual_seed(0)
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


def _recording(outputs: list[float], seed: int) -> roots.Wrapper:
    perturbed: set[int] = set()
    generator = torch.Generator().manual_seed(seed)

    def record(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if seed and id(module) not in perturbed:
            perturbed.add(id(module))
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.is_floating_point():
                        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                        parameter.mul_(1 + PERTURBATION * noise)
        output = call(*args, **kwargs)
        if next(module.parameters(), None) is not None:
            outputs.append(_size(module, args, kwargs, output))
        return output

    return record


def _size(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    """Mean absolute value of the first floating-point output, without padding."""
    first = next((leaf for leaf in _pytree.tree_leaves(output) if _is_float(leaf)), None)
    if first is None:
        return 0.0
    first = first.detach().double().abs()
    excluded = padding.excluded(module, args, kwargs)
    if excluded is not None and first.shape[:2] == excluded.shape:
        first = first[~excluded]
    return float(first.mean()) if first.numel() else 0.0


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _without_dropout() -> None:
    """Disable dropout: in another memory format its mask hits other values, and every loss would differ."""

    def identity(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, identity)
    attention = functional.scaled_dot_product_attention

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = without_dropout
