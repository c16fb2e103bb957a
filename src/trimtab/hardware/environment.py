"""The environment that measurements hold for: the machine, its limits and GPUs, and the versions of the installed software."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

from trimtab._internal.serialization import ESCAPED, dumps, fields_from_json, from_json, write_json
from trimtab.hardware import system
from trimtab.hardware.peaks import BUSY, Peaks, measure

if TYPE_CHECKING:
    import torch
else:
    from trimtab.tensors import late_torch as torch

RUNTIMES = (
    "torch",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "torchao",
    "executorch",
    "tensorrt",
    "torch-tensorrt",
    "triton",
)
"""Distributions that execute models. Their versions decide speed and are part of the fingerprint."""
BUILDERS = ("trimtab", "onnx", "onnxscript", "nncf")
"""Distributions that export and quantize models. Their versions are part of the fingerprint too."""
REMEASURE_S = 3600.0
"""Seconds after which peaks that were measured on a busy machine are measured again."""
IMPORT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Errors that the import of a broken package raises, for example if one of its libraries is missing or too new."""
_OTHER_PACKAGES = ("numpy", "torch-pruning", "transformers", "optuna", "safetensors", "ray")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionalPackage:
    """A package that trimtab can use but does not require."""

    package: str
    """The package's import name."""
    extra: str
    """The extra of trimtab that installs the package."""
    brings: str
    """What the package adds, as a sentence."""

    @property
    def installed(self) -> bool:
        """Whether the package is installed. The package is not imported."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def command(self) -> str:
        """The command that installs the package."""
        return f'pip install "trimtab[{self.extra}]"'


OPTIONAL: tuple[OptionalPackage, ...] = tuple(
    OptionalPackage(package=package, extra=extra, brings=brings)
    for package, extra, brings in (
        ("onnx", "onnx", "Reads and checks ONNX files, which the onnxruntime backend is built from."),
        ("onnxscript", "onnx", "Exports PyTorch models to ONNX."),
        ("onnxruntime", "onnx", "The onnxruntime backend: fp32, dynamic int8 and static int8 on nearly any machine."),
        ("openvino", "openvino", "The openvino backend, often the fastest on x86 CPUs."),
        ("nncf", "openvino", "Static int8 and int8 weights for the openvino backend."),
        ("torchao", "quant", "Weight-only and dynamic int8 inside PyTorch."),
        ("torch_pruning", "prune", "Channels removed from convolutional and recurrent networks, with optimize --compress."),
        ("psycopg", "postgres", "Studies kept in a PostgreSQL database, which several machines can share."),
        ("transformers", "hf", "Loads Hugging Face models, as some of the examples do."),
        ("pynvml", "gpu", "The driver version and the energy of NVIDIA GPUs."),
    )
)
"""All optional packages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device."""

    name: str
    capability: str
    """Compute capability, such as ``9.0``."""
    memory_mb: float
    driver: str | None = None
    """``None`` if pynvml is not installed or the driver does not answer."""

    def __str__(self) -> str:
        return f"{self.name} (capability {self.capability}, {self.memory_mb / 1e3:.0f} GB)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """One machine with its software, as :meth:`capture` finds it. A megabyte is 10**6 bytes."""

    schema: ClassVar[int] = 1

    cpu: str
    machine: str
    """The architecture, such as ``x86_64``."""
    isa: tuple[str, ...]
    """Instruction sets that matter for a model's speed."""
    physical_cores: int | None
    logical_cores: int
    cpu_quota: float | None
    """The cgroup's CPU limit in cores; ``None`` without one."""
    usable_cores: int
    """Cores that this process may use: the smaller of its CPU affinity and its quota (rounded down), at least 1."""
    memory_mb: float
    memory_limit_mb: float | None
    """The cgroup's memory limit; ``None`` without one."""
    gpus: tuple[Gpu, ...]
    os: str
    python: str
    compiler: str | None
    """The C++ compiler that torch.compile uses; ``None`` without one."""
    versions: Mapping[str, str]
    """Distribution name -> version, for the installed distributions that trimtab knows."""

    @classmethod
    def capture(cls) -> Environment:
        """Describe this machine and this interpreter. Takes about 20 ms; initializes CUDA if there is a GPU."""
        quota, limit = system.cpu_quota(), system.memory_limit_mb()
        memory = psutil.virtual_memory().total / 1e6
        return cls(
            cpu=system.cpu_name(),
            machine=platform.machine(),
            isa=instruction_sets(),
            physical_cores=psutil.cpu_count(logical=False),
            logical_cores=os.cpu_count() or 1,
            cpu_quota=quota,
            usable_cores=system.usable_cores(),
            memory_mb=round(memory, 1),
            memory_limit_mb=limit if limit is not None and limit < memory else None,
            gpus=_gpus(),
            os=system.os_name(),
            python=platform.python_version(),
            compiler=system.compiler(),
            versions=dict(_versions()),
        )

    @classmethod
    def from_json(cls, data: Any) -> Environment:
        """The inverse of :func:`trimtab._internal.serialization.to_json`.

        Raises:
                UsageError: fields are missing, unknown or of a wrong type, or the schema version differs.
        """
        return fields_from_json(cls, data)

    @functools.cached_property
    def fingerprint(self) -> str:
        """12 hexadecimal digits. They change if a property of the machine or a version changes that affects speed."""
        runtimes = {name: self.versions[name] for name in (*RUNTIMES, *BUILDERS) if name in self.versions}
        gpus = [dataclasses.replace(gpu, driver=None) for gpu in self.gpus]  # the driver is known only if pynvml is installed
        facts = [self.cpu, self.machine, self.isa, self.physical_cores, self.usable_cores, self.cpu_quota, gpus, runtimes]
        return hashlib.sha256(dumps(facts, indent=None).encode(errors=ESCAPED)).hexdigest()[:12]

    def differences(self, other: Environment, *, packages: Collection[str] | None = None) -> list[str]:
        """How this machine differs from ``other``, on which an artifact was verified: one sentence each, most important first.

        ``packages`` limits the comparison of versions to the distributions that the artifact needs.
        """
        names = other.versions if packages is None else packages
        return [*self._cpu_differences(other), *self._system_differences(other), *self.version_differences(other, names)]

    def version_differences(self, other: Environment, packages: Collection[str]) -> Iterator[str]:
        """One sentence for each of ``packages`` whose version differs from the one that the artifact was verified with."""
        for name in sorted(set(packages) & set(other.versions)):
            # a variant such as onnxruntime-gpu provides the same module
            variant = next((version for each, version in self.versions.items() if each.startswith(f"{name}-")), "not installed")
            if (found := self.versions.get(name, variant)) != other.versions[name]:
                yield f"{name} is {found} here; the artifact was proven with {other.versions[name]}."

    def _cpu_differences(self, other: Environment) -> Iterator[str]:
        if (self.cpu, self.machine) != (other.cpu, other.machine):
            # Two architectures can have the same CPU name; then the architecture is named.
            here, there = (self.cpu, other.cpu) if self.cpu != other.cpu else (self.machine, other.machine)
            yield f"The CPU is {here} here; the artifact was proven on {there}."
        if lacking := [name for name in other.isa if name not in self.isa]:
            outputs = ", and int8 may give other outputs" if any(name.endswith("vnni") for name in lacking) else ""
            what = f"This CPU has no {', '.join(lacking)}, which the machine of the proof had"
            yield f"{what}; its speed does not carry over{outputs}."
        if gained := [name for name in self.isa if name not in other.isa]:
            yield f"This CPU has {', '.join(gained)}, which the machine of the proof had not; another recipe may win here."
        if self.usable_cores != other.usable_cores:
            yield f"{_cores(self.usable_cores)} can be used here; the artifact was proven with {other.usable_cores}."
        if self.cpu_quota != other.cpu_quota:
            yield f"The CPU quota is {_quota(self.cpu_quota)} here; the artifact was proven with {_quota(other.cpu_quota)}."

    def _system_differences(self, other: Environment) -> Iterator[str]:
        here, there = ([str(gpu) for gpu in side.gpus] for side in (self, other))
        if here != there:
            yield f"The GPU is {_listed(here)} here; the artifact was proven with {_listed(there)}."
        here, there = ([gpu.driver or "unknown" for gpu in side.gpus] for side in (self, other))
        if here and there and here != there:
            yield f"The GPU driver is {_listed(here)} here; the artifact was proven with {_listed(there)}."
        for what, mine, its in (("The operating system", self.os, other.os), ("Python", self.python, other.python)):
            if mine != its:
                yield f"{what} is {mine} here; the artifact was proven on {its}."
        if self.compiler != other.compiler:
            yield f"The C++ compiler is {self.compiler or 'missing'} here; it was {other.compiler or 'missing'} at the proof."


