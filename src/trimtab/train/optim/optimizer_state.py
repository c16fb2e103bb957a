"""What an optimizer keeps from update to update, and how it comes back from a checkpoint as it was."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trimtab.errors import UsageError
from trimtab.train.optim.kernels import ON_HOST
from trimtab.train.runtime.world import World


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer`` and those that it is made of, as one that has matrices updated by Muon and the rest by AdamW is."""
    found = [optimizer]
    for each in found:  # which grows
        for name, value in vars(each).items():
            if name in ("state", "param_groups"):
                continue
            held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
            found += [one for one in held if isinstance(one, Optimizer) and all(one is not other for other in found)]
    return found


class OptimizerModes:
    """The modes of an ``optimizer`` that trains other parameters than those that its owner is to have, such as their average.

    It says so by having ``train()`` and ``eval()``, each of which puts its kind of parameters into ``model``.

    Source: Defazio et al. 2024, https://arxiv.org/abs/2405.15682; the protocol is that of their schedulefree.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        found: list[Any] = with_inner(optimizer)
        self._switched = found[:1] if _has_modes(found[0]) else [each for each in found if _has_modes(each)]

    def __bool__(self) -> bool:
        return bool(self._switched)

    def train(self) -> None:
        """Have the parameters that are trained."""
        for each in self._switched:
            each.train()

    def eval(self) -> None:
        """Have those that are to be used."""
        for each in self._switched:
            each.eval()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """A block with the parameters that are to be used, and those that are trained afterwards, to the last digit."""
        with self._within(self.eval, self.train):
            yield

    @contextlib.contextmanager
    def trained(self) -> Iterator[None]:
        """The inverse of :meth:`used`."""
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


def refuse_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has to call the model itself.

    Raises:
        UsageError: it does.
    """
    asks = isinstance(optimizer, torch.optim.LBFGS)
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)  # that of the object may be one that a scheduler has put there
    except TypeError:
        asks = True
    except ValueError:  # builtins have no signature
        pass
    if asks:
        raise UsageError(
            f"{type(optimizer).__name__} calls the model several times per update, which this loop does not do. Use another "
            "optimizer."
        )


def refuse_left_out(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose checkpoint would be without the state of those that it is made of.

    Raises:
        UsageError: they have some, and its ``state_dict()`` is torch's, which knows nothing of them.
    """
    apart = [each for each in with_inner(optimizer) if each.state and each.state is not optimizer.state]
    if apart and type(optimizer).state_dict is Optimizer.state_dict:
        raise UsageError(
            f"{type(optimizer).__name__} is made of other optimizers ({', '.join(type(each).__name__ for each in apart)}), and "
            "its state_dict() leaves out what they keep: a run could not go on from a checkpoint. Give it a state_dict() and a "
            "load_state_dict() that call theirs, or leave out checkpoint=..."
        )


def groups_of(state: Any) -> list[dict[str, Any]] | None:
    """The groups in what ``state_dict()`` gave; ``None`` where that has a form of its own."""
    return state.get("param_groups") if isinstance(state, Mapping) else None


def load(optimizer: Optimizer, state: Any, world: World, before: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Put ``state``, which its ``state_dict()`` gave, into ``optimizer``; all of it has the precision that it had.

    Args:
        before: what kind of numbers the parameters had then.
    """
    inner = with_inner(optimizer)[1:]
    links = [
        (place, each, index, own)
        for place, group in enumerate(optimizer.param_groups)
        for each in inner
        for index, own in enumerate(each.param_groups)
        if own is group
    ]
    if groups_of(state) is None or "state" not in state:
        optimizer.load_state_dict(state)
    else:
        kept = _shared_out(state, optimizer, world)
        optimizer.load_state_dict({**state, "state": kept})
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            _widen(optimizer, state["param_groups"], kept, before)
            _back_to_host(optimizer, state["param_groups"], kept)
    for place, each, index, own in links:  # torch puts new groups in place of the old, and a schedule writes into one of them
        if each.param_groups[index] is own:
            own.update(optimizer.param_groups[place])
        optimizer.param_groups[place] = each.param_groups[index]
    _like_parameters(optimizer)


def _shared_out(state: Mapping[str, Any], optimizer: Optimizer, world: World) -> dict[Any, Any]:
    """This process's part of the state per parameter: the optimizer would put the whole of it on the device."""
    found = dict(state["state"])
    for place, parameter in _places(state["param_groups"], optimizer).items():
        if isinstance(found.get(place), Mapping):
            values = found[place].items()
            found[place] = {n: world.part(v, parameter) if isinstance(v, torch.Tensor) else v for n, v in values}
    return found


def _places(groups: list[dict[str, Any]], optimizer: Optimizer) -> dict[Any, torch.Tensor]:
    """The parameters of ``optimizer`` by what they are called in the ``groups`` that were kept."""
    names = [name for group in groups for name in group["params"]]
    return dict(zip(names, (parameter for group in optimizer.param_groups for parameter in group["params"]), strict=True))


def _widen(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    kept: Mapping[Any, Any],
    before: Mapping[torch.Tensor, torch.dtype],
) -> None:
    """Undo that torch has turned what was ``kept`` into numbers of the kind that the parameters are.

    Some optimizers average parameters of 16 bits in 32, count in whole numbers, or keep masks. Parameters of another kind than
    ``before`` get what torch makes of it.
    """
    for place, parameter in _places(groups, optimizer).items():
        if place in kept and before.get(parameter, parameter.dtype) == parameter.dtype:
            state = optimizer.state[parameter]
            state.update({name: _as_kept(value, kept[place].get(name)) for name, value in state.items() if name != "step"})


def _back_to_host(optimizer: Optimizer, groups: list[dict[str, Any]], kept: Mapping[Any, Any]) -> None:
    """Undo that torch has put on a device what the kernels count on the host; of the number of steps it knows that itself."""
    on_device = {
        p for group in optimizer.param_groups if group.get("capturable") or group.get("fused") for p in group["params"]
    }
    for place, parameter in _places(groups, optimizer).items():
        if place in kept and parameter not in on_device:
            counts = [(n, v) for n, v in kept[place].items() if n in ON_HOST and n != "step" and isinstance(v, torch.Tensor)]
            optimizer.state[parameter].update({name: value.cpu().clone() for name, value in counts})


def _as_kept(now: Any, kept: Any) -> Any:
    """``now``, where it is, in numbers of the kind that were ``kept``."""
    if isinstance(now, torch.Tensor):
        return kept.to(now.device) if isinstance(kept, torch.Tensor) and kept.dtype != now.dtype else now
    if isinstance(now, dict) and isinstance(kept, Mapping):
        return {name: _as_kept(value, kept.get(name)) for name, value in now.items()}
    if isinstance(now, (list, tuple)) and isinstance(kept, (list, tuple)) and len(now) == len(kept):
        return type(now)(_as_kept(*pair) for pair in zip(now, kept, strict=True))
    return now


def _like_parameters(optimizer: Optimizer) -> None:
    """Lay out the optimizer's tensors as their parameters are: checkpoints know no layouts, and mixed ones are slow."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
