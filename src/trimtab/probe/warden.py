"""Run a command without leaving processes or files behind: ``python -I -S warden.py INSTRUCTIONS``, in its own session.

The warden starts the command as its child, in an overlay of the writable folders if asked to. It kills the command with all
descendants when a byte arrives on standard input, or when that pipe closes, which happens even if the driver is
killed by SIGKILL; then the scratch folder is deleted as well. It needs the standard library only. ``INSTRUCTIONS`` is JSON:
``argv``, ``scratch`` (folder), ``contain`` (folders that writes are kept from; none: in place), ``least_memory`` (share of the
memory below which the command is ended). A file :data:`FILES` in ``scratch`` has texts that replace files of the script in the
overlay, by path.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
FILES = "files.json"
CREATED = "made.txt"  # as in trimtab.probe.inside.plan: this file needs the standard library only
MEMORY_CHECK_EVERY = 10
"""Turns of 20 ms between two checks of the free memory."""
FILE_SYSTEMS = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "tmpfs",
    "zfs",
    "f2fs",
    "nfs",
    "nfs4",
    "overlay",
    "fuse",
    "lustre",
    "virtiofs",
}


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; ``OSError`` if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    given = [a.encode() if isinstance(a, str) else a for a in arguments]
    if getattr(library, name)(*given) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}({', '.join(str(a) for a in arguments)}): {os.strerror(error)}")


def mount_points() -> dict[str, str]:
    """Path -> type of file system."""
    found = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            found[before.split()[4].replace("\\040", " ")] = after.split()[0]
    return found


def overlay(folders: list[str], scratch: str) -> dict[str, Any]:
    """Mount overlays of ``folders`` onto themselves, whose upper layers lie in ``scratch``: whatever is written below them,
    now and by children, lands there. Raises ``OSError`` where the kernel refuses it."""
    uid, gid = os.getuid(), os.getgid()
    options = ""
    try:
        call("unshare", CLONE_NEWNS)
    except OSError:
        call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        options = ",userxattr"
    call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    points = mount_points()
    layers: dict[str, str] = {}
    loose: list[str] = []

    def mount_overlay(path: str, lower: int, needed: bool) -> None:
        number = len(layers)
        upper, work = f"{scratch}/upper/{number}", f"{scratch}/work/{number}"
        os.makedirs(upper)
        os.makedirs(work)
        shutil.copystat(f"/proc/self/fd/{lower}", upper)
        data = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work}{options}"
        try:
            call("mount", "overlay", path, "overlay", 0, data)
            layers[str(number)] = path
        except OSError:
            if needed:
                raise
            call("mount", f"/proc/self/fd/{lower}", path, None, MS_BIND | MS_REC, None)
            loose.append(path)
            layers[str(number)] = ""

    for folder in folders:
        below = sorted(point for point in points if point.startswith(folder.rstrip("/") + "/"))
        handles = {}
        for path in below:
            with contextlib.suppress(OSError):
                handles[path] = os.open(path, os.O_PATH | os.O_DIRECTORY)
        handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        mount_overlay(folder, handle, True)
        os.close(handle)
        for path, handle in handles.items():
            with contextlib.suppress(OSError):
                if points[path].partition(".")[0] in FILE_SYSTEMS:
                    mount_overlay(path, handle, False)
                else:
                    call("mount", f"/proc/self/fd/{handle}", path, None, MS_BIND | MS_REC, None)
            os.close(handle)
    os.chdir(os.getcwd())
    return {"contained": "overlay", "layers": layers, "loose": loose}


def execute(instructions: dict[str, Any]) -> None:
    """Replace this process by the command, after mounting the overlay and writing the files of a patch."""
    if sys.platform == "linux":
        call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    here = os.getcwd()
    state: dict[str, Any] = {"contained": "in place"}
    if instructions["contain"]:
        try:
            state = overlay(instructions["contain"], instructions["scratch"])
            os.chdir(here)
        except OSError as error:
            state = {"contained": "guarded", "why": str(error)}
            plan = json.loads(os.environ.get("TRIMTAB_PLAN") or "{}")
            os.environ["TRIMTAB_PLAN"] = json.dumps(plan | {"guard": True})
    with open(os.path.join(instructions["scratch"], "contained.json"), "w", encoding="utf-8") as file:
        json.dump(state, file)
    files = os.path.join(instructions["scratch"], FILES)
    if os.path.exists(files):
        if state["contained"] != "overlay":
            raise OSError("a patch is measured in an overlay only, so that the script itself stays as it is")
        with open(files, encoding="utf-8") as file:
            texts = json.load(file)
        kept = {os.stat(folder).st_dev for folder in state["layers"].values() if folder}
        for path, text in texts.items():
            if os.stat(os.path.dirname(os.path.realpath(path))).st_dev not in kept:
                raise OSError(f"{path} lies outside of the overlay, so that it would be changed itself")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    os.execv(instructions["argv"][0], instructions["argv"])


def memory_left() -> float:
    """Free share of the memory of the machine or of the control group, whichever is less; 1 if neither is known."""
    found = [1.0]
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
        found.append(sizes["MemAvailable"] / sizes["MemTotal"])
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):  # "max" is no number: no limit
        group = "/sys/fs/cgroup/memory"
        with open(f"{group}.max", encoding="ascii") as most, open(f"{group}.current", encoding="ascii") as now:
            limit, used = int(most.read()), int(now.read())
        with open(f"{group}.stat", encoding="ascii") as file:
            parts = dict(line.split() for line in file)
        reclaimable = sum(int(parts[name]) for name in ("inactive_file", "active_file", "slab_reclaimable"))
        found.append(1 - (used - reclaimable) / limit)
    return min(found)


def descendants() -> list[int]:
    """Ids of all descendants of this process, including orphans, because it is a subreaper."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found: list[int] = []
    new = [os.getpid()]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def kill_all(child: int) -> None:
    """Kill all that the command started, until nothing is left."""
    for _ in range(100):
        if sys.platform == "linux":
            left = descendants()
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        else:
            left = []
            with contextlib.suppress(OSError):
                os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        select.select([], [], [], 0.01)


