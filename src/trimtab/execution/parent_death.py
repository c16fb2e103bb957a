"""Run a module in a process that ends when its parent does: ``python -P parent_death.py PARENT MODULE [ARGUMENT ...]``.

It works if the parent is killed by SIGKILL, and if this process hangs in native code. The script imports only the standard
library, so that the parent is watched before torch is imported, which takes seconds.
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


def end_with_parent(parent: int) -> None:
    """End this process and all that it started when process ``parent`` ends or closes the pipe that is our standard input."""
    if sys.platform == "linux":
        # The kernel signals the whole group as soon as the pipe closes. Native code can keep a thread from doing that. The
        # second signal, on the parent's death, ends this process alone; it is for a parent that did not hold the pipe.
        own = os.open("/proc/self/fd/0", os.O_RDONLY)  # a new file description: the old one is shared with other processes
        os.dup2(own, 0)
        os.close(own)
        fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        library.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of our children become our children, so that they can be found
    else:
        threading.Thread(target=_watch, daemon=True).start()
    if os.getppid() != parent or select.select([0], [], [], 0)[0]:
        os._exit(1)


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    # the current folder stays off the path: it may be an artifact, whose files must not be imported
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
