"""AOTInductor: ahead-of-time compilation to machine code."""

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
    copy_back,
    dense,
    export_program,
    export_static,
    lost_dims,
    memory_formats,
    verified,
)
from trimtab.backends.common.inductor_process import Mode, options
from trimtab.backends.common.owned_outputs import contiguous
from trimtab.backends.common.process_lock import quiet
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
    """Build conditions of a package, stored beside it because the package does not contain them."""

    threads: int
    shapes: list[list[int]] = field(default_factory=list)
    """Shapes of the inputs that ``example.pt2`` is built for. ``dynamic.pt2``, if it exists, runs all other shapes."""
    layouts: list[str] = field(default_factory=list)
    """Memory format of each input."""
    writes: list[int] = field(default_factory=list)
    """Indices of the inputs that a call modifies, for ``run.py``."""


class AotiExecutable(Executable):
    """Two packages: one specialized to the example's shapes, and one for all other shapes."""

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
        """Run the package for the shapes of ``leaves``.

        A package requires the exact strides that it was built for, even for dimensions of size 1, so inputs are made dense.

        torch's number of threads (per Python thread) is set to the package's: with another one it would be up to 5x slower.
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
        converted = _with_strides(leaves, strides, self._formats)
        if written := self.signature.written:
            outputs = call(list(converted))  # a copy, because the package empties the list
            copy_back(leaves, converted, written)
        else:
            outputs = call(converted)
        return contiguous(outputs) if self.settings.memory_format == "channels_last" else outputs

    def save(self, folder: pathlib.Path) -> list[str]:
        names = [name for name in (EXAMPLE, DYNAMIC, BUILD) if (self._folder / name).exists()]
        for name in names:
            shutil.copyfile(self._folder / name, folder / name)
        return names

    def close(self) -> None:
        """Unload the packages and delete the files that this process built."""
        self._example, self._dynamic = _closed, None
        if self._scratch is not None:
            self._scratch.cleanup()


@dataclass(frozen=True, kw_only=True)
class Aoti(Backend):
    """Compile the graph with its weights to a shared library, ahead of time.

    Pays off most for small networks, because a call has no interpreter and no guards (on one machine a small MLP took a third
    of its eager time). Loading needs no compiler, unlike ``inductor``. Recurrent layers do not become faster: they call the
    same library as eager mode. The files are machine code: they fit one CPU family, torch version and number of threads, and
    need ``trust=True`` to load.
    Source: https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_aot_inductor.html
    """

    honours = frozenset({"threads", "memory_format", "precision.autocast", "data.batch", "memory.keep_freed"})
    native_code = True
    cost = "minute"

    mode: Literal["freezing", "default"] = "freezing"
    """``freezing`` packs weights for the CPU's matrix library: 2.3x faster on a transformer encoder of width 256, but 4x slower
    on an MLP of width 128, where library calls cost more than the generated loops of ``default``."""

    def describe(self) -> str:
        return "AOTInductor" + (", weights frozen" if self.mode == "freezing" else "")

    def why_not_here(self) -> str | None:
        return no_compiler()

    def compile(self, candidate: Candidate) -> Executable:
        """Build a package for the example's shapes and, if the signature has dynamic dimensions, one for other shapes."""
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
        notes: list[str] = []
        # before the example's package, which takes half a minute and is of no use alone if the workload states other sizes
        signature = self._dynamic(candidate, frozen, folder, notes) if candidate.signature.dims else frozen
        _package(program, folder / EXAMPLE, self.mode)
        executable = AotiExecutable(folder, build, signature, candidate.settings)
        executable._scratch = scratch
        executable.notes += notes
        # compare the packages with the model at the sizes of the signature
        executable.signature = verified(replace(candidate, signature=executable.signature), executable.run)
        return executable

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Load the packages. Refused if ``settings.threads`` differs from the number that they were built for."""
        try:
            build = from_json(Build, json.loads((folder / BUILD).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise IntegrityError(f"{BUILD} cannot be read: {error}") from error
        if settings.threads not in (None, build.threads):
            raise ArtifactError(
                f"This package was built for {counted(build.threads, 'thread')} and would run several times slower with "
                f"{settings.threads}. Load it with threads={build.threads}, or build it again for {settings.threads}."
            )
        torch.set_num_threads(build.threads)
        try:
            return AotiExecutable(folder, build, signature, settings)
        except EXPORT_ERRORS as error:
            problem = f"The package cannot be loaded here: {first_line(error)}"
            raise ArtifactError(with_fix(problem, "Optimize again on this machine.")) from error

    def script(self) -> str:
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
        """Build the package for other sizes than the example's, if there can be one. Returns the signature of both packages.

        Raises:
            CompileError: it cannot be built, and the workload states other sizes.
        """
        try:
            program, signature = export_program(candidate)
            if signature.dims:
                _package(program, folder / DYNAMIC, self.mode)
                notes += _built_for(lost_dims(candidate.signature, signature))
                return signature
        except CompileError as error:
            if candidate.all_sizes:
                raise
            notes.append(str(error))
        notes += _built_for(lost_dims(candidate.signature, frozen))
        return frozen


def _built_for(lost: Sequence[str]) -> list[str]:
    """A note about frozen dimensions, if there are any."""
    return [f"Built for the example's {', '.join(lost)} only, because the model does not export for others."] if lost else []


def _package(program: ExportedProgram, path: pathlib.Path, mode: Mode) -> None:
    """Build ``program`` into ``path``.

    The check of lower bounds is off: the tracer assumes at least 2 for every dynamic size. The executable checks its signature,
    and size 1 is verified by a run. Gradients are off, because freezing would silently be skipped otherwise."""
    chosen = options(mode) | {"aot_inductor.check_lowerbound": False}
    try:
        with quiet(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=chosen)
    except EXPORT_ERRORS as error:
        raise CompileError(f"AOTInductor cannot build this model: {first_line(error)}.") from error


def _load(path: pathlib.Path) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The package's entry point. Its input checks are enabled first: without them another batch size, dtype or memory format
    gives wrong numbers instead of an error."""
    os.environ[CHECK_INPUTS] = "1"
    loaded: Any = torch._inductor.aoti_load_package(str(path))
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loaded.loader.boxed_run
    return run


def _strides(shape: torch.Size, layout: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=layout).stride()


def _with_strides(
    leaves: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]], formats: Sequence[torch.memory_format]
) -> list[torch.Tensor]:
    if all(leaf.stride() == stride for leaf, stride in zip(leaves, strides, strict=True)):
        return list(leaves)
    converted = dense(leaves, formats)
    return [leaf if leaf.stride() == stride else leaf.as_strided(leaf.shape, stride)
            for leaf, stride in zip(converted, strides, strict=True)]  # fmt: skip


def _closed(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    raise UsageError("This executable was closed. Load it again.")
