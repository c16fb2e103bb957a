"""Optimizer state: train and eval modes, optimizers made of others, and bit-exact restoring from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trimtab.errors import UsageError
from trimtab.train.optim.kernels import ON_HOST, counts_on_device
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

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """A block with the evaluation weights; the training weights are restored bit for bit."""
        with self._within(self.eval, self.train):
            yield

    @contextlib.contextmanager
    def trained(self) -> Iterator[None]:
        """A block with the training weights; the evaluation weights are restored bit for bit."""
        with self._within(self.train, self.eval):
            yield

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


def refuse_left_out(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose ``state_dict()`` omits the state of the optimizers in it.

    Raises:
        UsageError: ``state_dict()`` is torch's own, which does not know the inner optimizers, and these have state.
    """
    if isinstance(optimizer, OptimizerDict):
        for each in optimizer.optimizers.values():
            refuse_left_out(each)
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

    ``torch.distributed.checkpoint.state_dict`` is not used. It loads no state of frozen parameters, fails for optimizers that
    keep no tensors (SGD without momentum), and gives parameters without state the state of one update.

    Args:
        before: the dtype of each parameter when ``state`` was saved.
    """
    if isinstance(optimizer, OptimizerDict):
        for name, each in optimizer.optimizers.items():
            load(each, state["optimizers"][name], world, before)
        return
    inner = with_inner(optimizer)[1:]
    links = [
        (place, each, index, own)
        for place, group in enumerate(optimizer.param_groups)
        for each in inner
        for index, own in enumerate(each.param_groups)
        if own is group
    ]
    if (groups := groups_of(state)) is None or "state" not in state:
        optimizer.load_state_dict(state)
    else:
        kept = dict(state["state"])
        names = [name for group in groups for name in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places = {name: parameter for name, parameter in zip(names, parameters, strict=True) if name in kept}
        for name, parameter in places.items():
            if isinstance(kept[name], Mapping):  # torch would move the whole tensors to the device of the parameter
                found = kept[name].items()
                kept[name] = {n: world.part(v, parameter) if isinstance(v, torch.Tensor) else v for n, v in found}
        optimizer.load_state_dict({**state, "state": kept})
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            _undo_casts(optimizer, {parameter: kept[name] for name, parameter in places.items()}, before)
    for place, each, index, own in links:  # torch replaces group objects, which optimizer and inner optimizer have shared
        if each.param_groups[index] is own:
            own.update(optimizer.param_groups[place])
        optimizer.param_groups[place] = each.param_groups[index]
    for parameter, values in optimizer.state.items():  # checkpoints hold no strides, and mixed strides are slow
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            else:
                values[name] = _aligned(value)


def _aligned(value: Any) -> Any:
    """Copies of tensors that do not begin at a multiple of 64 bytes, as a checkpoint's need not.

    The last bit of a dot product depends on that, and LBFGS steps by those of its state.
    """
    if type(value) is torch.Tensor and value.layout == torch.strided:
        return value.clone() if value.data_ptr() % 64 else value
    return [_aligned(item) for item in value] if type(value) is list else value


def _undo_casts(
    optimizer: Optimizer, kept: Mapping[torch.Tensor, Mapping[str, Any]], before: Mapping[torch.Tensor, torch.dtype]
) -> None:
    """Undo that torch casts state to the dtype and device of its parameter, except for ``step``.

    Optimizers may average 16-bit parameters in float32, count in integers, or keep masks. Counters in :data:`ON_HOST` go back
    to the CPU. The cast stays where the dtype of the parameter is not the one in ``before``.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {name: value for name, value in optimizer.state.get(parameter, {}).items() if name != "step"}
            for name, value in state.items():
                saved = kept.get(parameter, {}).get(name)
                if before.get(parameter, parameter.dtype) == parameter.dtype:
                    value = _in_dtype_of(value, saved)
                if name in ON_HOST and isinstance(saved, torch.Tensor) and not counts_on_device(group):
                    value = saved.cpu().clone()
                optimizer.state[parameter][name] = value


def _in_dtype_of(now: Any, kept: Any) -> Any:
    """``now`` on its device, with the values and dtypes of ``kept`` where the dtypes differ."""
    if isinstance(now, torch.Tensor):
        return kept.to(now.device) if isinstance(kept, torch.Tensor) and kept.dtype != now.dtype else now
    if isinstance(now, dict) and isinstance(kept, Mapping):
        return {name: _in_dtype_of(value, kept.get(name)) for name, value in now.items()}
    if isinstance(now, (list, tuple)) and isinstance(kept, (list, tuple)) and len(now) == len(kept):
        return type(now)(_in_dtype_of(*pair) for pair in zip(now, kept, strict=True))
    return now
