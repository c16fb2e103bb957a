"""An instance without torch, which starts at once: ``y = 2 x``; some values of ``x`` make it fail, hang or die.

If "paced" is in the path, a batch of up to 8 rows takes 10 ms, and each further row 5 ms more; it says that computing took a
quarter of a millisecond for each row. If "small" is there too, it fails on 8 rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time

import numpy as np

from trimtab.serve.frames import PREFIX, pack

DIE, FAIL, SLOW = -1.0, -2.0, -3.0


def tensor(name: str) -> dict[str, object]:
    """A tensor of the description."""
    return {"name": name, "dtype": "float32", "shape": ["batch", 2]}


def main() -> None:
    """Answer frames."""
    connection, settings = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    stream, path = connection.makefile("rb"), settings["path"]
    if "broken" in path:
        connection.sendall(b"".join(pack({"refused": "IntegrityError", "message": "a file was changed"})))
        return
    description = {
        "inputs": [tensor("x")],
        "outputs": [tensor("y")],
        **{"dims": {"batch": [1, None, 1]}, "batch": "batch", "joinable": True, "platform": "fake", "threads": 1, "card": {}},
        "example": {"shapes": [[1, 2]], "data": [[1.0, 1.0]]},
    }
    connection.sendall(b"".join(pack({"ready": description}, [[np.ones(2, "f4").tobytes()]])))
    while prefix := stream.read(PREFIX.size):
        length, size = PREFIX.unpack(prefix)
        head, body = json.loads(stream.read(length)), stream.read(size)
        rows = head["shapes"][0][0]
        x = np.frombuffer(body, dtype="f4", count=2 * rows)
        if DIE in x:
            os._exit(1)
        if SLOW in x:
            time.sleep(0.4)
        if "paced" in path:
            time.sleep(0.01 * (1 + max(rows - 8, 0) / 2))
        if FAIL in x or ("small" in path and rows >= 8):
            answer = pack({"id": 0, "error": "The model failed: it was asked to.", "input": False})
        else:
            took = {"compute": 0.00025 * rows, "cpu": 0.001}
            answer = pack({"id": 0, **took, "shapes": [[rows, 2]]}, [[(2 * x).tobytes()]])
        connection.sendall(b"".join(answer))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
