"""Dynamic sizes in what the script compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

_dynamic = False


def switch(settings: Mapping[str, Any]) -> None:
    """Apply ``compile_dynamic`` to the calls of ``torch.compile`` from now on."""
    global _dynamic
    _dynamic = bool(settings.get("compile_dynamic"))
    if _dynamic:
        _install()


@functools.cache
def _install() -> None:
    original: Callable[..., Any] = torch.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **(kwargs | {"dynamic": True} if _dynamic else kwargs))

    torch.compile = compile
