"""What exporters and tracers are given in place of a model: the same function, written in words that they know."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from trimtab.core.candidate import Candidate, FlatModel
from trimtab.tensors.torchscript_modules import beside
from trimtab.tensors.weights import is_composed

EXPERTS = "batched_mm"
"""The way to compute the experts of a transformers model that consists of plain operators and decides nothing on data.

Source: https://huggingface.co/docs/transformers/experts_interface
"""


def exportable(candidate: Candidate, *, traced: bool = False) -> FlatModel:
    """A flat copy of the model in a form that can be exported.

    Weights in classes of tensors made of others, as torchao's are, become computations on those others: exporters cannot write
    the classes. Parts that are TorchScript are held beside the registers, where :func:`torch.export.export` takes them and
    :func:`torch.jit.trace` does not (``traced``). Experts of transformers, which call an operator of its own by default, are
    computed with those of torch. Weights that are computed from others at every call, as by ``weight_norm``, are what they come
    to: few converters know a matrix exponential.
    """
    flat = candidate.flat()
    if not traced:
        flat.model = beside(flat.model)
    for module in flat.modules():
        _plain_experts(module)
        plain_weights(module)
    if any(is_composed(held) for held in (*flat.parameters(), *flat.buffers())):
        # which imports sympy, and costs each process that exports nothing half a second
        from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

        unwrap_tensor_subclass_parameters(flat)
    return flat


def _plain_experts(module: nn.Module) -> None:
    """Have ``module``, if it is a transformers model with experts, compute them by :data:`EXPERTS`."""
    can = getattr(type(module), "_can_set_experts_implementation", None)  # transformers 5; its setter warns where it cannot
    if can is not None and can() and getattr(module.config, "_experts_implementation", None) == "grouped_mm":
        module.set_experts_implementation(EXPERTS)  # type: ignore[operator]


def plain_weights(module: nn.Module) -> None:
    """Give ``module``, if weights of it are parametrized, these as they are now.

    Not by ``remove_parametrizations``, which changes the class of ``module``, and that is the class of what it was copied from.
    """
    if not is_parametrized(module):
        return
    names = [name for name, _ in module.get_submodule("parametrizations").named_children()]
    with torch.no_grad():
        values = {name: getattr(module, name).detach().clone() for name in names}
    own = type_before_parametrizations(module)  # which is told by what is deleted next
    del module.parametrizations
    module.__class__ = own
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
