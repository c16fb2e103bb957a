"""Frames between the front process and an instance: a JSON head and raw tensors, over a UNIX socket. Nothing is pickled.

A frame is ``u32 length of the head, u64 length of the body, head, body``, little-endian. Tensors start at multiples of
:data:`ALIGN` bytes in the body, so that the receiver can use them where they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import orjson

PREFIX = struct.Struct("<IQ")
ALIGN = 64
_PADDING = bytes(ALIGN)

Bytes = bytes | bytearray | memoryview


def pack(head: dict[str, Any], parts: Sequence[Sequence[Bytes]] = ()) -> list[Bytes]:
    """A frame as a list of buffers. ``parts`` holds one sequence of buffers for each tensor, which are joined."""
    body, total = list[Bytes](), 0
    for buffers in parts:
        body += buffers
        size = sum(map(len, buffers))
        total += size
        if gap := -size % ALIGN:
            body.append(_PADDING[:gap])
            total += gap
    text = orjson.dumps(head)
    return [PREFIX.pack(len(text), total), text, *body]


def aligned(size: int) -> int:
    """``size`` bytes and the padding after them."""
    return size + -size % ALIGN


def cut(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The tensors of ``sizes`` bytes in the body of a frame."""
    found, offset = [], 0
    for size in sizes:
        found.append(body[offset : offset + size])
        offset += aligned(size)
    return found


class Reader:
    """Cut received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, chunk: bytes) -> list[tuple[dict[str, Any], memoryview]]:
        """The frames that are complete with ``chunk``, as (head, body)."""
        self._data += chunk
        found, start = [], 0
        while len(self._data) - start >= PREFIX.size:
            head, body = PREFIX.unpack_from(self._data, start)
            end = start + PREFIX.size + head + body
            if len(self._data) < end:
                break
            frame = memoryview(bytes(memoryview(self._data)[start + PREFIX.size : end]))
            found.append((orjson.loads(frame[:head]), frame[head:]))
            start = end
        if start:
            del self._data[:start]
        return found
