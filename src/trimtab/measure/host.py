"""CPU time of our processes, of other processes, and of the hypervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Collection, Iterable, Mapping

TICK_NS = 10_000_000 if not hasattr(os, "sysconf") else 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""Nanoseconds in one unit of ``/proc/stat``."""
USER, NICE, SYSTEM, IDLE, IOWAIT, IRQ, SOFTIRQ, STEAL = range(8)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """CPU time since boot at one moment, in nanoseconds, summed over the CPUs that we may use."""

    at_ns: int
    busy_ns: int
    stolen_ns: int
    cpus: int
    own_ns: Mapping[int, int]
    """CPU time of each of our processes, including all threads."""


@dataclasses.dataclass(frozen=True)
class Share:
    """How the CPU time between two snapshots was used, as shares of the CPUs that we may use."""

    seconds: float
    """Wall-clock time between the snapshots."""
    foreign: float
    """Used by processes that are not ours, as a share of these CPUs; below 0 by the error of :attr:`resolution`, so that a mean
    over short spans is unbiased. (Without that, spans of 20 ms on an idle machine read 7%.)"""
    stolen: float
    """Taken by the hypervisor for other machines."""
    resolution: float
    """The share of one tick of the kernel's clock; the error of ``foreign`` and ``stolen`` is one or two of these."""

    @property
    def disturbed(self) -> float:
        """The share that was neither idle nor used by our processes."""
        return self.foreign + self.stolen


class Host:
    """CPU time of the machine and of our processes ``pids``, their threads and their children.

    Only the CPUs on which these may run count: if two of 64 CPUs are ours, a busy neighbour on one of them takes half, and
    neighbours on the others take nothing.

    The list of children is updated about once per second, because reading it is slow on Linux. A snapshot otherwise takes some
    tens of microseconds. ``proc`` is the mount point of the process file system.
    """

    def __init__(self, pids: Iterable[int], proc: str | os.PathLike[str] = "/proc") -> None:
        self._roots = frozenset(pids)
        self._proc = pathlib.Path(proc)
        self._family: Collection[int] = self._roots
        self._listed_ns: int | None = None
        self._usable_cpus = _usable_cpus(self._roots)

    def snapshot(self) -> Snapshot | None:
        """CPU times now, or ``None`` without ``/proc/stat``."""
        found = self._cpu_columns()
        if found is None:
            return None
        cpu, cpus = found
        at = time.perf_counter_ns()
        own = {pid: ns for pid in self._processes(at) if (ns := _process_ns(pid)) is not None}
        busy = sum(cpu[i] for i in (USER, NICE, SYSTEM, IRQ, SOFTIRQ))  # guest time is part of user time
        return Snapshot(at, busy * TICK_NS, cpu[STEAL] * TICK_NS, cpus, own)

    def _cpu_columns(self) -> tuple[list[int], int] | None:
        """The columns of ``/proc/stat`` summed over the CPUs that we may use, and the number of these CPUs; over all CPUs if
        the file does not list each one."""
        try:
            with open(self._proc / "stat", encoding="ascii") as file:
                lines = [line.split() for line in itertools.takewhile(lambda line: line.startswith("cpu"), file)]
        except OSError:
            return None
        columns = {head: [int(field) for field in fields] for head, *fields in lines}
        ours = [columns[name] for cpu in self._usable_cpus if (name := f"cpu{cpu}") in columns]
        if not ours or len(ours) < len(self._usable_cpus):
            ours, count = [columns.get("cpu", [])], os.cpu_count() or 1
        else:
            count = len(ours)
        cpu = [sum(column) for column in zip(*ours, strict=True)]
        return (cpu, count) if len(cpu) > STEAL and any(cpu) else None  # some sandboxes show a file full of zeros

    def _processes(self, now_ns: int) -> Collection[int]:
        if self._listed_ns is None or now_ns - self._listed_ns > 1e9:
            self._family = descendants(self._roots, self._proc)
            self._listed_ns = now_ns
        return self._family


def usage(before: Snapshot | None, after: Snapshot | None) -> Share | None:
    """The use of CPU time between two snapshots; ``None`` if either is missing or no time passed."""
    if before is None or after is None or after.at_ns <= before.at_ns:
        return None
    wall = after.at_ns - before.at_ns
    capacity = wall * after.cpus
    own = sum(max(0, ns - before.own_ns[pid]) for pid, ns in after.own_ns.items() if pid in before.own_ns)
    others = max(-2 * TICK_NS, after.busy_ns - before.busy_ns - own)
    stolen = max(0, after.stolen_ns - before.stolen_ns)
    return Share(wall / 1e9, min(1.0, others / capacity), min(1.0, stolen / capacity), TICK_NS / capacity)


