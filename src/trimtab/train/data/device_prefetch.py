"""How batches get to the device: on a CPU they are there, a GPU has them copied while it still works on the one before."""

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
    """A function that puts every tensor of a batch on ``device``, images in the layout that the model has.

    Objects with a ``to`` of their own, such as packed sequences and transformers' encodings, move themselves.
    """

    def move(batch: Batch) -> Batch:
        if isinstance(batch, torch.Tensor):
            moved = batch.to(device, non_blocking=True)
            return moved.contiguous(memory_format=torch.channels_last) if channels_last and moved.dim() == 4 else moved
        if callable(getattr(batch, "to", None)):
            moved = copy.copy(batch).to(device, **_unwaited(type(batch)))  # some change themselves
            return map_items(moved, move) if channels_last and isinstance(moved, Mapping) else moved
        return map_items(batch, move)

    return move if channels_last or device.type != "cpu" else _same


def _unwaited(kind: Any) -> dict[str, bool]:
    """What ``to`` of such an object takes to be told that nobody waits for the copy."""
    if issubclass(kind, PackedSequence):
        return {"non_blocking": True}
    try:
        takes = inspect.signature(kind.to).parameters
    except (TypeError, ValueError, AttributeError):  # one of C, or of the object alone
        return {}
    return {"non_blocking": True} if "non_blocking" in takes else {}


def _same(batch: Batch) -> Batch:
    return batch


class Transfer:
    """Moves each batch when its turn comes: :meth:`start` with the epoch's batches, then :meth:`arrive` with each it gives."""

    def __init__(self, move: Move) -> None:
        self.move = move

    def start(self, batches: Iterator[Batch], *, ahead: bool) -> Iterator[Any]:
        """What :meth:`arrive` takes, for each of ``batches``. Only if ``ahead`` may they be read before their turn."""
        return batches

    def arrive(self, coming: Any) -> Batch:
        """The batch, on the device and ready for what the current stream does next."""
        return self.move(coming)


class _Coming(NamedTuple):
    """A batch that a stream is still copying."""

    batch: Batch
    copied: torch.cuda.Event


class StreamTransfer(Transfer):
    """Copies on a CUDA stream of its own, one batch ahead, so that the copy runs beside the computation.

    It takes page-locked memory for that (``Loader`` and ``DataLoader(pin_memory=True)`` give it): a copy from other memory
    keeps the host waiting, though not the device. Otherwise only the stream that computes waits for the copy.

    Source: CUDA C++ Best Practices Guide, "Asynchronous and Overlapping Transfers with Computation"; on
    ``Tensor.record_stream``, torch's notes on CUDA semantics, "CUDA streams".
    """

    def __init__(self, move: Move, device: torch.device) -> None:
        super().__init__(move)
        self.device = device
        self._opaque = False
        """Whether any batch was."""
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batches: Iterator[Batch], *, ahead: bool) -> Iterator[Any]:
        """Each of ``batches``, its copy under way."""
        under_way: deque[_Coming] = deque()
        for batch in batches:
            if (sent := self._try_to_send(batch)) is None and under_way:
                yield from _drained(under_way)  # there is no room beside them
            under_way.append(sent or self._send(batch))
            del sent
            if len(under_way) > ahead:
                yield under_way.popleft()
        yield from _drained(under_way)

    def arrive(self, coming: Any) -> Batch:
        """The batch; the current stream goes on once it is there."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(coming.copied)
        for tensor in tensors_of(coming.batch):
            if tensor.is_cuda:
                _used_by(tensor, current)  # its memory belongs to the copying stream, which must not reuse it too early
        return coming.batch

    def _try_to_send(self, batch: Batch) -> _Coming | None:
        """The same as :meth:`_send`; nothing where memory does not suffice."""
        try:
            return self._send(batch)
        except torch.OutOfMemoryError:
            return None

    def _send(self, batch: Batch) -> _Coming:
        if there := [tensor for tensor in tensors_of(batch) if tensor.is_cuda]:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still be making them
            for tensor in there:
                _used_by(tensor, self.stream)
        self._opaque |= _opaque(batch)
        if self._opaque:  # nothing is known of their tensors, whose memory is used again only after what was computed with it
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            moved = self.move(batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self.stream)
        return _Coming(moved, copied)


def _opaque(batch: Batch) -> bool:
    """True if ``batch`` holds an object that moves itself to a device, and may hold tensors that are in no container."""
    if isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
        return any(map(_opaque, items_of(batch)))
    return callable(getattr(batch, "to", None)) or any(map(_opaque, items_of(batch)))


def _drained(under_way: deque[_Coming]) -> Iterator[_Coming]:
    """All of them, none of which is kept any longer."""
    while under_way:
        yield under_way.popleft()


def _used_by(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Keep the memory of ``tensor`` from others until ``stream`` has done what it has to do now."""
    for part in stored(tensor):
        part.record_stream(stream)


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the memory of ``tensor``: itself, or what a sparse one is made of, which has none."""
    return [getattr(tensor, name)() for name in SPARSE[tensor.layout]] if tensor.layout in SPARSE else [tensor]


def transfer_for(device: torch.device, move: Move) -> Transfer:
    """The transfer that fits ``device``."""
    return StreamTransfer(move, device) if device.type == "cuda" else Transfer(move)
