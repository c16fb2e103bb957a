"""Fold batch norms into the layers before them."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from trimtab._internal.user_code import user_code
from trimtab.core.candidate import MODEL_ERRORS, Candidate, call_model
from trimtab.core.dynamic_dims import resized
from trimtab.core.technique import Pass
from trimtab.errors import CompileError, UsageError, WorkloadError
from trimtab.tensors.comparison import difference, is_sorted, repeat_sorted
from trimtab.tensors.deepcopy import copied
from trimtab.tensors.structure import flatten
from trimtab.tensors.weights import tolerance

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-8, 1e-3
"""Largest allowed error of a fold, relative to the largest output, in float64 and in float32."""

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class FoldBn(Pass):
    """Fold each batch norm, which is a scale and a shift at inference, into the convolution or linear layer before it.

    Saves one read and one write of every activation. Pays off for convolutional networks on runtimes that do not fold (eager,
    and exports that are quantized later). Pairs of layer and norm are guessed from a symbolic trace, if the model can be
    traced, and from the order of registration. Therefore every fold is verified: a copy of the model with random batch-norm
    statistics (fresh ones would hide a wrong fold) must give equal outputs on the example, on random inputs and at other sizes,
    in float64 if the model supports it.
    Source: Jacob et al. 2018, https://arxiv.org/abs/1712.05877, section 3.2; ``torch.nn.utils.fusion``.
    """

    words = "batch norms folded into their neighbours"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a batch norm after a convolution or linear layer."""
        if not any(isinstance(module, _BatchNorm) for module in candidate.model.modules()):
            return "fold_bn needs a batch norm, and the model has no BatchNorm."
        if not _pairs(candidate.model):
            return "No BatchNorm of the model directly follows a convolution or linear layer in evaluation mode."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with all verified folds. The other batch norms stay."""
        verify = _FoldVerifier(candidate)
        pairs = _foldable(verify, [pair for pair in _pairs(candidate.model) if pair[1] in verify.executed_norms])
        if not pairs:
            raise CompileError(
                "No batch norm could be folded: every fold that was tried changed the model's outputs, or was of a batch norm "
                "that the example inputs do not reach."
            )
        model = candidate.own_model()
        _fold(model, pairs)
        return candidate.with_model(model)


def folded(candidate: Candidate) -> Candidate:
    """``candidate`` with every batch norm folded whose fold is verified."""
    with contextlib.suppress(CompileError):
        return FoldBn().apply(candidate) if FoldBn().why_not(candidate) is None else candidate
    return candidate


class _FoldVerifier:
    """Verifies folds on a copy of the model with random batch-norm statistics."""

    def __init__(self, candidate: Candidate) -> None:
        self._structure = candidate.signature.input_structure
        generator = torch.Generator().manual_seed(0)
        self._model, self._tolerance = candidate.own_model(), tolerance(candidate.model, SINGLE_TOLERANCE)
        _randomize_norms(self._model, generator)
        # the model may refuse resampled inputs, for example lengths that must be in falling order
        accepted = filter(self._accepts, [_resampled(candidate.leaves, generator), *_other_sizes(candidate)])
        self._inputs = [candidate.leaves, *accepted]
        self._use_float64()
        with _executed_norms(self._model) as self.executed_norms:
            self._reference = [self._outputs(self._model, leaves) for leaves in self._inputs]

    def __call__(self, pairs: Sequence[Pair]) -> bool:
        """Whether the outputs stay equal if all of ``pairs`` are folded."""
        folded = copied(self._model)
        try:
            _fold(folded, pairs)
            found = [self._outputs(folded, leaves) for leaves in self._inputs]
        except MODEL_ERRORS:
            return False
        return all(_close(a, b, self._tolerance) for a, b in zip(self._reference, found, strict=True))

    def _accepts(self, leaves: Sequence[torch.Tensor]) -> bool:
        try:
            self._outputs(self._model, leaves)
        except MODEL_ERRORS:
            return False
        return True

    def _use_float64(self) -> None:
        """Switch to float64 if the model supports it; some models cast to float32 explicitly."""
        model = copied(self._model).double()
        inputs = [[t.double() if t.is_floating_point() else t for t in leaves] for leaves in self._inputs]
        try:
            outputs = [self._outputs(model, leaves) for leaves in inputs]
        except MODEL_ERRORS:
            return
        if all(t.dtype is torch.float64 for found in outputs for t in found if t.dtype.is_floating_point):
            self._model, self._inputs, self._tolerance = model, inputs, DOUBLE_TOLERANCE

    def _outputs(self, model: nn.Module, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = flatten(call_model(model, self._structure, leaves), "output")[0]
        return [leaf.clone() for leaf in found]  # clone: the next call may overwrite the outputs


@contextlib.contextmanager
def _executed_norms(model: nn.Module) -> Iterator[set[str]]:
    """Collect the names of the batch norms that run in the block. Folds of the other batch norms cannot be verified."""
    executed = set[str]()
    norms = [item for item in model.named_modules(remove_duplicate=False) if isinstance(item[1], _BatchNorm)]
    hooks = [norm.register_forward_hook(lambda *_, name=name: executed.add(name)) for name, norm in norms]
    try:
        yield executed
    finally:
        for hook in hooks:
            hook.remove()


def _foldable(verify: Callable[[Sequence[Pair]], bool], pairs: Sequence[Pair]) -> list[Pair]:
    """A large subset of ``pairs`` that can be folded together, found by bisection."""
    if not pairs or verify(pairs):
        return list(pairs)
    if len(pairs) == 1:
        return []
    middle = len(pairs) // 2
    kept = _foldable(verify, pairs[:middle])
    for pair in _foldable(verify, pairs[middle:]):
        if verify([*kept, pair]):
            kept.append(pair)
    return kept


def _pairs(model: nn.Module) -> list[Pair]:
    """(layer, batch norm) pairs that may be folded. Each name occurs once; pairs from the trace take precedence."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: list[Pair] = []
    taken: set[str] = set()
    for layer, norm in (*_traced(model), *_registered(model)):
        if taken.isdisjoint((layer, norm)) and _fits(modules[layer], modules[norm]):
            found.append((layer, norm))
            taken |= {layer, norm}
    return found


