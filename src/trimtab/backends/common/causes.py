"""Why a runtime cannot take a model, or its graph computes something else than the model, for a person to act on."""

from __future__ import annotations

from torch import nn

from trimtab._internal.text import plain, said, told

_EMPTY = ("Exception from", "Traceback", "Check 'false' failed at", "FrontEnd API failed", "Model wasn't fully", "Summary:")
"""How lines begin that say nothing yet; what the matter is stands below them."""
_WRAPPED = "Couldn't get TorchScript module"
"""How OpenVINO begins what it wraps around an exception of the model's own."""
_UNKNOWN = "No conversion rule found for operations"
"""How OpenVINO's summary names the operators that it does not know. What fails above it may do so for want of these only, as an
argument that is none and that nobody took."""


def known_cause(model: nn.Module) -> str:
    """What may explain a difference, in brackets with a space before them; empty where nothing is known.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoder.html, ``enable_nested_tensor``
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            return (
                f" (given a padding mask, the nn.TransformerEncoder {name!r} sets padded positions to zero by nested tensors, "
                "which no export does; where nothing reads these positions, make it with enable_nested_tensor=False)"
            )
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, with the error's type and without a stop at its end.

    What torch's exporter and OpenVINO wrap around an error says which step it was and asks for a bug report; the cause is what
    tells why. Of TorchScript's own it is the line that says what was raised.
    """
    while error.__cause__ is not None and (type(error).__module__.startswith("torch.onnx.") or str(error).startswith(_WRAPPED)):
        error = error.__cause__
    lines = [line.strip().removeprefix("-- ") for line in plain(said(error)).splitlines()]
    saying = [line for line in lines if len(line) > 3 and not line.startswith(_EMPTY)]
    saying.sort(key=lambda line: not line.startswith(_UNKNOWN))
    text = "\n".join(saying)
    return f"{type(error).__name__}: {told(text)[:300]}"
