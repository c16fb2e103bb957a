"""Compare the outputs of two executables, relative to the variation of the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from trimtab.core.measurement import Parity, Relative
from trimtab.core.signature import TensorSpec, dtype_name
from trimtab.measure.figures import Figures, figures_of
from trimtab.measure.slices import MAX_USELESS, REACHED, axes_of, destroyed_slices, inexact_slices, slices_along, useless_slices
from trimtab.measure.structures import structure_difference
from trimtab.measure.values import all_finite, as_double, signed_infinities, without_masks
from trimtab.tensors.comparison import NEAR_TIES, NEAR_TIES_ALONE, is_discrete
from trimtab.tensors.structure import Structure, flatten, names

TOLERANCE = {  # of exact recipes, by the dtype of the output: (centred error, tail error)
    torch.float64: (1e-9, 1e-7),
    torch.float32: (1e-3, 1e-2),
    torch.float16: (5e-3, 5e-2),
    torch.bfloat16: (4e-2, 4e-1),
}
ROUNDINGS = (4.0, 32.0)
"""Rounding errors of the output's size that exact recipes may be off by, in the mean and at most: an output that is large and
hardly varies cannot be right to a thousandth of its variation."""
SLICES = 10.0
"""Factor on the whole output's tolerance for the centred error of a slice, relative to the variation of that slice."""
SLICE_ROUNDINGS = 64.0
"""Rounding errors of the output's size that a slice may be off by, whatever its variation."""
PART = 1 << 24
"""Maximum elements of one batch that are compared at once."""
SCORE = "Give an evaluation, whose score then judges it."
UNNEEDED = "If nobody needs it, name the outputs that count: Evaluation(outputs=...)."
"""Remedy for an output that was lost."""

Tensor = torch.Tensor
WORDS: dict[Relative, str] = {
    "examples": "what it varies by over the examples",
    "output": "what its values vary by within an example, as it does not vary over the examples",
    "size": "its size, as it is constant",
    "one": "1, as it is zero throughout",
}


_Rows = dict[tuple[str, torch.dtype], tuple[list[Tensor], list[Tensor]]]
"""For each name and dtype of an output: the reference's values in all batches, in parts, and the other side's."""


def compare_outputs(
    reference: Sequence[Any],
    outputs: Sequence[Any],
    *,
    exact: bool,
    max_error: float | None = None,
    scored: bool = False,
    specs: Sequence[TensorSpec] | None = None,
    gated: Collection[str] | None = (),
) -> Parity:
    """Compare ``outputs`` with ``reference``: one nested value of tensors per batch; dimension 0 counts examples.

    Structure, shapes, dtypes and the places of NaN and infinity must match. An ``exact`` recipe must also keep its errors
    within floating-point noise for the dtype (:data:`TOLERANCE`), and its integers and booleans equal but for near-ties
    (:data:`~trimtab.tensors.comparison.NEAR_TIES`, or ``NEAR_TIES_ALONE`` if there are no floats and no score, ``scored``).
    Any other recipe must keep its centred error within ``max_error``, if given. ``reason`` names the output and the figure.
    The figures are those of the worst output.

    Large values must not hide small ones. Mask values (:mod:`trimtab.tensors.comparison`) are compared relative to themselves,
    and left out of everything else. Along each axis but the first, every slice of an ``exact`` recipe must be right relative to
    its own variation. With ``max_error``, any other recipe may lose no slice altogether
    (:func:`~trimtab.measure.slices.destroyed_slices`), and a constant must be worse in more than nine tenths of the slices.

    Errors are relative to the variation of the reference over the examples, per element, in the root mean square. With one
    example, or without such variation, they are relative to the variation within examples; else to the size; else to 1.
    ``relative_to`` says which.

    Data-dependent results are left to the score, if there is one and the recipe is not ``exact``: sizes that differ between
    batches of the reference, such as the number of boxes, and the texts, numbers and lengths of lists that the evaluation's
    ``run`` makes. ``specs`` describe the outputs if there is no ``run``: then sizes that follow an input, texts and numbers are
    compared, because a runtime keeps these as it was built. Values are compared only in batches whose sizes match;
    ``left_out`` counts the others.

    ``gated`` names floating-point outputs that must not be lost although a score judges the recipe: the error of such an output
    must not reach its variation, nor may a slice be lost. ``None`` means all without data-dependent sizes, if
    there are several floating-point outputs. ``exact`` recipes are compared in all outputs.
    """
    if len(reference) != len(outputs):
        return _refused(f"There are outputs for {len(outputs)} batches and references for {len(reference)}.", 0)
    if not reference:
        return _refused("There is nothing to compare: no batch was run.", 0)
    left, right = [flatten(v, "reference") for v in reference], [flatten(v, "output") for v in outputs]
    n = _examples([leaves for leaves, _ in left])
    lenient = scored and not exact
    free = _data_dependent_axes(left, specs) if lenient else {}
    rows, left_out, reason = _gathered(left, right, free, lenient and specs is None)
    if reason is not None:
        return _refused(reason, n)
    masks = {}
    for key, (mine, other) in rows.items():
        if not is_discrete(key[1]):
            mine[:], masks[key] = without_masks(mine, other)
    figures = [figures_of(name, *pair) for (name, _), pair in rows.items()]
    kept = [each for each in figures if each.continuous] if lenient else []
    if gated is None:
        loose = {name for (name, _), axes in free.items() if axes}
        gated = {each.name for each in kept if each.name not in loose} if len(kept) > 1 else ()
    reasons = _objections(rows, masks, figures, [each for each in kept if each.name in gated], exact, max_error, scored)
    reason = next((each for each in reasons if each is not None), None)
    return dataclasses.replace(_worst(figures, reason, n), left_out=left_out)


