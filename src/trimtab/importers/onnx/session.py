"""Open ONNX Runtime sessions, and name every exception that ONNX Runtime raises."""

from __future__ import annotations

import os
from typing import Any

from trimtab._internal.text import shortened, summary_line
from trimtab.core.technique import require

UNOPTIMIZED = "ONNX Runtime opens this model only with its graph optimizations off, because they fail on it: {}."


def runtime_errors() -> tuple[type[Exception], ...]:
    """The exception classes of ONNX Runtime and of ONNX's own checks, which derive from :class:`Exception` itself."""
    state = vars(require("onnxruntime.capi.onnxruntime_pybind11_state"))
    raised = [value for value in state.values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*raised, require("onnx.shape_inference").InferenceError, require("onnx.checker").ValidationError)


def open_session(path: str | os.PathLike[str], options: Any) -> tuple[Any, str | None]:
    """A session for the CPU, and why its graph optimizations are off; ``None`` where they are on.

    ONNX Runtime's optimizer breaks some valid models (microsoft/onnxruntime#32413). A model that does not open is therefore
    opened once more without the optimizer.

    Raises:
        Exception: one of :func:`runtime_errors`, where the model opens in neither way; it is that of the first attempt.
    """
    runtime = require("onnxruntime")
    try:
        return runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"]), None
    except runtime_errors() as error:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except runtime_errors():
            raise error from None
        return session, UNOPTIMIZED.format(shortened(summary_line(str(error))))
