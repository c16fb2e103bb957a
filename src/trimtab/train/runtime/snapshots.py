"""Snapshot and restore what a forward pass or an update changes, to try something on the model of a run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trimtab.train.optim.optimizer_state import with_inner
from trimtab.train.runtime.random_generators import generators_within, set_states, states_of
from trimtab.train.runtime.torch_settings import random_state, set_random_state
from trimtab.train.runtime.train_modes import equal_nan

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, submodules, hooks and the mode."""


class Snapshot:
    """Copies of tensors, to restore later.

    Args:
        tensors: copied now, and referenced until this object goes. Lazy parameters without values are left out.
        modules: their buffers, and their plain attributes that hold tensors, are restored too.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], modules: Iterable[nn.Module] = ()) -> None:
        modules = list(modules)
        self._attributes = _Attributes(modules)
        self._places = [(each._buffers, name, buffer) for each in modules for name, buffer in each._buffers.items()]
        buffers = dict.fromkeys(buffer for _, _, buffer in self._places if buffer is not None)
        self._tensors = [tensor for tensor in (*buffers, *tensors) if not is_lazy(tensor)]
        self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the tensors, and put buffers and attributes that were replaced back in their places.

        A tensor that has its value already is not written to.
        """
        self._attributes.restore()
        for held, name, buffer in self._places:
            if name not in held or held[name] is not buffer:
                held[name] = buffer
        for tensor, kept in zip(self._tensors, self._copies, strict=True):
            if not equal_nan(tensor, kept):
                tensor.copy_(kept)

    def changed(self) -> list[torch.Tensor]:
        """The tensors that have another value now, and the buffers that another tensor has replaced."""
        replaced = {id(buffer) for held, name, buffer in self._places if held.get(name) is not buffer}
        pairs = zip(self._tensors, self._copies, strict=True)
        return [tensor for tensor, kept in pairs if id(tensor) in replaced or not equal_nan(tensor, kept)]


