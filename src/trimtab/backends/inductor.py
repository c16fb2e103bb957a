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
    dense,
    disagreement,
    export_program,
    frozen_note,
    frozen_signature,
    lost_dims,
    memory_formats,
    verified,
    write_exported,
    written_back,
)
from trimtab.backends.common.inductor_process import Mode, options
from trimtab.backends.common.other_sizes import answer, at_sizes, other_size
from trimtab.backends.common.owned_outputs import copied, in_order, lent_twice
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim, Signature
from trimtab.errors import ArtifactError, CompileError
from trimtab.hardware.system import no_compiler
from trimtab.safe_load.archives import load_program


class FlatProgram(nn.Module):
    """A flat face around the module of an exported program, so that torch.compile takes the pytree handling in too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the program."""
        outputs: tuple[torch.Tensor, ...] = self.module(*leaves)
        return outputs


class InductorExecutable(Executable):
    """A compiled flat module. Another size within the signature is compiled when it is first seen."""

    def __init__(self, module: nn.Module, mode: Mode, signature: Signature, settings: Settings) -> None:
        super().__init__(signature, settings)
        self._formats = memory_formats(signature, settings.memory_format)
        self._compiled = _compiled(module, mode)
        self._lent: tuple[int, ...] | None = None
        self._laid = settings.memory_format == "channels_last"
        self._written = signature.written
        self.candidate: Candidate | None = None

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the compiled module. Inputs are made dense first: another stride would be compiled anew, for seconds."""
        # no inference mode: callers could not write into its outputs, and copies cost more than it saves; nor a caller's own,
        # for which everything would be compiled once more
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._lent is None:
                self._lent = self._find_lent(leaves)
            laid = dense(leaves, self._formats)
            outputs = copied(self._compiled(*laid), self._lent)
            if self._written:
                written_back(leaves, laid, self._written)
            return in_order(outputs) if self._laid else outputs

    def _find_lent(self, leaves: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Which outputs are constants of the compiled code or lie in weights, found by two calls; it does not tell which."""
        calls = ([leaf.clone() for leaf in dense(leaves, self._formats)] for _ in range(2))
        first, second = (self._compiled(*call) for call in calls)
        return lent_twice(first, second)

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write the exported program that :meth:`Inductor.load` compiles; the signature becomes the one that it keeps."""
        if self.candidate is None:
            raise CompileError("This executable was loaded from files; copy those.")
        kept = write_exported(self.candidate, folder, plain=True)
        self.notes += frozen_note(lost_dims(self.signature, kept))
        self.signature = kept
        return [PROGRAM]


@dataclass(frozen=True, kw_only=True)
class Inductor(Backend):
    """Generate and compile C++ for the whole graph, with torch.compile.

    Pays where many small operators follow each other, which it fuses into single loops, and in front of quantized weights,
    whose conversions it fuses too. It gains nothing where a recurrent layer takes the time, which calls the same library as
    eager mode. A size of the inputs that it has not seen may be compiled anew, for seconds.

    What is saved is the exported program: it is compiled again where it is loaded, which needs a C++ compiler there and takes
    from ten seconds to a minute (``aoti`` saves the machine code instead).
    Source: https://docs.pytorch.org/docs/stable/torch.compiler.html
    """

    name = "inductor"
    honours = frozenset({"threads", "memory_format", "precision.autocast", "data.batch", "memory.keep_freed"})
    cost = "minute"

    mode: Mode = "freezing"
    """``freezing`` makes weights constants, which lets them be packed for the machine; ``max_autotune`` also times several
    matrix-multiplication kernels and keeps the fastest."""

    def describe(self) -> str:
        """The name that people know it by."""
        how = {"freezing": ", weights frozen", "max_autotune": ", kernels tuned by trial"}.get(self.mode, "")
        return f"torch.compile{how}"

    def why_not_here(self) -> str | None:
        """Needs a C++ compiler."""
        return no_compiler()

    def compile(self, candidate: Candidate) -> Executable:
        """Compile the module whole or, if that is refused, the exported program."""
        try:
            executable = self._built(candidate, candidate.flat())
        except CompileError as error:
            executable = self._built(candidate, FlatProgram(bare_module(export_program(candidate, plain=True)[0])))
            executable.notes.append(f"Compiled from the exported program. {error}")
        executable.candidate = candidate
        return executable

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Read the exported program; it is compiled at the first call."""
        if reason := no_compiler():
            raise ArtifactError(f"This artifact is compiled where it is loaded. {reason}")
        return InductorExecutable(FlatProgram(bare_module(load_program(folder / PROGRAM))), self.mode, signature, settings)

    def script(self) -> str:
        """Compiles the exported program with torch alone."""
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

    def _built(self, candidate: Candidate, module: nn.Module) -> InductorExecutable:
        """Compile ``module`` by running it on the example and, where sizes may differ, on one other size.

        Sizes of one need no check of their own: the compiler guards on them and compiles again. The signature promises other
        sizes only where one that was not seen yet runs what was compiled.
        """
        executable = InductorExecutable(module, self.mode, candidate.signature, candidate.settings)
        try:
            executable.signature = verified(candidate, executable.run, smallest=False)
        except CompileError:
            if reason := disagreement(candidate, executable.run, candidate.leaves):
                raise CompileError(f"torch.compile does not get this model right: {reason}.") from None
            executable.signature = frozen_signature(candidate, executable.run)
            return executable
        if (sizes := _compiled_anew(candidate, executable)) is not None:
            executable.signature = frozen_signature(candidate, executable.run)
            executable.notes.append(
                f"Built for the example's {', '.join(sizes)} only: other sizes would each be compiled anew, as for "
                f"{', '.join(f'{name}={size}' for name, size in sizes.items())}, and torch.compile gives up after eight."
            )
        return executable


def _compiled_anew(candidate: Candidate, executable: InductorExecutable) -> dict[str, int] | None:
    """Sizes for which the code that was compiled for two others does not do, as where a loop over them was unrolled.

    One version more is allowed, because code may differ between, say, even and odd sizes.
    """
    dims = candidate.signature.dims
    now = candidate.signature.sizes(candidate.leaves)
    seen = {dim.name: {now[dim.name], other_size(candidate, dim.name, step)} for step, dim in enumerate(dims, start=1)}
    for last in (False, True):
        sizes = {dim.name: _unseen(dim, seen[dim.name], first) for first, dim in enumerate(dims, start=len(dims) + 1)}
        leaves = at_sizes(candidate, sizes)
        if all(size in seen[name] for name, size in sizes.items()) or answer(candidate, leaves) is None:
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
    """A size of ``dim`` above one, ``first`` steps from those ``seen`` if bounds allow; one of them if there is no other."""
    start = max(seen)
    wanted = (start + step * dim.step for step in (first, *range(1, first), *range(-1, -start // dim.step - 1, -1)))
    return next((size for size in wanted if size > 1 and size in dim and size not in seen), start)


def _compiled(module: nn.Module, mode: Mode) -> Callable[..., Any]:
    """``module.forward`` for torch.compile, with code of its own.

    The compiler keeps what it made with the code object, and gives up after eight versions of one. Executables of one process
    share this module's class, so each gets a copy of its code. Compiling ``forward`` instead of the module saves a call.
    """
    shared = type(module).forward
    code = shared.__code__.replace()
    own = types.FunctionType(code, shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__)
    compiled: Callable[..., Any] = torch.compile(types.MethodType(own, module), fullgraph=True, options=options(mode))
    return compiled
