"""Traces of torch's profiler of an unmodified script, in a run of their own."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from trimtab.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The schedule of ``torch.profiler.schedule`` in steps, and the folder for the files."""

    folder: pathlib.Path
    wait: int = 1
    warmup: int = 1
    active: int = 3
    repeat: int = 1

    @classmethod
    def parse(cls, folder: pathlib.Path, schedule: str) -> Trace:
        """Read ``wait,warm-up,active,repeat``.

        Raises:
            UsageError: these are not four whole numbers, or nothing would be recorded.
        """
        parts = schedule.split(",")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts) or not int(parts[2]) or not int(parts[3]):
            raise UsageError(
                f"--schedule is {schedule!r}; give wait,warm-up,active,repeat as whole numbers, the last two above 0: 1,1,3,1."
            )
        wait, warmup, active, repeat = map(int, parts)
        return cls(folder=folder, wait=wait, warmup=warmup, active=active, repeat=repeat)

    @property
    def steps(self) -> int:
        """Steps until the last cycle is written."""
        return (self.wait + self.warmup + self.active) * self.repeat + 1

    def plan(self) -> dict[str, Any]:
        """What the watched process reads."""
        return {**dataclasses.asdict(self), "folder": str(self.folder.resolve())}
