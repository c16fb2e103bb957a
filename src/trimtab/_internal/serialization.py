"""Convert frozen dataclasses to JSON values and back, driven by type hints.

A class with ``schema: ClassVar[int]`` writes that number into its JSON; reading another number raises an error.
JSON has no NaN or infinity: non-finite floats are written as ``null``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from trimtab._internal.text import counted
from trimtab.errors import UsageError

T = TypeVar("T")
ESCAPED = "backslashreplace"
"""Encoding error handler: characters that UTF-8 cannot encode are written as escapes."""


def to_json(value: Any) -> Any:
    """Turn ``value`` into something that :mod:`json` can write. A ``to_json`` method of the object takes precedence.

    Raises:
        UsageError: the type of ``value`` has no JSON form.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, type) and hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_to_json(value)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(item) for item in value)
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    raise UsageError(f"{type(value).__name__} cannot be written as JSON: {value!r}. Use plain values or dataclasses.")


def fields_to_json(value: Any) -> dict[str, Any]:
    """The fields of dataclass instance ``value`` as a JSON object, ``schema`` first if the class has one."""
    head = {"schema": value.schema} if hasattr(type(value), "schema") else {}
    return head | {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}


def from_json(cls: type[T], data: Any) -> T:
    """Make a ``cls`` from what :func:`to_json` wrote.

    Raises:
        UsageError: a missing or unknown field, a value of the wrong type, or another schema version.
    """
    return typing.cast(T, _read(cls, data, cls.__name__))


def fields_from_json(cls: type[T], data: Any) -> T:
    """Like :func:`from_json`, but ignores a ``from_json`` that dataclass ``cls`` defines; for use inside of that method."""
    where = cls.__name__
    values = dict(_object(data, where))
    schema = getattr(cls, "schema", None)
    if schema is not None and (found := values.pop("schema", None)) != schema:
        raise UsageError(f"{where}: schema {found!r} cannot be read by this version, which reads {schema}.")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    optional = {
        name
        for name, field in fields.items()
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    known = type_hints(cls)  # type: ignore[arg-type]  # mypy does not accept type[T] as hashable
    hints = {name: known[name] for name in fields}
    return cls(**_read_fields(hints, values, where, optional))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` to ``path`` atomically: readers see the old file or the new one, never a part."""
    write_text(path, dumps(value) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` atomically: write a temporary file in the same folder, then rename it.

    A symbolic link is kept and its target is replaced. Devices and pipes are written to directly. Bytes of file names that are
    not UTF-8 are written as escapes.
    """
    target = pathlib.Path(path)
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8", errors=ESCAPED)
        return
    target = pathlib.Path(os.path.realpath(target)) if target.is_symlink() else target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors=ESCAPED)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def dumps(value: Any, *, indent: int | None = 2) -> str:
    """``value`` as canonical JSON text. ``indent=None`` gives the compact form with sorted keys that hashes use."""
    separators = None if indent else (",", ":")
    return json.dumps(
        to_json(value), indent=indent, separators=separators, sort_keys=indent is None, allow_nan=False, ensure_ascii=False
    )


@functools.cache
def type_hints(cls: type[Any]) -> Mapping[str, Any]:
    """The types of the fields of ``cls``, cached: evaluating them again for each of 1500 trials takes 15 s."""
    return typing.get_type_hints(cls)


def _read(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin is typing.Annotated:
        return _read(arguments[0], data, where)
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise UsageError(f"{where}: {data!r} is not one of {', '.join(map(repr, arguments))}.")
        return data
    if typing.is_typeddict(hint):
        return _read_fields(type_hints(hint), _object(data, where), where)
    if isinstance(hint, type) and origin is None:
        return _read_class(hint, data, where)
    if origin in (tuple, list, frozenset, Sequence):
        return _read_sequence(origin, arguments, data, where)
    if origin in (dict, Mapping):
        items = _object(data, where).items()
        return {int(key) if arguments[0] is int else key: _read(arguments[1], item, f"{where}[{key!r}]") for key, item in items}
    raise UsageError(f"{where}: values of type {hint} are not read from JSON.")


def _object(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: expected an object, got {type(data).__name__}.")
    return data


def _read_fields(
    hints: Mapping[str, Any], data: Mapping[str, Any], where: str, optional: Collection[str] = ()
) -> dict[str, Any]:
    """Read one value for each of ``hints``. Unknown fields, and missing fields that are not ``optional``, raise an error."""
    if unknown := sorted(set(data) - set(hints)):
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(hints) or 'none'}.")
    if missing := [name for name in hints if name not in data and name not in optional]:
        raise UsageError(f"{where}: field {missing[0]!r} is missing.")
    return {name: _read(hints[name], item, f"{where}.{name}") for name, item in data.items()}


def _read_union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    reasons = []
    for option in arguments:
        if option is type(None):
            continue
        try:
            return _read(option, data, where)
        except UsageError as error:
            reasons.append(str(error))
    raise UsageError(reasons[0] if len(reasons) == 1 else f"{where}: {data!r} fits none of {arguments}.")


def _read_sequence(origin: Any, arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, (list, tuple)):
        raise UsageError(f"{where}: expected a list, got {type(data).__name__}.")
    if origin is tuple and (len(arguments) != 2 or arguments[1] is not Ellipsis):
        if len(data) != len(arguments):
            raise UsageError(f"{where}: expected {counted(len(arguments), 'item')}, got {len(data)}.")
        return tuple(_read(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(zip(arguments, data, strict=True)))
    items = [_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
    return items if origin in (list, Sequence) else origin(items)


def _read_class(hint: type, data: Any, where: str) -> Any:
    if hasattr(hint, "from_json"):
        return hint.from_json(data)
    if dataclasses.is_dataclass(hint):
        return fields_from_json(hint, data)
    if issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            raise UsageError(f"{where}: {data!r} is not one of {', '.join(str(m.value) for m in hint)}.") from None
    if issubclass(hint, pathlib.PurePath) and isinstance(data, str):
        return hint(data)
    if hint is float and data is None:
        return math.nan  # non-finite figures are written as null; reading them back must not fail
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return _as_float(data, where)
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool and hint is not object):
        raise UsageError(f"{where}: expected {hint.__name__}, got {data!r}.")
    if hint is int and isinstance(data, int):
        _as_float(data, where)  # refuse integers that are too large for a float
    return data


def _as_float(data: int, where: str) -> float:
    try:
        return float(data)
    except OverflowError:
        raise UsageError(f"{where}: a whole number of {len(str(data))} digits is too large.") from None
