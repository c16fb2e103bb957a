"""Type hints of fields that plain values are held against: whether one fits, and what would."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin


def fits(hint: Any, value: Any) -> bool:
    """Whether ``value`` is of a type that a field states as ``hint``."""
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        return any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices)
    if choices:
        return any(fits(choice, value) for choice in choices)
    if isinstance(value, bool) or hint is bool:
        return hint is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if hint is float else hint)


def options(hint: Any) -> str:
    """The values that a field takes, in words: ``'flash', 'math', a whole number or None``."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    kinds = [hint] if get_origin(hint) is Literal or not get_args(hint) else list(get_args(hint))
    found = [text for kind in kinds for text in (map(repr, get_args(kind)) if get_args(kind) else [words[kind]])]
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