def _gathered(
    left: Sequence[tuple[Sequence[Tensor], Structure]],
    right: Sequence[tuple[Sequence[Tensor], Structure]],
    free: Mapping[tuple[str, int], Collection[int]],
    loose: bool,
) -> tuple[_Rows, int, str | None]:
    """The values of each output in all batches, the number of batches left out, and why the sides cannot be compared.

    Sizes of the axes in ``free`` may differ; if ``loose``, texts, numbers and lengths of lists may differ too.
    """
    rows: _Rows = {}
    left_out = 0
    for number, ((ours, expected), (theirs, found)) in enumerate(zip(left, right, strict=True)):
        reason = structure_difference(expected, found, loose)
        pairs = [] if reason else _pairs(ours, expected, theirs, found)
        reason = reason or _hard_mismatch(pairs, free) or _nan_in_more(ours, theirs)
        if reason is not None:
            return rows, left_out, f"{reason[:-1]} (batch {number})." if len(left) > 1 else reason
        if len(ours) != len(theirs) or any(a.shape != b.shape for _, a, b in pairs):
            left_out += 1
            continue
        for name, a, b in pairs:
            mine, other = rows.setdefault((name, a.dtype), ([], []))
            mine += _parts(a)
            other += _parts(b)
    return rows, left_out, None


def _objections(
    rows: _Rows,
    masks: Mapping[tuple[str, torch.dtype], float],
    figures: Sequence[Figures],
    gated: Sequence[Figures],
    exact: bool,
    max_error: float | None,
    scored: bool,
) -> Iterator[str | None]:
    """The objections of each check of the outputs, cheap checks first."""
    for (name, dtype), off in masks.items():
        yield _judge_masks(name, dtype, off, exact, max_error)
    others_judged = scored or any(each.continuous for each in figures)
    for each in figures:
        yield _judge(each, exact, max_error, others_judged)
    # a max_error that allows a constant for the output allows it for every slice
    if exact or (max_error is not None and max_error < REACHED):
        for (name, _), pair in rows.items():
            yield _judge_slices(name, *pair, exact)
    for each in gated:
        yield _lost_output(each, *rows[each.name, each.dtype])


def _refused(reason: str, n: int) -> Parity:
    return Parity(ok=False, reason=reason, n=n)


