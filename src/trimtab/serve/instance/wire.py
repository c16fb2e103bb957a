"""Frames of numpy arrays on the instance's end of the socket. numpy has no bfloat16; its bits are held as uint16."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trimtab.core.signature import TensorSpec
from trimtab.serve.frames import ALIGN, PREFIX, Bytes, aligned, pack
from trimtab.serve.protocol import DATATYPES
from trimtab.serve.shared_memory import SHARED_BYTES, SharedMemory

Array = npt.NDArray[Any]
BUFFER_BYTES = 1 << 16
"""Size of the receive buffer; smaller frames are sent as one buffer."""


def codes_of(specs: Iterable[TensorSpec]) -> list[np.dtype[Any]]:
    """numpy's dtypes of ``specs``."""
    return [np.dtype(DATATYPES[spec.dtype][1]) for spec in specs]


def arrays_in(body: Array, shapes: Sequence[Sequence[int]], dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
    """The arrays in a received body, without copies."""
    found, offset = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        array: Array = np.ndarray(shape, dtype, body, offset)
        found.append(array)
        offset += aligned(array.nbytes)
    return found


def as_bytes(array: Array) -> memoryview:
    """The values of ``array`` in memory order, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def send(
    connection: socket.socket, head: dict[str, Any], arrays: Sequence[Array] = (), shared: SharedMemory | None = None
) -> None:
    """Send a frame; a large body goes through ``shared`` memory."""
    parts: list[list[Bytes]] = [[as_bytes(array)] for array in arrays]
    if shared is not None and sum(array.nbytes for array in arrays) >= SHARED_BYTES:
        head, parts = head | {"shared": shared.write(parts)}, []
    buffers = [part for part in pack(head, parts) if len(part)]
    if sum(map(len, buffers)) <= BUFFER_BYTES:
        connection.sendall(b"".join(buffers))
        return
    while buffers:
        sent = connection.sendmsg(buffers[:512])
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if sent:
            buffers[0] = memoryview(buffers[0])[sent:]


def frames(connection: socket.socket, shared: SharedMemory | None = None) -> Iterator[tuple[dict[str, Any], Array]]:
    """Heads and bodies until the front process closes the connection. A body is valid until the next one is asked for."""
    buffer, start, end = _aligned_buffer(BUFFER_BYTES), 0, 0
    while True:
        size = PREFIX.size
        if end - start >= size:
            length, rest = PREFIX.unpack_from(buffer.data, start)
            size += length + rest
        if end - start < size:
            if start + size > buffer.size:  # move the partial frame to the start, to receive the rest behind it
                old, buffer = buffer[start:end], _aligned_buffer(max(size, BUFFER_BYTES))
                buffer[: end - start] = old
                start, end = 0, end - start
            count = connection.recv_into(buffer.data[end:])
            if not count:
                return
            end += count
            continue
        middle = start + PREFIX.size + length
        head = orjson.loads(buffer.data[start + PREFIX.size : middle])
        if shared is not None and "shared" in head:
            yield head, np.frombuffer(shared.view(head["shared"]), np.uint8)
        else:
            yield head, buffer[middle : start + size]
        start += size
        if start == end:
            start = end = 0


def _aligned_buffer(size: int) -> Array:
    """Memory that starts at a multiple of :data:`ALIGN`."""
    whole = np.empty(size + ALIGN, np.uint8)
    return whole[-whole.ctypes.data % ALIGN :][:size]
