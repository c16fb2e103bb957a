"""AOTInductor: machine code, built ahead of time."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from trimtab._internal.serialization import from_json, write_json
from trimtab._internal.text import counted, with_fix
from trimtab.backends.common.causes import first_line
from trimtab.backends.common.exported_program import (
    EXPORT_ERRORS,
    dense,
    export_program,
    export_static,
    lost_dims,
    memory_formats,
    quiet,
    verified,
    written_back,
)
from trimtab.backends.common.inductor_process import Mode, options
from trimtab.backends.common.owned_outputs import in_order
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.errors import ArtifactError, CompileError, IntegrityError, UsageError
from trimtab.hardware.system import no_compiler

EXAMPLE = "example.pt2"
DYNAMIC = "dynamic.pt2"
BUILD = "build.json"
CHECK_INPUTS = "AOTI_RUNTIME_CHECK_INPUTS"


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a package was built for, which it does not say itself."""

    threads: int
    shapes: list[list[int]] = field(default_factory=list)
    """Sizes of the inputs that ``example.pt2`` is made for; ``dynamic.pt2``, if there is one, takes all others."""
    layouts: list[str] = field(default_factory=list)
    """Memory format of each input."""
    writes: list[int] = field(default_factory=list)
    """Places of the inputs that a call writes to, for ``run.py``."""


class AotiExecutable(Executable):
    """One package for the example's sizes, where the compiler knows everything, and one for all others."""

    own_threads = True

    def __init__(self, folder: pathlib.Path, build: Build, signature: Signature, settings: Settings) -> None:
        super().__init__(signature, settings)
        self._folder = folder
        self._build = build
        self._formats = memory_formats(signature, settings.memory_format)
        self._shapes = [torch.Size(shape) for shape in build.shapes]
        self._strides = [_strides(shape, layout) for shape, layout in zip(self._shapes, self._formats, strict=True)]
        self._example = _load(folder / EXAMPLE)
        self._dynamic = _load(folder / DYNAMIC) if (folder / DYNAMIC).exists() else None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the package that fits.

        A package takes exactly the strides that it was built for, so inputs are made dense, down to the strides of dimensions
        of size one, which torch itself does not care about.

        It runs with the number of threads that it was built for, since with another it would be up to 5x slower. Each thread of
        Python's has a number of its own.
        """
        if (threads := torch.get_num_threads()) == self._build.threads:
            return self._run(leaves)
        torch.set_num_threads(self._build.threads)
        try:
            return self._run(leaves)
        finally:
            torch.set_num_threads(threads)

    def _run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        call, strides = self._example, self._strides
        if self._dynamic is not None and [leaf.shape for leaf in leaves] != self._shapes:
            call = self._dynamic
            strides = [_strides(leaf.shape, layout) for leaf, layout in zip(leaves, self._formats, strict=True)]
        laid = _exactly(leaves, strides, self._formats)
        if written := self.signature.written:
            outputs = call(list(laid))  # the package empties the list that it gets
            written_back(leaves, laid, written)
        else:
            outputs = call(laid)
        return in_order(outputs) if self.settings.memory_format == "channels_last" else outputs

    def save(self, folder: pathlib.Path) -> list[str]:
        """Copy the packages and what they were built for."""
        names = [name for name in (EXAMPLE, DYNAMIC, BUILD) if (self._folder / name).exists()]
        for name in names:
            shutil.copyfile(self._folder / name, folder / name)
        return names

    def close(self) -> None:
        """Unload the packages and remove the files that were built for this process."""
        self._example, self._dynamic = _closed, None
        if self._scratch is not None:
            self._scratch.cleanup()


@dataclass(frozen=True, kw_only=True)
class Aoti(Backend):
    """Compile the graph with its weights to a shared library, ahead of time.

    Pays most on small networks, whose calls it makes cheapest: there is no interpreter and no guard left (on one machine a
    small MLP took a third of its time in eager mode). It also starts without compiling, where ``inductor`` needs a compiler
    and its time at every start. It gains nothing where a recurrent layer takes the time, which calls the same library as eager
    mode. The files are machine code: they fit this CPU family, this torch and this number of threads only, and load with
    ``trust=True`` only.
    Source: https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_aot_inductor.html
    """

    name = "aoti"
    honours = frozenset({"threads", "memory_format", "precision.autocast", "data.batch", "memory.keep_freed"})
    native_code = True
    cost = "minute"

    mode: Literal["freezing", "default"] = "freezing"
    """``freezing`` packs weights for the processor's own matrix library: 2.3x on a transformer encoder of width 256, but
    4x slower on an MLP of width 128, where the library's calls cost more than the generated loops of ``default``."""

    def describe(self) -> str:
        """The name that people know it by."""
        return "AOTInductor" + (", weights frozen" if self.mode == "freezing" else "")

    def why_not_here(self) -> str | None:
        """Needs a C++ compiler."""
        return no_compiler()

    def compile(self, candidate: Candidate) -> Executable:
        """Build one package for the example's sizes and, where others are allowed, one for those."""
        scratch = tempfile.TemporaryDirectory(prefix="trimtab-aoti-")
        folder = pathlib.Path(scratch.name)
        layouts = memory_formats(candidate.signature, candidate.settings.memory_format)
        build = Build(
            threads=torch.get_num_threads(),
            shapes=[list(leaf.shape) for leaf in candidate.leaves],
            layouts=[str(layout).removeprefix("torch.") for layout in layouts],
            writes=list(candidate.signature.written),
        )
        write_json(folder / BUILD, build)
        program, frozen = export_static(candidate)
        _package(program, folder / EXAMPLE, self.mode)
        notes: list[str] = []
        signature = self._dynamic(candidate, frozen, folder, notes) if candidate.signature.dims else frozen
        executable = AotiExecutable(folder, build, signature, candidate.settings)
        executable._scratch = scratch
        executable.notes += notes
        return self._checked(candidate, executable)

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Load the packages, if they were built for as many threads as there will be."""
        try:
            build = from_json(Build, json.loads((folder / BUILD).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise IntegrityError(f"{BUILD} cannot be read: {error}") from error
        if settings.threads not in (None, build.threads):
            raise ArtifactError(_other_threads(build.threads, settings.threads))
        torch.set_num_threads(build.threads)
        try:
            return AotiExecutable(folder, build, signature, settings)
        except EXPORT_ERRORS as error:
            told = f"The package cannot be loaded here: {first_line(error)}"
            raise ArtifactError(with_fix(told, "Optimize again on this machine.")) from error

    def script(self) -> str:
        """Loads the packages with torch alone."""
        return """
