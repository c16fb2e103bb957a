"""The instance's side of the socket: frames with numpy arrays. numpy has no bfloat16, whose bits are held as uint16."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.core.signature import TensorSpec
from trimtab.serve.frames import PREFIX, Bytes, aligned, pack
from trimtab.serve.protocol import DATATYPES
from trimtab.serve.shared_memory import SHARED_BYTES, SharedMemory

Array = npt.NDArray[Any]


def codes_of(specs: Iterable[TensorSpec]) -> list[np.dtype[Any]]:
    """numpy's dtypes of ``specs``."""
    return [np.dtype(DATATYPES[spec.dtype][1]) for spec in specs]


def arrays_in(body: Array, shapes: Sequence[Sequence[int]], dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
    """The arrays in a received body, without copies."""
    found, offset = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        found.append(body[offset : offset + size].view(dtype).reshape(shape))
        offset += aligned(size)
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
    while buffers:
        sent = connection.sendmsg(buffers[:512])
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if sent:
            buffers[0] = memoryview(buffers[0])[sent:]


def frames(connection: socket.socket, shared: SharedMemory | None = None) -> Iterator[tuple[dict[str, Any], Array]]:
    """Heads and bodies until the front process closes the connection. A body is valid until the next one is asked for."""
    prefix, room = bytearray(PREFIX.size), np.empty(1 << 16, np.uint8)
    while _receive(connection, memoryview(prefix)):
        length, size = PREFIX.unpack(prefix)
        text = bytearray(length)
        if size > room.size:
            room = np.empty(size, np.uint8)
        if not _receive(connection, memoryview(text)) or not _receive(connection, room.data[:size]):
            return
        head = json.loads(text)
        if shared is not None and "shared" in head:
            yield head, np.frombuffer(shared.view(head["shared"]), np.uint8)
        else:
            yield head, room


def _receive(connection: socket.socket, target: memoryview) -> bool:
    """Fill ``target``; false if the other side has closed."""
    while len(target):
        count = connection.recv_into(target)
        if not count:
            return False
        target = target[count:]
    return True