def _parts(values: Tensor) -> Sequence[Tensor]:
    """``values`` in pieces along the first axis, because each is held in double precision several times."""
    if values.numel() <= PART or not values.dim():
        return [values]
    return torch.split(values, max(1, PART * len(values) // values.numel()))


def _worst(found: Sequence[Figures], reason: str | None, n: int) -> Parity:
    if not found:
        return Parity(ok=reason is None, reason=reason, n=n)
    found = [f for f in found if f.continuous] or found  # the distance between two class numbers means nothing
    return Parity(
        ok=reason is None,
        reason=reason,
        n=n,
        max_abs=max(f.max_abs for f in found),
        max_relative=max(f.max_relative for f in found),
        cosine=min(f.cosine for f in found),
        sqnr_db=min(f.sqnr_db for f in found),
        centred_error=max(f.centred for f in found),
        tail_error=max(f.tail for f in found),
        relative_to=max(found, key=lambda f: f.centred).relative_to,
        unrelated=max(f.unrelated for f in found),
    )


def _examples(batches: Sequence[Sequence[Tensor]]) -> int:
    return sum(leaves[0].shape[0] if leaves and leaves[0].dim() else 1 for leaves in batches)


def _data_dependent_axes(
    batches: Sequence[tuple[Sequence[Tensor], Structure]], specs: Sequence[TensorSpec] | None
) -> dict[tuple[str, int], set[int]]:
    """The axes of each output, by name and number of axes, whose sizes differ between ``batches``, without those that follow
    a size of the inputs according to ``specs``."""
    shapes: dict[tuple[str, int], set[torch.Size]] = {}
    for leaves, structure in batches:
        for name, leaf in zip(names(structure, "output"), leaves, strict=True):
            shapes.setdefault((name, leaf.dim()), set()).add(leaf.shape)
    free = {key: {axis for axis in range(key[1]) if len({shape[axis] for shape in seen}) > 1} for key, seen in shapes.items()}
    for spec in specs or ():
        held = {axis for axis, size in enumerate(spec.shape) if isinstance(size, str) and size != "?"}
        free[spec.name, len(spec.shape)] = free.get((spec.name, len(spec.shape)), set()) - held
    return free


def _pairs(
    ours: Sequence[Tensor], expected: Structure, theirs: Sequence[Tensor], found: Structure
) -> list[tuple[str, Tensor, Tensor]]:
    """Corresponding tensors with their names. In lists of different lengths, tensors at equal positions correspond."""
    where, there = names(expected, "output"), names(found, "output")
    if where == there:
        return list(zip(where, ours, theirs, strict=True))
    other = dict(zip(there, theirs, strict=True))
    return [(name, leaf, other[name]) for name, leaf in zip(where, ours, strict=True) if name in other]


def _hard_mismatch(pairs: Sequence[tuple[str, Tensor, Tensor]], free: Mapping[tuple[str, int], Collection[int]]) -> str | None:
    """Why shapes (apart from the axes in ``free``), dtypes, or places of NaN and infinity differ; ``None`` if they match."""
    for name, a, b in pairs:
        axes = free.get((name, a.dim()), ())
        same = a.dim() == b.dim() and all(x == y or i in axes for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)))
        if not same:
            return f"{name!r} has the shape {list(b.shape)}, but the reference has {list(a.shape)}."
        if a.dtype != b.dtype:
            return f"{name!r} is {dtype_name(b.dtype)}, but the reference is {dtype_name(a.dtype)}."
        strange = _nonfinite_mismatches if a.shape == b.shape else _nonfinite_counts
        for word, count in strange(a, b).items():
            if count:
                return f"{name!r} has {count} of {b.numel()} values that are {word}."
    return None


