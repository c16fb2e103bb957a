"""The artifact: a folder that ships, stands alone, and proves itself where it arrives."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import platform
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, overload

import torch
from torch import nn

from trimtab._internal.files import path_of
from trimtab._internal.text import mended_by, with_fix
from trimtab.artifact.manifest import BASELINE, COPY, MANIFEST, MODEL, Manifest, findings, read_manifest
from trimtab.artifact.staging import fresh_folder
from trimtab.artifact.test_vectors import GOLDEN, Case, Golden
from trimtab.artifact.writer import fill
from trimtab.core.backend import BACKENDS, Backend, Executable
from trimtab.core.measurement import Comparison
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.core.technique import technique_from_json
from trimtab.core.workload import Limits
from trimtab.errors import ArtifactError, IntegrityError, TrimtabError, UntrustedError, UsageError
from trimtab.hardware import system
from trimtab.hardware.environment import RUNTIMES, Environment, instruction_sets

__all__ = [
    "Artifact",
    "ArtifactModule",
    "Case",
    "Golden",
    "Parities",
    "Verification",
    "load",
    "open_artifact",
    "verify",
    "write_artifact",
]

LOAD_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    OSError,
    SyntaxError,
    MemoryError,
)
"""What runtimes raise on files that make no sense to them."""


@dataclasses.dataclass(frozen=True)
class Artifact:
    """An artifact folder whose manifest was read. Its files are checked when they are used."""

    path: pathlib.Path
    manifest: Manifest

    @mended_by(COPY)
    def check(self) -> None:
        """Check names, kinds, sizes and hashes of all files.

        Raises:
            IntegrityError: the first thing that is wrong.
        """
        if problem := next(findings(self.path, self.manifest), None):
            raise IntegrityError(f"{self.path} is not what was written: {problem}")

    def load(self, *, trust: bool = False, threads: int | None = None) -> Executable:
        """See :func:`load`."""
        return load(self.path, trust=trust, threads=threads)

    def load_baseline(self, *, trust: bool = False) -> Executable | None:
        """The original model, called like the artifact's own, or ``None`` if it does not travel with it.

        Raises:
            IntegrityError: as for :func:`load`.
        """
        self.check()
        facts = self.manifest.baseline
        if facts is None:
            return None
        backend = _made(lambda: technique_from_json(BACKENDS, facts.backend))
        return _load(backend, self.path / BASELINE, facts.signature, facts.settings, trust, self.manifest.environment)

    @mended_by(COPY)
    def golden(self) -> Golden:
        """The test vectors.

        Raises:
            IntegrityError: they are damaged, or do not fit the signature.
        """
        signature = self.manifest.signature
        found = Golden.load(self.path / GOLDEN, self.manifest.golden.cases, len(signature.inputs), len(signature.outputs))
        for case in found.cases:
            _check_case(case, signature)
        return found

    def save(self, folder: str | os.PathLike[str]) -> Artifact:
        """Copy the artifact to ``folder``, after checking it, and return the copy.

        Raises:
            IntegrityError: it is not what was written.
            ArtifactError: ``folder`` holds something else, or cannot be written.
        """
        self.check()
        with fresh_folder(path_of(folder, "folder", "runs/model/artifact")) as target:
            for name in (*self.manifest.files, MANIFEST):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, target / name)
        return open_artifact(folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parities:
    """The golden test vectors, replayed. ``errors`` and ``tolerance`` are absolute, one per output."""

    ok: bool
    cases: int
    errors: tuple[float | None, ...]
    """``None`` where shape or dtype differ or a NaN appears."""
    tolerance: tuple[float, ...]
    reason: str | None = None

    @property
    def max_error(self) -> float | None:
        """The largest error of all, ``None`` if there is one that is no number."""
        return None if None in self.errors else max((e for e in self.errors if e is not None), default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What :func:`verify` found here and now."""

    path: str
    ok: bool
    """Files as written and outputs within tolerance. Another machine is told, not held against it."""
    integrity: tuple[str, ...]
    """What is wrong with the files, a sentence each."""
    differences: tuple[str, ...]
    """How this machine differs from the one where the artifact was proven, a sentence each."""
    parity: Parities | None
    speed: Comparison | None
    """The model against the original here; its ratio is the speed-up."""
    speed_reason: str | None
    """Why the speed was not compared."""
    promised: Any
    """The speed-up over the model as written that was measured when the artifact was written."""
    baseline_speedup: Any = None
    """That of the original that travels with the artifact, an exported program, over the model as written; measured then."""


