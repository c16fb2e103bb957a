"""Attention written by hand as one call of scaled_dot_product_attention."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.nn import functional

from trimtab._internal.user_code import user_code
from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass
from trimtab.errors import CompileError, UsageError, WorkloadError
from trimtab.passes.common.structure import difference
from trimtab.tensors.deepcopy import copied

SOFTMAX = (torch.softmax, functional.softmax, "softmax")
PRODUCT = (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm")
DIVIDE, MULTIPLY = (operator.truediv, torch.div, "div"), (operator.mul, torch.mul, "mul")
ADD, MASKED_FILL = (operator.add, torch.add, "add"), (torch.masked_fill, "masked_fill")
IDENTITIES = (nn.Dropout, nn.Identity)


@dataclass(frozen=True, kw_only=True)
class FusedAttention(Pass):
    """Compute attention that is written as two products with a softmax between by ``scaled_dot_product_attention``.

    Pays off in eager mode and under torch's compilers for more than about a hundred tokens, because the matrix of weights is
    never written to memory. Runtimes with a graph of their own fuse such products themselves. Modules are traced one by one; a
    scale, an additive mask and ``masked_fill`` between product and softmax are taken over. A module that returns the weights,
    or decides by its inputs, stays as it is, and so does one for which the outputs differ.
    Source: Dao 2023, https://arxiv.org/abs/2307.08691;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """

    words = "attention in one kernel"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a module with a softmax between two products."""
        if not any(_fused_module(module) for _, module in _softmax_modules(candidate.model)):
            return "fused_attention needs attention written as two products with a softmax between, and finds none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model in which the modules that compute attention by hand call the kernel."""
        model, done = candidate.own_model(), 0
        for name, module in _softmax_modules(candidate.model):
            if (fused := _fused_module(module)) is None:
                continue
            tried = candidate.with_model(model).own_model()
            if name:
                parent, _, last = name.rpartition(".")
                setattr(tried.get_submodule(parent), last, fused.eval())
            else:
                tried = fused.eval()
            if difference(candidate, tried, candidate.model) is None:
                model, done = tried, done + 1
        if not done:
            raise CompileError("fused_attention changes the outputs of this model, so its attention stays as it is written.")
        return candidate.with_model(model)


class _Attention(NamedTuple):
    query: Node
    keys: Node
    """Transposed, as the product takes them."""
    scale: tuple[tuple[Any, bool], ...] = ()
    """Factors of the scores, and whether they divide."""
    mask: tuple[Any, ...] | None = None
    """The addend, or condition and value of ``masked_fill``."""


class _ModuleTracer(Tracer):
    """Traces one module. Submodules become single call nodes."""

    proxy_buffer_attributes = True  # a mask in a buffer is cut to the length of the input

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _softmax_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of user-defined classes whose source code mentions softmax, with their names."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule):
            continue
        try:
            source = inspect.getsource(type(module))
        except (OSError, TypeError):
            continue
        if "softmax" in source.lower():
            yield name, module


def _fused_module(module: nn.Module) -> GraphModule | None:
    """A copy of ``module`` with fused attention; ``None`` if it has none or cannot be traced."""
    own = copied(module)
    try:
        # tracing runs the model's code on symbolic values, which can raise any error
        with user_code("The module cannot be traced"):
            graph = _ModuleTracer().trace(own)
    except (UsageError, WorkloadError):
        return None
    found = [each for node in graph.nodes if (each := _matched_attention(node, own)) is not None]
    if not found:
        return None
    for attention, product in found:
        _fuse(graph, attention, product)
    fused = GraphModule(own, graph)
    fused.graph.eliminate_dead_code()
    fused.recompile()
    return fused


def _matched_attention(node: Node, module: nn.Module) -> tuple[_Attention, Node] | None:
    """Match the attention pattern around the softmax ``node``. Returns the scores and the product of weights and values."""
    if not _is_softmax(node, module):
        return None
    scores = _scores(node.args[0])
    reader = node
    while len(reader.users) == 1:
        user = next(iter(reader.users))
        if _calls(user, PRODUCT) and len(user.args) == 2 and user.args[0] is reader:
            return None if scores is None else (scores, user)
        if not _is_identity(user, module) or user.args[0] is not reader:
            return None
        reader = user
    return None


def _is_softmax(node: Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        part = module.get_submodule(str(node.target))
        return isinstance(part, nn.Softmax) and part.dim == -1
    if not _calls(node, SOFTMAX) or node.kwargs.get("dtype") is not None or len(node.args) > 2:
        return False
    return bool(node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None) == -1)


def _is_identity(node: Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), IDENTITIES)
    return _calls(node, (functional.dropout,)) and node.kwargs.get("training") is False


def _calls(node: Any, targets: tuple[Any, ...]) -> bool:
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


def _scores(node: Any) -> _Attention | None:
    """Match ``node`` as the product of queries and keys, optionally scaled and masked; ``None`` if it is something else."""
    if _calls(node, PRODUCT) and len(node.args) == 2:
        return _Attention(*node.args)
    if _calls(node, DIVIDE) or _calls(node, MULTIPLY):
        first, second = node.args
        for part, factor in ((first, second), (second, first))[: 1 if _calls(node, DIVIDE) else 2]:
            # a factor after the mask would scale the mask too
            if (found := _scores(part)) is not None and found.mask is None:
                return found._replace(scale=(*found.scale, (factor, _calls(node, DIVIDE))))
    if _calls(node, ADD) and len(node.args) == 2:
        for part, mask in (node.args, node.args[::-1]):
            if (found := _scores(part)) is not None and found.mask is None:
                return found._replace(mask=(mask,))
    if _calls(node, MASKED_FILL) and len(node.args) == 3:
        found = _scores(node.args[0])
        return None if found is None or found.mask is not None else found._replace(mask=node.args[1:])
    return None


def _fuse(graph: Graph, found: _Attention, product: Node) -> None:
    with graph.inserting_before(product):
        keys = graph.call_method("transpose", (found.keys, -2, -1))
        scale: Any = 1.0
        for factor, divides in found.scale:
            if isinstance(factor, (int, float)) and isinstance(scale, float):
                scale = scale / factor if divides else scale * factor
            else:
                scale = graph.call_function(operator.truediv if divides else operator.mul, (scale, factor))
        mask = None if found.mask is None else found.mask[0]
        if found.mask is not None and len(found.mask) == 2:
            mask = graph.call_function(torch.where, (found.mask[0], _finite_fill(found.mask[1]), 0.0))
        arguments = {"attn_mask": mask, "scale": scale}
        fused = graph.call_function(functional.scaled_dot_product_attention, (found.query, keys, product.args[1]), arguments)
    product.replace_all_uses_with(fused)


def _finite_fill(value: Any) -> Any:
    """The fill value of masked scores, with minus infinity as the lowest float32: a fully masked row is then not NaN."""
    return torch.finfo(torch.float32).min if isinstance(value, (int, float)) and math.isinf(value) else value
