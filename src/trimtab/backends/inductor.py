"""torch.compile with TorchInductor."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.backends.common.exported_program import (
    EXPORT_ERRORS,
    PROGRAM,
    bare_module,
    copy_back,
    dense,
    disagreement,
    export_program,
    frozen_note,
    frozen_signature,
    lost_dims,
    memory_formats,
    verified,
    write_exported,
)
from trimtab.backends.common.inductor_process import Mode, options
from trimtab.backends.common.other_sizes import at_sizes, other_size, reference_run
from trimtab.backends.common.owned_outputs import contiguous, reused_outputs, with_copies
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim, Signature
from trimtab.errors import ArtifactError, CompileError
from trimtab.hardware.system import no_compiler
from trimtab.safe_load.archives import load_program


class FlatProgram(nn.Module):
    """An exported program with flat inputs and outputs, so that torch.compile compiles the pytree handling too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = self.module(*leaves)
        return outputs


class InductorExecutable(Executable):
    """A compiled flat module. Other sizes within the signature are compiled at their first use."""

    def __init__(self, module: nn.Module, mode: Mode, signature: Signature, settings: Settings) -> None:
        super().__init__(signature, settings)
        self._formats = memory_formats(signature, settings.memory_format)
        self._compiled = _compiled(module, mode)
        self._reused_outputs: tuple[int, ...] | None = None
        self._channels_last = settings.memory_format == "channels_last"
        self._written = signature.written
        self.candidate: Candidate | None = None

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the compiled module. Inputs are made dense, because other strides would be compiled again, for seconds."""
        # Not in inference mode: callers could not modify the outputs, and copies would cost more than the mode saves. The
        # caller's inference mode is left too: everything would be compiled once more for it.
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._reused_outputs is None:
                self._reused_outputs = self._find_reused_outputs(leaves)
            converted = dense(leaves, self._formats)
            outputs = with_copies(self._compiled(*converted), self._reused_outputs)
            if self._written:
                copy_back(leaves, converted, self._written)
            return contiguous(outputs) if self._channels_last else outputs

    def _find_reused_outputs(self, leaves: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Indices of the outputs that are constants or weights, found by comparing the memory of two calls."""
        calls = ([leaf.clone() for leaf in dense(leaves, self._formats)] for _ in range(2))
        first, second = (self._compiled(*call) for call in calls)
        return reused_outputs(first, second)

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write the exported program, which :meth:`Inductor.load` compiles. The signature becomes the program's."""
        if self.candidate is None:
            raise CompileError("This executable was loaded from files; copy those.")
        kept = write_exported(self.candidate, folder, plain=True)
        self.notes += frozen_note(lost_dims(self.signature, kept))
        self.signature = kept
        return [PROGRAM]


class _RecompiledSizesError(CompileError):
    """Each size that the workload states would be compiled separately. Compiling from the exported program does not help."""


@dataclass(frozen=True, kw_only=True)
class Inductor(Backend):
    """Generate and compile C++ for the whole graph, with torch.compile.

    Pays off for sequences of small operators, which are fused into loops, and for quantized weights, whose conversions are
    fused too. Recurrent layers do not become faster: they call the same library as eager mode. New input sizes may be compiled
    again, for seconds.

    The saved file is the exported program. Loading compiles it again, which needs a C++ compiler and takes from ten seconds to
    a minute (``aoti`` saves machine code instead).
    Source: https://docs.pytorch.org/docs/stable/torch.compiler.html
    """

    honours = frozenset({"threads", "memory_format", "precision.autocast", "data.batch", "memory.keep_freed"})
    cost = "minute"

    mode: Mode = "freezing"
    """``freezing`` makes weights constants, so that they can be packed for the CPU; ``max_autotune`` also times several matrix
    product kernels and keeps the fastest."""

    def describe(self) -> str:
        how = {"freezing": ", weights frozen", "max_autotune": ", kernels tuned by trial"}.get(self.mode, "")
        return f"torch.compile{how}"

    def why_not_here(self) -> str | None:
        return no_compiler()

    def compile(self, candidate: Candidate) -> Executable:
        """Compile the module or, if torch.compile refuses it, its exported program."""
        try:
            executable = self._compile_module(candidate, candidate.flat())
        except _RecompiledSizesError:
            raise
        except CompileError as error:
            executable = self._compile_module(candidate, FlatProgram(bare_module(export_program(candidate, plain=True)[0])))
            executable.notes.append(f"Compiled from the exported program. {error}")
        executable.candidate = candidate
        return executable

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Load the exported program. It is compiled at the first call."""
        if reason := no_compiler():
            raise ArtifactError(f"This artifact is compiled where it is loaded. {reason}")
        return InductorExecutable(FlatProgram(bare_module(load_program(folder / PROGRAM))), self.mode, signature, settings)

    def script(self) -> str:
        return f"""
