"""Run a module in a process that ends when its parent does: ``python -P parent_death.py PARENT MODULE [ARGUMENT ...]``.

The parent may die by SIGKILL, and this process may hang in native code. It is a script of its own, and imports nothing but the
standard library, so that it holds before torch is imported, which takes seconds.
"""

import ctypes
import fcntl
import os
import runpy
import select
import signal
import sys
import threading

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def die_with(parent: int) -> None:
    """End this process, and all that it started, when process ``parent`` ends or closes our standard input, a pipe."""
    if sys.platform == "linux":
        # The kernel kills the group itself, whatever its processes do, the moment that the pipe closes. A thread may be kept
        # from it by native code, and the other signal ends this process alone: it is for a parent that did not hold the pipe.
        own = os.open("/proc/self/fd/0", os.O_RDONLY)  # what follows would else hold for all that share the pipe
        os.dup2(own, 0)
        os.close(own)
        fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        library.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what outlives whoever started it becomes our child, and is found
    else:
        threading.Thread(target=_watch, daemon=True).start()
    if os.getppid() != parent or select.select([0], [], [], 0)[0]:
        os._exit(1)


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    # the current folder stays off the path: it may be an artifact's, and what lies there must not be imported
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
