"""Copy batches to the device; to a GPU asynchronously, while it computes on the batch before."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from trimtab.tensors.structure import items_of, map_items, tensors_of
from trimtab.train.checkpoint.checkpoints import SPARSE
from trimtab.train.loss.adapter import Batch

Move = Callable[[Batch], Batch]


def mover(device: torch.device, *, channels_last: bool = False) -> Move:
    """A function that copies every tensor of a batch to ``device``, 4-D tensors in channels-last layout if asked.

    Objects with a method ``to``, such as packed sequences and transformers' encodings, move themselves.
    """

    def move(batch: Batch) -> Batch:
        if isinstance(batch, torch.Tensor):
            moved = batch.to(device, non_blocking=True)
            return moved.contiguous(memory_format=torch.channels_last) if channels_last and moved.dim() == 4 else moved
        if callable(getattr(batch, "to", None)):
            moved = copy.copy(batch).to(device, **_non_blocking(type(batch)))  # ``to`` of some classes works in place
            return map_items(moved, move) if channels_last and isinstance(moved, Mapping) else moved
        return map_items(batch, move)

    return move if channels_last or device.type != "cpu" else _identity


def _non_blocking(kind: Any) -> dict[str, bool]:
    """The keyword argument of ``to`` that makes the copy asynchronous; empty if the class ``kind`` has none."""
    if issubclass(kind, PackedSequence):
        return {"non_blocking": True}
    try:
        takes = inspect.signature(kind.to).parameters
    except (TypeError, ValueError, AttributeError):  # written in C, or an instance attribute
        return {}
    return {"non_blocking": True} if "non_blocking" in takes else {}


def _identity(batch: Batch) -> Batch:
    return batch


class Transfer:
    """Moves one batch at a time: :meth:`start` takes the batches of an epoch, :meth:`receive` each item that it yields."""

    def __init__(self, move: Move) -> None:
        self.move = move
        self.is_identity = move is _identity
        """Whether batches are on their device already, so that :meth:`receive` need not be called."""

    def start(self, batches: Iterator[Batch], *, ahead: bool) -> Iterator[Any]:
        """An item for :meth:`receive` per batch. With ``ahead``, batches may be read early."""
        return batches

    def receive(self, coming: Any) -> Batch:
        """The batch on the device, ready for the current stream."""
        return self.move(coming)


class _PendingCopy(NamedTuple):
    """A batch that is being copied, and the event that ends the copy."""

    batch: Batch
    copied: torch.cuda.Event


class StreamTransfer(Transfer):
    """Copies one batch ahead on a CUDA stream of its own, in parallel with the computation.

    Copies are asynchronous from page-locked memory only, as of ``Loader`` and ``DataLoader(pin_memory=True)``: a copy from
    other memory blocks the host, but not the device.

    Source: CUDA C++ Best Practices Guide, "Asynchronous and Overlapping Transfers with Computation"; on
    ``Tensor.record_stream``, torch's notes on CUDA semantics, "CUDA streams".
    """

    def __init__(self, move: Move, device: torch.device) -> None:
        super().__init__(move)
        self.device = device
        self._opaque = False
        """Whether any batch so far was opaque."""
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batches: Iterator[Batch], *, ahead: bool) -> Iterator[Any]:
        """The batches, each with its copy begun."""
        pending: deque[_PendingCopy] = deque()
        for batch in batches:
            if (sent := self._try_send(batch)) is None and pending:
                yield from _drained(pending)  # no GPU memory for one more batch
            pending.append(sent or self._send(batch))
            del sent
            if len(pending) > ahead:
                yield pending.popleft()
        yield from _drained(pending)

    def receive(self, coming: Any) -> Batch:
        """The batch; the current stream waits for its copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(coming.copied)
        for tensor in tensors_of(coming.batch):
            if tensor.is_cuda:
                _record_stream(tensor, current)  # the memory belongs to the copying stream, which must not reuse it too early
        return coming.batch

    def _try_send(self, batch: Batch) -> _PendingCopy | None:
        """:meth:`_send`; ``None`` if the GPU is out of memory."""
        try:
            return self._send(batch)
        except torch.OutOfMemoryError:
            return None

    def _send(self, batch: Batch) -> _PendingCopy:
        if there := [tensor for tensor in tensors_of(batch) if tensor.is_cuda]:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still compute them
            for tensor in there:
                _record_stream(tensor, self.stream)
        self._opaque |= _opaque(batch)
        if self._opaque:  # record_stream cannot reach their tensors: wait for the computation
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            moved = self.move(batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self.stream)
        return _PendingCopy(moved, copied)


def _opaque(batch: Batch) -> bool:
    """True if ``batch`` holds an object that moves itself to a device, and may hold tensors that are in no container."""
    if isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
        return any(map(_opaque, items_of(batch)))
    return callable(getattr(batch, "to", None)) or any(map(_opaque, items_of(batch)))


def _drained(pending: deque[_PendingCopy]) -> Iterator[_PendingCopy]:
    """The batches, each removed before it is yielded."""
    while pending:
        yield pending.popleft()


def _record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Do not reuse the memory of ``tensor`` before ``stream`` has finished its present work."""
    for part in storage_tensors(tensor):
        part.record_stream(stream)


def storage_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that own the memory of ``tensor``: itself, or the components of a sparse tensor."""
    return [getattr(tensor, name)() for name in SPARSE[tensor.layout]] if tensor.layout in SPARSE else [tensor]


def transfer_for(device: torch.device, move: Move) -> Transfer:
    """The transfer for ``device``."""
    return StreamTransfer(move, device) if device.type == "cuda" else Transfer(move)
