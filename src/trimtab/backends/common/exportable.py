"""Prepare a model for exporters and tracers: the same function in operators that they support."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from trimtab.core.candidate import Candidate, FlatModel
from trimtab.tensors.torchscript_modules import wrap_script_modules
from trimtab.tensors.weights import is_composed

EXPERTS = "batched_mm"
"""Experts implementation of transformers that consists of plain operators and has no data-dependent control flow.

Source: https://huggingface.co/docs/transformers/experts_interface
"""


def exportable(candidate: Candidate, *, traced: bool = False) -> FlatModel:
    """A flat copy of the model that can be exported.

    - Weights of tensor subclasses, such as torchao's, become operations on their parts; exporters cannot write subclasses.
    - TorchScript modules are moved out of the module registry, as :func:`torch.export.export` requires and
      :func:`torch.jit.trace` forbids (``traced``).
    - Experts of transformers are computed with torch's operators instead of their own.
    - Parametrized weights, as of ``weight_norm``, are replaced by their current values: few converters support matrix
      exponentials.
    """
    flat = candidate.flat()
    if not traced:
        flat.model = wrap_script_modules(flat.model)
    for module in flat.modules():
        _plain_experts(module)
        plain_weights(module)
    if any(is_composed(held) for held in (*flat.parameters(), *flat.buffers())):
        # imported late: it imports sympy, which takes half a second
        from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

        unwrap_tensor_subclass_parameters(flat)
    return flat


def _plain_experts(module: nn.Module) -> None:
    """Switch ``module`` to :data:`EXPERTS` if it is a transformers model with experts."""
    can = getattr(type(module), "_can_set_experts_implementation", None)  # transformers 5; the setter warns if unsupported
    if can is not None and can() and getattr(module.config, "_experts_implementation", None) == "grouped_mm":
        module.set_experts_implementation(EXPERTS)  # type: ignore[operator]


def plain_weights(module: nn.Module) -> None:
    """Replace the parametrized weights of ``module`` by parameters with their current values.

    ``remove_parametrizations`` is not used, because it changes the class of ``module``, which is also the class of the
    original.
    """
    if not is_parametrized(module):
        return
    names = [name for name, _ in module.get_submodule("parametrizations").named_children()]
    with torch.no_grad():
        values = {name: getattr(module, name).detach().clone() for name in names}
    own = type_before_parametrizations(module)  # read first: it needs the parametrizations
    del module.parametrizations
    module.__class__ = own
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
