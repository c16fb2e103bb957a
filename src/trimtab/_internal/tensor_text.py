"""The tensors of a failed call as text: ``outputs float32[51, 5], targets int64[51]``. Without torch: tensors are recognized by
their attributes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from trimtab._internal.text import error_text, listed

MOST_TENSORS = 6
"""Most tensors that a message describes."""
_SHAPE_ERROR = re.compile(
    r"shape|size|dimension|dtype|type Long|scalar type|data type|broadcast|expected .*(got|found)", re.IGNORECASE
)


def is_shape_error(error: BaseException) -> bool:
    """Whether ``error`` is about shapes or dtypes that do not fit together, by its text."""
    return isinstance(error, (RuntimeError, ValueError, TypeError, IndexError)) and bool(_SHAPE_ERROR.search(error_text(error)))


def described(values: Mapping[str, Any]) -> str:
    """``outputs float32[51, 5], targets int64[51]``: the tensors and arrays in ``values``, with the path of nested ones; empty
    without any."""
    found = [text for name, value in values.items() for text in _nested(name, value)]
    return listed(found, MOST_TENSORS)


def call_tensors(error: BaseException, is_own: Callable[[str], bool]) -> str:
    """The tensors of the innermost call that failed with ``error``: of a module, with its weights, or of a function in a file
    for which ``is_own`` holds. Empty if no such call has tensors."""
    for frame in reversed(list(_frames(error))):
        values, code = _arguments(frame), frame.f_code
        first = next(iter(values.values()), None)
        weights = getattr(first, "_parameters", None)  # set for a module, of which only forward is reported
        module = isinstance(weights, dict) and code.co_name == "forward"
        if not module and not is_own(code.co_filename):
            continue
        if given := described(values):
            called = type(first).__name__ if module else code.co_name
            own = described(weights) if module and weights else ""
            held = f" and has {own}{_cast_hint(values, weights)}" if own else ""
            return f"{'it' if called.startswith('<') else called} got {given}{held}"
    return ""


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _arguments(frame: FrameType) -> dict[str, Any]:
    """The arguments of the function that runs in ``frame``, by name."""
    code = frame.f_code
    count = (
        code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    )  # *args, **kwargs
    return {name: frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals}


def _cast_hint(values: Mapping[str, Any], weights: Any) -> str:
    """``: give input.float()`` if ``values`` has one tensor, and the weights have one other floating-point dtype."""
    given, own = ([text for name, value in side.items() for text in _nested(name, value)] for side in (values, weights))
    dtypes = {text.split("[")[0].split()[-1] for text in own}
    methods = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
    if len(given) != 1 or len(dtypes) != 1 or not dtypes <= methods.keys():
        return ""
    name, dtype = given[0].split("[")[0].split()
    return "" if dtype in dtypes else f": give {name}.{methods[dtypes.pop()]}()"


def _nested(name: str, value: Any) -> Iterator[str]:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        yield f"{name} {str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nested(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value[: MOST_TENSORS + 1]):
            yield from _nested(f"{name}[{place}]", item)