BUSY = 0.25
"""Share of the CPUs from which on other processes make a machine busy: several threads cannot be timed beside them."""
WATCH_S = 0.5
"""Seconds for which the use of the CPUs is watched."""


@dataclasses.dataclass(frozen=True)
class OtherLoad:
    """Share of the CPUs that other processes used over a short interval."""

    share: float
    cpus: int

    @property
    def busy(self) -> bool:
        """Whether they used so much that several threads cannot be timed beside them."""
        return self.share >= BUSY

    def __str__(self) -> str:
        return f"other processes used {self.share:.0%} of {'this CPU' if self.cpus == 1 else f'these {self.cpus} CPUs'}"


def other_load(seconds: float = WATCH_S) -> OtherLoad | None:
    """Measure the share of the CPUs that other processes use now; ``None`` if unknown. Children of this one are not counted."""
    host = Host({os.getpid()})
    before = host.snapshot()
    time.sleep(seconds)
    after = host.snapshot()
    found = usage(before, after)
    return None if found is None or after is None else OtherLoad(max(0.0, found.disturbed), after.cpus)


def busy_note() -> str | None:
    """A sentence for the user if other processes make this machine busy now; else ``None``."""
    found = other_load()
    return f"Busy machine: {found}, so figures will be wide." if found is not None and found.busy else None


def foreign(before: Snapshot | None, after: Snapshot | None) -> float | None:
    """Share of CPU time that processes other than ours used between two snapshots."""
    found = usage(before, after)
    return None if found is None else max(0.0, found.foreign)


def stolen(before: Snapshot | None, after: Snapshot | None) -> float | None:
    """Share of CPU time that the hypervisor took between two snapshots."""
    found = usage(before, after)
    return None if found is None else found.stolen


def waits(pid: int, proc: pathlib.Path = pathlib.Path("/proc")) -> dict[int, int]:
    """Nanoseconds that each thread of process ``pid`` has waited for a core since it began; empty if unknown.

    Source: https://docs.kernel.org/scheduler/sched-stats.html, under /proc/<pid>/schedstat.
    """
    found, folder = {}, proc / str(pid) / "task"
    for thread in _listed(folder):
        with contextlib.suppress(OSError):  # the thread has just ended
            fields = (folder / thread / "schedstat").read_bytes().split()
            if len(fields) > 1:
                found[int(thread)] = int(fields[1])
    return found


def waited_ns(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """Growth of :func:`waits` in nanoseconds, summed over all threads."""
    return sum(max(0, ns - before.get(thread, 0)) for thread, ns in after.items())


def computed_ns(pids: Iterable[int], proc: pathlib.Path = pathlib.Path("/proc")) -> int:
    """Nanoseconds of CPU time of the main threads of processes, or of threads by their ids; 0 for each that is unknown."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int((proc / str(pid) / "schedstat").read_bytes().split()[0])
    return total


def any_runnable(pids: Iterable[int], proc: pathlib.Path = pathlib.Path("/proc")) -> bool:
    """Whether a thread computes, or waits for a core, at this moment; of a process its main thread."""
    return any(fields[0] == b"R" for pid in pids if (fields := _stat(proc / str(pid))))


def descendants(roots: Collection[int], proc: pathlib.Path = pathlib.Path("/proc")) -> set[int]:
    """``roots`` and all living processes below them."""
    children: dict[int, list[int]] = {}
    for entry in _listed(proc):
        if entry.isdecimal() and (parent := _parent(proc / entry)) is not None:
            children.setdefault(parent, []).append(int(entry))
    found, waiting = set(roots), list(roots)
    while waiting:
        new = [child for child in children.get(waiting.pop(), []) if child not in found]
        found.update(new)
        waiting += new
    return found


def _listed(folder: pathlib.Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _parent(folder: pathlib.Path) -> int | None:
    fields = _stat(folder)
    return int(fields[1]) if len(fields) > 1 else None


def _stat(folder: pathlib.Path) -> list[bytes]:
    """The fields of ``/proc/<pid>/stat`` from the state on; empty for a process that has just ended."""
    try:
        text = (folder / "stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].split()  # the process name before it may contain spaces and brackets


def _usable_cpus(pids: Iterable[int]) -> frozenset[int]:
    """The CPUs that this process or one of ``pids`` may use; empty if unknown. All threads are read, because a runtime may
    have pinned this very thread to one CPU."""
    found: set[int] = set()
    for pid in (0, *pids) if hasattr(os, "sched_getaffinity") else ():
        with contextlib.suppress(OSError):  # the process has just ended
            found |= os.sched_getaffinity(pid)
    return frozenset(found)


def _process_ns(pid: int) -> int | None:
    """CPU time of a process with all its threads, from its CPU-time clock on Linux (clock_getcpuclockid(3))."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except (OSError, OverflowError, AttributeError):
        return None
