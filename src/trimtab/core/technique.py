"""The technique contract, which passes, backends and checks share; and the pass contract: a pass rewrites a candidate.

A technique is one file; the file name registers it. :mod:`trimtab.testing` has a test suite for each contract, for trimtab's
own techniques and for plug-ins.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from trimtab._internal.registry import Registry
from trimtab._internal.serialization import fields_from_json, fields_to_json, type_hints
from trimtab._internal.text import error_text, shortened
from trimtab._internal.user_code import user_code
from trimtab.errors import MissingPackageError, UsageError, WorkloadError
from trimtab.hardware.environment import IMPORT_ERRORS, OPTIONAL

if TYPE_CHECKING:
    from trimtab.core.candidate import Candidate

Mode = Literal["infer", "train"]


class Choice:
    """The search space of a field: ``Annotated[int, Choice(8, 4)] = 8``."""

    def __init__(self, *values: Any) -> None:
        self.values = values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Technique(abc.ABC):
    """Base of passes, backends and checks: a name, typed fields, and requirements.

    Subclasses are keyword-only frozen dataclasses. A field of type ``Literal`` is checked on construction, and its values are
    its search space. ``Annotated[..., Choice(...)]`` gives the search space of any other field.
    """

    name: ClassVar[str]
    """The name of its file, unless the class sets another."""
    modes: ClassVar[frozenset[Mode]] = frozenset({"infer"})
    """The uses of the technique. In training only the settings that a pass changes are used, not the model that it returns."""
    verbose: ClassVar[bool] = False
    """Whether ``str()`` shows fields with default values too."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Import names of optional packages; see :data:`~trimtab.hardware.environment.OPTIONAL`. Plug-ins may name others."""
    tries: ClassVar[bool] = False
    """Whether :meth:`why_not` runs the model. A search then calls it only when it is about to try the technique."""
    words: ClassVar[str | None] = None
    """A description with fields in braces, as ``"{keep:.0%} of the layers"``; see :meth:`describe`."""

    def __init_subclass__(cls) -> None:
        if not (hasattr(cls, "name") or cls.__module__.startswith("trimtab.core.")):  # there are the abstract ones
            cls.name = cls.__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if typing.get_origin(hints[field.name]) is Literal and value not in typing.get_args(hints[field.name]):
                options = ", ".join(map(repr, typing.get_args(hints[field.name])))
                raise UsageError(f"{self.name}: {field.name} is {value!r}; it can be {options}.")

    @property
    def exact(self) -> bool:
        """Whether outputs must equal eager's up to floating-point rounding. If not, the accuracy limit applies."""
        return True

    @property
    def quantizes(self) -> bool:
        """Whether weights or activations get 8 bits. A recipe does that once."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Data needed besides the example inputs: ``"calibration"``, ``"training"``, or nothing."""
        return frozenset()

    def why_not_here(self) -> str | None:
        """Why this cannot run on this machine, as a sentence; ``None`` if it can."""
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Why this cannot run on ``candidate``, as a sentence with a remedy; ``None`` if it can. Must not raise."""
        return None

    def blocked(self, candidate: Candidate) -> str | None:
        """The first reason why this cannot run on ``candidate``: packages, machine, data, then :meth:`why_not`.

        Never raises: an error of the model's code, which :meth:`why_not` may run, is returned as a reason.
        """
        if package := missing_package(self.requires):
            return f"{self.name} needs {package}, which is not installed: {install_hint(package)}."
        if reason := self.blocked_here():
            return reason
        if "calibration" in self.needs and not candidate.calibration:
            return f"{self.name} needs calibration data: give the workload calibration=... or an evaluation to take some from."
        if "training" in self.needs and (candidate.training is None or candidate.teacher is None):
            return (
                f"{self.name} needs data to train on, which only a study that compresses reads (--compress): give the workload "
                "training=trimtab.Training(data=...), or calibration=... for training without labels."
            )
        return _reason_or_error(f"{self.name} cannot look at this model", lambda: self.why_not(candidate))

    def blocked_here(self) -> str | None:
        """The result of :meth:`why_not_here`. Never raises: an installed package may fail to import."""
        return _reason_or_error(f"{self.name} cannot look at this machine", self.why_not_here)

    @classmethod
    def choices(cls) -> dict[str, tuple[Any, ...]]:
        """The search space: field name -> values."""
        hints = get_type_hints(cls, include_extras=True)
        return {f.name: found for f in dataclasses.fields(cls) if (found := _choices(hints[f.name]))}

    def describe(self) -> str:
        """A short description for people, without a full stop, such as ``OpenVINO, int8 weights``.

        By default :attr:`words`, else the name and the fields with non-default values. Override it if neither is clear enough.
        """
        if self.words is not None:
            return self.words.format(**vars(self))
        fields = dataclasses.fields(self)
        shown = [f.name for f in fields if self.verbose or getattr(self, f.name) != f.default]
        return ", ".join([_readable(self.name), *(_readable_field(name, getattr(self, name)) for name in shown)])

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
    """Names of the :class:`Settings` fields that this pass changes. A backend that ignores one of them refuses the recipe."""
    compresses: ClassVar[bool] = False
    """Whether it makes another, smaller network, or trains one. Tried only with ``--compress``. Its outputs may be far from the
    original's until the network is trained, so the test vectors of an artifact come from the rewritten model."""
    trained_only: ClassVar[bool] = False
    """Whether its result is useless until a later pass trains it, so that a recipe without that is refused."""
    pays_for: ClassVar[frozenset[str] | None] = None
    """Names of the backends with which it can pay; ``None`` stands for all."""

    @abc.abstractmethod
    def apply(self, candidate: Candidate) -> Candidate:
        """The rewritten candidate. The given candidate must stay unchanged.

        Raises:
            CompileError: the rewrite is impossible, or its own check of the outputs failed.
        """