def _nan_in_more(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str | None:
    """Why the surplus tensors of a longer list have NaN or infinity; ``None`` if they have not."""
    if len(theirs) <= len(ours) or any(leaf.isnan().any() for leaf in ours):
        return None
    return "The output holds NaN where the reference has none." if any(leaf.isnan().any() for leaf in theirs) else None


def _nonfinite_mismatches(a: Tensor, b: Tensor) -> dict[str, int]:
    """Number of values that are NaN or infinite on one side only, by kind in words."""
    if all_finite(a) and all_finite(b):
        return {}
    a, b = signed_infinities(as_double(a)), signed_infinities(as_double(b))
    return {
        "NaN where the reference has none": int((b.isnan() & ~a.isnan()).sum()),
        "not NaN where the reference is": int((a.isnan() & ~b.isnan()).sum()),
        "infinite where the reference is not": int((b.isinf() & (a != b) & ~a.isnan()).sum()),
        "finite where the reference is infinite": int((a.isinf() & b.isfinite()).sum()),
    }


def _nonfinite_counts(a: Tensor, b: Tensor) -> dict[str, int]:
    """Number of NaN or infinite values if the reference has none, for tensors whose sizes differ."""
    a, b = signed_infinities(as_double(a)), signed_infinities(as_double(b))
    return {
        "NaN where the reference has none": 0 if a.isnan().any() else int(b.isnan().sum()),
        "infinite where the reference is not": 0 if a.isinf().any() else int(b.isinf().sum()),
    }


def _judge(found: Figures, exact: bool, max_error: float | None, others_judged: bool) -> str | None:
    """Why this output is refused; ``others_judged`` says whether continuous outputs or a score are judged too."""
    if not found.continuous:
        return _judge_discrete(found, exact, max_error, others_judged)
    limits: list[tuple[str, float, float]] = []
    if exact:
        centred, tail = TOLERANCE.get(found.dtype, TOLERANCE[torch.float32])
        limits += [("centred error", found.centred, max(centred, ROUNDINGS[0] * found.noise))]
        limits += [("largest error", found.tail, max(tail, ROUNDINGS[1] * found.peak_noise))]
    elif max_error is not None:
        limits += [("centred error", found.centred, max_error)]
    for what, value, allowed in limits:
        if value > allowed:
            kind = f"an exact recipe in {dtype_name(found.dtype)}" if exact else "this workload"
            return (
                f"{found.name!r} has a {what} of {value:.3g}, relative to {WORDS[found.relative_to]}; {kind} may have "
                f"{allowed:.2g}."
            )
    return None


def _judge_masks(name: str, dtype: torch.dtype, off: float, exact: bool, max_error: float | None) -> str | None:
    """Why the mask values of this output are refused; ``off`` is their largest error relative to themselves."""
    allowed = TOLERANCE.get(dtype, TOLERANCE[torch.float32])[0] if exact else max_error
    if allowed is None or off <= allowed:
        return None
    kind = f"an exact recipe in {dtype_name(dtype)}" if exact else "this workload"
    return (
        f"{name!r} has values far beyond all others, such as a mask's, that are off by {off:.3g} of themselves; {kind} may "
        f"have {allowed:.2g}."
    )


def _judge_discrete(found: Figures, exact: bool, max_error: float | None, others_judged: bool) -> str | None:
    """Why these integers or booleans are refused."""
    if exact:
        allowed = NEAR_TIES if others_judged else NEAR_TIES_ALONE
        advice = "Rounding turns near-ties over, in an argmax or at a threshold, but not so many."
        if not others_judged:
            advice = f"Rounding turns near-ties over; return the scores beside it, and {NEAR_TIES:.1%} may differ."
    else:
        allowed = 1.0 if max_error is None else max_error
        advice = "Give an evaluation, whose score then judges them, or allow a larger max_error."
    if found.differing <= allowed:
        return None
    return (
        f"{found.name!r} differs from the reference in {found.differing:.3%} of its integers, where {allowed:.3%} may. {advice}"
    )


def _judge_slices(
    name: str, reference: Sequence[Tensor], outputs: Sequence[Tensor], exact: bool, advice: str = SCORE
) -> str | None:
    """Why single slices of this output are refused although the whole passes."""
    dtype, axes = reference[0].dtype, axes_of([a.shape for a in reference])
    if is_discrete(dtype) or not axes:
        return None
    limit = SLICES * TOLERANCE.get(dtype, TOLERANCE[torch.float32])[0]
    values = ((signed_infinities(as_double(a)), as_double(b)) for a, b in zip(reference, outputs, strict=True))
    for found in slices_along(values, axes):
        where = f"of the {reference[0].shape[found.axis]} slices along axis {found.axis}"
        if exact and (bad := inexact_slices(found, limit, SLICE_ROUNDINGS * torch.finfo(dtype).eps))[0]:
            return (
                f"{name!r} has an error of up to {bad[1]:.3g} in {bad[0]} {where}, relative to what each of these varies by; "
                f"an exact recipe in {dtype_name(dtype)} may have {limit:.2g}."
            )
        if not exact and (nothing := destroyed_slices(found)):
            return (
                f"{name!r} has lost {nothing} {where}: constant where the reference varies, or off by as much as it varies, "
                f"which the other slices hide. {advice}"
            )
        useless, vary = (0, 0) if exact else useless_slices(found)
        if useless and useless >= MAX_USELESS * vary:
            return (
                f"{name!r} is no better than a constant in {useless} {where}, of which {vary} vary: their errors reach what "
                f"they vary by, which the others hide. {advice}"
            )
    return None


def _lost_output(found: Figures, reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
    """Why an output that no score judges is refused: it, or a part of it, is no better than a constant."""
    if found.centred >= REACHED:
        return (
            f"{found.name!r} has a centred error of {found.centred:.3g}, relative to {WORDS[found.relative_to]}: a constant "
            f"would do as well. {UNNEEDED}"
        )
    return _judge_slices(found.name, reference, outputs, exact=False, advice=UNNEEDED)
