"""The artifact: a self-contained folder with an optimized model, which can be verified on another machine."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, overload

import torch
from torch import nn

from trimtab._internal.files import path_of
from trimtab._internal.notebook import link, paragraph
from trimtab._internal.serialization import from_json
from trimtab._internal.text import message_line, with_fix, with_remedy
from trimtab.artifact.manifest import (
    BASELINE,
    GOLDEN,
    MANIFEST,
    MODEL,
    MODULE,
    REMEDY,
    Manifest,
    check_files,
    findings,
    read_manifest,
    version_mismatch,
)
from trimtab.artifact.parity import LOAD_ERRORS, Parities, check_case, parities
from trimtab.artifact.staging import fresh_folder
from trimtab.artifact.test_vectors import Golden
from trimtab.artifact.trainable import TrainableModule, trainable
from trimtab.artifact.writer import fill
from trimtab.core.backend import BACKENDS, Backend, Executable
from trimtab.core.limits import Limits
from trimtab.core.measurement import Comparison, Interval
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.core.technique import technique_from_json
from trimtab.errors import ArtifactError, IntegrityError, TrimtabError, UntrustedError, UsageError
from trimtab.hardware import system
from trimtab.hardware.environment import Environment, instruction_sets


@dataclasses.dataclass(frozen=True)
class Artifact:
    """An artifact folder with its manifest read. Files are checked when they are used."""

    path: pathlib.Path
    manifest: Manifest

    def __repr__(self) -> str:
        return f"Artifact({str(self.path)!r}, {self.manifest.workload}: {self.manifest.signature.describe()})"

    def _repr_html_(self) -> str:
        """The recipe, the signature, the speed-up, and a link to the folder, for notebooks."""
        manifest, claim = self.manifest, self.manifest.evidence.get("speedup")
        faster = "" if claim is None else f"{from_json(Interval, claim).times()} the model as written"
        words = f"{manifest.workload}: {manifest.recipe_text}. Takes {manifest.signature.describe()}."
        return paragraph(words) + paragraph(faster) + link(self.path)

    @with_remedy(REMEDY)
    def check(self) -> None:
        """Check names, kinds, sizes and hashes of all files.

        Raises:
            IntegrityError: with the first problem found.
        """
        check_files(self.path, self.manifest)

    def load(self, *, trust: bool = False, threads: int | None = None) -> Executable:
        """See :func:`load`."""
        return load(self.path, trust=trust, threads=threads)

    def load_baseline(self) -> Executable | None:
        """The original model, called like the artifact's model; ``None`` if the artifact does not contain it.

        Raises:
            IntegrityError: as for :func:`load`.
        """
        self.check()
        facts = self.manifest.baseline
        if facts is None:
            return None
        backend = _installed_backend(lambda: technique_from_json(BACKENDS, facts.backend))
        return _load(backend, self.path / BASELINE, facts.signature, facts.settings, False, self.manifest.environment)

    @with_remedy(REMEDY)
    def module(self) -> TrainableModule:
        """The network in torch that the runtime's files were made of, as a module with weights, in evaluation mode.

        After compression that is the smaller, trained network; else the original. It is called like the model, and can be
        trained further or optimized again. Nothing of the user's code is imported, and nothing is unpickled.

        Raises:
            IntegrityError: as for :func:`load`.
            ArtifactError: the artifact does not hold the network in a form that can be trained; says why.
        """
        self.check()
        manifest = self.manifest
        name = MODULE if manifest.module is not None or manifest.module_reason else BASELINE
        facts, reason = manifest.module or manifest.baseline, manifest.module_reason or manifest.baseline_reason
        if manifest.module_reason or facts is None:
            raise ArtifactError(f"{self.path} does not hold the network as a module of torch. {reason}")
        return trainable(self.path / name, facts.signature)

    @with_remedy(REMEDY)
    def golden(self) -> Golden:
        """The test vectors.

        Raises:
            IntegrityError: the file is damaged, or does not fit the signature.
        """
        signature = self.manifest.signature
        found = Golden.load(self.path / GOLDEN, self.manifest.golden.cases, len(signature.inputs), len(signature.outputs))
        for case in found.cases:
            check_case(case.inputs, case.outputs, self.manifest)
        return found

    def save(self, folder: str | os.PathLike[str]) -> Artifact:
        """Check the artifact, copy it to ``folder``, and return the copy.

        Raises:
            IntegrityError: the files differ from the manifest.
            ArtifactError: ``folder`` contains something else, or cannot be written.
        """
        self.check()
        with fresh_folder(path_of(folder, "folder", "runs/model/artifact")) as target:
            for name in (*self.manifest.files, MANIFEST):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, target / name)
        return open_artifact(folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of :func:`verify`."""

    path: str
    ok: bool
    """The files are unchanged and the outputs are within tolerance. Differences of the machine do not matter."""
    integrity: tuple[str, ...]
    """Problems of the files, one sentence each."""
    differences: tuple[str, ...]
    """Differences between this machine and the one that made the artifact, one sentence each."""
    parity: Parities | None
    speed: Comparison | None
    """The model timed against the original on this machine; its ratio is the speed-up."""
    speed_reason: str | None
    """Why the speed was not measured."""
    promised: Any
    """The speed-up over the baseline that was measured when the artifact was made."""
    baseline_speedup: Any = None
    """Speed-up of the original in the artifact (an exported program) over the baseline, measured when the artifact was made."""
    record: str | None = None
    """The file beside the artifact into which the speed was written."""
    record_reason: str | None = None
    """Why a measured speed was not written."""


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
    module: Executable | None = None,
) -> Artifact:
    """Write an artifact to ``folder`` atomically, replacing an older artifact, and open it.

    ``executable`` saves itself; its errors on ``golden`` set the tolerances. ``baseline`` is the original model as an
    executable of ``baseline_backend`` (default: ``eager`` under ``no_grad``). It is included if it can be saved and is not far
    larger than the model. So is ``module``, the compressed network in eager mode, for :meth:`Artifact.module`.

    Raises:
        CompileError: ``executable`` cannot be saved.
        ArtifactError: ``folder`` contains something else, or cannot be written; no partial files are left.
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
            module=module,
        )
    return open_artifact(folder)


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Read the manifest of the artifact in ``path``. Nothing is loaded or run.

    Raises:
        ArtifactError: there is no artifact.
        IntegrityError: its manifest is damaged or invalid.
        UsageError: ``path`` is not a path.
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
    """Load the model of the artifact in ``path``. It is called like the original model.

    All files are checked first, and nothing is unpickled. Artifacts with machine code need ``trust=True``. ``threads``
    overrides the artifact's number of threads. If the runtime is torch, ``torch.set_num_threads`` is called. ``as_module``
    returns an :class:`ArtifactModule`, which can be a part of another model.

    Raises:
        UsageError: ``path`` is not a path.
        IntegrityError: a file is missing, changed, extra or malformed.
        UntrustedError: the artifact contains machine code.
        ArtifactError: the machine code is for another processor, or the installed version of the runtime cannot read the files.
        MissingPackageError: the runtime is not installed.
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
    """Refuse machine code that needs instructions which this processor lacks; running it would crash the process."""
    machine, here = platform.machine(), instruction_sets()
    lacking = [proven.machine] if machine != proven.machine else [name for name in proven.isa if name not in here]
    if lacking:
        raise ArtifactError(
            f"This artifact is machine code for a processor with {', '.join(lacking)} ({proven.cpu}), which this one does not "
            "have: running it could end the process. Optimize again on this machine."
        )


