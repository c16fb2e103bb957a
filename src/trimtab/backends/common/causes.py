"""Explain why a runtime cannot compile a model, or why its outputs differ."""

from __future__ import annotations

import traceback
import types
from typing import TYPE_CHECKING

from trimtab._internal.text import error_text, plain, summary_line

if TYPE_CHECKING:
    import torch
else:
    from trimtab.tensors import late_torch as torch

CONVERSION_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    OSError,
)
"""Errors of exporters and converters for models that they do not support. NotImplementedError is a RuntimeError."""
_EMPTY = ("Exception from", "Traceback", "Check 'false' failed at", "FrontEnd API failed", "Model wasn't fully", "Summary:")
"""Beginnings of lines without information; the cause follows below them."""
_WRAPPED = "Couldn't get TorchScript module"
"""First words of OpenVINO's wrapper around an error of the model."""
_QUANTIZERS = ("onnxruntime.quantization.", "nncf.")
"""Modules of quantizers written in Python, whose faults show as an error of numpy about shapes or an index."""
_UNKNOWN = "No conversion rule found for operations"
"""First words of OpenVINO's list of unknown operators. Errors above that list may only be consequences."""


def known_cause(model: torch.nn.Module) -> str:
    """A known cause of differing outputs, in brackets after a space; empty if there is none.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoder.html, ``enable_nested_tensor``
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            return (
                f" (given a padding mask, the nn.TransformerEncoder {name!r} sets padded positions to zero by nested tensors, "
                "which no export does; where nothing reads these positions, make it with enable_nested_tensor=False)"
            )
    return ""


def first_line(error: BaseException) -> str:
    """The first informative line of an error, with its type and without a full stop.

    Wrappers of torch's exporter and OpenVINO are skipped: they name a step and ask for a bug report; their cause has the
    reason. Of a fault in a quantizer it is the place: numpy's message there says nothing about the model.
    """
    while error.__cause__ is not None and (type(error).__module__.startswith("torch.onnx.") or str(error).startswith(_WRAPPED)):
        error = error.__cause__
    if (place := _fault(error)) is not None:
        return f"{type(error).__name__} in {place}"
    lines = [line.strip().removeprefix("-- ") for line in plain(error_text(error)).splitlines()]
    informative = [line for line in lines if len(line) > 3 and not line.startswith(_EMPTY)]
    informative.sort(key=lambda line: not line.startswith(_UNKNOWN))
    text = "\n".join(informative)
    return f"{type(error).__name__}: {summary_line(text)[:300]}"


def _fault(error: BaseException) -> str | None:
    """The function of a quantizer in which ``error`` arose, if no statement there raised it, but numpy or Python did."""
    if not isinstance(error, (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [each.line or "" for each in traceback.extract_tb(error.__traceback__)]
    while frames and _module(frames[-1]).startswith("numpy."):
        frames.pop()
    if not frames or not _module(frames[-1]).startswith(_QUANTIZERS):
        return None
    raised = len(frames) == len(lines) and lines[-1].startswith("raise ")
    return None if raised else f"{frames[-1].f_code.co_name} of {_module(frames[-1])}"


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
