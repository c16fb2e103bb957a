"""Optimizer state: train and eval modes, optimizers made of others, and bit-exact restoring from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trimtab.errors import UsageError
from trimtab.tensors.structure import map_tensors
from trimtab.train.optim.kernels import ON_HOST, move_state
from trimtab.train.optim.optimizer_dict import OptimizerDict
from trimtab.train.runtime.world import World


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer`` and the optimizers in its attributes, such as Muon for matrices and AdamW for all other parameters."""
    found = [optimizer]
    for each in found:  # grows meanwhile
        for name, value in vars(each).items():
            if name in ("state", "param_groups"):
                continue
            held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
            found += [one for one in held if isinstance(one, Optimizer) and all(one is not other for other in found)]
    return found


class OptimizerModes:
    """Switch between training and evaluation weights of an ``optimizer`` that keeps an average of the weights itself.

    Such an optimizer has ``train()`` and ``eval()``, each of which writes one kind of weights into ``model``. False if neither
    ``optimizer`` nor an optimizer in it has them.

    Source: Defazio et al. 2024, https://arxiv.org/abs/2405.15682; the protocol is that of schedulefree.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        found: list[Any] = with_inner(optimizer)
        self._switched = found[:1] if _has_modes(found[0]) else [each for each in found if _has_modes(each)]

    def __bool__(self) -> bool:
        return bool(self._switched)

    def train(self) -> None:
        """Write the training weights into the model."""
        for each in self._switched:
            each.train()

    def eval(self) -> None:
        """Write the evaluation weights into the model."""
        for each in self._switched:
            each.eval()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """A block with the evaluation weights; the training weights are restored bit for bit."""
        return self._within(self.eval, self.train)

    def training(self) -> contextlib.AbstractContextManager[None]:
        """A block with the training weights; the evaluation weights are restored bit for bit."""
        return self._within(self.train, self.eval)

    @contextlib.contextmanager
    def _within(self, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
        kept = [parameter.detach().clone() for parameter in self._model.parameters()] if self else []
        before()
        try:
            yield
        finally:
            after()
            with torch.no_grad():
                for parameter, value in zip(self._model.parameters() if self else (), kept, strict=True):
                    parameter.copy_(value)


def _has_modes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def refuse_incomplete_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose ``state_dict()`` omits the state of the optimizers in it.

    Raises:
        UsageError: ``state_dict()`` is torch's own, which does not know the inner optimizers, and these have state.
    """
    if isinstance(optimizer, OptimizerDict):
        for each in optimizer.optimizers.values():
            refuse_incomplete_state(each)
        return
    inner = [each for each in with_inner(optimizer) if each.state and each.state is not optimizer.state]
    if inner and type(optimizer).state_dict is Optimizer.state_dict:
        raise UsageError(
            f"{type(optimizer).__name__} is made of other optimizers ({', '.join(type(each).__name__ for each in inner)}), and "
            "its state_dict() leaves out what they keep: a run could not go on from a checkpoint. Give it a state_dict() and a "
            "load_state_dict() that call theirs, or leave out checkpoint=..."
        )


def groups_of(state: Any) -> list[dict[str, Any]] | None:
    """The parameter groups in the result of ``state_dict()``; ``None`` if that has a form of its own."""
    return state.get("param_groups") if isinstance(state, Mapping) else None


def load(optimizer: Optimizer, state: Any, world: World, before: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Load ``state``, the result of ``state_dict()``, into ``optimizer`` with the dtypes that the state had.

    torch's ``load_state_dict()`` casts state to the dtype and device of its parameter, although optimizers may average 16-bit
    parameters in float32, count in integers, or keep masks. So it gets the parameter groups only. State of floating point is
    cast where the dtype of the parameter is not the one in ``before``.

    ``torch.distributed.checkpoint.state_dict`` is not used. It loads no state of frozen parameters, fails for optimizers that
    keep no tensors (SGD without momentum), and gives parameters without state the state of one update.

    Args:
        before: the dtype of each parameter when ``state`` was saved.
    """
    if isinstance(optimizer, OptimizerDict):
        for name, each in optimizer.optimizers.items():
            load(each, state["optimizers"][name], world, before)
        return
    shared = [(each, list(each.param_groups)) for each in with_inner(optimizer)]
    if (groups := groups_of(state)) is None or "state" not in state:
        optimizer.load_state_dict(state)
    else:
        names = [name for group in groups for name in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places: dict[Any, Any] = dict(zip(names, parameters, strict=True))
        kept = dict(state["state"])
        for name, parameter in places.items():
            if isinstance(kept.get(name), Mapping):
                kept[name] = _part(kept[name], parameter, world, before.get(parameter, parameter.dtype))
        cast_by_torch = type(optimizer).load_state_dict is Optimizer.load_state_dict
        optimizer.load_state_dict({**state, "state": {} if cast_by_torch else kept})
        if cast_by_torch:
            entries: Any = optimizer.state
            entries.update({places.get(name, name): values for name, values in kept.items()})
            move_state(optimizer)
    for each, before_load in shared:  # torch replaces group objects, which an optimizer and one in it may share
        for group, loaded in zip(before_load, list(map(dict, each.param_groups)), strict=True):
            group.clear()
            group.update(loaded)
        each.param_groups[:] = before_load
    for parameter, values in optimizer.state.items():  # checkpoints hold no strides, and mixed strides are slow
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            else:
                values[name] = map_tensors(value, _aligned)


def _part(values: Mapping[str, Any], parameter: torch.Tensor, world: World, was: torch.dtype) -> dict[str, Any]:
    """This process's part of a parameter's state, cast if the dtype of the parameter ``was`` another."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameter.dtype) if tensor.is_floating_point() else tensor

    parts = {name: world.shard(each, parameter) if isinstance(each, torch.Tensor) else each for name, each in values.items()}
    if was == parameter.dtype:
        return parts
    return {name: value if name in ON_HOST else map_tensors(value, cast) for name, value in parts.items()}


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that does not begin at a multiple of 64 bytes, as a checkpoint's need not.

    The last bit of a dot product depends on that, and LBFGS steps by those of its state.
    """
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return tensor.clone() if plain and tensor.data_ptr() % 64 else tensor
