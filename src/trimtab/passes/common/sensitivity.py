"""How much the outputs change when one layer at a time is rounded to 8 bits: without labels, in torch, for every runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trimtab._internal.serialization import write_json
from trimtab._internal.user_code import save_errors
from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.errors import CompileError
from trimtab.hardware import environment
from trimtab.measure.values import scale_of
from trimtab.passes.common.quantized import LEVELS, Range, observed_ranges, quantizable, quantize
from trimtab.passes.fold_bn import folded
from trimtab.tensors.comparison import is_discrete
from trimtab.tensors.structure import cloned, flatten
from trimtab.tensors.weights import raw

FOLDER = "sensitivity"
"""Folder in the candidate's scratch folder with one table for each model and calibration data."""
MOST_CALLS = 16
"""Calibration calls on which outputs are compared."""
MIN_VARIANCE = 1e-300
"""Lower bound of an output's variance, by which errors are divided."""
MOST_NAMED = 3
"""Most layers that a note names."""

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Outputs = list[list[torch.Tensor]]


def sensitivities(candidate: Candidate, most_s: float = math.inf) -> dict[str, float]:
    """The sensitivity of each convolution, linear layer, recurrent layer and embedding that the calibration inputs reach.

    It is the mean squared change of the outputs if this layer alone is rounded, relative to their variance over the examples.
    Weights and activations are rounded; of a recurrent layer the weights and inputs, of an embedding the weights. The most
    sensitive layer is first.

    The table is kept in the candidate's scratch folder under the hash of weights and calibration data. If none is kept and
    measuring one is expected to take longer than ``most_s`` seconds, the result is empty.

    Raises:
        CompileError: the model fails on the calibration inputs.
    """
    path = None if candidate.scratch is None else candidate.scratch / FOLDER / f"{_key(candidate)}.json"
    if path is not None and (found := _read(path)) is not None:
        return found
    if most_s < math.inf and _expected_s(candidate) > most_s:
        return {}
    try:
        table = _measured(candidate)
    except MODEL_ERRORS as error:
        raise CompileError(f"The layers' sensitivities cannot be measured on the calibration inputs: {error}") from error
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with save_errors():
            write_json(path, table)
    return table


def most_sensitive(candidate: Candidate, count: int, *, every: bool = False) -> tuple[str, ...]:
    """Names of the ``count`` most sensitive layers: convolutions and linear layers only, or layers of ``every`` kind.

    Raises:
        CompileError: no layer would be left.
    """
    if not count:
        return ()
    layers = dict(candidate.model.named_modules())
    names = [name for name in sensitivities(candidate) if every or not isinstance(layers[name], (nn.RNNBase, *EMBEDDINGS))]
    if count >= len(names):
        raise CompileError(f"No layer is left to quantize: float_layers is {count}, and the model has {len(names)}.")
    return tuple(names[:count])


def known_sensitivities(candidate: Candidate, most_s: float = math.inf) -> dict[str, float]:
    """:func:`sensitivities` of the model with folded batch norms; empty if they cannot be measured."""
    try:
        return sensitivities(folded(candidate), most_s)
    except CompileError:
        return {}


def _expected_s(candidate: Candidate) -> float:
    """Estimated seconds of a measurement, from the duration of one call."""
    begun = time.perf_counter()
    try:
        _outputs(dataclasses.replace(candidate, calibration=candidate.calibration[:1]), candidate.model)
    except MODEL_ERRORS as error:
        raise CompileError(f"The model fails on the calibration inputs: {error}") from error
    kinds = (nn.modules.conv._ConvNd, nn.Linear, nn.RNNBase, *EMBEDDINGS)
    layers = sum(isinstance(module, kinds) for module in candidate.model.modules())
    return (time.perf_counter() - begun) * max(1, len(candidate.calibration[:MOST_CALLS])) * layers


def sensitivity_note(table: Mapping[str, float]) -> str | None:
    """A sentence that names the first layers of ``table``, from :func:`sensitivities`; ``None`` if it is empty."""
    named = ", ".join(f"{name} ({value:.2g})" for name, value in list(table.items())[:MOST_NAMED])
    if not named:
        return None
    return f"Rounded alone, these layers change the outputs most, relative to their variance over the examples: {named}."


