"""Energy per call, if the machine counts it: RAPL for CPUs, NVML for NVIDIA GPUs.

Source: https://www.kernel.org/doc/html/latest/power/powercap/powercap.html and the NVML API reference.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from trimtab.core.technique import install_hint
from trimtab.measure.timer import BLOCK_S, MAX_CALLS, Runner

POWERCAP = pathlib.Path("/sys/class/powercap")
METERED_S = 0.5
"""Seconds that a runner is metered. RAPL's counters are updated every millisecond, NVML's every 20 to 100."""


@dataclasses.dataclass(frozen=True)
class Counter:
    """One energy counter of the machine."""

    name: str
    read: Callable[[], int]
    """The counter's present value. Raises OSError if it can no longer be read."""
    joules: float
    """Joules per step of the counter."""
    wraps_at: int | None = None
    """The value after which it starts again at 0; ``None`` if it never does."""


class Meter:
    """Joules since the meter was made, of whole processors and GPUs, including other users' work.

    RAPL counters wrap after 60 to 260 kJ, which a large machine draws in minutes: call :meth:`joules` before that.
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = tuple(counters)
        self._last = [counter.read() for counter in self._counters]
        self._joules = [0.0] * len(self._counters)

    @property
    def scope(self) -> str:
        """The names of the counted devices, to print with the figure."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Energy:
    """The joules of one call, or the reason why they are unknown."""

    subject_j: float | None = None
    rival_j: float | None = None
    scope: str | None = None
    """The devices that were counted."""
    reason: str | None = None


class Power:
    """Watts drawn while runners work, from ``meter``, the result of :func:`energy_meter`."""

    def __init__(self, meter: Meter | str) -> None:
        self._meter = meter
        self._watts = collections.defaultdict[str, list[float]](list)

    def measure(self, name: str, runner: Runner, call_s: float) -> None:
        """Meter back-to-back calls of ``runner``, each of about ``call_s`` seconds."""
        if isinstance(self._meter, str):
            return
        calls = max(1, min(MAX_CALLS, int(BLOCK_S / call_s)))
        try:
            begun, before, elapsed = time.perf_counter(), self._meter.joules(), 0.0
            while elapsed < METERED_S:
                runner.block(calls)
                elapsed = time.perf_counter() - begun
            self._watts[name].append((self._meter.joules() - before) / elapsed)
        except OSError as error:
            self._meter = f"Energy cannot be measured here: {error}."

    def energy(self, subject_s: float, rival_s: float | None) -> Energy:
        """Energy per call of ``subject`` and ``rival``, the names that were metered, from their seconds per call."""
        if isinstance(self._meter, str):
            return Energy(reason=self._meter)
        if not any(map(sum, self._watts.values())):
            return Energy(reason="Energy cannot be measured here: its counters do not move.")
        watts = {name: statistics.mean(found) for name, found in self._watts.items()}
        rival_j = None if rival_s is None else watts["rival"] * rival_s
        return Energy(subject_j=watts["subject"] * subject_s, rival_j=rival_j, scope=self._meter.scope)


def energy_meter(powercap: pathlib.Path = POWERCAP) -> Meter | str:
    """A meter over all energy counters of this machine, or a sentence why there is none."""
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
    """Counters of processor packages and their memory. Cores and graphics are parts of a package and would count twice."""
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
        except (OSError, ValueError):  # a zone that is switched off
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
        return f"pynvml is not installed ({install_hint('pynvml')})"
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
