"""A pass and a backend that live outside trimtab."""

from dataclasses import dataclass

import torch

from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass
from trimtab.errors import ArtifactError, CompileError
from trimtab.safe_load.archives import load_torchscript


@dataclass(frozen=True, kw_only=True)
class DenseWeights(Pass):
    """Copy weights that are views of something larger. Source: none, it is a demonstration."""

    name = "dense_weights"

    def why_not(self, candidate):
        if not any(True for _ in candidate.model.parameters()):
            return "dense_weights needs a model with weights, and this one has none."
        return None

    def apply(self, candidate):
        model = candidate.own_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.set_(parameter.detach().clone(memory_format=torch.contiguous_format))
        return candidate.with_model(model)


class TracedExecutable(Executable):
    def __init__(self, module, signature, settings):
        super().__init__(signature, settings)
        self.module = module

    def run(self, leaves):
        with torch.no_grad():
            return [tensor.clone() for tensor in self.module(*leaves)]  # one may be a weight, or a view of one

    def save(self, folder):
        self.module.save(str(folder / "traced.pt"))
        return ["traced.pt"]


@dataclass(frozen=True, kw_only=True)
class Traced(Backend):
    """The plainest trace, for one set of sizes. Source: none, it is a demonstration."""

    name = "traced"

    def compile(self, candidate: Candidate) -> Executable:
        try:
            with torch.no_grad():
                leaves = candidate.own_leaves()  # one tensor given twice would become one input
                module = torch.jit.trace(candidate.flat(), tuple(leaves), check_trace=False)
                outputs = module(*leaves)
        except RuntimeError as error:
            raise CompileError(f"The tracer refused the model: {error}") from error
        signature = candidate.signature.without_dims(candidate.leaves, outputs)
        return TracedExecutable(module, signature, candidate.settings)

    def load(self, folder, signature, settings):
        try:
            return TracedExecutable(load_torchscript(folder / "traced.pt"), signature, settings)
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"traced.pt cannot be read: {error}") from error

    def script(self):
        return """
def load(folder, threads):
    import torch
    model = torch.jit.load(f"{folder}/traced.pt")
    return lambda tensors: model(*tensors)
"""
