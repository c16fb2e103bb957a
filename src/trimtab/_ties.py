"""How many integers and booleans two right forms of one model may disagree on."""

from __future__ import annotations

import torch

NEAR_TIES = 0.005
"""Share of an output's integers (or booleans) that may differ between forms that agree on the floats behind them. An arg-max, a
threshold or a bin turns over where two values are closer than rounding, whichever runtime computes them."""
NEAR_TIES_ALONE = 0.001
"""The same where a model gives integers only, so that nothing beside them tells a near-tie from a wrong value."""


def is_discrete(dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` are integers or booleans, between which a distance means nothing."""
    return not (dtype.is_floating_point or dtype.is_complex)


def too_many_differ(want: torch.Tensor, got: torch.Tensor, allowed: float = NEAR_TIES) -> str | None:
    """The share of the elements of ``got`` that are not those of ``want``, in words, if it is more than ``allowed``."""
    share = float((want != got).double().mean()) if want.numel() else 0.0
    return f"{share:.2%} of its values differ, where {allowed:.2%} may" if share > allowed else None