def write_artifact(
    folder: str | os.PathLike[str],
    *,
    executable: Executable,
    recipe: Recipe,
    workload_name: str,
    golden: Golden,
    evidence: Mapping[str, Any],
    environment: Environment,
    limits: Limits | None = None,
    baseline: Executable | None = None,
    baseline_backend: Backend | None = None,
) -> Artifact:
    """Write an artifact to ``folder``, whole or not at all, and open it. An older artifact there is replaced.

    ``executable`` is saved by its own means, and run on ``golden`` to learn what its outputs may be off by. ``baseline`` is the
    original model, as an executable of ``baseline_backend`` (``eager`` under ``no_grad`` unless given); it travels along if it
    can be saved and is not far larger than the model.

    Raises:
        CompileError: ``executable`` has no form that stands alone.
        ArtifactError: ``folder`` holds something else, or cannot be written; nothing is left half-written.
    """
    with fresh_folder(pathlib.Path(folder)) as target:
        fill(
            target,
            executable=executable,
            recipe=recipe,
            workload_name=workload_name,
            golden=golden,
            evidence=evidence,
            environment=environment,
            limits=limits,
            baseline=baseline,
            baseline_backend=baseline_backend,
        )
    return open_artifact(folder)


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Read the manifest of the artifact in ``path``; nothing is loaded or run.

    Raises:
        ArtifactError: there is no artifact.
        IntegrityError: its manifest is damaged or claims what cannot be.
        UsageError: ``path`` is no path.
    """
    folder = path_of(path, "The artifact", "runs/model/artifact")
    return Artifact(folder, read_manifest(folder))


class ArtifactModule(nn.Module):
    """An artifact as an :class:`torch.nn.Module` for inference, which can stand where the model stood: ``self.encoder = ...``.

    It has no parameters, stays in evaluation mode when its parent is trained, gives outputs without gradients, and runs on the
    CPU in its own precision. It is copied and pickled as the path of its folder, whose files are checked again where it is
    loaded.
    """

    def __init__(self, path: str | os.PathLike[str], *, trust: bool = False, threads: int | None = None) -> None:
        super().__init__()
        self._arguments = (os.path.abspath(path), trust, threads)
        self.executable = load(path, trust=trust, threads=threads)
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the artifact, in the structure of the model's."""
        return self.executable(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever ``mode`` says."""
        return self

    def extra_repr(self) -> str:
        """The folder and the signature."""
        return f"{self._arguments[0]}, {self.executable.signature.describe()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _module, self._arguments

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        moved = fn(torch.zeros(()))
        if moved.device.type != "cpu" or moved.dtype != torch.float32:
            raise UsageError(
                f"The artifact {self._arguments[0]} was asked to move to {moved.device} as {str(moved.dtype)[6:]}. "
                "It runs on the CPU, in the precision that it was built for: move the other parts of the model only."
            )
        return self


def _module(path: str, trust: bool, threads: int | None) -> ArtifactModule:
    return ArtifactModule(path, trust=trust, threads=threads)


@overload
def load(
    path: str | os.PathLike[str], *, trust: bool = False, threads: int | None = None, as_module: Literal[False] = False
) -> Executable: ...
@overload
def load(
    path: str | os.PathLike[str], *, trust: bool = False, threads: int | None = None, as_module: Literal[True]
) -> ArtifactModule: ...
def load(
    path: str | os.PathLike[str], *, trust: bool = False, threads: int | None = None, as_module: bool = False
) -> Executable | ArtifactModule:
    """The model in the artifact ``path``, ready to be called like the original.

    Every file is checked first, and nothing is unpickled. An artifact that is machine code loads with ``trust=True`` only.
    ``threads`` overrides the number that it was built for; where the runtime is torch, torch's own is set to it. With
    ``as_module`` it is an :class:`ArtifactModule`, which can be a part of another model.

    Raises:
        UsageError: ``path`` is no path.
        IntegrityError: a file is missing, changed, extra or malformed.
        UntrustedError: loading would run machine code from the artifact.
        ArtifactError: its machine code is for another processor, or another version of its runtime is installed than wrote it
            and cannot read it.
        MissingPackageError: its runtime is not installed.
    """
    if as_module:
        return ArtifactModule(path, trust=trust, threads=threads)
    artifact = open_artifact(path)
    artifact.check()
    manifest = artifact.manifest
    settings = manifest.settings.replaced({"threads": threads or manifest.settings.threads})
    backend = _backend(manifest)
    if settings.threads is not None and "torch" in backend.packages:
        torch.set_num_threads(settings.threads)
    if settings.memory.keep_freed:
        system.keep_freed_memory()
    if manifest.native_code and trust:
        _refuse_other_processors(manifest.environment)
    return _load(backend, artifact.path / MODEL, manifest.signature, settings, trust, manifest.environment)


def _refuse_other_processors(proven: Environment) -> None:
    """Machine code ends the process, without a word, at the first instruction that the processor does not have."""
    machine, here = platform.machine(), instruction_sets()
    lacking = [proven.machine] if machine != proven.machine else [name for name in proven.isa if name not in here]
    if lacking:
        raise ArtifactError(
            f"This artifact is machine code for a processor with {', '.join(lacking)} ({proven.cpu}), which this one does not "
            "have: running it could end the process. Optimize again on this machine."
        )


def verify(path: str | os.PathLike[str], *, trust: bool = False) -> Verification:
    """Replay what the artifact claims of its files and outputs. Speed takes processes: :func:`trimtab.verify` adds it.

    Raises:
        ArtifactError: there is no artifact that could be verified.
        UntrustedError: verifying would run machine code from the artifact.
    """
    artifact = open_artifact(path)
    manifest = artifact.manifest
    wrong = tuple(findings(artifact.path, manifest))
    differences = tuple(Environment.capture().differences(manifest.environment, packages=manifest.packages))
    parity: Parities | None = None
    reason = "The files are not what was written, so nothing was run."
    if not wrong:
        golden = artifact.golden()
        executable = artifact.load(trust=trust)
        parity = _replay(executable, golden, manifest)
        reason = manifest.baseline_reason or "It was not asked for."
        if not parity.ok:
            reason = "The outputs are wrong, and the speed of a wrong answer says nothing."
        executable.close()
    return Verification(
        path=str(artifact.path),
        ok=not wrong and parity is not None and parity.ok,
        integrity=wrong,
        differences=differences,
        parity=parity,
        speed=None,
        speed_reason=reason,
        promised=manifest.evidence.get("speedup"),
        baseline_speedup=manifest.evidence.get("baseline_speedup"),
    )


@mended_by(COPY)
def _backend(manifest: Manifest) -> Backend:
    backend = _made(lambda: manifest.backend)
    if backend.native_code != manifest.native_code:
        raise IntegrityError(f"{MANIFEST} is wrong about whether {backend.name} files are machine code.")
    return backend


def _made(make: Callable[[], Backend]) -> Backend:
    try:
        return make()
    except (UsageError, TypeError) as error:
        told = f"This artifact cannot be loaded by this installation: {error}"
        raise ArtifactError(with_fix(told, "Install what its README.md names, or make a new one.")) from error


@mended_by(COPY)
def _load(
    backend: Backend, folder: pathlib.Path, signature: Signature, settings: Settings, trust: bool, proven: Environment
) -> Executable:
    if backend.native_code and not trust:
        raise UntrustedError(
            f"{folder} holds machine code ({backend.name}), which runs as it is loaded and cannot be checked. If you built it "
            "or trust who did, load it with trust=True (--trust on the command line)."
        )
    try:
        return _read(backend, folder, signature, settings)
    except IntegrityError as error:
        runtimes = [name for name in backend.packages if name in RUNTIMES]
        if not (differing := list(Environment.capture().version_differences(proven, runtimes))):
            raise
        told = with_fix(
            f"The artifact, whose files are as they were written, cannot be read here: {error}", " ".join(differing)
        )
        raise ArtifactError(with_fix(told, "Install that version.")) from error


def _read(backend: Backend, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
    try:
        return backend.load(folder, signature, settings)
    except TrimtabError:
        raise
    except LOAD_ERRORS as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise IntegrityError(f"{backend.name} cannot read the files in {folder}: {line[:300]}") from error


def _check_case(case: Case, signature: Signature) -> None:
    try:
        signature.check(case.inputs)
    except (UsageError, ValueError) as error:
        raise IntegrityError(f"{GOLDEN} does not fit the signature: {error}") from error
    for spec, tensor in zip(signature.outputs, case.outputs, strict=True):
        fixed = all(isinstance(w, str) or w == got for w, got in zip(spec.shape, tensor.shape, strict=False))
        if len(spec.shape) != tensor.dim() or not fixed:
            raise IntegrityError(f"{GOLDEN} holds an output of shape {tuple(tensor.shape)}, but the signature says {spec}.")


def _replay(executable: Executable, golden: Golden, manifest: Manifest) -> Parities:
    tolerance = manifest.golden.tolerance
    try:
        errors = golden.errors(executable.run)
    except LOAD_ERRORS as error:
        why = f"The model failed on a test vector: {type(error).__name__}: {str(error)[:300]}"
        return Parities(ok=False, cases=len(golden.cases), errors=(None,) * len(tolerance), tolerance=tolerance, reason=why)
    bad = [i for i, (error, most) in enumerate(zip(errors, tolerance, strict=True)) if not error <= most]
    reason = None
    if bad:
        spec = manifest.signature.outputs[bad[0]]
        found = (
            f"is off by {errors[bad[0]]:.3g}" if math.isfinite(errors[bad[0]]) else "has another shape or dtype, or holds NaN"
        )
        reason = f"The output {spec.name!r} {found} on the test vectors; {tolerance[bad[0]]:.3g} is allowed."
    figures = tuple(error if math.isfinite(error) else None for error in errors)
    return Parities(ok=not bad, cases=len(golden.cases), errors=figures, tolerance=tolerance, reason=reason)
