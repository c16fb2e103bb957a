"""Training and evaluation mode of the modules of a model: which of them train, and which their owner has frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from trimtab._internal.text import listed

_FROZEN: WeakSet[nn.Module] = WeakSet()
"""Modules that were in evaluation mode when their model was last seen in training mode. A run leaves the whole model in
evaluation mode, so that the modules themselves do not tell."""


class Modes:
    """Puts ``model`` in training mode, except for its frozen modules: those that its owner has put in evaluation mode.

    In a model that is in evaluation mode as a whole, as one from a hub is, no module counts as frozen, except those that were
    frozen before an earlier run. ``model.train()`` thaws all modules, and ``module.train()`` one; callbacks may do so, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen: list[str] = []
        self._given: list[str] | None = None
        """The frozen modules that the first run found."""

    def find_frozen(self) -> str | None:
        """Find the frozen modules as a run begins. Returns a sentence on those to which the mode matters."""
        self._find()
        if self._given is None:
            self._given = self._frozen
        if not (shown := self._shown(self._frozen)):
            return None
        return f"In evaluation mode, and so it stays: {shown}. model.train() before fit() has all modules train."

    def update_frozen(self) -> None:
        """Find the modules that callbacks have frozen or thawed since."""
        if self.model.training:  # in evaluation mode, the modes of its modules say nothing
            self._find()

    def begin_epoch(self) -> None:
        """Put the model in training mode; modules that callbacks have frozen or thawed since the last epoch stay so."""
        if self._frozen or not all(module.training for module in self.model.modules()):
            self.update_frozen()
            self.train()

    def state_of(self) -> dict[str, list[str] | None]:
        """For a checkpoint: the modules that are frozen now, and those that were as the run began."""
        now = [name for name, module in self.model.named_modules() if not module.training]
        return {"given": self._given, "now": now if self.model.training else self._frozen}

    def restore(self, state: Mapping[str, list[str] | None]) -> list[str]:
        """Freeze and thaw as in a checkpoint, unless the script begins with others frozen. Returns sentences on changes."""
        if state["given"] != self._given or (now := state["now"]) is None:
            return []
        before = self._frozen
        for name, module in self.model.named_modules():
            (_FROZEN.add if name in now else _FROZEN.discard)(module)
        self._frozen = self._names()
        self.train()
        modes = {"evaluation": set(self._frozen) - set(before), "training": set(before) - set(self._frozen)}
        names = {mode: self._shown(sorted(changed)) for mode, changed in modes.items()}
        return [f"In {mode} mode, as the run before left it: {shown}." for mode, shown in names.items() if shown]

    def train(self, copy: nn.Module | None = None) -> None:
        """Put the model, or a ``copy`` of it, in training mode, except for its frozen modules."""
        model = self.model if copy is None else copy
        model.train()
        for name in self._frozen:
            model.get_submodule(name).training = False

    def _find(self) -> None:
        for module in self.model.modules():
            if module.training:
                _FROZEN.discard(module)
            elif self.model.training:
                _FROZEN.add(module)
        self._frozen = self._names()

    def _names(self) -> list[str]:
        return [name for name, module in self.model.named_modules() if module in _FROZEN]

    def _shown(self, names: Sequence[str]) -> str:
        """Up to three of the modules ``names`` to which the mode matters; a module stands for those within it."""
        matter: list[str] = []
        for name in names:
            within = bool(matter) and name.startswith(f"{matter[-1]}.")
            if name and not within and _matters(self.model.get_submodule(name)):
                matter.append(name)
        return listed(matter)


class DropoutOff(Modes):
    """Training mode without random numbers: dropout and all else that might draw is in evaluation mode.

    Normalisation layers train as before. So do recurrent layers, whose backward pass on a GPU requires training mode; their
    dropout is 0 until :meth:`end`.

    Args:
        model: the model.
        gathering: names of other modules that train as before, because they gather statistics; see :func:`changed_modules`.
    """

    def __init__(self, model: nn.Module, gathering: Collection[str]) -> None:
        super().__init__(model)
        self._gathering = gathering
        recurrent = (module for module in model.modules() if isinstance(module, nn.RNNBase))
        self._dropouts = [(module, module.dropout) for module in recurrent]
        for module, _ in self._dropouts:
            module.dropout = 0.0

    def train(self, copy: nn.Module | None = None) -> None:
        """Put the model, or a ``copy`` of it, in this mode."""
        super().train(copy)
        for name, module in (self.model if copy is None else copy).named_modules():
            module.training &= name in self._gathering or isinstance(module, (_NormBase, nn.RNNBase))

    def end(self) -> None:
        """Restore the dropout of recurrent layers."""
        for module, dropout in self._dropouts:
            module.dropout = dropout


def float_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the floating-point buffers, by name."""
    found = model.named_buffers(remove_duplicate=False)
    return {name: buffer.detach().clone() for name, buffer in found if not is_lazy(buffer) and buffer.is_floating_point()}


def changed_modules(model: nn.Module, before: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the modules whose :func:`float_buffers` have changed since ``before``: they gather statistics."""
    now = float_buffers(model).items()
    return {name.rpartition(".")[0] for name, buffer in now if name not in before or not equal_nan(buffer, before[name])}


def equal_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN."""
    if a.layout != torch.strided:  # torch.equal takes no sparse tensors
        a, b = a.detach().to_dense(), b.to_dense()
    a = a.detach()
    return torch.equal(a, b) or bool(torch.all((a == b) | ((a != a) & (b != b))))


def _matters(module: nn.Module) -> bool:
    """Whether the mode of ``module`` changes what it computes or learns."""
    kinds = (nn.modules.dropout._DropoutNd, _NormBase)
    return any(p.requires_grad for p in module.parameters()) or any(isinstance(inner, kinds) for inner in module.modules())
