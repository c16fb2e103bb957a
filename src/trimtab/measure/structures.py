"""Differences between two nested outputs other than the values of tensors: containers, texts and numbers."""

from __future__ import annotations

import math

from trimtab.tensors.structure import Structure


def unlike(expected: Structure, found: Structure, lenient: bool, where: str = "The output") -> str | None:
    """The first difference between two structures, constants included, as a sentence. Class names may differ; if ``lenient``,
    texts, numbers and the lengths of lists may differ too."""
    longer = len(expected.items) != len(found.items) and not (lenient and expected.kind == "list")
    if expected.kind != found.kind or expected.keys != found.keys or longer:
        return f"{where} is {_shape_of(found)}, but the reference is {_shape_of(expected)}."
    alike = _score_may_judge if lenient else _equal_constants
    if expected.kind == "constant" and not alike(expected.value, found.value):
        return f"{where} is {found.value!r}, but the reference is {expected.value!r}."
    keys = expected.keys or tuple(map(str, range(len(expected.items))))
    pairs = zip(keys, expected.items, found.items, strict=False)  # one of two lists may be longer
    return next((r for key, a, b in pairs if (r := unlike(a, b, lenient, f"{where}[{key}]")) is not None), None)


def _shape_of(structure: Structure) -> str:
    inside = ", ".join(structure.keys) or str(len(structure.items))
    return f"a {structure.kind} of {inside}" if structure.items else f"a {structure.kind}"


def _equal_constants(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    return a == b


def _score_may_judge(a: object, b: object) -> bool:
    """Whether a score may judge the difference of two constants: two texts, or two numbers of which none became infinite."""
    if isinstance(a, (bool, int, float)) and isinstance(b, (bool, int, float)):
        return math.isfinite(b) or _equal_constants(a, b)
    return (isinstance(a, str) and isinstance(b, str)) or _equal_constants(a, b)