def remove_created(scratch: str) -> None:
    """Delete the files and empty folders that a guarded script made."""
    path = os.path.join(scratch, "out", CREATED)
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        made = [json.loads(line) for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
    for name in reversed(made):  # what lies in a folder was made after it
        with contextlib.suppress(OSError):
            os.rmdir(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)


def remove(folder: str) -> None:
    """Delete a folder, also one that an overlay left without permissions."""

    def unlock(function: Any, path: str, _: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            function(path) if function is not os.open and function is not os.scandir else shutil.rmtree(
                path, ignore_errors=True
            )

    shutil.rmtree(folder, onerror=unlock)


def main() -> None:
    instructions = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        try:
            execute(instructions)
        except OSError as error:
            print(f"trimtab: {instructions['argv'][0]} could not be run: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    status, orphaned, stopped, out_of_memory, turns = None, False, False, False, 0
    while status is None and not stopped and not out_of_memory:
        turns += 1
        out_of_memory = turns % MEMORY_CHECK_EVERY == 0 and memory_left() < instructions["least_memory"]
        stopped = bool(select.select([0], [], [], 0.02)[0])
        orphaned = stopped and not os.read(0, 1)
        while True:  # orphans of the command are reaped, too
            try:
                process, found = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if process == child:
                status = found
            if process == 0:
                break
    kill_all(child)
    if out_of_memory:
        least = instructions["least_memory"]
        print(f"MemoryError: trimtab ended the script, because less than {least:.0%} of the memory was left", flush=True)
    if orphaned:
        remove_created(instructions["scratch"])
        remove(instructions["scratch"])
        os._exit(1)
    code = 1 if out_of_memory else -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    with open(os.path.join(instructions["scratch"], "exit.json"), "w", encoding="utf-8") as file:
        json.dump(code, file)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
