"""What a score or a metric returned, as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trimtab._internal.text import counted, of_type
from trimtab.errors import WorkloadError


def number(value: Any, what: str) -> float:
    """The number that the user's ``what`` returned.

    Raises:
        WorkloadError: it is none, or not finite.
    """
    if (isinstance(value, torch.Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, (str, bytes)) or not isinstance(value, (int, float, np.number)):
        raise WorkloadError(f"Evaluation {what} returned {shown(value)}; it must return one number.")
    if not np.isfinite(float(value)):
        raise WorkloadError(f"Evaluation {what} returned {value!r}; it must be a finite number.")
    return float(value)


def shown(value: Any) -> str:
    """A value that is not what it should be, in few words."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        kind = "complex tensor" if value.is_complex() else "tensor"
        return f"a {kind} of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    return f"{text if len(text) < 60 else text[:56] + ' ...'}, {of_type(value)}"


def numbers(found: Any, rows: int) -> list[float]:
    """The scores of a batch of ``rows`` examples; of any number where they are 0.

    Raises:
        WorkloadError: they are none, too few or too many, or not finite.
    """
    if rows <= 1 and isinstance(found, (int, float, np.generic)):  # of one example there is no need for a list
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
    """A list or array of numbers as a tensor; ``None`` for what is none, such as texts or lists of several lengths."""
    found = np.atleast_1d(found) if isinstance(found, np.ndarray) else found  # such as tensor.mean().numpy()
    if not isinstance(found, (list, tuple, np.ndarray)) or any(isinstance(value, str) for value in found):
        return None
    try:
        return torch.as_tensor(np.asarray(found, dtype=float))
    except (ValueError, TypeError, RuntimeError):
        return None
