"""Frozen TorchScript."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.backends.common.causes import first_line
from trimtab.backends.common.exported_program import EXPORT_ERRORS, disagreement, lost_dims
from trimtab.backends.common.owned_outputs import contiguous, has_control_flow, held_addresses, held_outputs, with_copies
from trimtab.backends.common.process_lock import SHARED
from trimtab.backends.common.torchscript import SCRIPT, frozen, kept_signature, load_script, save_script, trace_or_script
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.errors import CompileError, IntegrityError

FROZEN = "frozen.pt"
"""File of a module that runs without ``optimize_for_inference``; a module in ``script.pt`` is optimized when it is loaded."""
UNOPTIMIZED = "The frozen module runs as it is, because torch.jit.optimize_for_inference {}."
WARM_UP = 3
"""Calls until TorchScript's profiling executor has specialized the graph."""
_PLAIN_ERRORS: tuple[type[Exception], ...] = (*EXPORT_ERRORS, CompileError, IntegrityError, OSError)
"""Errors of making the frozen module once more, and of calling it."""


class TorchScriptExecutable(Executable):
    """A frozen script module, optimized for inference.

    ``plain`` makes the module without that optimization. It takes the place of ``module`` once that raises an error on inputs
    that it takes.
    """

    def __init__(
        self,
        module: Any,
        source: Any,
        signature: Signature,
        settings: Settings,
        *,
        plain: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(signature, settings)
        self._source, self._plain = source, plain
        self._made: Any = None
        """What ``plain`` has made. It is kept, because a call may raise again and again on wrong inputs."""
        self._channels_last = settings.memory_format == "channels_last"
        self._held_outputs: tuple[int, ...] | None = None
        self._use(module)

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():  # not inference mode: callers could not modify the outputs, and copies cost more than it saves
            try:
                outputs: Sequence[torch.Tensor] = self._module(*leaves)
            except EXPORT_ERRORS as error:
                outputs = self._run_plain(leaves, error)
            if self._held_outputs is None or self._has_control_flow:
                self._held_outputs = held_outputs(outputs, self._held)
            outputs = with_copies(outputs, self._held_outputs)
            return contiguous(outputs) if self._channels_last else outputs

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write the frozen module without the optimizations for this machine, which could be saved but not loaded."""
        if self._source is None:
            raise CompileError("This executable was loaded from files; copy those.")
        return save_script(self._source, folder, FROZEN if self._plain is None else SCRIPT)

    def _use(self, module: Any) -> None:
        self._module = module
        self._held, self._has_control_flow = held_addresses(module), has_control_flow(module)
        self._held_outputs = None

    def _run_plain(self, leaves: Sequence[torch.Tensor], error: Exception) -> Sequence[torch.Tensor]:
        """The outputs of the module without the optimization, on which ``error`` was raised. Raises ``error`` if that module
        raises too, or if inputs may be modified by now."""
        if self._plain is None or self.signature.writes:
            raise error
        try:
            self._made = self._made or self._plain()
            outputs: Sequence[torch.Tensor] = self._made(*leaves)
        except _PLAIN_ERRORS:
            raise error from None
        self._use(self._made)
        self._plain = self._made = None
        self.notes.append(UNOPTIMIZED.format(f"raises {first_line(error)}"))
        return outputs


@dataclass(frozen=True, kw_only=True)
class TorchScript(Backend):
    """Trace the model, freeze it (weights become constants, batch norms are folded), and optimize it for inference.

    Pays off a little for small networks, because Python is removed, and for convolutions (oneDNN graph fusions). Needs no
    compiler. Models with data-dependent control flow are compiled from their source instead of traced.
    Source: https://docs.pytorch.org/docs/stable/jit.html
    """

    words = "TorchScript, frozen"
    honours = frozenset({"threads", "memory_format", "precision.autocast", "data.batch", "memory.keep_freed"})

    def compile(self, candidate: Candidate) -> Executable:
        """Trace or script a copy, and run it until TorchScript has specialized it."""
        source, notes = trace_or_script(candidate)
        module, signature, reason = _fastest(candidate, source)
        plain = (lambda: frozen(source)) if reason is None else None
        executable = TorchScriptExecutable(module, source, signature, candidate.settings, plain=plain)
        executable.notes += notes + ([UNOPTIMIZED.format(reason)] if reason else [])
        if lost := lost_dims(candidate.signature, signature):
            executable.notes.append(f"Built for the example's {', '.join(lost)} only, because it is not right for others.")
        for _ in range(WARM_UP):
            executable.run(candidate.own_leaves())
        return executable

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Load the frozen module. ``script.pt`` is optimized for this machine, ``frozen.pt`` runs as it is."""
        if (folder / FROZEN).exists():
            return TorchScriptExecutable(load_script(folder, FROZEN), None, signature, settings)
        before = _file_state(folder / SCRIPT)

        def plain() -> Any:
            if _file_state(folder / SCRIPT) != before:
                raise IntegrityError(f"{folder / SCRIPT} was changed after it was loaded.")
            return load_script(folder)

        try:
            return TorchScriptExecutable(_optimized(load_script(folder)), None, signature, settings, plain=plain)
        except EXPORT_ERRORS as error:  # the pass depends on the machine
            executable = TorchScriptExecutable(load_script(folder), None, signature, settings)
            executable.notes.append(UNOPTIMIZED.format(f"raises {first_line(error)}"))
            return executable

    def script(self) -> str:
        return """
def load(folder, threads):
    import os, torch
    torch.set_num_threads(threads or torch.get_num_threads())
    name = "script" if os.path.exists(f"{folder}/script.pt") else "frozen"
    plain = lambda: torch.jit.load(f"{folder}/{name}.pt")
    try:  # torch.jit.optimize_for_inference may fail, or what it makes when it is called; frozen.pt is there where it does
        model = torch.jit.optimize_for_inference(plain()) if name == "script" else plain()
    except RuntimeError:
        model = plain()
    def call(arrays):
        nonlocal model
        inputs = [torch.as_tensor(array, device="cpu") for array in arrays]
        with torch.no_grad():
            try:
                return model(*inputs)
            except RuntimeError:
                if any(x._version for x in inputs): raise  # inputs that the call has changed would give another answer
                model, outputs = (other := plain()), other(*inputs)  # the model stays where the other one fails too
                return outputs
    return call
"""


def _fastest(candidate: Candidate, source: torch.jit.ScriptModule) -> tuple[Any, Signature, str | None]:
    """``source`` frozen and optimized, its signature, and ``None``; or only frozen, with the reason for that.

    For some models ``torch.jit.optimize_for_inference`` makes a module that raises errors, at some sizes or at all
    (pytorch/pytorch#64806), although the frozen module is right.
    """
    try:
        module = _optimized(frozen(source))
    except EXPORT_ERRORS as error:
        reason, kept = f"raises {first_line(error)}", None
    else:
        wrong = disagreement(candidate, lambda leaves: module(*leaves), candidate.leaves)
        kept = None if wrong else kept_signature(candidate, module)
        if kept is not None and not lost_dims(candidate.signature, kept):
            return module, kept, None
        reason = f"makes a module that is wrong: {wrong}" if wrong else "loses dynamic sizes that the frozen module takes"
    plain = frozen(source)
    signature = kept_signature(candidate, plain)
    if kept is not None and len(kept.dims) >= len(signature.dims):
        return module, kept, None
    return plain, signature, reason


def _optimized(module: Any) -> Any:
    with SHARED, warnings.catch_warnings(action="ignore"):
        return torch.jit.optimize_for_inference(module)


def _file_state(path: pathlib.Path) -> tuple[int, int, int]:
    """What changes when the file is written anew."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
