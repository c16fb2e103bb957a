"""The one place in the script's process where every exception is caught: a probe must not stop the script that it watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """The result of ``function(*args)`` and ``None``, or ``None`` and the exception that it raised."""
    try:
        return function(*args), None
    except Exception as error:  # noqa: BLE001 - whatever the person's data set or a record may raise
        return None, error
