"""The manifest of an artifact: its fields, strict reading, and the check of the folder against it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import keyword
import os
import pathlib
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from trimtab._internal.files import sha256
from trimtab._internal.serialization import dumps, from_json, to_json
from trimtab._internal.text import counted, message_line, with_fix, with_remedy
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.limits import Limits
from trimtab.core.measurement import Interval
from trimtab.core.settings import Settings
from trimtab.core.signature import STORED, Signature
from trimtab.core.technique import technique_from_json
from trimtab.errors import ArtifactError, IntegrityError, UsageError
from trimtab.hardware.environment import RUNTIMES, Environment
from trimtab.tensors.structure import Structure

MANIFEST, MODEL, BASELINE, RUN, README, EVIDENCE = "manifest.json", "model", "baseline", "run.py", "README.md", "evidence.json"
MODULE = "module"
GOLDEN = "golden.safetensors"
"""The file of the test vectors."""
FOLDER_REMEDY = "Give the folder that optimize wrote, such as runs/NAME/artifact."
REMEDY = "Copy the artifact again from where it was made, or make a new one."
"""Remedy for an artifact that was changed or cannot be loaded by this installation."""
MAX_MANIFEST = 4 << 20
MAX_TEXT = 64 << 20
MAX_DEPTH = 60
MAX_FILES = 10_000
CLAIMS = ("speedup", "baseline_speedup")
"""Names of speed ratios in the evidence."""
LABELS = {
    "thread_limit": "threads with which both were timed",
    "speedup": "speed-up over the model as written",
    "against_tuned": "speed-up over the tuned original",
    "latency_ms": "latency of one call",
    "baseline_score": "score of the model as written, on test data",
    "score": "its score, on the same data",
    "drop": "drop of the score",
    "size_mb": "size in MB",
    "peak_mb": "peak memory in MB of a process that loads and calls it",
    "cold_s": "seconds to the first answer",
    "baseline_speedup": "speed-up of the original in this folder over the model as written",
}
"""Labels of the evidence figures for readers."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+@-]*)*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenFacts:
    """The test vectors: number of cases; and per output the scale of its values, the tolerance, and the error that was measured
    when the artifact was written. See :meth:`trimtab.artifact.test_vectors.Golden.errors`."""

    cases: int
    scale: tuple[float, ...]
    tolerance: tuple[float, ...]
    measured: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineFacts:
    """The original model as an exported program, for measuring the speed-up on machines without the model's class."""

    backend: Mapping[str, Any]
    signature: Signature
    settings: Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All facts about an artifact."""

    schema: ClassVar[int] = 1

    workload: str
    recipe: Mapping[str, Any]
    """The recipe as JSON. Loading needs only its backend, so its passes need not be installed."""
    recipe_text: str
    native_code: bool
    """Whether the files are machine code, which needs ``trust=True``."""
    packages: tuple[str, ...]
    """Distributions that ``run.py`` needs, besides numpy and safetensors."""
    signature: Signature
    settings: Settings
    golden: GoldenFacts
    baseline: BaselineFacts | None
    baseline_reason: str | None
    """Why there is no baseline."""
    environment: Environment
    evidence: Mapping[str, Any]
    limits: Limits | None
    notes: tuple[str, ...]
    trimtab: str
    """Version of trimtab that wrote the artifact."""
    created: str
    """Date and time in UTC, ISO 8601."""
    files: Mapping[str, FileFacts]
    module: BaselineFacts | None = None
    """The compressed network as an exported program, for training it further; ``None`` if the recipe compresses nothing."""
    module_reason: str | None = None
    """Why there is no module, although the recipe compresses."""

    @property
    def backend(self) -> Backend:
        """The backend that loads the files.

        Raises:
            UsageError: the backend is not installed, or does not have one of the fields.
        """
        found: Backend = technique_from_json(BACKENDS, self.recipe.get("backend"))
        return found


@with_remedy(REMEDY)
def read_manifest(folder: pathlib.Path) -> Manifest:
    """Read and check the manifest in ``folder``.

    Raises:
        ArtifactError: there is no artifact.
        IntegrityError: the manifest is damaged, too large, of another schema version, or invalid.
    """
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise IntegrityError(f"{path} is not a plain file; an artifact holds nothing else.")
        if path.lstat().st_size > MAX_MANIFEST:
            raise IntegrityError(f"{path} has {path.lstat().st_size} bytes; at most {MAX_MANIFEST} are read.")
        text = path.read_bytes().decode("utf-8")
        data = json.loads(text)
        spelled, stated = dumps(data) + "\n" == text, data.pop("digest")
        unchanged = spelled and stated == _digest(data)
        manifest = from_json(Manifest, data)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(folder):
            raise ArtifactError(f"{str(folder)!r} is no artifact: it has no {MANIFEST}. {FOLDER_REMEDY}") from None
        raise ArtifactError(f"There is no artifact folder {str(folder)!r}. {FOLDER_REMEDY}") from None
    except PermissionError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}. Let this user read the folder and its files.") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}. {REMEDY}") from error
    except (UsageError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
        raise IntegrityError(f"{path} cannot be read: {message_line(error)[:300]}") from error
    if not unchanged:
        raise IntegrityError(f"{path} was changed after it was written: it does not have the digest that it states.")
    _check(manifest)
    return manifest


def version_mismatch(error: IntegrityError, packages: Sequence[str], proven: Environment) -> ArtifactError | None:
    """The error for unchanged files that cannot be read, if the runtime has another version than when they were made; else
    ``None``. ``packages`` are the distributions that the files need."""
    runtimes = [name for name in packages if name in RUNTIMES]
    if not (differing := list(Environment.capture().version_differences(proven, runtimes))):
        return None
    problem = with_fix(f"The artifact, whose files are as they were written, cannot be read here: {error}", " ".join(differing))
    return ArtifactError(with_fix(problem, "Install that version."))


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` in canonical form, with a digest of its contents; :func:`read_manifest` accepts no other form."""
    data = to_json(manifest)
    (folder / MANIFEST).write_text(dumps(data | {"digest": _digest(data)}) + "\n", encoding="utf-8")


