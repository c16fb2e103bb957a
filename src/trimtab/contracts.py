"""The contracts that techniques and runtimes keep. Each is written in one file; the file's name registers it.

``trimtab.testing`` holds a suite for each contract, used on everything here and meant for plug-ins too.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_type_hints

import torch

from trimtab._json import fields_from_json, fields_to_json, type_hints
from trimtab._machine import affinity
from trimtab._registry import Registry
from trimtab._said import said, shortened
from trimtab._tree import unflatten
from trimtab._user_code import user_code
from trimtab.candidate import Candidate, Settings
from trimtab.environment import IMPORT_ERRORS, OPTIONAL, Environment
from trimtab.errors import CompileError, MissingPackageError, UsageError, WorkloadError
from trimtab.measurement import OperatorTime
from trimtab.signature import Signature

if typing.TYPE_CHECKING:
    from trimtab.finding import Finding

Mode = Literal["infer", "train"]


class Choice:
    """The values of a field that a search may try: ``Annotated[int, Choice(8, 4)] = 8``."""

    def __init__(self, *values: Any) -> None:
        self.values = values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Technique(abc.ABC):
    """What passes and backends share: a name, documented fields, and what they need in order to run.

    Subclasses are keyword-only frozen dataclasses. A field's type is its rule: a ``Literal`` is checked when the object is
    made, and is the search space too; ``Annotated[..., Choice(...)]`` gives the search space of a field with an open type.
    """

    name: ClassVar[str]
    modes: ClassVar[frozenset[Mode]] = frozenset({"infer"})
    """What it is for. In training only the settings that a pass changes count, and not what it makes of the model."""
    verbose: ClassVar[bool] = False
    """Whether ``str()`` shows the fields that have their default value too."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Import names of optional packages, each in :data:`~trimtab.environment.OPTIONAL` or a plug-in's own affair."""
    tries: ClassVar[bool] = False
    """Whether :meth:`why_not` has the model run, so that a search asks only once it comes to a recipe with this."""

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if typing.get_origin(hints[field.name]) is Literal and value not in typing.get_args(hints[field.name]):
                options = ", ".join(map(repr, typing.get_args(hints[field.name])))
                raise UsageError(f"{self.name}: {field.name} is {value!r}; it can be {options}.")

    @property
    def exact(self) -> bool:
        """Whether outputs must match eager within floating-point noise; if not, the accuracy limit judges them."""
        return True

    @property
    def needs(self) -> frozenset[str]:
        """The data this asks for beside the example inputs: ``"calibration"``, or nothing."""
        return frozenset()

    def why_not_here(self) -> str | None:
        """Why this cannot run on this machine, whatever the candidate, in such a sentence as :meth:`why_not` gives."""
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Why this cannot run on ``candidate``, in a sentence that a person can act on; ``None`` if it can. Never raises."""
        return None

    def blocked(self, candidate: Candidate) -> str | None:
        """The first reason of all against running this on ``candidate``: packages, machine, data, then :meth:`why_not`.

        Never raises: a look at the model may run its code, and whatever that raises is a reason too.
        """
        if package := missing_package(self.requires):
            return f"{self.name} needs {package}, which is not installed: {install_hint(package)}."
        if reason := self.blocked_here():
            return reason
        if "calibration" in self.needs and not candidate.calibration:
            return f"{self.name} needs calibration data: give the workload calibration=... or an evaluation to take some from."
        return _asked(f"{self.name} cannot look at this model", lambda: self.why_not(candidate))

    def blocked_here(self) -> str | None:
        """What :meth:`why_not_here` says. Never raises: a package that is installed may be one that cannot be imported."""
        return _asked(f"{self.name} cannot look at this machine", self.why_not_here)

    @classmethod
    def choices(cls) -> dict[str, tuple[Any, ...]]:
        """The values of every field that a search may try."""
        hints = get_type_hints(cls, include_extras=True)
        return {f.name: found for f in dataclasses.fields(cls) if (found := _choices(hints[f.name]))}

    def describe(self) -> str:
        """What this is in the words of a person, such as ``OpenVINO, int8 weights``: a few, without a full stop.

        Made of the name and of the fields that are not at their default; override it where these do not speak for themselves.
        """
        fields = dataclasses.fields(self)
        shown = [f.name for f in fields if self.verbose or getattr(self, f.name) != f.default]
        return ", ".join([_spoken(self.name), *(_spoken_field(name, getattr(self, name)) for name in shown)])

    def to_json(self) -> dict[str, Any]:
        """``{"name": ..., field: value, ...}``."""
        return {"name": self.name} | fields_to_json(self)

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        shown = [f"{f.name}={getattr(self, f.name)}" for f in fields if self.verbose or getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


class Pass(Technique):
    """One technique: Candidate -> Candidate."""

    verbose = True
    sets: ClassVar[frozenset[str]] = frozenset()
    """Names of the :class:`Settings` fields that this pass changes; a backend that ignores them refuses the recipe."""

    @abc.abstractmethod
    def apply(self, candidate: Candidate) -> Candidate:
        """The rewritten candidate. Pure: the one that came in still works, and gives the same outputs, afterwards.

        Raises:
            CompileError: the rewrite turned out to be impossible, or its own check of the outputs failed.
        """


class Executable(abc.ABC):
    """A model that is ready to run, called exactly like the original.

    It owns its runtime's resources until :meth:`close`. It may be called from one thread at a time. Outputs belong to the
    caller: a later call does not overwrite them, and they can be changed in place. A call checks its inputs against
    :attr:`signature` first, because several runtimes answer a question they were not built for with wrong numbers instead of
    an error. A process that was forked after it was made has none of its threads, and is refused unless it has but one.
    """

    own_threads: ClassVar[bool] = False
    """Whether its runtime starts threads of its own, whatever torch's number: as many as there are cores unless it is told."""
    _forks: ClassVar[int] = 0
    """How many forks lie between this process and the first of its family."""

    def __init__(self, signature: Signature, settings: Settings) -> None:
        self._made = Executable._forks
        self.signature = signature
        self._bare = signature.output_structure.kind == "tensor"
        self.settings = settings
        self.notes: list[str] = []
        """What the runtime said that explains its speed: operators it could not run natively, dimensions it could not keep."""

    @abc.abstractmethod
    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The output tensors for input tensors that were checked already, both in the order of the signature.

        The inputs that ``signature.writes`` names are written to as the model does; the others stay as they are. A recipe whose
        executable does otherwise is refused.
        """

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
        """The outputs of several independent requests; what throughput times. Runtimes that can overlap requests do it here."""
        return [self.run(leaves) for leaves in requests]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on inputs given as to the original; outputs have the original's structure.

        Raises:
            InputError: the inputs do not fit the signature.
            UsageError: this process was forked from the one in which it was made.
        """
        if self._made != Executable._forks:
            self._refuse_threads_of_another()
        outputs = self.run(self.signature.accept(args, kwargs))
        return outputs[0] if self._bare else unflatten(self.signature.output_structure, outputs)

    def _refuse_threads_of_another(self) -> None:
        """A forked process has none of the threads that its runtime started; it would wait for them, or do without."""
        threads = (self.settings.threads or affinity()) if self.own_threads else torch.get_num_threads()
        if self.settings.threads != 1 and threads > 1:
            raise UsageError(
                "This model was loaded before its process was forked, and the threads of its runtime were left behind: it "
                "would hang, or run on one thread. Load it in each process and not before, or load it with threads=1."
            )

    def operator_times(self, leaves: Sequence[torch.Tensor], repeats: int) -> list[OperatorTime] | None:
        """Where the time of a call goes, as the runtime's own profiler tells; ``None`` where torch runs the operators and its
        profiler sees them. Slow, and not for timing: the runtime may have to be started once more."""
        return None

    def synchronize(self) -> None:  # noqa: B027 - a runtime that computes on the CPU has nothing to wait for
        """Return when all work that was started is done."""

    def close(self) -> None:  # noqa: B027 - most runtimes free their resources with the object
        """Give the runtime's resources back; the executable cannot be called any more."""

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write into ``folder`` what :meth:`Backend.load` needs, without pickles, and return the names of the files.

        Raises:
            CompileError: this executable has no form that stands alone; the message says why.
        """
        raise CompileError(f"A {type(self).__name__} has no form that stands alone.")


def _count_fork() -> None:
    Executable._forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Backend(Technique):
    """One runtime: Candidate -> Executable.

    The runtime is imported inside :meth:`compile` and :meth:`load` only, so that this file imports on every machine.
    """

    honours: ClassVar[frozenset[str]] = frozenset({"threads"})
    """Names of the :class:`Settings` fields that this backend carries out."""
    overlap: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields that only matter to several requests at once, and so to throughput."""
    own_graph: ClassVar[bool] = False
    """Whether it has a graph and kernels of its own, and folds, lays out and quantizes by itself; rewrites of the model and
    its weights are then not worth a ladder's time."""
    native_code: ClassVar[bool] = False
    """Whether its files are machine code, which nothing can make safe to load from a stranger."""
    tells_fallbacks: ClassVar[bool] = False
    """Whether the notes of its executables name every operator that it could not run natively, so that none named means that
    there is none."""
    cost: ClassVar[Literal["seconds", "minute", "minutes"]] = "seconds"
    """What a compilation costs on a small model; cheap ones are tried first."""

    @abc.abstractmethod
    def compile(self, candidate: Candidate) -> Executable:
        """Build an executable for ``candidate``, whose model stays as it was.

        Dynamic dimensions that the runtime cannot keep are frozen to the example's sizes in the executable's signature.

        Raises:
            CompileError: the runtime cannot take this model; the message carries the runtime's own words.
        """

    @abc.abstractmethod
    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """The executable whose :meth:`Executable.save` wrote ``folder``. Never unpickles, never needs the model's class.

        Raises:
            ArtifactError: the files are not what this backend writes.
        """

    @abc.abstractmethod
    def script(self) -> str:
        """Python source of a function ``load(folder, threads)`` that returns a callable from a list of inputs to a list of
        outputs, using only the runtime. They are numpy arrays, or tensors where ``torch`` is among :attr:`packages`, since
        numpy has no bfloat16. Where the model writes to inputs (``signature.writes``), the callable writes to them too, or
        gives their new values after its outputs. The source becomes part of the artifact's ``run.py``; at most 16 lines."""

    @property
    def arithmetic(self) -> str:
        """The type that products are computed in, which says what peak of the machine they are held against."""
        return "float32"

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions that the saved files need at run time, beside numpy and safetensors."""
        return ("torch",)


class Check(Technique):
    """One finding about a workload: what is slow or risky, with evidence and a remedy."""

    @abc.abstractmethod
    def run(self, subject: Any, environment: Environment) -> list[Finding]:
        """The findings on ``subject``, a :class:`~trimtab.subject.Subject`; empty if it is fine.

        It never raises, and looks without measuring: what a remedy gains is for whoever asked to find out, in fresh processes.
        """


PASSES: Registry[Pass] = Registry("pass", "trimtab.passes", Pass)  # type: ignore[type-abstract]
BACKENDS: Registry[Backend] = Registry("backend", "trimtab.backends", Backend)  # type: ignore[type-abstract]
CHECKS: Registry[Check] = Registry("check", "trimtab.checks", Check)  # type: ignore[type-abstract]


def technique_from_json(registry: Mapping[str, type[Any]], data: Any) -> Any:
    """Make the pass, backend or check that :meth:`Technique.to_json` described.

    Raises:
        UsageError: unknown name or field, or a value that the field does not take.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise UsageError(f"A technique is written as an object with a name, got {data!r}.")
    fields = {key: value for key, value in data.items() if key != "name"}
    return fields_from_json(registry[data["name"]], fields)


