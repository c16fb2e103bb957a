"""TorchInductor options that do not change process-wide state."""

from __future__ import annotations

from typing import Any, Literal

Mode = Literal["default", "freezing", "max_autotune"]


def options(mode: Mode) -> dict[str, Any]:
    """Options for ``mode``, to pass with the call instead of changing inductor's global configuration.

    Compilation uses this process only. With more threads inductor would start worker processes that outlive the compilation,
    use about 200 MB each, and disturb later measurements. A CPU network compiles to few C++ files, so the pool would save
    little.
    """
    chosen: dict[str, Any] = {"compile_threads": 1}
    if mode != "default":
        chosen |= {"freezing": True}
    if mode == "max_autotune":
        chosen |= {"max_autotune": True, "autotune_in_subproc": False}
    return chosen