def load(folder, threads):
    import torch
    torch.set_num_threads(threads or torch.get_num_threads())
    with torch.device("cpu"):
        program = torch.export.load(f"{{folder}}/program.pt2")
    model = torch.compile(program.module(check_guards=False), options={options(self.mode)!r})
    def call(arrays):
        with torch.no_grad():
            return model(*(torch.as_tensor(array, device="cpu") for array in arrays))
    return call
"""

    def _compile_module(self, candidate: Candidate, module: nn.Module) -> InductorExecutable:
        """Compile ``module`` by running it on the example and, with dynamic dimensions, at one other size.

        Size 1 needs no check: the compiler guards on it and compiles again. The signature keeps a dynamic dimension only if a
        size that was not seen yet runs without compilation. Of dimensions that the workload states all must be kept.
        """
        executable = InductorExecutable(module, self.mode, candidate.signature, candidate.settings)
        try:
            executable.signature = verified(candidate, executable.run, smallest=False)
        except CompileError:
            if candidate.all_sizes:
                raise
            if reason := disagreement(candidate, executable.run, candidate.leaves):
                raise CompileError(f"torch.compile does not get this model right: {reason}.") from None
            executable.signature = frozen_signature(candidate, executable.run)
            return executable
        if (sizes := _recompiled_sizes(candidate, executable)) is not None:
            anew = (
                "Other sizes than the example's would each be compiled anew, as for "
                f"{', '.join(f'{name}={size}' for name, size in sizes.items())}, and torch.compile gives up after eight."
            )
            if candidate.all_sizes:
                raise _RecompiledSizesError(anew)
            executable.signature = frozen_signature(candidate, executable.run)
            executable.notes.append(f"Built for the example's {', '.join(sizes)} only. {anew}")
        return executable


def _recompiled_sizes(candidate: Candidate, executable: InductorExecutable) -> dict[str, int] | None:
    """Sizes that are recompiled although two others were compiled before, as for an unrolled loop; ``None`` if there are none.

    One more version is allowed, because the code may differ, for example, between even and odd sizes.
    """
    dims = candidate.signature.dims
    now = candidate.signature.sizes(candidate.leaves)
    seen = {dim.name: {now[dim.name], other_size(candidate, dim.name, step)} for step, dim in enumerate(dims, start=1)}
    for last in (False, True):
        sizes = {dim.name: _unseen(dim, seen[dim.name], first) for first, dim in enumerate(dims, start=len(dims) + 1)}
        leaves = at_sizes(candidate, sizes)
        if all(size in seen[name] for name, size in sizes.items()) or reference_run(candidate, leaves) is None:
            return None
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                executable.run(leaves)
        except EXPORT_ERRORS:
            if last:
                return sizes
        else:
            return None
        executable.run(leaves)
        for name, size in sizes.items():
            seen[name].add(size)
    return None


def _unseen(dim: Dim, seen: set[int], first: int) -> int:
    """A size of ``dim`` above 1 that is not in ``seen``, ``first`` steps away if possible; one of ``seen`` if there is none."""
    start = max(seen)
    wanted = (start + step * dim.step for step in (first, *range(1, first), *range(-1, -start // dim.step - 1, -1)))
    return next((size for size in wanted if size > 1 and size in dim and size not in seen), start)


def _compiled(module: nn.Module, mode: Mode) -> Callable[..., Any]:
    """``module.forward`` compiled by torch.compile, with a code object of its own.

    The compiler caches by code object and gives up after eight versions. Executables of one process share the class, so each
    gets a copy of the code. Compiling ``forward`` instead of the module saves a call.
    """
    shared = type(module).forward
    code = shared.__code__.replace()
    own = types.FunctionType(code, shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__)
    compiled: Callable[..., Any] = torch.compile(types.MethodType(own, module), fullgraph=True, options=options(mode))
    return compiled
