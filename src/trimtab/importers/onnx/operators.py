"""ONNX operators as PyTorch functions, by operator name. Keyword-only parameters are the operator's attributes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from trimtab.importers.onnx.values import Host, elementwise, ints, tensor, unsupported

OPS: dict[str, Callable[..., Any]] = {}
MULTI_OUTPUT = {"Split", "TopK", "LSTM", "GRU"}
"""Operators whose function returns a tuple."""

TENSORS_ONLY = {
    name: 2 if name in ("And", "Or", "Xor") else 1
    for name in (
        *("Abs", "Exp", "Log", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos", "Tan", "Asin", "Acos"),
        *("Atan", "Sinh", "Cosh", "Tanh", "Erf", "Sigmoid", "Relu", "Softplus", "Softsign", "HardSwish", "Mish", "Not"),
        *("And", "Or", "Xor", "Elu", "Celu", "Selu", "LeakyRelu", "PRelu", "HardSigmoid", "Gelu", "Swish", "Clip", "ArgMax"),
        *("ArgMin", "CumSum", "TopK", "Softmax", "LogSoftmax", "MatMul", "Gemm", "Einsum", "Flatten", "Transpose", "Trilu"),
        *("GatherElements", "ScatterND", "ScatterElements", "Pad", "IsNaN"),
    )
}
"""Operator -> number of leading inputs that must be tensors, not :class:`Host`."""

DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""ONNX element type number -> dtype."""


def op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function for the operator ``name``."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = function
        return function

    return keep


OPS |= {
    "Abs": torch.abs,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sigmoid": torch.sigmoid,
    "Relu": torch.relu,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "HardSwish": functional.hardswish,
    "Mish": functional.mish,
    "Not": torch.logical_not,
    "IsNaN": torch.isnan,
}


def _floor_div(a: Any, b: Any) -> Any:
    return a // b if (a >= 0) == (b >= 0) else -(-a // b)


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _small_power(a: int, b: int) -> int:
    if not 0 <= b < 64:
        raise unsupported(f"it takes a whole number to the power of {b}")
    found: int = a**b
    return found


