"""How torch multiplies matrices of float32: as they are, or by the shorter products that some devices have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def products_of_float32(*, tf32: bool) -> Iterator[None]:
    """A block in which GPUs take TF32 for them, or nothing but float32 whatever a script has asked for.

    Set by whichever of torch's two interfaces the process uses, because mixing them is an error.
    """
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    before = [place.fp32_precision for place in places]
    older: tuple[str, bool] | None
    try:
        older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # somebody has set an fp32_precision, which the older interface has no word for
        older = None
    try:
        if older is not None:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            backends.cudnn.allow_tf32 = tf32
        elif tf32:
            _set(places[:3], ["tf32"] * 3)
        else:
            _set(places, ["ieee"] * 4)
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            backends.cudnn.allow_tf32 = older[1]
        _set(places, before)


def rounded_to_tf32() -> bool:
    """Whether GPUs may take TF32 for any of them now, as torch does for convolutions where nobody says otherwise."""
    backends: Any = torch.backends
    return any(place.fp32_precision == "tf32" for place in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn))


def _set(places: Sequence[Any], wanted: Sequence[str]) -> None:
    """Of torch's parts; those that have theirs, perhaps from a setting above them, are left alone.

    Others get torch's own first, with which they may have it from there again.
    """
    backends: Any = torch.backends
    for place, precision in zip(places, wanted, strict=True):
        if place.fp32_precision != precision:
            place.fp32_precision = "tf32" if place in (backends.cudnn.conv, backends.cudnn.rnn) else "none"
        if place.fp32_precision != precision:
            place.fp32_precision = precision
