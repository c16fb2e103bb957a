"""Losses with parameters or buffers of their own, which are trained and stored in checkpoints as the model's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trimtab._internal.text import counted
from trimtab.errors import UsageError
from trimtab.train.runtime import state_dict_versions


def trainable(loss: nn.Module | None, model: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``loss`` to train beside those of ``model``.

    A part of the loss in evaluation mode is left out: it is a network whose outputs are only compared, as in a perceptual loss.
    """
    inner = [module for module in (() if loss is None else loss.modules()) if module.training]
    found = dict.fromkeys(parameter for module in inner for parameter in module.parameters(recurse=False))
    known = set(map(id, model.parameters()))
    return [parameter for parameter in found if parameter.requires_grad and id(parameter) not in known]


def refuse_several_processes(optimizer: Optimizer, model: nn.Module, processes: int) -> None:
    """Refuse to train parameters of a loss in several processes, which exchange gradients of the model only.

    Raises:
        UsageError: the optimizer has some.
    """
    if processes > 1 and (count := _foreign(optimizer, model)):
        raise UsageError(
            f"The optimizer trains {counted(count, 'parameter')} of the loss, but between the {processes} processes only "
            "gradients of the model cross. Put the loss into the model, which then answers with its loss; or call "
            "loss.requires_grad_(False)."
        )


def note(optimizer: Optimizer, model: nn.Module) -> str | None:
    """A sentence if the optimizer trains parameters of the loss."""
    if not (count := _foreign(optimizer, model)):
        return None
    return (
        f"The optimizer trains {counted(count, 'parameter')} of the loss too. loss.requires_grad_(False) before "
        "Trainer(...) leaves it alone."
    )


def state_of(loss: nn.Module | None) -> dict[str, Any]:
    """The state of the loss that a checkpoint stores."""
    return {} if loss is None else loss.state_dict()


def restore(loss: nn.Module | None, state: Mapping[str, Any]) -> str | None:
    """Load what :func:`state_of` gave; if ``loss`` has other names or shapes, leave it and return a sentence on that."""
    now = state_of(loss)
    if loss is not None and {n: _shape(v) for n, v in now.items()} == {n: _shape(v) for n, v in state.items()}:
        loss.load_state_dict(state_dict_versions.versioned(state, state_dict_versions.versions(now)))
        return None
    return "The checkpoint was made with another loss: what that had learnt or counted is left out." if state or now else None


def _foreign(optimizer: Optimizer, model: nn.Module) -> int:
    """The number of the optimizer's parameters that are not the model's."""
    known = set(map(id, model.parameters()))
    return sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if hasattr(value, "shape") else None
