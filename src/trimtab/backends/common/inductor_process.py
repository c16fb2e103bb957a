"""What the two backends on TorchInductor share: options that leave nothing behind."""

from __future__ import annotations

from typing import Any, Literal

Mode = Literal["default", "freezing", "max_autotune"]


def options(mode: Mode) -> dict[str, Any]:
    """Inductor options for ``mode``, to be passed with the call so that its global configuration stays as it was.

    Compilation stays in this process: with more than one compile thread inductor starts a pool of worker processes that
    outlives the compilation, keeps about 200 MB each and takes CPU time from whatever is measured next. A network on the CPU is
    a handful of C++ files, so the pool would save little.
    """
    chosen: dict[str, Any] = {"compile_threads": 1}
    if mode != "default":
        chosen |= {"freezing": True}
    if mode == "max_autotune":
        chosen |= {"max_autotune": True, "autotune_in_subproc": False}
    return chosen