def _measured(candidate: Candidate) -> dict[str, float]:
    model = candidate.own_model()
    layers = quantizable(model)
    recurrent = {name: module for name, module in model.named_modules() if isinstance(module, (nn.RNNBase, *EMBEDDINGS))}
    with torch.no_grad(), _observed_inputs(model, recurrent) as inputs, observed_ranges(model, layers) as seen:
        wanted = _outputs(candidate, model)
    variances = [
        1.0 if is_discrete(each[0].dtype) else max(scale_of(each)[0] ** 2, MIN_VARIANCE) for each in zip(*wanted, strict=True)
    ]
    table: dict[str, float] = {}
    for name, module in model.named_modules():
        if name in seen:
            scales = (seen[name][0].scale("minmax"), seen[name][1].scale("minmax"))
            with _quantized_layer(model, name, scales):
                table[name] = _change(wanted, _outputs(candidate, model), variances)
        elif name in inputs:
            with _rounded_weights(module, inputs[name].scale("minmax")):
                table[name] = _change(wanted, _outputs(candidate, model), variances)
    return _sorted(table)


@contextlib.contextmanager
def _quantized_layer(model: nn.Module, name: str, scales: tuple[tuple[float, int], tuple[float, int]]) -> Iterator[None]:
    layer = model.get_submodule(name)
    own = layer.__class__
    quantize(model, {name: scales})
    try:
        yield
    finally:
        layer.__class__ = own


@contextlib.contextmanager
def _rounded_weights(layer: nn.Module, scale: tuple[float, int]) -> Iterator[None]:
    """Round the weights of ``layer``, with one scale per row, and its inputs in the block. Indices are not rounded."""
    largest = 127 if environment.has_vnni() else 63
    before = {name: weight.detach().clone() for name, weight in layer.named_parameters() if name.startswith("weight")}
    handle = layer.register_forward_pre_hook(
        lambda _, args: (
            (torch.fake_quantize_per_tensor_affine(args[0], *scale, 0, LEVELS), *args[1:])
            if args and args[0].is_floating_point()
            else args
        )
    )
    try:
        with torch.no_grad():
            for name, weight in before.items():
                step = weight.abs().amax(1, keepdim=True).clamp_min(1e-8) / largest
                getattr(layer, name).copy_((weight / step).round() * step)
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            for name, weight in before.items():
                getattr(layer, name).copy_(weight)


@contextlib.contextmanager
def _observed_inputs(model: nn.Module, names: Mapping[str, Any]) -> Iterator[dict[str, Range]]:
    seen: dict[str, Range] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):  # not a packed sequence
                seen.setdefault(name, Range()).observe(args[0])

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _outputs(candidate: Candidate, model: nn.Module) -> Outputs:
    calls = candidate.calibration[:MOST_CALLS] or ((candidate.args, candidate.kwargs),)
    found = []
    with torch.no_grad():
        for args, kwargs in calls:
            leaves = flatten(model(*cloned(args), **cloned(dict(kwargs))), "output")[0]
            found.append([leaf.detach().clone() for leaf in leaves])
    return found


def _change(wanted: Outputs, found: Outputs, variances: Sequence[float]) -> float:
    """The sum over the outputs of the relative squared error; for integers, of the share of differing values."""
    total = 0.0
    for i, variance in enumerate(variances):
        pairs = [(a[i], b[i]) for a, b in zip(wanted, found, strict=True)]
        if is_discrete(pairs[0][0].dtype):
            total += sum(float((a != b).double().mean()) for a, b in pairs) / len(pairs)
        else:
            total += sum(float((a.double() - b.double()).square().nanmean()) for a, b in pairs) / len(pairs) / variance
    return total


def _key(candidate: Candidate) -> str:
    digest = hashlib.sha256(f"2 {torch.__version__} {environment.has_vnni()} {candidate.model}".encode())
    for name, tensor in candidate.model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(raw(tensor).numpy().data)
    for args, kwargs in candidate.calibration[:MOST_CALLS]:
        for leaf in flatten((args, dict(kwargs)), "inputs")[0]:
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(raw(leaf).numpy().data)
    return digest.hexdigest()[:32]


def _read(path: pathlib.Path) -> dict[str, float] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _sorted({str(name): float(value) for name, value in found.items()})
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _sorted(table: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(table.items(), key=lambda item: (-item[1], item[0])))