def missing_package(requires: Sequence[str]) -> str | None:
    """The first of ``requires`` that cannot be imported here."""
    return next((name for name in requires if importlib.util.find_spec(name) is None), None)


def install_hint(package: str) -> str:
    """The command that brings ``package``."""
    return next((item.command for item in OPTIONAL if item.package == package), f"pip install {package}")


def broken_package(requires: Sequence[str]) -> str | None:
    """Why the first of ``requires`` that cannot be imported here cannot be, in a sentence."""
    for package in requires:
        try:
            require(package)
        except MissingPackageError as error:
            return str(error)
    return None


def require(package: str) -> Any:
    """Import optional ``package`` and return it.

    Raises:
        MissingPackageError: it is not installed, and the message names the extra that brings it; or what is installed is
            broken, and the message says why.
    """
    try:
        return importlib.import_module(package)
    except IMPORT_ERRORS as error:
        whole = package.partition(".")[0]
        if missing_package((whole,)):
            told = f"{package} cannot be imported ({error}). Install it: {install_hint(package)}."
        else:
            why = " ".join(said(error).split())
            told = f"{package} is installed but cannot be imported ({type(error).__name__}: {shortened(why, 300)}). Install it "
            told += f"again: pip install --force-reinstall {whole}."
        raise MissingPackageError(told) from error


def _asked(what: str, why_not: Callable[[], str | None]) -> str | None:
    """The answer of ``why_not``, or what it raised: one technique must not end a whole study."""
    try:
        with user_code(what):
            return why_not()
    except (UsageError, WorkloadError) as error:
        said = " ".join(str(error).split())
        return f"{said[:400].rstrip('.')}."


def _spoken(name: object) -> str:
    return str(name).replace("_", " ")


def _spoken_field(name: str, value: Any) -> str:
    """``precision int8``, or ``spinning`` and ``no spinning`` for a flag."""
    if isinstance(value, bool):
        return _spoken(name) if value else f"no {_spoken(name)}"
    return f"{_spoken(name)} {_spoken(value)}"


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Annotated:
        return next((item.values for item in typing.get_args(hint)[1:] if isinstance(item, Choice)), ())
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return (True, False) if hint is bool else ()
