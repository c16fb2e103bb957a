"""Energy, where the machine counts it: RAPL for CPUs, NVML for NVIDIA GPUs.

Source: https://www.kernel.org/doc/html/latest/power/powercap/powercap.html and the NVML API reference.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Sequence

import torch

POWERCAP = pathlib.Path("/sys/class/powercap")


@dataclasses.dataclass(frozen=True)
class Counter:
    """One energy counter of the machine."""

    name: str
    read: Callable[[], int]
    """Its value now. Raises OSError if it can no longer be read."""
    joules: float
    """What one step of it is worth."""
    wraps_at: int | None = None
    """The value after which it starts again at 0; ``None`` if it never does."""


class Meter:
    """Counts the joules since it was made. It sees whole processors and GPUs, whoever uses them.

    RAPL counters start again after 60 to 260 kJ, which a large machine draws in minutes: ask for :meth:`joules` in between.
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = tuple(counters)
        self._last = [counter.read() for counter in self._counters]
        self._joules = [0.0] * len(self._counters)

    @property
    def scope(self) -> str:
        """What is counted, to be said beside the figure."""
        return f"whole device, all processes: {', '.join(counter.name for counter in self._counters)}"

    def joules(self) -> float:
        """Energy of all counters since the meter was made.

        Raises:
            OSError: a counter can no longer be read.
        """
        for index, counter in enumerate(self._counters):
            now = counter.read()
            steps = now - self._last[index]
            if steps < 0 and counter.wraps_at is not None:
                steps += counter.wraps_at + 1
            self._last[index] = now
            self._joules[index] += max(steps, 0) * counter.joules
        return sum(self._joules)


def energy_meter(powercap: pathlib.Path = POWERCAP) -> Meter | str:
    """A meter over everything this machine counts, or the reason in a sentence why there is none."""
    cpu = _rapl(powercap)
    gpu = _nvml() if torch.cuda.is_available() else "no CUDA GPU is in use"
    counters = [counter for found in (cpu, gpu) if not isinstance(found, str) for counter in found]
    if not counters:
        return f"Energy cannot be measured here: {cpu}, and {gpu}."
    try:
        return Meter(counters)
    except OSError as error:
        return f"Energy cannot be measured here: {error}."


def _rapl(powercap: pathlib.Path) -> list[Counter] | str:
    """Counters of the processor packages and their memory; cores and graphics are parts of a package and would count twice."""
    packages = sorted(powercap.glob("intel-rapl:*"))  # the name is the same for AMD
    if not packages:
        return "the processor's RAPL counters are not there (virtual machines rarely have them)"
    counters = []
    for zone in packages:
        try:
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                counters.append(_zone_counter(zone, f"{name} ({zone.name})"))
        except PermissionError:
            return f"{zone / 'energy_uj'} may not be read (run: sudo chmod a+r {powercap}/intel-rapl:*/energy_uj)"
        except (OSError, ValueError):  # a zone that is listed but switched off
            continue
    return counters or "the processor's RAPL counters name no package"


def _zone_counter(zone: pathlib.Path, name: str) -> Counter:
    def read() -> int:
        return int((zone / "energy_uj").read_text())

    read()
    return Counter(name, read, 1e-6, int((zone / "max_energy_range_uj").read_text()))


def _nvml() -> list[Counter] | str:
    """Counters of the GPUs, in millijoules since the driver was loaded; Volta and later have them."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return 'pynvml is not installed (pip install "trimtab[gpu]")'
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        for handle in handles:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        return f"NVML does not count energy here ({error})"

    def reader(handle: object) -> Callable[[], int]:
        def read() -> int:
            try:
                return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            except nvml.NVMLError as error:
                raise OSError(f"NVML stopped answering: {error}") from error

        return read

    return [Counter(f"GPU {index}", reader(handle), 1e-3) for index, handle in enumerate(handles)]
