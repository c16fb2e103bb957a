"""Words for remedies, phases and gains of a script."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from trimtab._internal.text import counted
from trimtab.core.diagnosis import standing
from trimtab.core.evidence import Phase, ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.measurement import Interval
from trimtab.core.script_settings import LoaderSettings, ScriptSettings
from trimtab.report import formatting as words

PHASES: tuple[str, ...] = typing.get_args(Phase)
ANCHORS = {
    "optimizer": "one update of the parameters",
    "backward": "one backward pass",
    "batch": "one batch of the loader",
    "forward": "one call of the model",
}
SETTINGS: Mapping[str, str] = {
    "set_to_none": "zero_grad(set_to_none=True)",
    "no_grad": "no gradients in evaluation mode",
    "trim_padding": "padding cut off",
    "channels_last": "channels_last layout",
    "compile": "torch.compile",
    "compile_dynamic": "torch.compile(dynamic=True)",
    "debug_off": "anomaly mode off",
    "float32": "float32 in place of float64",
    "keep_freed": "freed memory kept in the process",
    "batch_fetch": "whole batches read at once",
}
LEAST_ADDED_MB = 1.0
"""Memory that a line must have added to be told."""
KEPT = {"persistent": "kept over epochs", "pin_memory": "pinned memory"}
CONTAINED = {
    "overlay": "in a copy of its folder (overlay): nothing that you have is touched",
    "guarded": "where it is, guarded: a write to a file that existed ends the run",
    "in place": "in place, as asked",
}


def described(settings: ScriptSettings) -> str:
    """``fused optimizer, 2 workers (train.py:35)``."""
    return ", ".join(_parts(settings)) or "nothing changed"


def _parts(settings: ScriptSettings) -> Iterator[str]:
    for name, value in settings.changes().items():
        if name == "loaders":
            for site, loader in settings.loaders.items():
                if changed := ", ".join(_loader_parts(loader)):
                    yield f"{changed} ({site})"
        elif name == "environment":
            yield from (f"{key}={text}" for key, text in settings.environment.items())
        elif name == "without":
            yield f"without {', '.join(settings.lines) if value == 'lines' else value}"
        elif name == "lines":
            continue
        elif name == "files":
            yield "the patched script"
        elif name in SETTINGS:
            yield SETTINGS[name]
        elif name == "threads":
            yield words.count(value, "thread")
        else:
            yield f"{value} {name}"


def _loader_parts(loader: LoaderSettings) -> Iterator[str]:
    for field in dataclasses.fields(loader):
        value: Any = getattr(loader, field.name)
        if value is None or (field.name == "batch_fetch" and not value):
            continue
        if field.name == "workers":
            yield words.count(value, "worker")
        elif field.name == "prefetch":
            yield f"{words.count(value, 'batch')} read ahead"
        elif field.name in KEPT:
            yield f"{'' if value else 'not '}{KEPT[field.name]}"
        elif field.name in SETTINGS:
            yield SETTINGS[field.name]
        else:
            yield f"{field.name}={value}"


def remedy(finding: Finding) -> str:
    """What to do about ``finding``, with its line."""
    if standing(finding) != "advice" and finding.settings is not None:
        where = f" ({finding.where})" if finding.where and not finding.settings.loaders else ""
        return f"{described(finding.settings)}{where}"
    if finding.edit is not None:
        return f"{finding.edit.site}: {finding.edit.advice}"
    return f"{finding.where}: {finding.message}" if finding.where else finding.message


def gain(found: Interval | None) -> str:
    """A speed-up with its interval, or that it was not measured."""
    return words.UNKNOWN if found is None else found.times()


def shares(record: ProbeRecord) -> list[tuple[str, float, float]]:
    """``(phase, ms per step, share)`` of a step, in the order of :data:`PHASES`, without empty phases; shares add up to 1."""
    total = sum(record.phases.values())
    names = [*PHASES, *(name for name in record.phases if name not in PHASES)]
    found = [(name, record.phases[name]) for name in names if record.phases.get(name, 0.0) > 0]
    return [(name, ms, ms / total) for name, ms in found] if total > 0 else []


def step(record: ProbeRecord) -> str:
    """What a step is, how long it takes, and how many were seen."""
    seen = f"{words.count(record.steps, 'step')} measured"
    median = f"median {words.milliseconds(record.median_ms)}"
    where = f" ({record.anchor_site})" if record.anchor_site else ""
    return f"A step is {ANCHORS[record.anchor]}{where}: {words.milliseconds(record.step_ms)} ({median}; {seen})"


def losses(finding: Finding) -> str:
    """Whether the losses stayed."""
    return f"losses {finding.losses}"


def unmeasured(finding: Finding) -> str:
    """Why the gain of ``finding`` is not known."""
    return (finding.unmeasured or "the budget was spent").removesuffix(".")


def run_parts(record: ProbeRecord) -> list[tuple[str, float]]:
    """Seconds of the parts of the whole run that took any."""
    return [(name, seconds) for name, seconds in record.run_s.items() if seconds > 0]


def memory(record: ProbeRecord) -> str | None:
    """Peak and growth of the memory in one sentence."""
    found = record.memory
    if found is None:
        return None
    text = f"peak {words.megabytes(found.peak_mb)}, {words.megabytes(found.at_start_mb)} before the first step"
    if found.growth_low_mb > 0:
        text += f"; grows by {words.megabytes(found.growth_mb)} per step"
        text += f" at {found.grows_at}" if found.grows_at else ""
    if found.lines and found.lines[0][1] >= LEAST_ADDED_MB:
        where, added = found.lines[0]
        text += f"; most is added while {where} runs, {words.megabytes(added)} over {counted(record.steps, 'step')}"
    if found.reserved_mb is not None and found.allocated_mb is not None:
        idle = found.reserved_mb - found.allocated_mb
        text += f"; the GPU's allocator reserves {words.megabytes(idle)} more than is allocated"
    return text


def used(record: ProbeRecord) -> str:
    """CPU, GPU and energy during the steps in one sentence; of what is not known, the reason."""
    cpu = f"{words.share(record.cpu_share, 0)} of {words.count(record.cores, 'core')}"
    parts = [f"{cpu}, other processes {words.share(record.others_share, 0)}"]
    if record.gpu_share is not None:
        parts.append(f"GPU {words.share(record.gpu_share, 0)}")
    elif record.device != "cpu":
        parts.append("GPU not known: NVML is needed (pip install nvidia-ml-py)")
    if record.energy_j is not None:
        parts.append(f"{words.digits(record.energy_j)} J a step ({record.energy})")
    elif record.energy:
        parts.append(record.energy.rstrip("."))
    return "; ".join(parts)