def measured_peaks(environment: Environment, *, cache: pathlib.Path | None = None, refresh: bool = False) -> Peaks:
    """The peak rates of ``environment``, which must be this machine. Measuring takes a few seconds; the result is cached.

    ``cache`` is the cache file (default: ``peaks-<fingerprint>.json`` in :func:`~trimtab.hardware.system.cache_folder`). An
    unreadable file is measured anew; an unwritable one is not fatal. Peaks of a busy machine are measured again after
    :data:`REMEASURE_S`, and the higher rate counts. ``notes`` of the result report these cases. torch's number of threads is
    restored.
    """
    file = cache or _peaks_file(environment)
    known, notes = (None, ()) if refresh else _known_peaks(file, environment.fingerprint)
    if known is not None and (known.foreign <= BUSY or _age_s(file) < REMEASURE_S):
        return dataclasses.replace(known, notes=_busy_notes(known))
    limits = [limit for limit in (environment.memory_mb, environment.memory_limit_mb) if limit]
    peaks = measure(environment.fingerprint, environment.usable_cores, len(environment.gpus), min(limits))
    if known is not None:
        peaks = peaks.merged(known)
    notes += _busy_notes(peaks)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, peaks)
    except OSError as error:
        notes += (f"The peaks could not be kept in {file} ({error}), so the next command measures them again.",)
    return dataclasses.replace(peaks, notes=notes)


