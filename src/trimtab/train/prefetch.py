"""How batches get to the device: on a CPU they are there, a GPU has them copied while it still works on the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from trimtab.train.checkpoint import SPARSE
from trimtab.train.objective import Batch, opaque, tensors

Move = Callable[[Batch], Batch]


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

    def __init__(self, move: Move, device: torch.device, depth: int = 1) -> None:
        super().__init__(move)
        self.device, self.depth = device, depth
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batches: Iterator[Batch], *, ahead: bool) -> Iterator[Any]:
        """Each of ``batches``, its copy under way."""
        under_way: deque[_Coming] = deque()
        for batch in batches:
            under_way.append(self._send(batch))
            if len(under_way) > self.depth * ahead:
                yield under_way.popleft()
        yield from under_way

    def arrive(self, coming: Any) -> Batch:
        """The batch; the current stream goes on once it is there."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(coming.copied)
        for tensor in tensors(coming.batch):
            if tensor.is_cuda:
                _used_by(tensor, current)  # its memory belongs to the copying stream, which must not reuse it too early
        return coming.batch

    def _send(self, batch: Batch) -> _Coming:
        if there := [tensor for tensor in tensors(batch) if tensor.is_cuda]:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still be making them
            for tensor in there:
                _used_by(tensor, self.stream)
        if opaque(batch):  # nothing can be said of its tensors: their memory is used again only after what was computed with it
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            moved = self.move(batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self.stream)
        return _Coming(moved, copied)


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
