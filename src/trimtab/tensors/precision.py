"""The precision of float32 matrix products and convolutions on GPUs: float32 or TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:
    from trimtab.tensors import late_torch as torch


@contextlib.contextmanager
def float32_precision(*, tf32: bool) -> Iterator[None]:
    """Allow TF32, or float32 only, on GPUs in a block. The previous settings are restored afterwards.

    torch has two interfaces for this, and mixing them is an error. The one that the process has used before is used.
    """
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    before = [place.fp32_precision for place in places]
    older: tuple[str, bool] | None
    try:
        older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # an fp32_precision was set, which the older interface cannot express
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


def tf32_allowed() -> bool:
    """True if GPUs may use TF32 now for any operation; torch does for convolutions by default."""
    backends: Any = torch.backends
    return any(place.fp32_precision == "tf32" for place in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn))


def _set(places: Sequence[Any], wanted: Sequence[str]) -> None:
    """Set ``fp32_precision`` of each backend to ``wanted``, unless it has that value already, perhaps inherited.

    The default is set first, because the backend may then inherit the value again.
    """
    backends: Any = torch.backends
    for place, precision in zip(places, wanted, strict=True):
        if place.fp32_precision != precision:
            place.fp32_precision = "tf32" if place in (backends.cudnn.conv, backends.cudnn.rnn) else "none"
        if place.fp32_precision != precision:
            place.fp32_precision = precision
