"""What every technique keeps: a name, documented fields, the packages and data that it needs; and passes, which rewrite a
candidate.

A technique is written in one file, whose name registers it. ``trimtab.testing`` holds a suite for each contract, used on
everything here and meant for plug-ins too.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_type_hints

from trimtab._internal.registry import Registry
from trimtab._internal.serialization import fields_from_json, fields_to_json, type_hints
from trimtab._internal.text import said, shortened
from trimtab._internal.user_code import user_code
from trimtab.core.candidate import Candidate
from trimtab.errors import MissingPackageError, UsageError, WorkloadError
from trimtab.hardware.environment import IMPORT_ERRORS, OPTIONAL

if typing.TYPE_CHECKING:
    pass


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
    """Import names of optional packages, each in :data:`~trimtab.hardware.environment.OPTIONAL` or a plug-in's own affair."""
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


PASSES: Registry[Pass] = Registry("pass", "trimtab.passes", Pass)  # type: ignore[type-abstract]


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
