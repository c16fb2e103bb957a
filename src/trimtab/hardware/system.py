"""Read facts about this machine from the operating system: processor, cores, memory, limits, compiler.

``root`` is the root of the file system to read, so that tests can describe other machines as folders.
No function raises: a fact that cannot be read is ``None`` or empty, or is taken from another source.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import psutil

try:
    import resource
except ImportError:  # Windows; psutil gives the peak memory there
    resource = None  # type: ignore[assignment]

ROOT = pathlib.Path("/")

FLAGS: Mapping[str, str] = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "neon": "neon",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
}
"""Name of an instruction set in /proc/cpuinfo -> trimtab's name. Only instruction sets that matter for a model's speed."""

COMPILER = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
"""The C++ compiler that torch uses if ``CXX`` is not set."""
_TORCH_FLAGS = {"avx512_f": "avx512f", "amx_int8": "amx_int8", "amx_bf16": "amx_bf16", "arm_i8mm": "i8mm", "arm_bf16": "bf16"}
_MAC_FLAGS = {
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.AdvSIMD": "neon",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
}
_ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
_UNLIMITED = 2**60
"""Limits at or above this mean "no limit" in cgroup v1."""


def read(path: pathlib.Path) -> str | None:
    """The stripped text of a small file, or ``None`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cpuinfo(root: pathlib.Path = ROOT) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty where there is none."""
    fields: dict[str, str] = {}
    for line in (read(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def cpu_name(root: pathlib.Path = ROOT) -> str:
    """The processor's model name. If a hypervisor hides details (``AMD EPYC``), family and model number are added."""
    fields = cpuinfo(root)
    if name := fields.get("model name"):
        numbers = [fields.get(key) for key in ("cpu family", "model")]
        return f"{name} (family {numbers[0]}, model {numbers[1]})" if all(numbers) else name
    if part := fields.get("CPU part"):
        return f"ARM {_ARM_PARTS.get(part, part)} (implementer {fields.get('CPU implementer', 'unknown')})"
    return _sysctl("machdep.cpu.brand_string").get("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def isa(capabilities: Mapping[str, object], root: pathlib.Path = ROOT) -> tuple[str, ...]:
    """Instruction sets that matter for speed, sorted. ``capabilities``, which torch detects, are used if /proc has none."""
    fields = cpuinfo(root)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    if flags:
        return tuple(sorted({FLAGS[flag] for flag in flags if flag in FLAGS}))
    found = {_TORCH_FLAGS.get(name, FLAGS.get(name, "")) for name, present in capabilities.items() if present is True}
    found |= {_MAC_FLAGS[name] for name, value in _sysctl(*_MAC_FLAGS).items() if value == "1"}
    return tuple(sorted(found - {""}))


def affinity() -> int:
    """Number of logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def numa_nodes(cores: Collection[int], root: pathlib.Path = ROOT) -> list[list[int]]:
    """The logical ``cores`` by NUMA node, sorted; one list where the system names no nodes."""
    found = []
    for file in sorted(root.glob("sys/devices/system/node/node*/cpulist")):
        try:
            parts = [part.split("-") for part in file.read_text(encoding="ascii").strip().split(",") if part]
        except OSError:
            continue
        there = {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
        found.append(sorted(there & set(cores)))
    return [node for node in found if node] or [sorted(cores)]


def usable_cores() -> int:
    """Cores that this process can keep busy: its affinity, limited by its cgroup's quota. The quota is rounded down, because a
    thread beyond it is throttled for whole scheduler periods."""
    return max(1, min(affinity(), int(cpu_quota() or affinity())))


def cpu_quota(root: pathlib.Path = ROOT) -> float | None:
    """The lowest CPU limit of this process's cgroups (v1 and v2), in cores; ``None`` without a limit."""
    limits = [_cores(*text.split()[:2]) for folder in _cgroups(root, "cpu") if len((text := _v2_cpu(folder)).split()) == 2]
    return min((limit for limit in limits if limit is not None), default=None)


def free_mb() -> float:
    """Memory in MB that this process and its children may still allocate: free memory, within the cgroup's limit."""
    free, limit = psutil.virtual_memory().available / 1e6, memory_limit_mb()
    return free if limit is None else max(0.1 * limit, min(free, limit - psutil.Process().memory_info().rss / 1e6))


def peak_rss_mb() -> float:
    """Peak resident memory of this process in MB; 0 if the system does not report it."""
    info: Any = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):
        return float(info.peak_wset) / 1e6
    if resource is None:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def memory_limit_mb(root: pathlib.Path = ROOT) -> float | None:
    """The lowest memory limit of this process's cgroups, in MB (10**6 bytes); ``None`` without a limit."""
    texts = [read(folder / name) for folder in _cgroups(root, "memory") for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text and text.isdigit() and int(text) < _UNLIMITED]
    return min(limits) / 1e6 if limits else None


def last_level_cache(root: pathlib.Path = ROOT) -> int | None:
    """Total bytes of all last-level caches. A cache that cores share counts once."""
    caches: dict[tuple[int, str], int] = {}
    for index in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        level, size = read(index / "level"), _cache_bytes(read(index / "size") or "")
        if level and level.isdigit() and size:
            caches[int(level), read(index / "shared_cpu_list") or str(index)] = size
    top = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == top) or None


def os_name() -> str:
    """Distribution and kernel: ``Debian GNU/Linux 12 (bookworm), Linux 6.1.0``."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return f"macOS {platform.mac_ver()[0]}, {kernel}" if platform.mac_ver()[0] else kernel


def compiler() -> str | None:
    """First line of the version text of the C++ compiler (``CXX``, else torch's default); ``None`` without a compiler."""
    command = shlex.split(os.environ.get("CXX", "")) or [COMPILER]
    if shutil.which(command[0]) and (text := _output([*command, "--version"])):
        return text.splitlines()[0].strip()
    return None


def no_compiler() -> str | None:
    """Why torch cannot compile generated C++ on this machine, as a sentence; ``None`` if it can."""
    asked = os.environ.get("CXX")
    if asked is not None and shutil.which(asked) is None:
        return f"The C++ compiler {asked!r}, which CXX names, was not found. Set CXX to one that is installed."
    if asked is None and shutil.which(COMPILER) is None:
        other = next(filter(shutil.which, ("g++", "clang++", "c++")), None)
        fix = "Install g++ (apt-get install g++) or set CXX" if other is None else f"Set CXX={other}, which is installed"
        return f"torch.compile needs the C++ compiler {COMPILER}, which was not found. {fix}."
    return None


def _cgroups(root: pathlib.Path, controller: str) -> Iterator[pathlib.Path]:
    """This process's cgroup folders of ``controller``, and their parents: a limit on any level applies."""
    mount = root / "sys/fs/cgroup"
    for line in (read(root / "proc/self/cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0":
            bases = [mount, mount / "unified"]
        elif controller in names.split(","):
            bases = [mount / names, mount / controller]
        else:
            continue
        for base in bases:
            folder = pathlib.PurePosixPath(path or "/")
            yield from (base / str(part).lstrip("/") for part in (folder, *folder.parents))


def _v2_cpu(folder: pathlib.Path) -> str:
    """``quota period`` in microseconds, in the format of cgroup v2, from the files of either version."""
    if text := read(folder / "cpu.max"):
        return text
    return f"{read(folder / 'cpu.cfs_quota_us') or ''} {read(folder / 'cpu.cfs_period_us') or ''}"


def _cores(quota: str, period: str) -> float | None:
    """The quota in cores; ``None`` without a limit ("max" or -1)."""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _cache_bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * 1024 ** " KMG".index(match[2] or " ") if match else None


def _sysctl(*names: str) -> dict[str, str]:
    """The values that macOS has for ``names``; empty on other systems. sysctl skips unknown names."""
    if platform.system() != "Darwin":
        return {}
    pairs = (line.partition(": ") for line in (_output(["sysctl", *names]) or "").splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() or None


def has_glibc() -> bool:
    """Whether this process uses the GNU C library (glibc), whose allocator can be configured."""
    return platform.libc_ver()[0] == "glibc"


def keep_freed_memory() -> None:
    """Configure glibc's allocator to keep freed memory until this process ends. Without glibc nothing happens."""
    if not has_glibc():
        return
    mallopt = ctypes.CDLL(None).mallopt
    for option, values in KEEP_MEMORY.items():
        any(mallopt(option, value) for value in values)  # stop at the first accepted value


KEEP_MEMORY: Mapping[int, tuple[int, ...]] = {-1: (2**31 - 1,), -3: (2**30, 2**25)}
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of malloc.h -> values to try in order; older glibc accepts only the smaller."""


_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def huge_pages_variable(root: pathlib.Path = ROOT, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variable with which the C library of a new process asks for huge pages; empty where it has no effect.

    malloc of glibc 2.35 and later then advises the kernel to back blocks from 2 MB on with pages of 2 MB in place of 4 kB: a
    step that allocates its activations anew has 512 times fewer page faults, and weights take fewer entries of the TLB. Results
    stay. The variable has no effect where the kernel gives such pages always or never. A choice of the user's is kept.
    Source: https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html
    """
    given = environment.get(_TUNABLES, "")
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 35) or _HUGE_PAGES in given:
        return {}
    enabled = read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    return {_TUNABLES: f"{given}:{_HUGE_PAGES}=1".lstrip(":")} if "[madvise]" in enabled else {}


def cache_folder() -> pathlib.Path:
    """The folder for caches: ``TRIMTAB_CACHE``, else ``trimtab`` in the user's cache folder. It is not created."""
    if folder := os.environ.get("TRIMTAB_CACHE"):
        return pathlib.Path(folder)
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "trimtab"
    except RuntimeError:  # a user without a home folder, as in some containers
        return pathlib.Path(tempfile.gettempdir()) / f"trimtab-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
