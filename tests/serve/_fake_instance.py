"""An instance without torch, which starts at once: ``y = 2 x``; some values of ``x`` make it fail, hang or die."""

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
    stream = connection.makefile("rb")
    if "broken" in settings["path"]:
        connection.sendall(b"".join(pack({"refused": "IntegrityError", "message": "a file was changed"})))
        return
    description = {
        "inputs": [tensor("x")],
        "outputs": [tensor("y")],
        **{"dims": {"batch": [1, None, 1]}, "batch": "batch", "joinable": True, "platform": "fake", "threads": 1, "card": {}},
    }
    connection.sendall(b"".join(pack({"ready": description})))
    rate = 150.0 if "faster" in settings["path"] else 100.0
    while prefix := stream.read(PREFIX.size):
        length, size = PREFIX.unpack(prefix)
        head, body = json.loads(stream.read(length)), stream.read(size)
        if "rows" in head:
            connection.sendall(b"".join(pack({"id": head["id"], "rate": rate * min(head["rows"], 8)})))
            continue
        rows = head["shapes"][0][0]
        x = np.frombuffer(body, dtype="f4", count=2 * rows)
        if DIE in x:
            os._exit(1)
        if SLOW in x:
            time.sleep(0.4)
        if FAIL in x:
            answer = pack({"id": 0, "error": "The model failed: it was asked to.", "input": False})
        else:
            answer = pack({"id": 0, "compute": 0.001, "cpu": 0.001, "shapes": [[rows, 2]]}, [[(2 * x).tobytes()]])
        connection.sendall(b"".join(answer))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