def _age_s(file: pathlib.Path) -> float:
    return abs(time.time() - file.stat().st_mtime)  # abs: the clock may have been set back


def _busy_notes(peaks: Peaks) -> tuple[str, ...]:
    """A note if other processes used the CPU while the peaks were measured."""
    if peaks.foreign <= BUSY:
        return ()
    return (
        f"Others took {peaks.foreign:.0%} of the CPU while the peaks were measured, so they may be too low. They are measured "
        "again in an hour, or with trimtab env --refresh.",
    )


def known_peaks(environment: Environment) -> Peaks | None:
    """The cached peaks of ``environment``, or ``None``. Measures nothing."""
    return _known_peaks(_peaks_file(environment), environment.fingerprint)[0]


def _peaks_file(environment: Environment) -> pathlib.Path:
    return system.cache_folder() / f"peaks-{environment.fingerprint}.json"


def _known_peaks(file: pathlib.Path, fingerprint: str) -> tuple[Peaks | None, tuple[str, ...]]:
    """The peaks in ``file``; or ``None`` and notes that say why they cannot be used."""
    if not os.path.exists(file):  # False for a forbidden folder, where pathlib's exists raises
        return None, ()
    try:
        known = from_json(Peaks, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        return None, (f"The peaks in {file} could not be read ({error}), so they were measured anew.",)
    if known.fingerprint != fingerprint:
        return None, (f"The peaks in {file} are of another machine, so they were measured anew.",)
    return known, ()


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of this CPU that matter for a model's speed, sorted."""
    known = system.cpuinfo()
    return system.isa({} if known.get("flags") or known.get("Features") else _capabilities())


def has_vnni() -> bool:
    """Whether int8 products do not saturate on this CPU. If they can, backends quantize weights to 7 bits.

    x86 without VNNI adds two u8 * s8 products in 16 bits (``vpmaddubsw``), which clips silently.
    """
    return platform.machine() not in ("x86_64", "AMD64") or not {"avx512_vnni", "avx_vnni"}.isdisjoint(instruction_sets())


def _capabilities() -> dict[str, object]:
    """The CPU capabilities that torch detects. Older versions of torch have one function for each."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    names = {
        "avx2": "_is_avx2_supported",
        "avx512f": "_is_avx512_supported",
        "avx512_vnni": "_is_vnni_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
    }
    return {name: getattr(torch.cpu, probe)() for name, probe in names.items() if hasattr(torch.cpu, probe)}


def _gpus() -> tuple[Gpu, ...]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about drivers that it cannot use
            if not torch.cuda.is_available():
                return ()
            found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError, ImportError):  # the driver does not answer, or there is no torch
        return ()
    driver = _driver()
    return tuple(
        Gpu(name=gpu.name, capability=f"{gpu.major}.{gpu.minor}", memory_mb=round(gpu.total_memory / 1e6, 1), driver=driver)
        for gpu in found
    )


def _driver() -> str | None:
    try:
        import pynvml
    except IMPORT_ERRORS:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


@functools.cache
def builders() -> dict[str, str]:
    """The installed versions of :data:`BUILDERS`, on which the export of a model depends."""
    return {name: number for name, number in _versions() if name in BUILDERS}


def _versions() -> Iterator[tuple[str, str]]:
    for name in sorted({*RUNTIMES, *BUILDERS, *_OTHER_PACKAGES}):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _quota(cores: float | None) -> str:
    return "no quota" if cores is None else f"{cores:g} cores"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
