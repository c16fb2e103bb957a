"""A loss that has parameters or a state of its own: they are trained, and kept in checkpoints, as the model's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trimtab._internal.text import counted
from trimtab.errors import UsageError
from trimtab.train.run_context import RunContext
from trimtab.train.runtime import state_dict_versions


def trained(loss: nn.Module | None, model: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``loss`` that are not the model's, and that are to be trained with them.

    Not those of a part that is in evaluation mode: that is how a network comes that outputs are only compared by.
    """
    inner = [module for module in (() if loss is None else loss.modules()) if module.training]
    found = dict.fromkeys(parameter for module in inner for parameter in module.parameters(recurse=False))
    known = set(map(id, model.parameters()))
    return [parameter for parameter in found if parameter.requires_grad and id(parameter) not in known]


def refuse_apart(optimizer: Optimizer, model: nn.Module, processes: int) -> None:
    """Refuse to train parameters of a loss in several processes, each of which would train its own.

    Raises:
        UsageError: the optimizer has some.
    """
    if processes > 1 and (count := _beside(optimizer, model)):
        raise UsageError(
            f"The optimizer trains {counted(count, 'parameter')} of the loss, but between the {processes} processes only "
            "gradients of the "
            "model cross. Put the loss into the model, which then answers with its loss; or call loss.requires_grad_(False)."
        )


def told(context: RunContext) -> str | None:
    """A sentence where the optimizer trains more than the model."""
    if not (count := _beside(context.optimizer, context.model)):
        return None
    return (
        f"The optimizer trains {counted(count, 'parameter')} of the loss too. loss.requires_grad_(False) before "
        "Trainer(...) leaves it alone."
    )


def state_of(context: RunContext) -> dict[str, Any]:
    """What a checkpoint keeps of the loss; those of torch have nothing but options."""
    loss = context.objective.module
    return {} if loss is None else loss.state_dict()


def restore(context: RunContext, state: Mapping[str, Any]) -> None:
    """Put back what :func:`state_of` gave, unless the loss is another one now."""
    loss, now = context.objective.module, state_of(context)
    if loss is not None and {n: _shape(v) for n, v in now.items()} == {n: _shape(v) for n, v in state.items()}:
        loss.load_state_dict(state_dict_versions.versioned(state, state_dict_versions.versions(now)))
    elif state or now:
        context.note("The checkpoint was made with another loss: what that had learnt or counted is left out.")


def _beside(optimizer: Optimizer, model: nn.Module) -> int:
    """How many of the optimizer's parameters are not the model's."""
    known = set(map(id, model.parameters()))
    return sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if hasattr(value, "shape") else None
