"""Each runtime called straight, as its own documentation shows it: what trimtab's recipes are held against.

A method takes a model, example inputs, calibration batches and a number of threads, and gives a function of no arguments that
runs the example, and one that runs any inputs of that shape. Nothing here goes through trimtab.
"""

from __future__ import annotations

import itertools
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

Inputs = tuple[torch.Tensor, ...]
Call = Callable[..., Any]
"""Runs inputs in the form that :class:`Hand` keeps them in."""


class Hand:
    """A call by hand: ``run(*inputs)`` on inputs that ``convert`` has put into the runtime's own form."""

    def __init__(self, run: Call, convert: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> None:
        self.run = run
        self.convert = convert

    def prepared(self, inputs: Inputs) -> Callable[[], Any]:
        """A function of no arguments; the inputs are converted once, as they would arrive."""
        run, ready = self.run, [self.convert(tensor) for tensor in inputs]
        return lambda: run(*ready)

    def output(self, inputs: Inputs) -> torch.Tensor:
        """The output as a tensor of its own."""
        return torch.as_tensor(np.array(self.prepared(inputs)()))


Method = Callable[[nn.Module, Inputs, Sequence[Inputs], int], Hand]


def as_written(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """What most people write."""
    return _under(torch.no_grad, model)


def eager(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """Inference mode."""
    return _under(torch.inference_mode, model)


def channels_last(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """Batch normalisation folded, NHWC."""
    model = _folded(model).to(memory_format=torch.channels_last)
    hand = _under(torch.inference_mode, model)
    hand.convert = lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    return hand


def torchscript(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """Traced, frozen, optimized for inference."""
    frozen = torch.jit.freeze(torch.jit.trace(model, inputs, check_trace=False).eval())
    return _under(torch.inference_mode, torch.jit.optimize_for_inference(frozen))


def inductor(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """torch.compile with frozen weights."""
    import torch._inductor.config as config

    config.freezing = True
    return _under(torch.inference_mode, torch.compile(model))


def torch_dynamic(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """torch's dynamic int8 for linear and recurrent layers."""
    from torch.ao.quantization import quantize_dynamic

    return _under(torch.inference_mode, quantize_dynamic(model, {nn.Linear, nn.LSTM}, dtype=torch.qint8))


def ort(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """ONNX Runtime, float32."""
    return _session(_exported(model, inputs), threads)


def ort_dynamic(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """ONNX Runtime, dynamic int8, per channel."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = _preprocessed(_exported(model, inputs), inputs)
    quantize_dynamic(path, f"{path}.int8", weight_type=QuantType.QInt8, per_channel=True)
    return _session(f"{path}.int8", threads)


def ort_static(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """ONNX Runtime, static int8 per channel; in a transformer only products with a weight, since the mask ruins the rest."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    path = _preprocessed(_exported(model, inputs), inputs)
    names = _names(inputs)
    feeds = [{name: tensor.numpy() for name, tensor in zip(names, batch, strict=True)} for batch in data]
    options: dict[str, Any] = {}
    if not inputs[0].is_floating_point():
        graph = onnx.load(path).graph
        weights = {tensor.name for tensor in graph.initializer}
        products = [n.name for n in graph.node if n.op_type in ("MatMul", "Gemm") and weights & set(n.input)]
        options = {"op_types_to_quantize": ["MatMul", "Gemm"], "nodes_to_quantize": products}
    quantize_static(
        path,
        f"{path}.int8",
        _Reader(feeds),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        **options,
    )
    return _session(f"{path}.int8", threads)


def openvino(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """OpenVINO, float32, which has to be asked for: left alone, it computes in bfloat16 wherever the CPU can."""
    return _compiled(_converted(model, inputs), threads, {"INFERENCE_PRECISION_HINT": "f32"})


def openvino_default(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """OpenVINO as it comes: bfloat16 on CPUs that have it, else the same as float32."""
    return _compiled(_converted(model, inputs), threads)


def openvino_weights(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """OpenVINO, weights in int8, activations quantized as they come."""
    import nncf

    return _compiled(nncf.compress_weights(_converted(model, inputs)), threads)


def openvino_static(model: nn.Module, inputs: Inputs, data: Sequence[Inputs], threads: int) -> Hand:
    """OpenVINO, static int8 through NNCF."""
    import nncf

    transformer = {} if inputs[0].is_floating_point() else {"model_type": nncf.ModelType.TRANSFORMER}
    dataset = nncf.Dataset([[tensor.numpy() for tensor in batch] for batch in data])
    return _compiled(nncf.quantize(_converted(model, inputs), dataset, subset_size=len(data), **transformer), threads)


LOSSLESS: dict[str, Method] = {f.__name__: f for f in (as_written, eager, channels_last, torchscript, inductor, ort, openvino)}
LOSSY: dict[str, Method] = {
    f.__name__: f for f in (torch_dynamic, ort_dynamic, ort_static, openvino_default, openvino_weights, openvino_static)
}
METHODS = LOSSLESS | LOSSY


def _under(mode: Callable[[], Any], model: Call) -> Hand:
    def run(*inputs: torch.Tensor) -> Any:
        with mode():
            return model(*inputs)

    return Hand(run)


def _folded(model: nn.Module) -> nn.Module:
    """Each batch normalisation folded into the convolution that is registered before it; the fidelity check would notice."""
    for module in model.modules():
        children = list(module.named_children())
        for (name, conv), (next_name, norm) in itertools.pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(conv, norm))
                setattr(module, next_name, nn.Identity())
    return model


def _names(inputs: Inputs) -> list[str]:
    return [f"input_{i}" for i in range(len(inputs))]


def _exported(model: nn.Module, inputs: Inputs) -> str:
    path = str(pathlib.Path(tempfile.mkdtemp(prefix="by-hand-")) / "model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": _names(inputs), "output_names": ["out"]}
        torch.onnx.export(model, inputs, path, dynamo=True, external_data=False, verbose=False, **names)
    return path


def _preprocessed(path: str, inputs: Inputs) -> str:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    masked = not inputs[0].is_floating_point()  # symbolic shapes fail with a TypeError on MiniLM's mask; an LSTM needs them
    quant_pre_process(path, f"{path}.pre", skip_symbolic_shape=masked)
    return f"{path}.pre"


def _session(path: str, threads: int) -> Hand:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return Hand(lambda *arrays: session.run(None, dict(zip(names, arrays, strict=True)))[0], torch.Tensor.numpy)


class _Reader:
    """Calibration data as ONNX Runtime asks for it."""

    def __init__(self, feeds: list[dict[str, np.ndarray]]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch; ``None`` at the end."""
        return next(self._feeds, None)


def _converted(model: nn.Module, inputs: Inputs) -> Any:
    import openvino as ov

    example = inputs if len(inputs) > 1 else inputs[0]
    return ov.convert_model(model, example_input=example, input=[list(tensor.shape) for tensor in inputs])


def _compiled(model: Any, threads: int, config: dict[str, str] | None = None) -> Hand:
    import openvino as ov

    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, **(config or {})}
    compiled = ov.Core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    return Hand(lambda *arrays: request.infer(list(arrays), share_outputs=True)[0], torch.Tensor.numpy)
