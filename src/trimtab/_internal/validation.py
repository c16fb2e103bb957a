"""Checks of arguments: keyword-only dataclasses with clear errors, values against type hints, arguments against signatures."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin

from trimtab.errors import UsageError

T = TypeVar("T")


def by_name(cls: type[T]) -> type[T]:
    """Class decorator: the dataclass takes keyword arguments only. Wrong names raise a :class:`UsageError` with the fields."""
    made = getattr(cls, "__init__")  # noqa: B009 - mypy refuses cls.__init__ as unsound

    @functools.wraps(made)
    def checked(self: T, *values: Any, **given: Any) -> None:
        if problem := _wrong(cls, len(values), given):
            raise UsageError(problem)
        made(self, **given)

    setattr(cls, "__init__", checked)  # noqa: B010 - as above
    return cls


def _wrong(cls: type[Any], unnamed: int, given: dict[str, Any]) -> str | None:
    fields = [field for field in dataclasses.fields(cls) if field.init]
    known, name = [field.name for field in fields], cls.__name__
    if unnamed:
        return f"{name} takes its fields by name, as in {name}({known[0]}=...); {unnamed} without one cannot be told apart."
    if unknown := [each for each in given if each not in known]:
        for field in fields:  # of which some are groups of fields
            group = field.default_factory
            if isinstance(group, type) and dataclasses.is_dataclass(group) and unknown[0] in group.__dataclass_fields__:
                call = f"{name}({field.name}={group.__name__}({unknown[0]}={given[unknown[0]]!r}))"
                return f"{unknown[0]} is in {group.__name__}: {call}."
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{name} has no field {unknown[0]!r}.{hint} It takes: {', '.join(known)}."
    none = dataclasses.MISSING
    needed = [field.name for field in fields if field.default is none and field.default_factory is none]
    if missing := [each for each in needed if each not in given]:
        return f"{name} has no {missing[0]}=..., which it needs. It takes: {', '.join(known)}."
    return None


def fits(hint: Any, value: Any) -> bool:
    """Whether ``value`` has the type that the type hint ``hint`` states. Integers fit ``float``; booleans fit ``bool`` only."""
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        return any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices)
    if choices:
        return any(fits(choice, value) for choice in choices)
    if isinstance(value, bool) or hint is bool:
        return hint is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if hint is float else hint)


def options(hint: Any) -> str:
    """The values that type hint ``hint`` allows, for a message: ``'flash', 'math', a whole number or None``."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    kinds = [hint] if get_origin(hint) is Literal or not get_args(hint) else list(get_args(hint))
    found = [text for kind in kinds for text in (map(repr, get_args(kind)) if get_args(kind) else [words[kind]])]
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def refuses(function: Callable[..., Any], *arguments: Any) -> TypeError | None:
    """The error of calling ``function`` with ``arguments``, found without a call. ``None`` if they fit, or if the signature of
    ``function`` is unknown, as it is for many builtins."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return error
    except ValueError:
        return None
    return None
