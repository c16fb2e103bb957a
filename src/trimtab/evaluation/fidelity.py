"""Compare an executable with the model as written: outputs, and inputs that are written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.backend import Executable
from trimtab.core.candidate import Candidate
from trimtab.core.measurement import Parity
from trimtab.core.recipe import Recipe
from trimtab.core.signature import Signature
from trimtab.core.workload import Evaluation
from trimtab.evaluation.reference import Reference
from trimtab.measure.parity import compare_outputs
from trimtab.tensors.structure import cloned, flatten, unflatten

REINDEX = "An index made with the original must be made again."
"""The end of the note about embeddings that moved."""
FEATURES, ALIKE, MOST_CALLS = 32, 0.99, 16
"""Numbers of a vector, and mean cosine, from which on outputs count as the same embedding; calls that are compared."""


def output_parity(
    reference: Reference,
    outputs: Sequence[Any],
    full: Signature,
    evaluation: Evaluation | None,
    *,
    exact: bool,
    max_error: float | None,
) -> Parity:
    """Parity of ``outputs`` with those of ``reference``, as far as no score judges them.

    ``full`` is the signature of the original model. Of values that the evaluation's ``run`` makes, only named outputs are
    compared in addition to the score.
    """
    scored = evaluation is not None
    specs = full.outputs if evaluation is None or evaluation.run is None else None  # values of run have no specs
    gated: Sequence[str] | None = () if specs is None else None
    if evaluation is not None and evaluation.outputs is not None:
        gated = [form for name in evaluation.outputs for form in (name, f"output.{name}")]
    most = None if scored or exact else max_error
    return compare_outputs(reference.nested(), outputs, exact=exact, max_error=most, scored=scored, specs=specs, gated=gated)


def write_mismatch(
    executable: Executable, original: nn.Module, candidate: Candidate, *, exact: bool, max_error: float | None
) -> str | None:
    """Why in-place writes to the inputs of ``candidate`` differ from the model's, or ``None`` if they match."""
    signature = candidate.signature
    if not signature.writes:
        return None
    own, given = candidate.own_leaves(), candidate.own_leaves()
    with torch.no_grad():
        for call, leaves in ((original, own), (executable, given)):
            args, kwargs = unflatten(signature.input_structure, leaves)
            call(*args, **kwargs)
    for i in signature.written:
        name, before = signature.inputs[i].name, candidate.leaves[i]
        # the model may write back, apart from rounding, what was there
        if torch.equal(given[i], before) and not compare_outputs([own[i]], [before], exact=True).ok:
            return (
                f"It leaves the input {name!r} as it was, where the model writes to it. Have the model return it as an output "
                "instead, and pass that to the next call."
            )
        found = compare_outputs([own[i]], [given[i]], exact=exact, max_error=None if exact else max_error)
        if not found.ok:
            return f"It writes something else to the input {name!r} than the model: {found.reason}"
    return None


def embedding_note(recipe: Recipe, candidate: Candidate, original: nn.Module) -> tuple[str, ...]:
    """A note if the outputs of the compressed model are embeddings that differ from those of ``original``.

    Without labels outputs of shape ``(examples, features)`` are embeddings, which are compared with those of other inputs. A
    score can hold although they moved: a sentence encoder with half of its layers had a mean cosine of 0.83.
    """
    training = candidate.training
    if not recipe.compresses or training is None or training.loss is not None:
        return ()
    cosines = []
    with torch.no_grad():
        for args, kwargs in candidate.calibration[:MOST_CALLS] or ((candidate.args, candidate.kwargs),):
            wanted, found = (
                flatten(model(*cloned(args), **cloned(dict(kwargs))), "output")[0] for model in (original, candidate.model)
            )
            pairs = [(one, other) for one, other in zip(wanted, found, strict=True) if one.is_floating_point()]
            if len(pairs) != 1 or pairs[0][0].dim() != 2 or pairs[0][0].shape[1] < FEATURES:
                return ()
            cosines.append(torch.nn.functional.cosine_similarity(*pairs[0], dim=1))
    if (mean := float(torch.cat(cosines).mean())) >= ALIKE:
        return ()
    return (f"Its vectors moved: their mean cosine with the original's is {mean:.2f}. {REINDEX}",)
