"""Validate the numbers that a score or metric returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trimtab._internal.text import counted, of_type
from trimtab.errors import WorkloadError


def number(value: Any, what: str) -> float:
    """The number that the user's ``what`` returned.

    Raises:
        WorkloadError: the value is no number, or not finite.
    """
    if (isinstance(value, torch.Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, (str, bytes)) or not isinstance(value, (int, float, np.number)):
        raise WorkloadError(f"Evaluation {what} returned {shown(value)}; it must return one number.")
    if not np.isfinite(float(value)):
        raise WorkloadError(f"Evaluation {what} returned {value!r}; it must be a finite number.")
    return float(value)


def shown(value: Any) -> str:
    """A short description of a refused value."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        kind = "complex tensor" if value.is_complex() else "tensor"
        return f"a {kind} of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    return f"{text if len(text) < 60 else text[:56] + ' ...'}, {of_type(value)}"


def numbers(found: Any, rows: int) -> list[float]:
    """The scores of a batch of ``rows`` examples; with 0 rows, any number of scores.

    Raises:
        WorkloadError: the scores are no numbers, not one per example, or not finite.
    """
    if rows <= 1 and isinstance(found, (int, float, np.generic)):  # a plain number for one example
        found = [found]
    values = found if isinstance(found, torch.Tensor) else _as_tensor(found)
    if values is None or values.is_complex():
        raise WorkloadError(f"Evaluation score returned {shown(found)}; it must return a tensor with one score per example.")
    values = values.detach().double().flatten()
    if rows and len(values) != rows:
        raise WorkloadError(
            f"Evaluation score returned {counted(len(values), 'score')} for a batch of {rows}; it must return one per "
            "example. For "
            "a number about the whole set use metric=... instead."
        )
    if not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values)).sum())
        raise WorkloadError(
            f"Evaluation score returned {bad} of {len(values)} scores that are NaN or infinite. Mend the score, or leave out "
            "the examples that it cannot judge."
        )
    return [float(value) for value in values]


def _as_tensor(found: Any) -> torch.Tensor | None:
    """A list or array of numbers as a tensor; ``None`` for anything else, such as texts or ragged lists."""
    found = np.atleast_1d(found) if isinstance(found, np.ndarray) else found  # such as tensor.mean().numpy()
    if not isinstance(found, (list, tuple, np.ndarray)) or any(isinstance(value, str) for value in found):
        return None
    try:
        return torch.as_tensor(np.asarray(found, dtype=float))
    except (ValueError, TypeError, RuntimeError):
        return None
