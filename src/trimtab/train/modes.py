"""Which modules of a model train, and which its owner has frozen."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

_FROZEN: WeakSet[nn.Module] = WeakSet()
"""What was in evaluation mode when its model was last seen in training mode: every run leaves all of a model in the former."""


class Modes:
    """Puts ``model`` in training mode but for the modules that its owner has put in evaluation mode, such as frozen BatchNorms.

    A model that is in evaluation mode itself, as models come from a hub, has nothing that was chosen so; as a run leaves it, it
    has what was chosen before that, whichever Trainer it is given to. ``model.train()`` makes the choice anew, and that of a
    part of it the choice for that part.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen: list[str] = []

    def look(self) -> str | None:
        """Take note of the modules that are to stay as they are; what an earlier run left in evaluation mode tells nothing.

        Returns a sentence about those to which it makes a difference: a part that comes from a hub is in evaluation mode too.
        """
        for module in self.model.modules():
            if module.training:
                _FROZEN.discard(module)
            elif self.model.training:
                _FROZEN.add(module)
        self._frozen = [name for name, module in self.model.named_modules() if module in _FROZEN]
        matter: list[str] = []
        for name in self._frozen:
            within = bool(matter) and name.startswith(f"{matter[-1]}.")
            if name and not within and _matters(self.model.get_submodule(name)):
                matter.append(name)
        if not matter:
            return None
        shown = ", ".join(matter[:3]) + (f" and {len(matter) - 3} more" if len(matter) > 3 else "")
        return f"In evaluation mode, and so it stays: {shown}. model.train() before fit() has all modules train."

    def train(self, copy: nn.Module | None = None) -> None:
        """Training mode, but for those: the model's, or that of a copy of it."""
        model = self.model if copy is None else copy
        model.train()
        for name in self._frozen:
            model.get_submodule(name).training = False


def _matters(module: nn.Module) -> bool:
    """Whether ``module`` may learn something, or does something else in training mode."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    return any(p.requires_grad for p in module.parameters()) or any(isinstance(inner, kinds) for inner in module.modules())