def verify(path: str | os.PathLike[str], *, trust: bool = False) -> Verification:
    """Check the files and the outputs on the test vectors. :func:`trimtab.verify` also measures the speed, in new processes.

    Raises:
        ArtifactError: there is no artifact that can be verified.
        UntrustedError: the artifact contains machine code.
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
        parity = replay(executable, golden, manifest)
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


@with_remedy(REMEDY)
def _backend(manifest: Manifest) -> Backend:
    backend = _installed_backend(lambda: manifest.backend)
    if backend.native_code != manifest.native_code:
        raise IntegrityError(f"{MANIFEST} is wrong about whether {backend.name} files are machine code.")
    return backend


def _installed_backend(make: Callable[[], Backend]) -> Backend:
    try:
        return make()
    except (UsageError, TypeError) as error:
        problem = f"This artifact cannot be loaded by this installation: {error}"
        raise ArtifactError(with_fix(problem, "Install what its README.md names, or make a new one.")) from error


@with_remedy(REMEDY)
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
        if (explained := version_mismatch(error, backend.packages, proven)) is None:
            raise
        raise explained from error


def _read(backend: Backend, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
    try:
        return backend.load(folder, signature, settings)
    except TrimtabError:
        raise
    except LOAD_ERRORS as error:
        raise IntegrityError(f"{backend.name} cannot read the files in {folder}: {message_line(error)[:300]}") from error


def replay(executable: Executable, golden: Golden, manifest: Manifest) -> Parities:
    """Run the test vectors and compare the outputs with the tolerances of the manifest."""
    return parities(lambda: golden.errors(executable.run), manifest)
