"""Which modules of a model train, and which its owner has frozen."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

_FROZEN: WeakSet[nn.Module] = WeakSet()
"""What was in evaluation mode when its model was last seen in training mode: every run leaves all of a model in the former."""


class Modes:
    """Puts ``model`` in training mode but for the modules that its owner has put in evaluation mode, such as frozen BatchNorms.

    A model that is in evaluation mode itself, as models come from a hub, has nothing that was chosen so; as a run leaves it, it
    has what was chosen before that, whichever Trainer it is given to. ``model.train()`` makes the choice anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen: list[str] = []

    def look(self) -> None:
        """Take note of the modules that are to stay as they are; what an earlier run left in evaluation mode tells nothing."""
        if self.model.training:
            for module in self.model.modules():
                (_FROZEN.discard if module.training else _FROZEN.add)(module)
        self._frozen = [name for name, module in self.model.named_modules() if module in _FROZEN]

    def train(self, copy: nn.Module | None = None) -> None:
        """Training mode, but for those: the model's, or that of a copy of it."""
        model = self.model if copy is None else copy
        model.train()
        for name in self._frozen:
            model.get_submodule(name).training = False