def _traced(model: nn.Module) -> list[Pair]:
    """Pairs in which the layer's output is used by the norm only; empty if the model cannot be traced.

    A trace refers to a module with several names by one of them, so such modules are skipped.
    """
    try:
        # Tracing runs the model's code on symbolic values, which can raise any error. A copy is traced, because models may
        # store computed values as attributes.
        with user_code("The model cannot be traced"):
            graph = torch.fx.Tracer().trace(copied(model))
    except (UsageError, WorkloadError):
        return []
    calls = [node for node in graph.nodes if node.op == "call_module"]
    names = collections.Counter(map(id, dict(model.named_modules(remove_duplicate=False)).values()))
    pairs = [
        (str(node.args[0].target), str(node.target))
        for node in calls
        if node.args and node.args[0] in calls and len(node.args[0].users) == 1
    ]
    return [pair for pair in pairs if all(names[id(model.get_submodule(name))] == 1 for name in pair)]


def _registered(model: nn.Module) -> list[Pair]:
    """Pairs of consecutive children in the order of registration."""
    found = []
    for prefix, parent in model.named_modules():  # yields a layer that two parents share once per parent
        names = [f"{prefix}.{name}" if prefix else name for name, child in parent.named_children() if _is_foldable_type(child)]
        found += list(itertools.pairwise(names))
    return found


def _is_foldable_type(module: nn.Module) -> bool:
    return isinstance(module, (*CONVOLUTIONS, nn.Linear, _BatchNorm))


def _fits(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether ``norm`` can be folded into ``layer``: supported types, evaluation mode, no hooks, equal width."""
    if not isinstance(norm, _BatchNorm) or norm.training or norm.running_mean is None or layer.training:
        return False
    if any(
        module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations") for module in (layer, norm)
    ):
        return False
    if isinstance(layer, _ConvTransposeNd):
        return layer.groups == 1 and layer.out_channels == norm.num_features
    if isinstance(layer, CONVOLUTIONS):
        return layer.out_channels == norm.num_features
    return isinstance(layer, nn.Linear) and layer.out_features == norm.num_features and norm.affine


def _fold(model: nn.Module, pairs: Sequence[Pair]) -> None:
    for layer_name, norm_name in pairs:
        layer, norm = model.get_submodule(layer_name), model.get_submodule(norm_name)
        assert isinstance(norm, _BatchNorm)
        if isinstance(layer, nn.Linear):
            _replace(model, layer_name, fuse_linear_bn_eval(layer, norm))
        else:
            transpose = isinstance(layer, _ConvTransposeNd)
            _replace(model, layer_name, fuse_conv_bn_eval(layer, norm, transpose=transpose))  # type: ignore[type-var]
        _replace(model, norm_name, nn.Identity().eval())


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _randomize_norms(model: nn.Module, generator: torch.Generator) -> None:
    """Give every batch norm random statistics and weights, so that it changes its inputs."""
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.running_var is not None:
                spans = (
                    (norm.running_mean, -0.2, 0.2),
                    (norm.running_var, 0.7, 1.4),
                    (norm.weight, 0.8, 1.2),
                    (norm.bias, -0.2, 0.2),
                )
                for tensor, low, high in spans:
                    if tensor is not None:
                        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)


def _resampled(leaves: Sequence[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Inputs like the example: floats with its mean and standard deviation, other values permuted."""
    return [_resample(leaf, generator) for leaf in leaves]


def _resample(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if leaf.dtype.is_floating_point:
        return torch.randn(leaf.shape, generator=generator).to(leaf) * leaf.std(correction=0) + leaf.mean()
    if is_sorted(leaf):
        return repeat_sorted(leaf)
    return leaf.flatten()[torch.randperm(leaf.numel(), generator=generator)].view(leaf.shape)


def _other_sizes(candidate: Candidate) -> Iterator[list[torch.Tensor]]:
    """The example with each dynamic dimension at another size and at its minimum: models may skip norms for a single row."""
    signature = candidate.signature
    now = signature.sizes(candidate.leaves)
    for dim in signature.dims:
        for size in {dim.near(now[dim.name], 1, -1), dim.min} - {now[dim.name]}:
            pairs = zip(candidate.leaves, signature.inputs, strict=True)
            yield [resized(leaf, spec.shape, dim.name, size) for leaf, spec in pairs]


def _close(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor], tolerance: float) -> bool:
    pairs = zip(want, got, strict=True)
    return not any(difference("", one, other, tolerance, floor=1e-12) for one, other in pairs)
