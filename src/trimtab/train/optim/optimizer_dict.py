"""Several optimizers of one run, by name, and their schedulers."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from trimtab._internal.text import of_type
from trimtab.errors import UsageError

PAGE = "The page docs/training-loops.md shows several optimizers, a GAN and LBFGS."


class OptimizerDict(Optimizer):
    """Optimizers by name, as one: its parameter groups are theirs, and :meth:`step` makes the step of each.

    Args:
        optimizers: each over parameters that no other one has.

    Raises:
        UsageError: two of them have a parameter in common.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        super().__init__([{"params": [p]} for p in _disjoint(self.optimizers)][:1], {})  # only the hooks of a step are used

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in their order."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @param_groups.setter
    def param_groups(self, _: Any) -> None:
        """The groups stay those of the optimizers."""

    @property
    def state(self) -> collections.defaultdict[torch.Tensor, Any]:
        """The state of all optimizers, by parameter."""
        pairs = ((key, value) for each in self.optimizers.values() for key, value in each.state.items())
        return collections.defaultdict(dict, pairs)

    @state.setter
    def state(self, _: Any) -> None:
        """The state stays that of the optimizers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a group belongs to one of the optimizers. torch calls this once, when the object is made."""
        if hasattr(self, "_made"):
            raise UsageError("A parameter group is added to one of several optimizers: trainer.optimizer['name'].")
        self._made = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the step of each optimizer; those that need a closure get it."""
        for each in self.optimizers.values():
            if closure is not None and needs_closure(each):
                each.step(closure)
            else:
                each.step()

    def state_dict(self) -> dict[str, Any]:
        """The states, by name."""
        return {"optimizers": {name: each.state_dict() for name, each in self.optimizers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, each in self.optimizers.items():
            each.load_state_dict(state_dict["optimizers"][name])

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets; torch's has the groups and the state, which belong to the optimizers."""
        return {"defaults": self.defaults, "optimizers": self.optimizers, "_made": True}

    def __getitem__(self, name: str) -> Optimizer:
        return self.optimizers[name]

    def __repr__(self) -> str:
        return f"OptimizerDict({', '.join(f'{name}={type(each).__name__}' for name, each in self.optimizers.items())})"


class SchedulerDict(ChainedScheduler):
    """Schedulers of some of the ``optimizers``, by name, as one. Its state is that of torch's ``ChainedScheduler``."""

    def __init__(self, optimizers: OptimizerDict, schedulers: Mapping[str, LRScheduler]) -> None:
        self.optimizer, self.last_epoch = optimizers, 0
        self.names = [name for name in optimizers.optimizers if name in schedulers]
        self._schedulers = [schedulers[name] for name in self.names]


def members(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of an :class:`OptimizerDict`; of another optimizer itself."""
    return list(optimizer.optimizers.values()) if isinstance(optimizer, OptimizerDict) else [optimizer]


def named(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers by name; a single one is called ``"optimizer"``."""
    return optimizer.optimizers if isinstance(optimizer, OptimizerDict) else {"optimizer": optimizer}


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step()`` calls a closure that computes the loss and its gradients anew, as LBFGS does."""
    if isinstance(optimizer, OptimizerDict):
        return any(map(needs_closure, members(optimizer)))
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)  # schedulers patch the ``step`` of the instance
    except TypeError:
        return True
    except ValueError:  # builtins have no signature
        pass
    return False


def plateaus(scheduler: LRScheduler | None) -> list[ReduceLROnPlateau]:
    """The schedulers in ``scheduler`` that follow the validation."""
    found = scheduler._schedulers if isinstance(scheduler, SchedulerDict) else (scheduler,)
    return [each for each in found if isinstance(each, ReduceLROnPlateau)]


def parameters_for(name: str, model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters for the optimizer ``name``: those of the submodule of that name.

    Raises:
        UsageError: ``model`` has none of that name, or nothing in it is trained.
    """
    parts = dict(model.named_children())
    if (part := parts.get(name)) is None:
        raise UsageError(
            f"optimizer has {name!r}, and {type(model).__name__} has no part of that name, whose parameters the function would "
            f"get. Its parts are {', '.join(parts) or 'none'}. Name one of these, or give a ready optimizer over the "
            "parameters that you mean."
        )
    if not (found := [parameter for parameter in part.parameters() if parameter.requires_grad]):
        raise UsageError(f"optimizer has {name!r}, and nothing in {type(model).__name__}.{name} has requires_grad=True.")
    return found


def kind_of(optimizer: Optimizer) -> str:
    """The class of ``optimizer``, of several each with its name."""
    return repr(optimizer) if isinstance(optimizer, OptimizerDict) else type(optimizer).__qualname__


def _disjoint(optimizers: Mapping[str, Any]) -> list[nn.Parameter]:
    owner: dict[int, str] = {}
    found = []
    for name, each in optimizers.items():
        if not isinstance(each, Optimizer):
            raise UsageError(f"optimizer {name!r} is {of_type(each)}; give one of torch.optim, or a function that makes it.")
        for parameter in (p for group in each.param_groups for p in group["params"]):
            if (other := owner.setdefault(id(parameter), name)) != name:
                raise UsageError(
                    f"The optimizers {other!r} and {name!r} have a parameter of shape {tuple(parameter.shape)} in common. Give "
                    "each parameter to one of them."
                )
            found.append(parameter)
    return found
