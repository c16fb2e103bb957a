"""PyTorch as it is."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trimtab._archive import load_program
from trimtab._json import from_json, write_json
from trimtab.backends._graph_call import graph_call
from trimtab.backends._owned import owned
from trimtab.backends._program import PROGRAM, bare_module, export_program, save_program
from trimtab.backends._scratch import copy_files, fingerprint, shared_folder
from trimtab.backends._script import SCRIPT, kept_signature, load_script, save_script, script_flat
from trimtab.candidate import Candidate, Settings
from trimtab.contracts import Backend, Executable
from trimtab.errors import CompileError
from trimtab.signature import Signature

SIGNATURE = "signature.json"
GRAD_MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}


class EagerExecutable(Executable):
    """The module itself; it takes whatever the module takes, so a call goes straight through."""

    def __init__(self, candidate: Candidate, grad_mode: str) -> None:
        super().__init__(candidate.signature, candidate.settings)
        self._candidate = candidate
        self._flat = candidate.flat(copied=False)
        self._grad_mode = GRAD_MODES[grad_mode]
        self._plain = candidate.settings.autocast is None and candidate.settings.memory_format == "contiguous"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module under its gradient mode, without any wrapping where no setting asks for it."""
        if not self._plain:
            return super().__call__(*args, **kwargs)
        with self._grad_mode():
            outputs = self._candidate.model(*args, **kwargs)
        return owned(outputs)

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the module on flat inputs."""
        with self._grad_mode():
            outputs: tuple[torch.Tensor, ...] = self._flat(*leaves)
        return owned(outputs)

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write the module as an exported program; its signature becomes the one that the export keeps.

        Recipes of one study that differ in what no export knows, such as threads, share it. A module whose control flow depends
        on data is written as frozen TorchScript, compiled from its source.
        """
        try:
            with shared_folder(self._candidate, f"program-{fingerprint(self._candidate)}", self._export) as made:
                self.signature = from_json(Signature, json.loads((made / SIGNATURE).read_text(encoding="utf-8")))
                return copy_files(made, [PROGRAM], folder)
        except CompileError as exported:
            try:
                module = script_flat(self._candidate)
            except CompileError as scripted:
                raise CompileError(f"The model has no form that stands alone. {exported} {scripted}") from exported
            self.signature = kept_signature(self._candidate, module)
            return save_script(module, folder)

    def _export(self, folder: pathlib.Path) -> None:
        program, signature = export_program(self._candidate)
        save_program(program, folder)
        write_json(folder / SIGNATURE, signature)


class FlatExecutable(Executable):
    """A callable that takes tensors in a row and gives a sequence of tensors."""

    def __init__(self, call: Callable[..., Any], signature: Signature, settings: Settings, grad_mode: str) -> None:
        super().__init__(signature, settings)
        self._call = call
        self._grad_mode = GRAD_MODES[grad_mode]

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the callable."""
        with self._grad_mode():
            outputs: Sequence[torch.Tensor] = self._call(*leaves)
        return owned(outputs)


@dataclass(frozen=True, kw_only=True)
class Eager(Backend):
    """PyTorch's eager mode: the reference that everything else is measured against.

    It pays where nothing else does: tiny networks, control flow that depends on data, operators that no other runtime knows.
    It takes every model and needs nothing, and it is what ships where no other form is provably faster. An artifact of it
    holds an exported program or, where that is impossible, frozen TorchScript.
    Source: https://docs.pytorch.org/docs/stable/notes/autograd.html#inference-mode
    """

    name = "eager"
    honours = frozenset({"threads", "autocast", "memory_format", "batch", "keep_memory"})

    grad_mode: Literal["inference", "no_grad"] = "inference"
    """``no_grad`` is what most people write; ``inference`` saves the version counters and view tracking too."""

    def describe(self) -> str:
        """Says what is left out of a call."""
        return "PyTorch in eager mode, " + ("inference mode" if self.grad_mode == "inference" else "gradients off")

    def compile(self, candidate: Candidate) -> Executable:
        """Nothing to build."""
        return EagerExecutable(candidate, self.grad_mode)

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Read the exported program, or the TorchScript in its stead, and run it eagerly."""
        scripted = (folder / SCRIPT).exists()
        call = load_script(folder) if scripted else graph_call(bare_module(load_program(folder / PROGRAM)))
        return FlatExecutable(call, signature, settings, self.grad_mode)

    def script(self) -> str:
        """Runs the exported program with torch alone."""
        return """
def load(folder, threads):
    import os, torch
    torch.set_num_threads(threads or torch.get_num_threads())
    if os.path.exists(f"{folder}/script.pt"):
        model = torch.jit.load(f"{folder}/script.pt")
    else:
        model = torch.export.load(f"{folder}/program.pt2").module()
    def call(arrays):
        with torch.no_grad():
            return model(*map(torch.as_tensor, arrays))
    return call
"""
