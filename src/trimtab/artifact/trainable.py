"""The model of an artifact as a module with weights, which can be trained on."""

from __future__ import annotations

import pathlib
from typing import Any, Self

import torch
from torch import fx, nn

from trimtab.backends.common.exported_program import PROGRAM, bare_module
from trimtab.core.signature import Signature
from trimtab.errors import ArtifactError
from trimtab.safe_load.archives import load_program
from trimtab.tensors.structure import flatten, unflatten
from trimtab.tensors.torchscript_modules import allow_modes

TRAINING_ARGUMENT = {torch.ops.aten.dropout.default: 2, torch.ops.aten.batch_norm.default: 5}
"""Operators with a training mode, and the position of the argument that switches it."""


class TrainableModule(nn.Module):
    """The network that an artifact's files were made of, with its weights as parameters. It is called like the original.

    It is an exported graph: the classes of the model are not needed, and are not there. ``train()`` and ``eval()`` switch
    dropout and batch normalisation of torch. Anything else that the original does only in training is not part of the graph.
    """

    def __init__(self, program: fx.GraphModule, signature: Signature) -> None:
        super().__init__()
        allow_modes(program)
        self.program = program
        self.signature = signature
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, in the structure of the model's."""
        outputs = self.program(*self.signature.bind(args, kwargs))
        return unflatten(self.signature.output_structure, flatten(outputs, "output")[0])

    def train(self, mode: bool = True) -> Self:
        """Switch dropout and batch normalisation."""
        super().train(mode)
        for node in self.program.graph.nodes:
            if (place := TRAINING_ARGUMENT.get(node.target)) is not None and node.args[place] is not mode:
                node.update_arg(place, mode)
        self.program.recompile()
        return self

    def extra_repr(self) -> str:
        """The signature."""
        return self.signature.describe()


def trainable(folder: pathlib.Path, signature: Signature) -> TrainableModule:
    """The module whose exported program is in ``folder``.

    Raises:
        ArtifactError: the model is there as TorchScript only, whose weights are constants.
        IntegrityError: the file is malformed.
    """
    if not (folder / PROGRAM).exists():
        raise ArtifactError(
            f"{folder} holds the model as TorchScript, whose weights cannot be trained, because it was not exportable. Train "
            "the model's own class instead."
        )
    return TrainableModule(bare_module(load_program(folder / PROGRAM)), signature)
