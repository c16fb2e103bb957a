"""Which modules of a model train, and which its owner has frozen."""

from __future__ import annotations

from torch import nn


class Modes:
    """Puts ``model`` in training mode but for the modules that its owner has put in evaluation mode, such as frozen BatchNorms.

    A model that is in evaluation mode itself, as models come from a hub, has nothing that was chosen so.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen: list[nn.Module] = []

    def look(self) -> None:
        """Take note of the modules that are to stay as they are; what an earlier run left in evaluation mode tells nothing."""
        if self.model.training:
            self._frozen = [module for module in self.model.modules() if not module.training]

    def train(self) -> None:
        """Training mode, but for those."""
        self.model.train()
        for module in self._frozen:
            module.training = False
