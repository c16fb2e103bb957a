"""Frames between the front process and an instance: a JSON head and raw tensors, over a UNIX socket. Nothing is pickled.

A frame is ``u32 length of the head, u64 length of the body, head, body``, little-endian. Body and tensors start at multiples of
:data:`ALIGN` bytes, so that the receiver can use them where they are; the JSON of the head ends with spaces for that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import orjson

PREFIX = struct.Struct("<IQ")
ALIGN = 64
_PADDING, _SPACES = bytes(ALIGN), b" " * ALIGN

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
    text += _SPACES[: -(PREFIX.size + len(text)) % ALIGN]
    return [PREFIX.pack(len(text), total), text, *body]


def aligned(size: int) -> int:
    """``size`` bytes and the padding after them."""
    return size + -size % ALIGN


def unpack(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The tensors in the body of a frame: views of ``sizes`` bytes, without padding."""
    found, offset = [], 0
    for size in sizes:
        found.append(body[offset : offset + size])
        offset += aligned(size)
    return found


class Reader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._chunks, self._size, self._wanted = list[Bytes](), 0, PREFIX.size
        """Received bytes of the current frame, their size, and the size at which a prefix or a frame is complete."""

    def feed(self, chunk: bytes) -> list[tuple[dict[str, Any], memoryview]]:
        """Add ``chunk``. Returns the frames that are now complete, as (head, body)."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size < self._wanted:
            return []
        data = memoryview(chunk if len(self._chunks) == 1 else b"".join(self._chunks))
        found, start, self._wanted = [], 0, PREFIX.size
        while len(data) - start >= PREFIX.size:
            head, body = PREFIX.unpack_from(data, start)
            end = start + PREFIX.size + head + body
            if len(data) < end:
                self._wanted = end - start
                break
            middle = start + PREFIX.size + head
            found.append((orjson.loads(data[start + PREFIX.size : middle]), data[middle:end]))
            start = end
        self._chunks, self._size = [data[start:]] if start < len(data) else [], len(data) - start
        return found
