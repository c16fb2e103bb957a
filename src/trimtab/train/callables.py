"""Whether what somebody gave can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def refuses(function: Callable[..., Any], *arguments: Any) -> TypeError | None:
    """Why ``function`` cannot be called with so many ``arguments``; ``None`` if it can, or does not tell, as builtins."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return error
    except ValueError:
        return None
    return None