def _digest(data: Any) -> str:
    return hashlib.sha256(dumps(data, indent=None).encode()).hexdigest()


def file_facts(folder: pathlib.Path) -> dict[str, FileFacts]:
    """Size and hash of every file below ``folder``, except the manifest."""
    found = {}
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != MANIFEST:
            found[name] = FileFacts(size=path.stat().st_size, sha256=sha256(path))
    return found


def check_files(folder: pathlib.Path, manifest: Manifest) -> None:
    """Check names, kinds, sizes and hashes of all files in ``folder``.

    Raises:
        IntegrityError: with the first problem found.
    """
    if problem := next(findings(folder, manifest), None):
        raise IntegrityError(f"{folder} is not what was written: {problem}")


def findings(folder: pathlib.Path, manifest: Manifest) -> Iterator[str]:
    """Problems of the files in ``folder``, one sentence each; none if they are as in ``manifest``.

    Contents are hashed only if names, kinds and sizes are right.
    """
    there, odd = _regular_files(folder)
    problems = list(odd)
    for name in sorted(set(there) - set(manifest.files) - {MANIFEST}):
        problems.append(f"{name} does not belong to the artifact: the manifest does not list it. Remove it.")
    for name, facts in manifest.files.items():
        if name in there and there[name] != facts.size:
            problems.append(f"{name} was changed: it has {there[name]} bytes, the manifest says {facts.size}.")
        elif name not in there and (problem := _why_not_regular(folder / name)):
            problems.append(f"{name} {problem}")
    yield from problems
    if not problems:
        for name, facts in manifest.files.items():
            try:
                unchanged = sha256(folder / name) == facts.sha256
            except OSError as error:
                yield f"{name} cannot be read: {error.strerror}."
                continue
            if not unchanged:
                yield f"{name} was changed: its contents do not have the hash that the manifest states."


