"""Collate examples into a batch: equal shapes are stacked, sequences of unequal lengths are padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from trimtab._internal.text import of_type
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.loss.torch_losses import IGNORED

LABELS = frozenset({"labels", "label_ids"})
"""Keys padded with :data:`~trimtab.train.loss.torch_losses.IGNORED`, which losses leave out."""
TARGETS = frozenset({"label", "target", "targets", "tags"})
"""Keys padded like :data:`LABELS` if they hold integers and ``pad`` is 0."""
_NUMBERS = (bool, int, float, complex, np.generic)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collate:
    """Collates examples into a batch of the same structure, with the examples along a new axis 0.

    - Tensors, arrays, numbers and lists of numbers become tensors. Python floats get torch's default dtype. Sequences that
      differ in their first axis only are padded to the longest.
    - Mappings become dicts; tuples, named tuples and lists of other values keep their form. Each item is collated.
    - Everything else, such as strings and ``None``, becomes a list.
    """

    pad: float | Mapping[str | int, float] = 0
    """The padding value, or one by key (by position in tuples), with 0 for other keys. ``labels`` are padded with -100. So are
    integer targets, by name or as the second of a pair, unless ``pad`` is another number than 0: 0 is a class too."""
    mask: str | None = None
    """A key to add to mappings: an int64 mask, 1 for tokens and 0 for padding, of shape (examples, padded length)."""
    of: str = "input_ids"
    """The key of the item that the mask describes."""
    multiple: int = 1
    """Padded lengths of tokens are rounded up to a multiple of this; 8 or 64 suits the matrix units of GPUs."""
    side: Literal["right", "left"] = "right"
    """The side of the padding; generation needs the left."""

    def __post_init__(self) -> None:
        if not isinstance(self.multiple, int) or self.multiple < 1:
            raise UsageError(f"Collate multiple is {self.multiple!r}; it must be a whole number of at least 1.")
        if self.side not in ("right", "left"):
            raise UsageError(f"Collate side is {self.side!r}; it must be 'right' or 'left'.")

    def __call__(self, examples: Sequence[Any]) -> Any:
        """The batch of ``examples``.

        Raises:
            WorkloadError: examples differ in keys, in types, or in another axis than the first; names the item.
        """
        return self.join(examples)

    def join(self, items: Sequence[Any], path: tuple[str | int, ...] = (), *, targets: bool = False) -> Any:
        """The batch of ``items``, which are at ``path`` in their examples; ``targets``: they are targets."""
        first = items[0]
        if isinstance(first, (torch.Tensor, np.ndarray)) and not _is_text(first):
            return self._tensors(_as_tensors(items, path), path, targets)
        if isinstance(first, _NUMBERS) and not isinstance(first, (np.str_, np.bytes_)):
            return _numbers(items, path)
        if isinstance(first, Mapping):
            return self._mappings(items, path)
        if isinstance(first, list) and any(_is_numbers(item) for item in items):
            return self._tensors(_as_tensors(items, path), path, targets)
        if isinstance(first, (tuple, list)):
            return self._sequences(items, path)
        return list(items)

    def _mappings(self, items: Sequence[Any], path: tuple[str | int, ...]) -> dict[Any, Any]:
        first = items[0]
        for place, item in enumerate(items):
            if not isinstance(item, Mapping) or item.keys() != first.keys():
                theirs = sorted(map(str, item)) if isinstance(item, Mapping) else type(item).__name__
                raise WorkloadError(
                    f"Examples of one batch{_at(path)} have different keys: the first has {sorted(map(str, first))}, that at "
                    f"place {place} {theirs}. Let the dataset give the same keys for every example."
                )
        joined = {key: self.join([item[key] for item in items], (*path, key), targets=key in TARGETS) for key in first}
        if self.mask is not None and self.mask not in joined and self.of in joined:
            joined[self.mask] = self._mask([len(item[self.of]) for item in items], joined[self.of])
        if self.mask is not None and not path and not _has(joined, self.mask):
            raise WorkloadError(
                f"There is no {self.of!r} to make the mask {self.mask!r} for; the examples have {', '.join(map(str, joined))}. "
                "Name one of these: Collate(mask=..., of=...)."
            )
        return joined

    def _sequences(self, items: Sequence[Any], path: tuple[str | int, ...]) -> Any:
        first = items[0]
        if any(not isinstance(item, (tuple, list)) or len(item) != len(first) for item in items):
            counts = sorted({str(len(item)) if isinstance(item, (tuple, list)) else type(item).__name__ for item in items})
            raise WorkloadError(
                f"Examples of one batch{_at(path)} have different numbers of items ({', '.join(counts)}). Let the dataset give "
                "the same for every example, or give collate=..."
            )
        second = 1 if not path and type(first) is tuple and len(first) == 2 else None
        columns = enumerate(zip(*items, strict=True))
        joined = [self.join(column, (*path, place), targets=place == second) for place, column in columns]
        if isinstance(first, tuple):
            return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
        return joined

    def _tensors(self, tensors: list[torch.Tensor], path: tuple[str | int, ...], targets: bool) -> torch.Tensor:
        shapes = {tensor.shape for tensor in tensors}
        ragged = len(shapes) > 1
        if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
            shown = ", ".join(str(tuple(shape)) for shape in sorted(shapes, key=tuple)[:4])
            raise WorkloadError(
                f"Examples{_at(path)} cannot be joined to a batch: their shapes are {shown}, and only the first axis may "
                "differ. Bring them to one shape in the dataset, or give collate=..."
            )
        whole = self.multiple > 1 and tensors[0].dim() == 1 and not tensors[0].is_floating_point()
        if not ragged and not whole:
            return torch.stack(tensors)
        value = self._value(path, targets and _is_whole(tensors[0]))
        padded = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=self.side)
        missing = -padded.shape[1] % self.multiple
        return _padded(padded, missing, value, self.side) if missing else padded

    def _value(self, path: tuple[str | int, ...], labels: bool) -> float:
        key = path[-1] if path else ""
        if isinstance(self.pad, Mapping):
            return self.pad.get(key, IGNORED if key in LABELS or labels else 0)
        return IGNORED if key in LABELS or (labels and not self.pad) else self.pad

    def _mask(self, lengths: Sequence[int], padded: torch.Tensor) -> torch.Tensor:
        places = torch.arange(padded.shape[1])
        if self.side == "left":
            places = places.flip(0)
        return (places < torch.tensor(lengths)[:, None]).long()


def _padded(batch: torch.Tensor, missing: int, value: float, side: str) -> torch.Tensor:
    """``batch`` with its second axis padded by ``missing``."""
    amounts = (missing, 0) if side == "left" else (0, missing)
    return functional.pad(batch, [0, 0] * (batch.dim() - 2) + list(amounts), value=value)


def _as_tensors(items: Sequence[Any], path: tuple[str | int, ...]) -> list[torch.Tensor]:
    found = [item if isinstance(item, torch.Tensor) else _as_tensor(item, path) for item in items]
    kinds = {tensor.dtype for tensor in found if tensor.numel()}
    if len(kinds) > 1 or (len(kinds) == 1 and any(not tensor.numel() for tensor in found)):
        widest = max(kinds, key=lambda kind: (kind.is_floating_point, kind.itemsize))  # an empty list has no dtype
        found = [tensor.to(widest) for tensor in found]
    return found


def _as_tensor(item: Any, path: tuple[str | int, ...]) -> torch.Tensor:
    try:
        if isinstance(item, np.ndarray):
            return torch.from_numpy(item if item.flags.writeable else item.copy())
        return torch.tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"An example{_at(path)}, {of_type(item)}, cannot become a tensor: {error}. Make it one in the dataset."
        ) from error


def _numbers(items: Sequence[Any], path: tuple[str | int, ...]) -> torch.Tensor:
    if isinstance(items[0], np.generic):
        return torch.from_numpy(np.stack(items))
    try:
        return torch.tensor(items)
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise WorkloadError(
            f"Examples{_at(path)} are of different types ({kinds}) and cannot be joined to a tensor. Make them alike in the "
            "dataset."
        ) from error


def _is_numbers(item: Any) -> bool:
    """True for a list, nested or not, whose first leaf is a number."""
    while isinstance(item, list) and item:
        item = item[0]
    return isinstance(item, _NUMBERS)


def _is_whole(tensor: torch.Tensor) -> bool:
    """True for a tensor of signed integers."""
    return tensor.dtype.is_signed and not (tensor.is_floating_point() or tensor.is_complex())


def _is_text(item: Any) -> bool:
    return isinstance(item, np.ndarray) and item.dtype.kind not in "biufc"


def _has(joined: Any, key: str) -> bool:
    """True if any mapping in a batch has ``key``."""
    if isinstance(joined, Mapping):
        return key in joined or any(_has(item, key) for item in joined.values())
    return isinstance(joined, (tuple, list)) and any(_has(item, key) for item in joined)


def _at(path: tuple[str | int, ...]) -> str:
    return f" at {'.'.join(map(str, path))!r}" if path else ""
