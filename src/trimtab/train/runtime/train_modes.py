"""Which modules of a model train, and which its owner has frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from trimtab.train.runtime.module_attributes import same

_FROZEN: WeakSet[nn.Module] = WeakSet()
"""What was in evaluation mode when its model was last seen in training mode: every run leaves all of a model in the former."""


class Modes:
    """Puts ``model`` in training mode but for the modules that its owner has put in evaluation mode, such as frozen BatchNorms.

    A model that is in evaluation mode itself, as models come from a hub, has nothing that was chosen so; as a run leaves it, it
    has what was chosen before that, whichever Trainer it is given to. ``model.train()`` makes the choice anew, and that of a
    part of it the choice for that part; callbacks may do so in mid-run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen: list[str] = []
        self._given: list[str] | None = None
        """Which those were that the first run found."""

    def look(self) -> str | None:
        """Take note of the modules that are to stay as they are; what an earlier run left in evaluation mode tells nothing.

        Returns a sentence about those to which it makes a difference: a part that comes from a hub is in evaluation mode too.
        """
        self._take()
        if self._given is None:
            self._given = self._frozen
        if not (shown := self._shown(self._frozen)):
            return None
        return f"In evaluation mode, and so it stays: {shown}. model.train() before fit() has all modules train."

    def follow(self) -> list[str]:
        """Take note of what callbacks have put in another mode since the run began; sentences about that."""
        before = self._frozen
        if self.model.training:  # else somebody has evaluated the model, and told nothing of its parts
            self._take()
        return self._told(before, "from now on")

    def state_of(self) -> dict[str, list[str] | None]:
        """What a checkpoint keeps: which modules are frozen, and which were when the run began."""
        now = [name for name, module in self.model.named_modules() if not module.training]
        return {"given": self._given, "now": now if self.model.training else self._frozen}

    def restore(self, state: Mapping[str, list[str] | None]) -> list[str]:
        """Freeze and thaw what the run had by then, unless the script has frozen others from the start; sentences on it."""
        if state["given"] != self._given or (now := state["now"]) is None:
            return []
        before = self._frozen
        for name, module in self.model.named_modules():
            (_FROZEN.add if name in now else _FROZEN.discard)(module)
        self._frozen = [name for name, module in self.model.named_modules() if module in _FROZEN]
        self.train()
        return self._told(before, "as the run before left it")

    def train(self, copy: nn.Module | None = None) -> None:
        """Training mode, but for those: the model's, or that of a copy of it."""
        model = self.model if copy is None else copy
        model.train()
        for name in self._frozen:
            model.get_submodule(name).training = False

    def _take(self) -> None:
        for module in self.model.modules():
            if module.training:
                _FROZEN.discard(module)
            elif self.model.training:
                _FROZEN.add(module)
        self._frozen = [name for name, module in self.model.named_modules() if module in _FROZEN]

    def _told(self, before: list[str], since: str) -> list[str]:
        modes = {"evaluation": set(self._frozen) - set(before), "training": set(before) - set(self._frozen)}
        names = {mode: self._shown(sorted(changed)) for mode, changed in modes.items()}
        return [f"In {mode} mode, {since}: {shown}." for mode, shown in names.items() if shown]

    def _shown(self, names: Sequence[str]) -> str:
        """Those of the modules ``names``, without what is in them, to which the mode makes a difference."""
        matter: list[str] = []
        for name in names:
            within = bool(matter) and name.startswith(f"{matter[-1]}.")
            if name and not within and _matters(self.model.get_submodule(name)):
                matter.append(name)
        return ", ".join(matter[:3]) + (f" and {len(matter) - 3} more" if len(matter) > 3 else "")


class Still(Modes):
    """Keeps ``model`` from drawing random numbers that training asks for: dropout and the like are in evaluation mode.

    What gathers statistics trains as it did; recurrent layers do, because a GPU cannot go back through others, and have no
    dropout until the :meth:`end`.

    Args:
        gathering: the names of modules that gather statistics, beside torch's own normalisation layers.
    """

    def __init__(self, model: nn.Module, gathering: Collection[str]) -> None:
        super().__init__(model)
        self._gathering = gathering
        recurrent = (module for module in model.modules() if isinstance(module, nn.RNNBase))
        self._dropouts = [(module, module.dropout) for module in recurrent]
        for module, _ in self._dropouts:
            module.dropout = 0.0

    def train(self, copy: nn.Module | None = None) -> None:
        """Training mode for what would not draw."""
        super().train(copy)
        for name, module in (self.model if copy is None else copy).named_modules():
            module.training &= name in self._gathering or isinstance(module, (_NormBase, nn.RNNBase))

    def end(self) -> None:
        """Give recurrent layers their dropout back."""
        for module, dropout in self._dropouts:
            module.dropout = dropout


def floats(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers of floats, by name."""
    found = model.named_buffers(remove_duplicate=False)
    return {name: buffer.detach().clone() for name, buffer in found if not is_lazy(buffer) and buffer.is_floating_point()}


def gathered(model: nn.Module, before: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the modules that have another buffer of floats than ``before``: they gather statistics."""
    now = floats(model).items()
    return {name.rpartition(".")[0] for name, buffer in now if name not in before or not same(buffer, before[name])}


def _matters(module: nn.Module) -> bool:
    """Whether ``module`` may learn something, or does something else in training mode."""
    kinds = (nn.modules.dropout._DropoutNd, _NormBase)
    return any(p.requires_grad for p in module.parameters()) or any(isinstance(inner, kinds) for inner in module.modules())