def load(folder, threads):
    import json, os, torch
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    build = json.load(open(f"{folder}/build.json"))
    torch.set_num_threads(build["threads"])
    names = ("example", "dynamic") if os.path.exists(f"{folder}/dynamic.pt2") else ("example", "example")
    example, other = (torch._inductor.aoti_load_package(f"{folder}/{name}.pt2") for name in names)
    def laid(array, layout):  # a package takes exactly the strides that it was built for
        tensor = torch.as_tensor(array, device="cpu")
        return torch.empty_like(tensor, memory_format=getattr(torch, layout)).copy_(tensor)
    def call(arrays):
        fits, given = [list(a.shape) for a in arrays] == build["shapes"], list(map(laid, arrays, build["layouts"]))
        with torch.no_grad():
            return [*(example if fits else other)(*given), *(given[i] for i in build["writes"])]
    return call
"""

    def _dynamic(self, candidate: Candidate, frozen: Signature, folder: pathlib.Path, notes: list[str]) -> Signature:
        try:
            program, signature = export_program(candidate)
            if signature.dims:
                _package(program, folder / DYNAMIC, self.mode)
                notes += _built_for(lost_dims(candidate.signature, signature))
                return signature
        except CompileError as error:
            notes.append(str(error))
        notes += _built_for(lost_dims(candidate.signature, frozen))
        return frozen

    def _checked(self, candidate: Candidate, executable: AotiExecutable) -> AotiExecutable:
        """Run the packages next to the model, at the sizes that the signature claims."""
        executable.signature = verified(replace(candidate, signature=executable.signature), executable.run)
        return executable


def _built_for(lost: Sequence[str]) -> list[str]:
    """What there is to say about dimensions that were frozen; nothing if there are none."""
    return [f"Built for the example's {', '.join(lost)} only, because the model does not export for others."] if lost else []


def _package(program: ExportedProgram, path: pathlib.Path, mode: Mode) -> None:
    """Build ``program`` into ``path``. A lower bound of two, which the tracer assumes for every dynamic size, is not built in;
    the executable checks its own signature, and sizes of one are verified by running them. With gradients enabled, freezing
    would be skipped without a word."""
    chosen = options(mode) | {"aot_inductor.check_lowerbound": False}
    try:
        with quiet(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=chosen)
    except EXPORT_ERRORS as error:
        raise CompileError(f"AOTInductor cannot build this model: {first_line(error)}.") from error


def _load(path: pathlib.Path) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The package's own entry point. Its checks are switched on first: without them another batch size, dtype or memory
    format gives wrong numbers and no error."""
    os.environ[CHECK_INPUTS] = "1"
    loaded: Any = torch._inductor.aoti_load_package(str(path))
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loaded.loader.boxed_run
    return run


def _strides(shape: torch.Size, layout: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=layout).stride()


def _exactly(
    leaves: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]], formats: Sequence[torch.memory_format]
) -> list[torch.Tensor]:
    if all(leaf.stride() == stride for leaf, stride in zip(leaves, strides, strict=True)):
        return list(leaves)
    laid = dense(leaves, formats)
    return [leaf if leaf.stride() == stride else leaf.as_strided(leaf.shape, stride)
            for leaf, stride in zip(laid, strides, strict=True)]  # fmt: skip


def _closed(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    raise UsageError("This executable was closed. Load it again.")


def _other_threads(built: int, found: int) -> str:
    return (
        f"This package was built for {counted(built, 'thread')} and would run several times slower with {found}. Load it with "
        f"threads={built}, or build it again for {found}."
    )
