"""Frozen TorchScript."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.backends.common.causes import first_line
from trimtab.backends.common.exported_program import EXPORT_ERRORS, lost_dims, quiet
from trimtab.backends.common.owned_outputs import branches, copied, held_by, in_order, lent
from trimtab.backends.common.torchscript import frozen, kept_signature, load_script, save_script, trace_or_script
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.errors import CompileError

WARM_UP = 3
"""Calls until TorchScript's profiling executor has specialized the graph."""


class TorchScriptExecutable(Executable):
    """A frozen script module, optimized for inference."""

    def __init__(self, module: Any, source: Any, signature: Signature, settings: Settings) -> None:
        super().__init__(signature, settings)
        self._module = module
        self._source = source
        self._held, self._branches = held_by(module), branches(module)
        self._lent: tuple[int, ...] | None = None
        self._laid = settings.memory_format == "channels_last"

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the module."""
        with torch.no_grad():  # not inference mode: callers could not modify the outputs, and copies cost more than it saves
            outputs: Sequence[torch.Tensor] = self._module(*leaves)
            if self._lent is None or self._branches:
                self._lent = lent(outputs, self._held)
            outputs = copied(outputs, self._lent)
            return in_order(outputs) if self._laid else outputs

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write the frozen module without the optimizations for this machine, which could be saved but not loaded."""
        if self._source is None:
            raise CompileError("This executable was loaded from files; copy those.")
        return save_script(self._source, folder)


@dataclass(frozen=True, kw_only=True)
class TorchScript(Backend):
    """Trace the model, freeze it (weights become constants, batch norms are folded), and optimize it for inference.

    Pays off a little for small networks, because Python is removed, and for convolutions (oneDNN graph fusions). Needs no
    compiler. Models with data-dependent control flow are compiled from their source instead of traced.
    Source: https://docs.pytorch.org/docs/stable/jit.html
    """

    name = "torchscript"
    honours = frozenset({"threads", "autocast", "memory_format", "batch", "keep_memory"})

    def describe(self) -> str:
        """Names the form."""
        return "TorchScript, frozen"

    def compile(self, candidate: Candidate) -> Executable:
        """Trace or script a copy, and run it until TorchScript has specialized it."""
        source, notes = trace_or_script(candidate)
        optimized, more = _optimized(frozen(source))
        signature = kept_signature(candidate, optimized)
        executable = TorchScriptExecutable(optimized, source, signature, candidate.settings)
        executable.notes += notes + more
        if lost := lost_dims(candidate.signature, signature):
            executable.notes.append(f"Built for the example's {', '.join(lost)} only, because it is not right for others.")
        for _ in range(WARM_UP):
            executable.run(candidate.own_leaves())
        return executable

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Load the frozen module and optimize it for this machine."""
        optimized, notes = _optimized(load_script(folder))
        executable = TorchScriptExecutable(optimized, None, signature, settings)
        executable.notes += notes
        return executable

    def script(self) -> str:
        """Runs the frozen module with torch."""
        return """
def load(folder, threads):
    import torch
    torch.set_num_threads(threads or torch.get_num_threads())
    model = torch.jit.optimize_for_inference(torch.jit.load(f"{folder}/script.pt"))
    def call(arrays):
        with torch.no_grad():
            return model(*(torch.as_tensor(array, device="cpu") for array in arrays))
    return call
"""


def _optimized(module: Any) -> tuple[Any, list[str]]:
    try:
        with quiet(stream=False):
            return torch.jit.optimize_for_inference(module), []
    except EXPORT_ERRORS as error:
        return module, [f"optimize_for_inference failed, so the frozen module runs as it is: {first_line(error)}."]
