"""Differences between two nested outputs other than the values of tensors: containers, texts and numbers."""

from __future__ import annotations

import math

from trimtab.tensors.structure import Structure, described, first_difference


def structure_difference(expected: Structure, found: Structure, lenient: bool, where: str = "The output") -> str | None:
    """The first difference between two structures, constants included, as a sentence. Class names may differ; if ``lenient``,
    texts, numbers and the lengths of lists may differ too."""
    alike = _score_may_judge if lenient else _equal_constants

    def same(a: Structure, b: Structure) -> bool:
        return a.kind == b.kind and (a.kind != "constant" or alike(a.value, b.value))

    if (difference := first_difference(expected, found, where, same, lists=lenient)) is None:
        return None
    place, reference, other = difference
    return f"{place} is {described(other)}, but the reference is {described(reference)}."


def _equal_constants(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    return a == b


def _score_may_judge(a: object, b: object) -> bool:
    """Whether a score may judge the difference of two constants: two texts, or two numbers of which none became infinite."""
    if isinstance(a, (bool, int, float)) and isinstance(b, (bool, int, float)):
        return math.isfinite(b) or _equal_constants(a, b)
    return (isinstance(a, str) and isinstance(b, str)) or _equal_constants(a, b)