class _Attributes:
    """Plain attributes of ``modules``, such as a recurrent state: tensors, and lists, dicts and tuples that hold tensors.

    Other attributes, such as a counter of calls, are left alone, and so are lazy modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = [vars(module) for module in modules if not isinstance(module, LazyModuleMixin)]
        self._held = [(held, {name: held[name] for name in held.keys() - _OF_TORCH}) for held in found]
        self._contents: dict[int, tuple[Any, Any]] = {}
        """By ``id``: a tensor or container, and its copy."""
        for _, own in self._held:
            for value in own.values():
                self._keep(value)

    def restore(self) -> None:
        for held, own in self._held:
            for name in held.keys() - own.keys() - _OF_TORCH:
                if _has_tensors(held[name]):
                    del held[name]
            for name, value in own.items():
                now = held.get(name)
                if now is not value and (_has_tensors(value) or _has_tensors(now)):
                    held[name] = value
        for value, kept in self._contents.values():
            if isinstance(value, torch.Tensor):
                if not equal_nan(value, kept):
                    value.copy_(kept)
            elif _has_tensors(value) or _has_tensors(kept):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(kept)

    def _keep(self, value: Any) -> None:
        """Copy ``value`` and what is in it."""
        if id(value) in self._contents:
            return
        if type(value) is torch.Tensor:
            if value.layout == torch.strided and not (value.is_nested or value.is_meta):
                self._contents[id(value)] = (value, value.detach().clone())
            return
        if isinstance(value, (list, dict)):
            self._contents[id(value)] = (value, copy.copy(value))
        for item in _items(value):
            self._keep(item)


def _has_tensors(value: Any, depth: int = 4) -> bool:
    """True for a tensor, or a container with a tensor within ``depth`` levels."""
    return isinstance(value, torch.Tensor) or (depth > 0 and any(_has_tensors(item, depth - 1) for item in _items(value)))


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def modules_of_both(model: nn.Module, loss: nn.Module | None) -> list[nn.Module]:
    """The modules of ``model``, and of ``loss`` if it is a module."""
    return [*model.modules(), *(() if loss is None else loss.modules())]


def _moving_averages(model: nn.Module, loss: nn.Module | None) -> list[nn.Parameter]:
    """Parameters without gradient that a forward pass may change, such as those of a teacher that is a moving average.

    Empty where they take more memory than the trained parameters: those are of a frozen backbone.
    """
    held = (parameter for module in modules_of_both(model, loss) for parameter in module._parameters.values())
    own = [parameter for parameter in dict.fromkeys(held) if parameter is not None and not is_lazy(parameter)]
    frozen = [parameter for parameter in own if not parameter.requires_grad]
    return frozen if 2 * sum(p.nbytes for p in frozen) <= sum(p.nbytes for p in own) else []


def forward_snapshot(model: nn.Module, loss: nn.Module | None) -> Snapshot:
    """A snapshot of everything that a forward pass may change."""
    return Snapshot(_moving_averages(model, loss), modules_of_both(model, loss))


def why_parts_differ(kept: Snapshot, model: nn.Module) -> str:
    """The reason why an update from parts differs from that of the whole batch, after a forward pass; "" if there is none.

    Args:
        kept: taken before the forward pass.
        model: the model.
    """
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in model.modules()):
        return "BatchNorm"
    changed = [tensor for tensor in kept.changed() if not tensor.requires_grad]
    return "what the forward pass changes, such as buffers" if changed else ""


def generators_of_both(model: nn.Module, loss: nn.Module | None) -> dict[str, Any]:
    """The random generators that modules of ``model`` and ``loss`` have as attributes."""
    return {**generators_within("model", model), **generators_within("loss", loss)}


@contextlib.contextmanager
def rolled_back(model: nn.Module, optimizer: Optimizer | None = None, *, loss: nn.Module | None = None) -> Iterator[Snapshot]:
    """A block after which everything that a forward pass of ``model`` may change is restored, and gradients are ``None``.

    Random generators are restored too, and with an ``optimizer`` its state, its options and all parameters. The block gets the
    snapshot of the tensors.
    """
    parameters: dict[torch.Tensor, None] = dict.fromkeys(_moving_averages(model, loss))
    if optimizer is not None:  # which may have parameters of the loss, too
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = dict.fromkeys([*parameters, *model.parameters(), *trained])
    kept = Snapshot(parameters, modules_of_both(model, loss))
    random, generators = random_state(), generators_of_both(model, loss)
    drawn = states_of(generators)
    before = [] if optimizer is None else [(each, _state(each), _options(each)) for each in with_inner(optimizer)]
    try:
        yield kept
    finally:
        for parameter in (*model.parameters(), *(() if loss is None else loss.parameters())):
            parameter.grad = None
        kept.restore()
        for each, state, options in before:
            each.state.clear()
            each.state.update(state)
            _restore_options(each, options)
        set_random_state(random)
        set_states(generators, drawn)


def zero_learning_rates(optimizer: Optimizer) -> None:
    """Set the learning rates of ``optimizer`` to 0, so that its updates change no parameter.

    An optimizer without ``lr`` is left alone.
    """
    for group in optimizer.param_groups:
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * 0.0


def _state(optimizer: Optimizer) -> dict[Any, Any]:
    return {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}


def _options(optimizer: Optimizer) -> list[dict[str, tuple[Any, Any]]]:
    """Of each group every option with a copy of it: some optimizers store counters or their learning rate there."""
    groups = optimizer.param_groups
    return [{name: (value, copy.deepcopy(value)) for name, value in group.items() if name != "params"} for group in groups]


@torch.no_grad()
def _restore_options(optimizer: Optimizer, options: list[dict[str, tuple[Any, Any]]]) -> None:
    for group, kept in zip(optimizer.param_groups, options, strict=True):
        for name in group.keys() - kept.keys() - {"params"}:
            del group[name]
        for name, (value, before) in kept.items():
            group[name] = value.copy_(before) if isinstance(value, torch.Tensor) else before
