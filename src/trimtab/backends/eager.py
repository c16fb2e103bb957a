"""PyTorch's eager mode."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from trimtab._internal.serialization import from_json, write_json
from trimtab.backends.common.exported_program import PROGRAM, bare_module, frozen_note, lost_dims, write_exported
from trimtab.backends.common.graph_call import graph_call
from trimtab.backends.common.owned_outputs import contiguous, held_addresses, owned
from trimtab.backends.common.scratch import copy_files, fingerprint, shared_folder
from trimtab.backends.common.torchscript import SCRIPT, kept_signature, load_script, save_script, script_flat
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.errors import CompileError
from trimtab.safe_load.archives import load_program

T = TypeVar("T")

SIGNATURE = "signature.json"
GRAD_MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}


class EagerExecutable(Executable):
    """The module itself. It accepts any inputs that the module accepts; calls are passed through."""

    def __init__(self, candidate: Candidate, grad_mode: str) -> None:
        super().__init__(candidate.signature, candidate.settings)
        self._candidate = candidate
        self._flat = candidate.flat(copied=False)
        self._grad_mode = GRAD_MODES[grad_mode]
        self._inference = grad_mode == "inference"
        self._held: frozenset[int] | None = None
        self._direct_call = candidate.settings.precision.autocast is None and candidate.settings.memory_format == "contiguous"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module in its gradient mode, without a wrapper if no setting needs one."""
        if not self._direct_call:
            return super().__call__(*args, **kwargs)
        with self._grad_mode():
            outputs = self._candidate.model(*args, **kwargs)
        return self._owned_outputs(outputs)

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with self._grad_mode():
            outputs: Sequence[torch.Tensor] = self._flat(*leaves)
        return self._owned_outputs(outputs if self._direct_call else _in_default_layout(outputs, self.settings))

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write the module as an exported program. The signature becomes the program's.

        Recipes of a study that export equally, for example with different threads, share the export. A module with
        data-dependent control flow, or whose export would fix dynamic sizes, is written as frozen TorchScript, compiled from
        its source.
        """
        try:
            with shared_folder(self._candidate, f"program-{fingerprint(self._candidate)}", self._export) as made:
                self.signature = from_json(Signature, json.loads((made / SIGNATURE).read_text(encoding="utf-8")))
                lost = lost_dims(self._candidate.signature, self.signature)
                written = self._scripted(folder, len(lost)) if lost else None
                self.notes += frozen_note(lost) if written is None else []
                return written or copy_files(made, [PROGRAM], folder)
        except CompileError as exported:
            try:
                module = script_flat(self._candidate)
                files = save_script(module, folder)
            except CompileError as scripted:
                raise CompileError(f"The model has no form that stands alone. {exported} {scripted}") from exported
            self.signature = kept_signature(self._candidate, module)
            self.notes += frozen_note(lost_dims(self._candidate.signature, self.signature))
            return files

    def _scripted(self, folder: pathlib.Path, lost: int) -> list[str] | None:
        """Write TorchScript compiled from the source if it supports more dynamic dimensions than the export, which loses
        ``lost``. Returns the files, or ``None``."""
        try:
            module = script_flat(self._candidate)
        except CompileError:
            return None
        signature = kept_signature(self._candidate, module)
        still = lost_dims(self._candidate.signature, signature)
        if len(still) >= lost:
            return None
        self.signature = signature
        self.notes += ["Written as TorchScript, which keeps dynamic sizes that an export would freeze.", *frozen_note(still)]
        return save_script(module, folder)

    def _owned_outputs(self, outputs: T) -> T:
        if self._held is None:  # after the first call, because models may create their state in it
            self._held = held_addresses(self._candidate.model)
        return owned(outputs, self._held, inference=self._inference)

    def _export(self, folder: pathlib.Path) -> None:
        candidate = self._candidate
        try:
            signature = write_exported(candidate, folder)
        except CompileError:
            if not (candidate.all_sizes and candidate.signature.dims):
                raise
            signature = write_exported(candidate.keeping([]), folder)  # it cannot ship, but an artifact carries the original
        write_json(folder / SIGNATURE, signature)


class FlatExecutable(Executable):
    """An exported graph or TorchScript module with flat inputs and outputs."""

    def __init__(self, module: nn.Module, signature: Signature, settings: Settings, grad_mode: str) -> None:
        super().__init__(signature, settings)
        self._call = graph_call(module) if isinstance(module, torch.fx.GraphModule) else module
        self._held = held_addresses(module)
        self._grad_mode = GRAD_MODES[grad_mode]
        self._inference = grad_mode == "inference"

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with self._grad_mode():
            outputs: Sequence[torch.Tensor] = self._call(*leaves)
        return owned(_in_default_layout(outputs, self.settings), self._held, inference=self._inference)


def _in_default_layout(outputs: Sequence[torch.Tensor], settings: Settings) -> Sequence[torch.Tensor]:
    return contiguous(outputs) if settings.memory_format == "channels_last" else outputs


@dataclass(frozen=True, kw_only=True)
class Eager(Backend):
    """PyTorch's eager mode, the baseline of all measurements.

    Pays off for tiny networks, data-dependent control flow, and operators that no other runtime supports. It accepts every
    model, needs no other package, and ships if nothing else is verifiably faster. Its artifacts contain an exported program or,
    if that is impossible, frozen TorchScript.
    Source: https://docs.pytorch.org/docs/stable/notes/autograd.html#inference-mode
    """

    honours = frozenset({"threads", "memory_format", "precision.autocast", "data.batch", "memory.keep_freed"})
    tells_fallbacks = True  # there are none: all operators are PyTorch's own

    grad_mode: Literal["inference", "no_grad"] = "inference"
    """``no_grad`` is the usual choice; ``inference`` also skips version counters and view tracking."""

    def describe(self) -> str:
        return "PyTorch in eager mode, " + ("inference mode" if self.grad_mode == "inference" else "gradients off")

    def compile(self, candidate: Candidate) -> Executable:
        """Wrap the model; nothing is built."""
        return EagerExecutable(candidate, self.grad_mode)

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Load the exported program or the TorchScript file, and run it eagerly."""
        scripted = (folder / SCRIPT).exists()
        module = load_script(folder) if scripted else bare_module(load_program(folder / PROGRAM))
        return FlatExecutable(module, signature, settings, self.grad_mode)

    def script(self) -> str:
        return """
def load(folder, threads):
    import os, torch
    torch.set_num_threads(threads or torch.get_num_threads())
    if os.path.exists(f"{folder}/script.pt"):
        model = torch.jit.load(f"{folder}/script.pt")
    else:
        with torch.device("cpu"):
            model = torch.export.load(f"{folder}/program.pt2").module()
    def call(arrays):
        with torch.no_grad():
            return model(*(torch.as_tensor(array, device="cpu") for array in arrays))
    return call
"""
