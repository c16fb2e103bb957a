"""Operations of one call, counted by running it: torch's counter, plus formulas for operators that it lacks.

torch's :class:`~torch.utils.flop_counter.FlopCounterMode` counts matrix products, convolutions and GPU attention. Added are
fused recurrent layers, attention on the CPU, the fused transformer layers of evaluation mode, matrix-vector products and
quantized layers. A multiply-add counts as two operations. Element-wise work is not counted, as is usual.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Formula = Callable[..., int]


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """Operations of one call."""

    total: int
    by_operator: Mapping[str, int]
    """Operator -> its operations, the largest first."""
    uncounted: tuple[str, ...]
    """Heavy operators that ran and have no formula. If there are any, ``total`` is a lower bound."""


def count_flops(
    model: Callable[..., object],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gradients: bool = False,
) -> FlopCount:
    """Run ``model(*args, **kwargs)`` once and count its operations, with ``gradients`` also those of its backward pass.

    The model runs in its present mode; in training mode its statistics change.

    Raises:
        Exception: whatever the model raises.
    """
    seen = _OperatorRecorder()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    counter.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    with torch.set_grad_enabled(gradients), seen, counter:
        model(*args, **(kwargs or {}))
    counts = {str(operator): count for operator, count in counter.get_flop_counts().get("Global", {}).items() if count}
    ranked = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    uncounted = sorted(str(operator) for operator in seen.operators - set(counter.flop_registry) if _may_be_heavy(operator))
    return FlopCount(sum(ranked.values()), ranked, tuple(uncounted))


class _NoModuleTracker:
    """Replaces the counter's module tracker, whose hooks fail on leaves that are passed to ``torch.autograd.grad``.

    Only sums over all modules are used.
    """

    parents: ClassVar = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that reaches the kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operator and run it."""
        self.operators.add(getattr(func, "overloadpacket", func))
        return func(*args, **(kwargs or {}))


_LIGHT_NAMESPACES = {"aten", "prim", "prims", "profiler", "quantized", "quantized_decomposed", "_c10d_functional"}
_HEAVY_WORDS = (
    "linalg", "_fft", "cholesky", "_cdist", "cdist", "_pdist", "rnn", "lstm", "gru", "attention", "_mm", "matmul", "linear",
    "conv", "triangular_solve", "lu_solve", "svd", "_grouped", "_sparse", "mkldnn_", "miopen", "cudnn_", "mps_",
)  # fmt: skip
_LIGHT_WORDS = (
    "convert", "to_mkldnn", "reorder", "prepack", "quantize_", "upsample", "flatten_weight", "batch_norm", "_thnn_fused",
    "check_errors", "vector_norm",
)  # fmt: skip


def _may_be_heavy(operator: Any) -> bool:
    """Whether an operator without a formula may be heavy: matrix work by its name, or an operator from outside torch."""
    namespace, _, name = str(getattr(operator, "_qualified_op_name", operator)).partition("::")
    if any(word in name for word in _LIGHT_WORDS):
        return False
    return namespace not in _LIGHT_NAMESPACES or any(word in name for word in _HEAVY_WORDS)


def _formulas() -> dict[Any, Formula]:
    """Formulas by operator, for the operators that this build of torch has."""
    return {
        operator: _tensor_formula(formula)
        for formula, names in _OPERATORS.items()
        for name in names.split()
        if (operator := _operator(name)) is not None
    }


def _operator(name: str) -> Any | None:
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator, None)


def _tensor_formula(formula: Formula) -> Formula:
    """Mark ``formula`` so that torch's counter passes tensors instead of shapes: packed weights need more than shapes."""

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(out_val, *args, **kwargs)

    counted._get_raw = True  # type: ignore[attr-defined]
    return counted


def _rows(x: torch.Tensor) -> int:
    """Number of vectors in ``x``: the product of all sizes but the last."""
    return x.numel() // max(x.shape[-1], 1)


def _matrices(rows: int, weights: Iterable[torch.Tensor]) -> int:
    """Operations of multiplying every row with every matrix in ``weights``; biases are skipped."""
    return sum(2 * rows * weight.numel() for weight in weights if weight.dim() >= 2)


def _mkldnn_rnn(out: Any, x: torch.Tensor, w_input: torch.Tensor, w_hidden: torch.Tensor, *rest: Any, **more: Any) -> int:
    """One layer in one direction."""
    return _matrices(_rows(x), (w_input, w_hidden))


def _mkldnn_rnn_backward(
    out: Any, x: torch.Tensor, w_input: torch.Tensor, w_hidden: torch.Tensor, *rest: Any, **more: Any
) -> int:
    """Two products for each one of the forward pass: the gradients of the input and of the matrix."""
    return 2 * _mkldnn_rnn(out, x, w_input, w_hidden)


def _fused_rnn(out: Any, x: torch.Tensor, weights: Sequence[torch.Tensor], *rest: Any, **more: Any) -> int:
    """All layers and directions, projections included. A packed sequence has one row per real step."""
    return _matrices(_rows(x), weights)


