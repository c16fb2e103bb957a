"""Start a server for one artifact while it is measured."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from trimtab.errors import UsageError
from trimtab.execution import parent_death

READY = "ready at "
END_S = 30.0
"""Seconds that the server has to end."""


@contextlib.contextmanager
def address_of(target: str, *, trust: bool = False) -> Iterator[str]:
    """The address of a server: ``target`` itself, unless it is a folder; then a server on a free port, until the context ends.

    Raises:
        UsageError: the artifact cannot be served; the server has said why on standard error.
    """
    if "://" in target or not pathlib.Path(target).is_dir():
        yield target
        return
    watcher = str(pathlib.Path(str(parent_death.__file__)).resolve())
    words = ["serve", str(pathlib.Path(target).resolve()), "--port", "0", "--no-grpc", *(["--trust"] if trust else [])]
    process = subprocess.Popen(
        [sys.executable, "-P", watcher, str(os.getpid()), "trimtab", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield _wait_until_ready(process, target)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _wait_until_ready(process: subprocess.Popen[str], target: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).split(",")[0].strip()
        print(line, end="", file=sys.stderr)
    raise UsageError(f"{target} cannot be served; the server's words are above. Serve it by hand to see all of them.")