def _why_not_regular(path: pathlib.Path) -> str | None:
    """Why a listed file is not a regular file; ``None`` for kinds that :func:`_regular_files` reports."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is missing."
    except OSError as error:
        return f"cannot be looked at: {error.strerror}."
    return "is a folder; the manifest lists a file of that name." if stat.S_ISDIR(mode) else None


def _regular_files(folder: pathlib.Path) -> tuple[dict[str, int], list[str]]:
    """Sizes of the regular files below ``folder``, and one sentence for everything else there."""
    sizes: dict[str, int] = {}
    odd: list[str] = []
    for root, folders, names in os.walk(folder, followlinks=False):
        for name in (*folders, *names):
            path = pathlib.Path(root, name)
            short = path.relative_to(folder).as_posix()
            try:
                facts = path.lstat()
            except OSError as error:
                odd.append(f"{short} cannot be looked at: {error.strerror}.")
                continue
            mode = facts.st_mode
            if stat.S_ISLNK(mode):
                odd.append(f"{short} is a link; an artifact holds files only, nothing that points elsewhere.")
            elif stat.S_ISREG(mode):
                sizes[short] = facts.st_size
            elif not stat.S_ISDIR(mode):
                odd.append(f"{short} is neither a file nor a folder; an artifact holds nothing else.")
    return sizes, odd


def _check(manifest: Manifest) -> None:
    """Refuse a manifest with invalid or contradictory parts."""
    _check_names(manifest)
    _check_signature(manifest.signature)
    for facts in (manifest.baseline, manifest.module):
        if facts is not None:
            _check_signature(facts.signature)
    outputs, golden = len(manifest.signature.outputs), manifest.golden
    if not 1 <= golden.cases <= 1000 or not len(golden.scale) == len(golden.tolerance) == len(golden.measured) == outputs:
        raise IntegrityError(
            f"{MANIFEST} lists {counted(golden.cases, 'test vector')} with {counted(len(golden.tolerance), 'tolerance')}; "
            f"want {outputs}."
        )
    if any(not 0 <= value < float("inf") for value in golden.tolerance):
        raise IntegrityError(f"{MANIFEST} states a tolerance of {golden.tolerance}; tolerances are positive numbers.")
    for claim in CLAIMS:
        if manifest.evidence.get(claim) is not None:
            _check_claim(manifest.evidence[claim])
    for name in ("backend", "passes"):
        if name not in manifest.recipe:
            raise IntegrityError(f"{MANIFEST} holds a recipe without {name}.")


def _check_claim(claim: Any) -> None:
    try:
        found = from_json(Interval, claim)
    except UsageError as error:
        raise IntegrityError(f"{MANIFEST} states a speed-up that is none: {message_line(error)[:300]}") from error
    # non-finite bounds are written as null and read as NaN
    if not 0 < found.value < float("inf") or found.low < 0 or found.high < 0:
        raise IntegrityError(f"{MANIFEST} states a speed-up that is none: {found}.")


def _check_names(manifest: Manifest) -> None:
    for name, facts in manifest.files.items():
        if not _NAME.fullmatch(name) or len(name) > 500 or name == MANIFEST:
            raise IntegrityError(
                f"{MANIFEST} lists the file {name[:200]!r}, which is no name inside the artifact; it is not opened."
            )
        if name not in (RUN, README, EVIDENCE, GOLDEN) and not name.startswith((f"{MODEL}/", f"{BASELINE}/", f"{MODULE}/")):
            # a torch.py beside run.py would be imported instead of torch by scripts that run in the folder
            raise IntegrityError(f"{MANIFEST} lists the file {name[:200]!r}, which has no place in an artifact; remove it.")
        if facts.size < 0 or not re.fullmatch(r"[0-9a-f]{64}", facts.sha256):
            raise IntegrityError(f"{MANIFEST} states an impossible size or hash for {name}.")
        if name in (RUN, README, EVIDENCE) and facts.size > MAX_TEXT:
            raise IntegrityError(f"{MANIFEST} claims {facts.size} bytes for {name}; at most {MAX_TEXT} are read.")
    if len(manifest.files) > MAX_FILES:
        raise IntegrityError(f"{MANIFEST} lists {len(manifest.files)} files; at most {MAX_FILES} are read.")
    for name in (RUN, README, EVIDENCE, GOLDEN):
        if name not in manifest.files:
            raise IntegrityError(f"{MANIFEST} does not list {name}, which every artifact has.")
    if not any(name.startswith(f"{MODEL}/") for name in manifest.files):
        raise IntegrityError(f"{MANIFEST} lists no file of the model.")


def _check_signature(signature: Signature) -> None:
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype not in STORED:
            raise IntegrityError(f"{MANIFEST}: {spec.name!r} has the dtype {spec.dtype[:80]!r}, which no artifact holds.")
        elements = 1
        for size in spec.shape:
            elements *= max(size, 1) if isinstance(size, int) else 1
        if len(spec.shape) > 64 or any(isinstance(s, int) and s < 0 for s in spec.shape) or elements > 2**40:
            raise IntegrityError(f"{MANIFEST}: {spec.name!r} claims the impossible shape {str(spec.shape)[:200]}.")
    known = {dim.name for dim in signature.dims}
    if unknown := {s for spec in signature.inputs for s in spec.shape if isinstance(s, str)} - known:
        raise IntegrityError(f"{MANIFEST}: the dimension {sorted(unknown)[0][:80]!r} is used but not declared.")
    kinds = [item.kind for item in signature.input_structure.items]
    if (
        signature.input_structure.kind != "tuple"
        or kinds != ["tuple", "dict"]
        or signature.input_structure.tensors != len(signature.inputs)
    ):
        raise IntegrityError(f"{MANIFEST}: the structure of the inputs does not fit the {len(signature.inputs)} inputs.")
    if unknown := set(signature.writes) - {spec.name for spec in signature.inputs}:
        raise IntegrityError(f"{MANIFEST}: a call is said to write to {sorted(unknown)[0][:80]!r}, which is no input.")
    if signature.output_structure.tensors != len(signature.outputs):
        raise IntegrityError(f"{MANIFEST}: the structure of the outputs does not fit the {len(signature.outputs)} outputs.")
    for structure in (signature.input_structure, signature.output_structure):
        _check_structure(structure, 0)


def _check_structure(structure: Structure, depth: int) -> None:
    keyed = structure.kind in ("dict", "namedtuple", "record")
    if depth > MAX_DEPTH or (keyed and len(structure.keys) != len(structure.items)):
        raise IntegrityError(f"{MANIFEST}: a structure of inputs or outputs is malformed.")
    if structure.kind == "namedtuple":
        words = (structure.value, *structure.keys)
        if any(not isinstance(word, str) or not word.isidentifier() or keyword.iskeyword(word) for word in words):
            raise IntegrityError(f"{MANIFEST}: a named tuple has the impossible name or field {str(words)[:120]}.")
    for item in structure.items:
        _check_structure(item, depth + 1)