def _attention(out: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> int:
    """``q k^T`` and its product with ``v``, shapes (..., heads, length, width); every query head counts, shared keys or not."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(
    out: Any, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any
) -> int:
    """``q k^T`` again, then two products for each of the forward pass's two, as torch counts on GPUs."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _multi_head(
    out: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, heads: int, qkv: torch.Tensor, qkv_bias: Any,
    project: torch.Tensor, *rest: Any, **more: Any,
) -> int:  # fmt: skip
    """nn.MultiheadAttention's fast path, shapes (batch, length, width)."""
    queries, keys, values = _lengths(q), _lengths(k), _lengths(v)
    into = 2 * (sum(queries) + sum(keys) + sum(values)) * width * width
    pairs = sum(a * b for a, b in zip(queries, keys, strict=True))
    return into + 4 * pairs * width + _matrices(sum(queries), [project])


def _encoder_layer(out: Any, x: torch.Tensor, width: int, heads: int, *rest: Any, **more: Any) -> int:
    """nn.TransformerEncoderLayer's fast path: attention, then two linear layers, in the fixed order of its arguments."""
    qkv, project, first, second = (item for item in rest[:15] if isinstance(item, torch.Tensor) and item.dim() == 2)
    return _multi_head(out, x, x, x, width, heads, qkv, None, project) + _matrices(sum(_lengths(x)), (first, second))


def _lengths(x: torch.Tensor) -> list[int]:
    """Length of every sequence of a batch. A padded batch is a nested tensor without its padding."""
    if x.is_nested:
        return [int(size[0]) for size in x._nested_tensor_size()]
    return [x.shape[-2]] * math.prod(x.shape[:-2])


def _dense(out: torch.Tensor, x: torch.Tensor, *rest: Any, **more: Any) -> int:
    """A linear layer whose weight may be packed: rows times width in times width out."""
    return 2 * x.numel() * out.shape[-1]


def _packed_convolution(out: torch.Tensor, x: torch.Tensor, packed: Any, *rest: Any, **more: Any) -> int:
    weight: torch.Tensor = packed.unpack()[0]
    return 2 * out.numel() * math.prod(weight.shape[1:])


def _plain_convolution(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **more: Any) -> int:
    return 2 * out.numel() * math.prod(weight.shape[1:])


def _convolution_backward(
    out: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool],
) -> int:  # fmt: skip
    """A forward pass's operations for each of input and weight. torch's formula is wrong for grouped convolutions."""
    return sum(wanted[:2]) * 2 * (x if transposed else grad).numel() * math.prod(weight.shape[1:])


def _product(out: Any, a: torch.Tensor, *rest: Any, **more: Any) -> int:
    """Matrix or vector ``a`` times a vector."""
    return 2 * a.numel()


def _added_product(out: Any, bias: Any, a: torch.Tensor, *rest: Any, **more: Any) -> int:
    return 2 * a.numel()


def _activated_product(out: torch.Tensor, bias: Any, a: torch.Tensor, *rest: Any, **more: Any) -> int:
    return 2 * a.numel() * out.shape[-1]


def _bilinear(out: Any, a: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, *rest: Any, **more: Any) -> int:
    """nn.Bilinear: ``a W`` for every output, then with ``b``."""
    return 2 * _rows(a) * weight.numel() + 2 * _rows(a) * weight.shape[0] * weight.shape[-1]


_OPERATORS: Mapping[Formula, str] = {
    _mkldnn_rnn: "aten::mkldnn_rnn_layer",
    _mkldnn_rnn_backward: "aten::mkldnn_rnn_layer_backward",
    _fused_rnn: "aten::_cudnn_rnn aten::miopen_rnn",
    _attention: "aten::_scaled_dot_product_flash_attention_for_cpu aten::_scaled_dot_product_fused_attention_overrideable",
    _attention_backward: "aten::_scaled_dot_product_flash_attention_for_cpu_backward "
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
    _multi_head: "aten::_native_multi_head_attention",
    _encoder_layer: "aten::_transformer_encoder_layer_fwd",
    _dense: "quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic "
    "quantized::linear_dynamic_fp16 onednn::qlinear_pointwise onednn::linear_dynamic_fp16 mkldnn::_linear_pointwise "
    "mkl::_mkl_linear aten::mkldnn_linear aten::_int_mm aten::_weight_int8pack_mm aten::_dyn_quant_matmul_4bit",
    _packed_convolution: "quantized::conv1d quantized::conv1d_relu quantized::conv2d quantized::conv2d_relu quantized::conv3d "
    "quantized::conv3d_relu",
    _plain_convolution: "mkldnn::_convolution_pointwise aten::mkldnn_convolution",
    _convolution_backward: "aten::convolution_backward",
    _product: "aten::mv aten::dot aten::vdot",
    _added_product: "aten::addmv",
    _activated_product: "aten::_addmm_activation",
    _bilinear: "aten::_trilinear",
}
