"""The process of an instance: ``python -m trimtab.serve.instance FD SETTINGS``.

It loads the artifact, replays its test vectors, warms up, says that it is ready, and answers frames until its socket closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from trimtab.errors import TrimtabError, UsageError
from trimtab.serve.instance.load import load_artifact
from trimtab.serve.instance.served import Served
from trimtab.serve.instance.wire import frames, send
from trimtab.serve.shared_memory import SharedMemory

WARM_CALLS = 2
"""Calls with the largest batch before an instance is ready."""


def serve(connection: socket.socket, served: Served, shared: Sequence[SharedMemory]) -> None:
    """Answer frames until the front process closes the connection. ``shared``: memory for requests and for answers, or none."""
    requests, answers = shared or (None, None)
    for head, buffer in frames(connection, requests):
        start, cpu = time.perf_counter(), time.process_time()
        try:
            outputs = served.call(served.arrays(buffer, head["shapes"]))
        except TrimtabError as error:
            send(connection, {"id": head["id"], "error": str(error), "input": isinstance(error, UsageError)})
            continue
        took = {"compute": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        send(connection, {"id": head["id"], **took, "shapes": [array.shape for array in outputs]}, outputs, answers)


def main(descriptor: int, settings: dict[str, Any]) -> None:
    """Load, prove, warm up and serve."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front process closes the connection when it is time
    connection = socket.socket(fileno=descriptor)
    if settings["cores"] is not None:
        os.sched_setaffinity(0, settings["cores"])
    try:
        served = Served(load_artifact(pathlib.Path(settings["path"]), trust=settings["trust"], threads=settings["threads"]))
        served.check_parity()
        arrays = served.rows_of_example(settings["rows"])
        for _ in range(WARM_CALLS):
            served.call(arrays)
    except TrimtabError as error:
        send(connection, {"refused": type(error).__name__, "message": str(error)})
        return
    send(connection, {"ready": served.description()}, served.rows_of_example(1))
    serve(connection, served, [SharedMemory(number) for number in settings["shared"]])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the front process has ended
        main(int(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # without the teardown of runtimes, which can crash
