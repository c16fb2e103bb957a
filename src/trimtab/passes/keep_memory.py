"""Memory that is freed stays with the process."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass
from trimtab.hardware import system


@dataclass(frozen=True, kw_only=True)
class KeepMemory(Pass):
    """Keep the memory of freed tensors for the next call, instead of giving it back to the system.

    On Linux, torch takes the memory of CPU tensors from the C library, and that gives large blocks, and what is free at the end
    of its heap, back to the kernel, which clears each page anew at its next use. Pays where a call makes tensors of hundreds of
    kilobytes or more: on a virtual machine a small U-Net had 1,300 page faults per call, and ran 1.4 times as fast without
    them. Whether a process suffers from it depends on what else lies in its heap, so that it also makes times steadier. The
    process keeps its highest use of memory, for all that runs in it and until it ends.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html (``M_TRIM_THRESHOLD``, ``M_MMAP_THRESHOLD``)
    """

    name = "keep_memory"
    modes = frozenset({"infer", "train"})
    sets = frozenset({"memory.keep_freed"})

    def describe(self) -> str:
        """What becomes of the memory."""
        return "freed memory kept"

    def why_not_here(self) -> str | None:
        """Needs the C library that has this setting."""
        if not system.has_glibc():
            return "keep_memory sets the allocator of the GNU C library (glibc), and this system has another."
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs tensors that come from it."""
        if not candidate.settings.device.startswith("cpu"):
            return f"keep_memory is about memory of the CPU, and this runs on {candidate.settings.device!r}."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; whoever runs the settings tells the allocator."""
        return candidate.with_settings({"memory.keep_freed": True})
