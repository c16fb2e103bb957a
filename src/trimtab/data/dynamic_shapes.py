"""The dynamic sizes of a model: those that differ between the calls of the data and that the model accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from trimtab._internal.user_code import BY_HAND, user_code
from trimtab.core.candidate import Candidate, call_model
from trimtab.core.capture import Call, difference, rearranged
from trimtab.core.dynamic_dims import Dims, accepted_dim, dim_names, mark_dynamic, replaced, resized, sizes_of, without
from trimtab.core.signature import Dim, TensorSpec, input_names, parameter_names, specs
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import Structure, flatten

Specs = tuple[TensorSpec, ...]


def specs_of(model: nn.Module, calls: Sequence[Call]) -> list[Specs]:
    """The static specs of the inputs of each call; the first call is the example.

    Raises:
        UsageError: a call has another structure than the example.
    """
    found: list[Specs] = []
    structures: list[Structure] = []
    parameters = parameter_names(model.forward, len(calls[0].args))
    for given in calls:
        call = rearranged(given, structures[0], parameters) if structures else given
        leaves, structure = flatten((call.args, dict(call.kwargs)), "inputs of the data" if found else "inputs")
        structures.append(structure)
        if structure != structures[0]:
            how = difference(structures[0], structure, 1, len(structures))
            raise UsageError(
                f"The data's inputs are structured differently from the example inputs: with the example as call 1, {how}. "
                "Make them alike."
            )
        found.append(specs(leaves, input_names(parameters, structure)))
    return found


def with_accepted_dims(make: Callable[..., Candidate], dims: Dims, calls: Sequence[Specs], notes: list[str]) -> Candidate:
    """A candidate with those of ``dims`` dynamic that the model accepts at another size, each tested alone. ``calls`` show the
    sizes that occur, and so the multiples that a model may need. ``notes`` get a sentence for each refused dimension."""
    refused: dict[str, WorkloadError | UsageError] = {}
    found: dict[str, Dim] = {}
    with user_code("The model failed on the example inputs", BY_HAND):
        example = make(dynamic={})
    for name in dim_names(dims):
        alone = without(dims, {other for other in dim_names(dims) if other != name})
        if (error := _refusal(make, alone)) is None:
            continue
        dim = accepted_dim(name, sizes_of(name, dims, calls), size_test(example, alone, name))
        if dim is not None and _refusal(make, replaced(alone, {name: dim})) is None:
            found[name] = dim
        else:
            refused[name] = error
    fixed = sorted(name for name, error in refused.items() if isinstance(error, WorkloadError))
    if fixed:
        verb = "stays" if len(fixed) == 1 else "stay"
        notes.append(f"The data shows varying sizes, but the model takes only the example's: {', '.join(fixed)} {verb} fixed.")
    notes += [
        f"{str(error).partition('. ')[0]}, so that {name} stays fixed. squeeze() drops every axis of size one: name the axis."
        for name, error in refused.items()
        if isinstance(error, UsageError)  # the output has more axes at one size than at another
    ]
    notes += [f"The model does not take every size of {name}, which goes from {dim.bounds}." for name, dim in found.items()]
    with user_code("The model failed on the example inputs", BY_HAND):
        return make(dynamic=replaced(without(dims, set(refused)), found))


def _refusal(make: Callable[..., Candidate], dims: Dims) -> WorkloadError | UsageError | None:
    """The error of a candidate with ``dims``; ``None`` if it can be made."""
    try:
        with user_code("The model failed at another size"):
            make(dynamic=dims)
    except (WorkloadError, UsageError) as error:
        return error
    return None


def size_test(example: Candidate, dims: Dims, name: str) -> Callable[[int], bool]:
    """A function that tests whether the model accepts the example with dimension ``name`` at a given size."""
    marked = mark_dynamic(example.signature.inputs, dims)

    def accepts(size: int) -> bool:
        leaves = [resized(leaf, spec.shape, name, size) for leaf, spec in zip(example.leaves, marked, strict=True)]
        try:
            with user_code("The model failed at another size"):
                call_model(example.model, example.signature.input_structure, leaves)
        except WorkloadError:
            return False
        return True

    return accepts