class SettingPass(Pass):
    """A pass that changes one setting: to the value of its only field, or to ``True``."""

    def apply(self, candidate: Candidate) -> Candidate:
        """``candidate`` with the setting, which backends and the Trainer apply."""
        (setting,) = self.sets
        return candidate.with_settings({setting: next(iter(vars(self).values()), True)})


class ShrinkingPass(Pass):
    """A pass that makes another, smaller network. Its fields are shares of what stays."""

    exact = False
    compresses = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, share in vars(self).items():
            if not 0 < share < 1:
                raise UsageError(f"{self.name}: {field} is {share!r}; it must be above 0 and below 1.")


PASSES: Registry[Pass] = Registry("pass", "trimtab.passes", Pass)  # type: ignore[type-abstract]


def technique_from_json(registry: Mapping[str, type[Any]], data: Any) -> Any:
    """Make the technique that :meth:`Technique.to_json` wrote.

    Raises:
        UsageError: an unknown name or field, or a value that the field does not allow.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise UsageError(f"A technique is written as an object with a name, got {data!r}.")
    fields = {key: value for key, value in data.items() if key != "name"}
    return fields_from_json(registry[data["name"]], fields)


def missing_package(requires: Sequence[str]) -> str | None:
    """The first of ``requires`` that is not installed; ``None`` if all are."""
    return next((name for name in requires if importlib.util.find_spec(name) is None), None)


def install_hint(package: str) -> str:
    """The command that installs ``package``."""
    return next((item.command for item in OPTIONAL if item.package == package), f"pip install {package}")


def broken_package(requires: Sequence[str]) -> str | None:
    """Why the first of ``requires`` that fails to import fails, as a sentence; ``None`` if all can be imported."""
    for package in requires:
        try:
            require(package)
        except MissingPackageError as error:
            return str(error)
    return None


def require(package: str) -> Any:
    """Import the optional ``package`` and return it.

    Raises:
        MissingPackageError: the package is not installed; the message gives the command that installs it. Or it is broken; the
            message gives the error.
    """
    try:
        return importlib.import_module(package)
    except IMPORT_ERRORS as error:
        whole = package.partition(".")[0]
        if missing_package((whole,)):
            message = f"{package} cannot be imported ({error}). Install it: {install_hint(package)}."
        else:
            why = " ".join(error_text(error).split())
            message = f"{package} is installed but cannot be imported ({type(error).__name__}: {shortened(why, 300)}). "
            message += f"Install it again: pip install --force-reinstall {whole}."
        raise MissingPackageError(message) from error


def _reason_or_error(what: str, why_not: Callable[[], str | None]) -> str | None:
    """The result of ``why_not``, or the text of its error: one technique must not end a study."""
    try:
        with user_code(what):
            return why_not()
    except (UsageError, WorkloadError) as error:
        reason = " ".join(str(error).split())
        return f"{reason[:400].rstrip('.')}."


def _readable(name: object) -> str:
    return str(name).replace("_", " ")


def _readable_field(name: str, value: Any) -> str:
    """A field as text: ``precision int8``; for a flag ``spinning`` or ``no spinning``."""
    if isinstance(value, bool):
        return _readable(name) if value else f"no {_readable(name)}"
    return f"{_readable(name)} {_readable(value)}"


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Annotated:
        return next((item.values for item in typing.get_args(hint)[1:] if isinstance(item, Choice)), ())
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return (True, False) if hint is bool else ()
