"""Trying something out on a run's own model, so that the run does not notice."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trimtab.train.optim.optimizer_state import with_inner
from trimtab.train.runtime.module_attributes import Attributes, same
from trimtab.train.runtime.random_generators import generators_within, set_states, states_of
from trimtab.train.runtime.torch_settings import random_state, set_random_state


class Snapshot:
    """Copies of tensors that change, to put back later.

    Args:
        tensors: looked at now, and held by this object; those that a forward pass is yet to make are left alone.
        modules: whose buffers and plain attributes are kept too. Some forward passes do not change a buffer, but put another
            in its place.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], modules: Iterable[nn.Module] = ()) -> None:
        modules = list(modules)
        self._attributes = Attributes(modules)
        self._places = [(each._buffers, name, buffer) for each in modules for name, buffer in each._buffers.items()]
        buffers = dict.fromkeys(buffer for _, _, buffer in self._places if buffer is not None)
        self._tensors = [tensor for tensor in (*buffers, *tensors) if not is_lazy(tensor)]
        self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the tensors the values that were copied, and buffers and attributes their places.

        Tensors and places that have them are not touched.
        """
        self._attributes.put_back()
        for held, name, buffer in self._places:
            if not _holds(held, name, buffer):
                held[name] = buffer
        for tensor, kept in zip(self._tensors, self._copies, strict=True):
            if not same(tensor, kept):
                tensor.copy_(kept)

    def changed(self) -> list[torch.Tensor]:
        """The tensors that have another value now, or were buffers where there is another tensor now."""
        replaced = {id(buffer) for held, name, buffer in self._places if not _holds(held, name, buffer)}
        pairs = zip(self._tensors, self._copies, strict=True)
        return [tensor for tensor, kept in pairs if id(tensor) in replaced or not same(tensor, kept)]


def modules_of_both(model: nn.Module, loss: nn.Module | None) -> list[nn.Module]:
    """Those whose buffers a forward pass may change: in ``model``, and in a ``loss`` that is a module."""
    return [*model.modules(), *(() if loss is None else loss.modules())]


def averages(model: nn.Module, loss: nn.Module | None) -> list[nn.Parameter]:
    """Parameters that nothing trains but a forward pass may change, as those of a teacher that follows what is trained.

    Such are no more than those that are trained. Where more is frozen it is a backbone, whose copy might not fit into memory.
    """
    held = (parameter for module in modules_of_both(model, loss) for parameter in module._parameters.values())
    own = [parameter for parameter in dict.fromkeys(held) if parameter is not None and not is_lazy(parameter)]
    frozen = [parameter for parameter in own if not parameter.requires_grad]
    return frozen if 2 * sum(p.nbytes for p in frozen) <= sum(p.nbytes for p in own) else []


def moving(model: nn.Module, loss: nn.Module | None) -> Snapshot:
    """Copies of everything that a forward pass may change."""
    return Snapshot(averages(model, loss), modules_of_both(model, loss))


def moved(kept: Snapshot, model: nn.Module) -> str:
    """What makes an update from parts of a batch another one, once ``kept`` was moved by a forward pass; else nothing."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in model.modules()):
        return "BatchNorm"
    changed = [tensor for tensor in kept.changed() if not tensor.requires_grad]
    return "what the forward pass changes, such as buffers" if changed else ""


def generators_of_both(model: nn.Module, loss: nn.Module | None) -> dict[str, Any]:
    """The generators of random numbers in their modules."""
    return {**generators_within("model", model), **generators_within("loss", loss)}


@contextlib.contextmanager
def rehearsal(model: nn.Module, optimizer: Optimizer | None = None, *, loss: nn.Module | None = None) -> Iterator[Snapshot]:
    """A block after which what a forward pass of ``model`` may change is as before, and gradients are gone.

    So are random generators, and what changes of a ``loss`` that is a module. With an ``optimizer``, its state, its options and
    the parameters of both are put back too, from copies that exist meanwhile. The block gets what keeps the tensors.
    """
    parameters: dict[torch.Tensor, None] = dict.fromkeys(averages(model, loss))
    if optimizer is not None:  # which may have parameters of the loss, too
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = dict.fromkeys([*parameters, *model.parameters(), *trained])
    kept = Snapshot(parameters, modules_of_both(model, loss))
    random, generators = random_state(), generators_of_both(model, loss)
    drawn = states_of(generators)
    before = [] if optimizer is None else [(each, _optimizer_state(each), _options(each)) for each in with_inner(optimizer)]
    try:
        yield kept
    finally:
        for parameter in (*model.parameters(), *(() if loss is None else loss.parameters())):
            parameter.grad = None
        kept.put_back()
        for each, state, options in before:
            each.state.clear()
            each.state.update(state)
            _put_back_options(each, options)
        set_random_state(random)
        set_states(generators, drawn)


def stand_still(optimizer: Optimizer) -> None:
    """Set its learning rates to nought, so that many updates from the same batches change nothing, and cannot diverge.

    An optimizer that finds its own rate has none to set, and goes on; a rehearsal puts back what it changes.
    """
    for group in optimizer.param_groups:
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * 0.0


def _optimizer_state(optimizer: Optimizer) -> dict[Any, Any]:
    """A copy of the state per parameter; the parameters themselves are not copied."""
    return {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}


def _options(optimizer: Optimizer) -> list[dict[str, tuple[Any, Any]]]:
    """Per group each option and a copy of it: some optimizers count, or find their learning rate, there."""
    groups = optimizer.param_groups
    return [{name: (value, copy.deepcopy(value)) for name, value in group.items() if name != "params"} for group in groups]


@torch.no_grad()
def _put_back_options(optimizer: Optimizer, options: list[dict[str, tuple[Any, Any]]]) -> None:
    for group, kept in zip(optimizer.param_groups, options, strict=True):
        for name in group.keys() - kept.keys() - {"params"}:
            del group[name]
        for name, (value, before) in kept.items():
            group[name] = value.copy_(before) if isinstance(value, torch.Tensor) else before


def _holds(held: Any, name: str, buffer: torch.Tensor | None) -> bool:
    """Whether a module has ``buffer`` in its place among those that it has ``held``."""
    return name in held and held[name] is buffer
