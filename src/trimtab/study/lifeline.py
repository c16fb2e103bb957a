"""Run a module in a process that ends when its parent does: ``python -P lifeline.py PARENT MODULE [ARGUMENT ...]``.

The parent may die by SIGKILL, and this process may hang in native code. It is a script of its own, and imports nothing but the
standard library, so that it holds before torch is imported, which takes seconds.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End this process, and all that it started, when process ``parent`` ends or closes our standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
