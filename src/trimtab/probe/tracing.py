"""Traces of torch's profiler, and NVTX ranges, of an unmodified script in a run of their own."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import shutil

from trimtab.core.evidence import ProbeRecord
from trimtab.errors import UsageError
from trimtab.probe.command import Command
from trimtab.probe.launch import ScriptProcess
from trimtab.probe.serving import anchor_of

SLOWER, SPARE_S = 20.0, 30.0
"""How much slower a step under the profiler may be before the run is given up, and seconds for start and files besides."""
NO_RANGES = "NVTX ranges need a CUDA device, and the model is not on one: none were pushed."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of the profiler in steps, as ``torch.profiler.schedule`` takes it."""

    wait: int = 1
    warmup: int = 1
    active: int = 3
    repeat: int = 1

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read ``wait,warm-up,active,repeat``.

        Raises:
            UsageError: these are not four whole numbers, or nothing would be recorded.
        """
        parts = text.split(",")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts) or not int(parts[2]) or not int(parts[3]):
            raise UsageError(
                f"--schedule is {text!r}; give wait,warm-up,active,repeat as whole numbers, the last two above 0: 1,1,3,1."
            )
        wait, warmup, active, repeat = map(int, parts)
        return cls(wait=wait, warmup=warmup, active=active, repeat=repeat)

    @property
    def steps(self) -> int:
        """Steps until the last cycle is written."""
        return (self.wait + self.warmup + self.active) * self.repeat + 1


def record_traces(
    command: Command,
    record: ProbeRecord,
    *,
    schedule: Schedule | None = None,
    folder: pathlib.Path | None = None,
    nvtx: bool = False,
    in_place: bool = False,
    seconds: float = math.inf,
) -> tuple[list[pathlib.Path], str | None]:
    """Run ``command`` once more for the steps of ``schedule``, and move its traces to ``folder``.

    Args:
        command: as it was watched.
        record: of the watching run; its anchor says what a step is.
        schedule: of the profiler; ``None`` records nothing and runs as many steps as ``record`` has, for ``nvtx``.
        folder: for the files.
        nvtx: whether steps and calls of modules are NVTX ranges, if there is a CUDA device.
        in_place: whether the script writes where it writes.
        seconds: most time of the run.

    Returns:
        The files, and a sentence if a schedule was given and there are none, or if ranges have no GPU.
    """
    no_ranges = NO_RANGES if nvtx and not record.device.startswith("cuda") else None
    if schedule is None and no_ranges is not None:
        return [], no_ranges
    steps = record.steps if schedule is None else schedule.steps
    plan = {
        "mode": "trace",
        "anchor": anchor_of(record),
        "steps": steps,
        "nvtx": nvtx,
        "schedule": None if schedule is None else dataclasses.asdict(schedule),
    }
    found = list[pathlib.Path]()
    with ScriptProcess(command, plan, in_place=in_place) as process:
        most = min(seconds, record.start_s + SPARE_S + SLOWER * steps * record.step_ms / 1e3)
        code = process.wait(max(most, 0.0))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(process.out.glob("*.json*")):
                found.append(folder / path.name)
                shutil.move(path, found[-1])
        if schedule is None or found:
            return found, no_ranges
        why = f"it did not end within {most:.0f} s" if code is None else f"it ended with code {code}: {process.log(3)}"
    return [], f"No trace was written: the script made fewer than {steps} steps under the profiler, or {why}."