def _power(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.pow(a, b).to(a.dtype)


OPS |= {
    "Add": elementwise("add", operator.add, torch.add),
    "Sub": elementwise("sub", operator.sub, torch.sub),
    "Mul": elementwise("mul", operator.mul, torch.mul),
    "Div": elementwise("div", _floor_div, _divide),
    "Pow": elementwise("pow_", _small_power, _power),
    "Equal": elementwise("equal", lambda a, b: bool(a == b), torch.eq),
    "Greater": elementwise("greater", lambda a, b: bool(a > b), torch.gt),
    "GreaterOrEqual": elementwise("greater_equal", lambda a, b: bool(a >= b), torch.ge),
    "Less": elementwise("less", lambda a, b: bool(a < b), torch.lt),
    "LessOrEqual": elementwise("less_equal", lambda a, b: bool(a <= b), torch.le),
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
}
add, sub, mul, div, pow_ = (OPS[name] for name in ("Add", "Sub", "Mul", "Div", "Pow"))
equal, greater, greater_equal = (OPS[name] for name in ("Equal", "Greater", "GreaterOrEqual"))
less, less_equal = OPS["Less"], OPS["LessOrEqual"]
"""Module-level names for the generated code of a graph."""


def _reduce_values(on_numbers: Callable[..., Any], on_tensors: Callable[..., Any], values: Sequence[Any]) -> Any:
    found = values[0]
    for other in values[1:]:
        found = elementwise("extreme", on_numbers, on_tensors)(found, other)
    return found


@op("Max")
def maximum(*values: Any) -> Any:
    return _reduce_values(max, torch.maximum, values)


@op("Min")
def minimum(*values: Any) -> Any:
    return _reduce_values(min, torch.minimum, values)


@op("Sum")
def sum_(*values: torch.Tensor) -> Any:
    return _reduce_values(operator.add, torch.add, values)


@op("Mean")
def mean_(*values: torch.Tensor) -> Any:
    return sum_(*values) / len(values)


@op("Neg")
def neg(x: Any) -> Any:
    return Host([-value for value in x.values], x.scalar) if isinstance(x, Host) else torch.neg(x)


@op("Mod")
def mod(a: Any, b: Any, *, fmod: int = 0) -> torch.Tensor:
    return torch.fmod(tensor(a), tensor(b)) if fmod else torch.remainder(tensor(a), tensor(b))


@op("Identity")
def identity(x: Any) -> Any:
    return x


@op("Dropout")
def dropout(x: Any, ratio: Any = None, training_mode: Any = None, *, seed: int = 0) -> Any:
    if isinstance(training_mode, torch.Tensor) and bool(training_mode):
        raise unsupported("a Dropout in it is in training mode")
    return x


@op("Elu")
def elu(x: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return functional.elu(x, alpha)


@op("Celu")
def celu(x: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return functional.celu(x, alpha)


@op("Selu")
def selu(
    x: torch.Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> torch.Tensor:
    return gamma * (torch.clamp(x, min=0) + functional.elu(torch.clamp(x, max=0), alpha))


@op("LeakyRelu")
def leaky_relu(x: torch.Tensor, *, alpha: float = 0.01) -> torch.Tensor:
    return functional.leaky_relu(x, alpha)


@op("PRelu")
def prelu(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 0, x * slope, x)


@op("HardSigmoid")
def hard_sigmoid(x: torch.Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> torch.Tensor:
    return torch.clamp(alpha * x + beta, 0, 1)


@op("Gelu")
def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    return functional.gelu(x, approximate=approximate)


@op("Swish")
def swish(x: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return x * torch.sigmoid(alpha * x)


@op("Clip")
def clip(x: torch.Tensor, low: Any = None, high: Any = None, *, min: float | None = None, max: float | None = None) -> Any:
    low, high = (min if low is None else tensor(low)), (max if high is None else tensor(high))
    return x if low is None and high is None else torch.clamp(x, low, high)


@op("Cast")
def cast(x: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    if isinstance(x, Host) and DTYPES.get(to) is torch.int64:
        return x
    if to not in DTYPES:
        raise unsupported(f"it casts to the element type {to}, which is not known here")
    return tensor(x).to(DTYPES[to])


@op("CastLike")
def cast_like(x: Any, like: Any, *, saturate: int = 1, round_mode: str = "up") -> torch.Tensor:
    return tensor(x).to(tensor(like).dtype)


@op("Where")
def where(condition: Any, x: Any, y: Any) -> Any:
    if all(isinstance(part, Host) for part in (condition, x, y)):
        size = max(len(part.values) for part in (condition, x, y))
        c, a, b = (part.values * size if len(part.values) == 1 else part.values for part in (condition, x, y))
        return Host([a[i] if c[i] else b[i] for i in range(size)], condition.scalar and x.scalar and y.scalar)
    return torch.where(tensor(condition).bool(), tensor(x), tensor(y))


def _axes(axes: Any, x: torch.Tensor, noop: int) -> list[int]:
    found = [] if axes is None else ints(axes)
    return found if found or noop else list(range(x.dim()))


def _reduction(name: str, compute: Callable[[torch.Tensor, list[int], bool], torch.Tensor]) -> None:
    def function(x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> torch.Tensor:
        value = tensor(x)
        where = _axes(axes, value, noop_with_empty_axes)
        return compute(value, where, bool(keepdims)) if where else value

    function.__name__ = function.__qualname__ = name.lower()
    OPS[name] = globals()[name.lower()] = function


_reduction("ReduceMean", lambda x, axes, keep: torch.mean(x, axes, keepdim=keep))
_reduction("ReduceSum", lambda x, axes, keep: torch.sum(x, axes, keepdim=keep))
_reduction("ReduceMax", lambda x, axes, keep: torch.amax(x, axes, keepdim=keep))
_reduction("ReduceMin", lambda x, axes, keep: torch.amin(x, axes, keepdim=keep))
_reduction("ReduceL1", lambda x, axes, keep: torch.sum(torch.abs(x), axes, keepdim=keep))
_reduction("ReduceL2", lambda x, axes, keep: torch.sqrt(torch.sum(x * x, axes, keepdim=keep)))
_reduction("ReduceSumSquare", lambda x, axes, keep: torch.sum(x * x, axes, keepdim=keep))
_reduction("ReduceLogSumExp", lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep))


@op("ReduceProd")
def reduce_prod(x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
    if isinstance(x, Host):
        product = 1
        for value in x.values:
            product = product * value
        return Host([product], not keepdims)
    for axis in sorted((a % x.dim() for a in _axes(axes, x, noop_with_empty_axes)), reverse=True):
        x = torch.prod(x, axis, keepdim=bool(keepdims))
    return x


@op("ArgMax")
def arg_max(x: torch.Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> torch.Tensor:
    if select_last_index:
        raise unsupported("an ArgMax in it wants the last of equal values")
    return torch.argmax(x, axis, keepdim=bool(keepdims))


@op("ArgMin")
def arg_min(x: torch.Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> torch.Tensor:
    if select_last_index:
        raise unsupported("an ArgMin in it wants the last of equal values")
    return torch.argmin(x, axis, keepdim=bool(keepdims))


@op("CumSum")
def cum_sum(x: torch.Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> torch.Tensor:
    where = ints(axis)[0]
    x = torch.flip(x, [where]) if reverse else x
    found = torch.cumsum(x, where, dtype=x.dtype)
    found = found - x if exclusive else found
    return torch.flip(found, [where]) if reverse else found


@op("TopK")
def top_k(x: torch.Tensor, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.topk(x, ints(k)[0], axis, bool(largest), bool(sorted))
    return found.values, found.indices


@op("Softmax")
def softmax(x: torch.Tensor, *, axis: int = -1, rest: int = 0) -> torch.Tensor:
    """Softmax over ``axis``; with ``rest`` (opsets before 13) over ``axis`` and all later axes together."""
    return torch.reshape(torch.softmax(torch.flatten(x, axis), -1), x.shape) if rest else torch.softmax(x, axis)


@op("LogSoftmax")
def log_softmax(x: torch.Tensor, *, axis: int = -1, rest: int = 0) -> torch.Tensor:
    """Like :func:`softmax`."""
    return torch.reshape(torch.log_softmax(torch.flatten(x, axis), -1), x.shape) if rest else torch.log_softmax(x, axis)


@op("MatMul")
def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


@op("Gemm")
def gemm(
    a: torch.Tensor, b: torch.Tensor, c: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> torch.Tensor:
    found = torch.matmul(a.t() if transA else a, b.t() if transB else b)
    found = found if alpha == 1 else alpha * found
    return found if c is None else found + (tensor(c) if beta == 1 else beta * tensor(c))


@op("Einsum")
def einsum(*parts: torch.Tensor, equation: str) -> torch.Tensor:
    return torch.einsum(equation.replace(" ", ""), *parts)
