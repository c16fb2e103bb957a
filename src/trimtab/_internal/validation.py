"""Checks of arguments: keyword-only dataclasses with clear errors, values against type hints, arguments against signatures."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from trimtab._internal.text import counted
from trimtab.errors import UsageError

T = TypeVar("T")
P = ParamSpec("P")


def by_name(cls: type[T]) -> type[T]:
    """Class decorator: the dataclass takes keyword arguments only. Wrong names raise a :class:`UsageError` with the fields."""
    made = getattr(cls, "__init__")  # noqa: B009 - mypy refuses cls.__init__ as unsound

    @functools.wraps(made)
    def checked(self: T, *values: Any, **given: Any) -> None:
        if problem := _constructor_problem(cls, len(values), given):
            raise UsageError(problem)
        made(self, **given)

    setattr(cls, "__init__", checked)  # noqa: B010 - as above
    return cls


def _constructor_problem(cls: type[Any], unnamed: int, given: dict[str, Any]) -> str | None:
    fields = [field for field in dataclasses.fields(cls) if field.init]
    known, name = [field.name for field in fields], cls.__name__
    if unnamed:
        return f"{name} takes its fields by name, as in {name}({known[0]}=...); {unnamed} without one cannot be told apart."
    if unknown := [each for each in given if each not in known]:
        return _unknown(name, "field", unknown[0], given[unknown[0]], known, cls)
    none = dataclasses.MISSING
    needed = [field.name for field in fields if field.default is none and field.default_factory is none]
    if missing := [each for each in needed if each not in given]:
        return f"{name} has no {missing[0]}=..., which it needs. It takes: {', '.join(known)}."
    return None


def _unknown(name: str, kind: str, word: str, value: Any, known: Iterable[str], owner: Any) -> str:
    """The message about the unknown argument ``word`` of ``owner``: the dataclass that has such a field, or a similar name."""
    if call := _field_in_group(owner, word, value, 2):
        return f"{word} is in {call[1]}: {name}({call[0]})."
    near = difflib.get_close_matches(word, list(known), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{name} has no {kind} {word!r}.{hint} It takes: {', '.join(known)}."


def _field_in_group(owner: Any, word: str, value: Any, depth: int) -> tuple[str, str] | None:
    """``limits=Limits(max_drop=0.01)`` and ``Limits``, if an argument of ``owner`` is a dataclass with a field ``word``, or
    with such a dataclass in it."""
    try:
        hints = get_type_hints(owner)
    except (NameError, TypeError):  # a name that only type checkers import
        return None
    for argument, hint in hints.items():
        for group in (hint, *get_args(hint)):
            if argument == "return" or not (isinstance(group, type) and dataclasses.is_dataclass(group)):
                continue
            if (field := group.__dataclass_fields__.get(word)) is not None and field.init:
                text = repr(value)
                shown = text if len(text) < 40 and "\n" not in text else "..."
                return f"{argument}={group.__name__}({word}={shown})", group.__name__
            if depth > 1 and (inner := _field_in_group(group, word, value, depth - 1)):
                return f"{argument}={group.__name__}({inner[0]})", inner[1]
    return None


def checked_call(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: the function called ``name`` in messages raises a :class:`UsageError` with its arguments where a call does not
    fit its signature, and not Python's ``TypeError``."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*values: P.args, **given: P.kwargs) -> T:
            try:
                signature.bind(*values, **given)
            except TypeError as error:
                raise UsageError(_call_problem(name, function, signature, len(values), given) or f"{name}: {error}.") from None
            return function(*values, **given)

        return checked

    return decorated


def _call_problem(name: str, function: Any, signature: inspect.Signature, unnamed: int, given: dict[str, Any]) -> str | None:
    parameters = {key: value for key, value in signature.parameters.items() if key not in ("self", "cls")}
    unnamed -= len(parameters) < len(signature.parameters)
    positional = [key for key, value in parameters.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    if unknown := [each for each in given if each not in parameters]:
        return _unknown(name, "argument", unknown[0], given[unknown[0]], parameters, function)
    if unnamed > len(positional):
        named = next((key for key in parameters if key not in positional and key not in given), "")
        example = f" Give the others by name, as in {name}(..., {named}=...)." if named else ""
        return f"{name} takes {counted(len(positional), 'argument')} without a name; {unnamed} were given.{example}"
    missing = [key for key in parameters if key not in positional[:unnamed] and key not in given]
    if needed := [key for key in missing if parameters[key].default is inspect.Parameter.empty]:
        return f"{name} has no {needed[0]}=..., which it needs. It takes: {', '.join(parameters)}."
    return None


def fits(hint: Any, value: Any) -> bool:
    """Whether ``value`` has the type that the type hint ``hint`` states. Integers fit ``float``; booleans fit ``bool`` only."""
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        return any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices)
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping) and all(fits(choices[0], key) and fits(choices[1], value[key]) for key in value)
    if choices:
        return any(fits(choice, value) for choice in choices)
    if isinstance(value, bool) or hint is bool:
        return hint is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if hint is float else hint)


def options(hint: Any) -> str:
    """The values that type hint ``hint`` allows, for a message: ``'flash', 'math', a whole number or None``."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    kinds = [hint] if get_origin(hint) is Literal or not get_args(hint) else list(get_args(hint))
    words |= {kind: "a dict of plain values" for kind in kinds if get_origin(kind) is Mapping}
    kinds = [kind for kind in kinds if kind not in words] + [kind for kind in kinds if kind in words]
    found = [text for kind in kinds for text in ([words[kind]] if kind in words else map(repr, get_args(kind)))]
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


def length_of(data: Any) -> int | None:
    """The length of ``data``; ``None`` if it has none, such as a DataLoader over a stream."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
