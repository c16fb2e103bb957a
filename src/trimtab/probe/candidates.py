"""Candidate settings for a script in addition to the remedies of checks; their thresholds are lower than those of checks."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.core.evidence import LoaderRecord, ProbeRecord
from trimtab.core.script_settings import LoaderSettings, ScriptSettings

WAITS = 0.03
"""Share of a step spent waiting for data from which on other workers are tried."""
FAULT_MS, FAULTS = 0.4e-3, 0.01
"""Estimated milliseconds of a page fault, and their share of a step from which on huge pages, and keeping freed memory, are
tried."""
PADDING = 0.05
"""Share of padding from which on columns are trimmed."""


def candidates(record: ProbeRecord) -> Iterator[ScriptSettings]:
    """The settings to try for a script; their gain shows only in a measurement."""
    yield from _step(record)
    ranks = record.distributed.ranks if record.distributed is not None else 1
    cores = max(1, record.cores // ranks)
    for loader in record.loaders:
        found = list(_loader(loader, record))
        for settings in found:
            yield ScriptSettings(loaders={loader.site: settings})
        # on two cores a worker made a step 0.84 times as fast beside two threads of the model, and 1.16 times beside one
        most = max(found, key=lambda settings: settings.workers or 0, default=LoaderSettings())
        spare = max(1, cores - (most.workers or 0))
        if (most.workers or 0) > loader.workers and record.threads > spare:
            yield ScriptSettings(loaders={loader.site: most}, threads=spare)
    for threads in sorted({1, max(1, cores // 2), cores} - {record.threads}, reverse=True):
        yield ScriptSettings(threads=threads)


def left_out(record: ProbeRecord) -> Iterator[str]:
    """Sentences about settings of loaders that would fit but cannot be applied safely."""
    for loader in record.loaders:
        if loader.iterable:
            why = "its data set is iterable, and each worker would read all of it"
        elif loader.draws:
            why = "reading an example draws random numbers, and workers would draw others"
        else:
            continue
        if _waits(loader, record) > WAITS:
            yield f"Another number of workers for {loader.site} was left out: {why}."


def _waits(loader: LoaderRecord, record: ProbeRecord) -> float:
    """Share of a step spent waiting for the loader."""
    return loader.wait_ms * loader.batches / max(1, record.steps) / max(record.step_ms, 1e-9)


def _step(record: ProbeRecord) -> Iterator[ScriptSettings]:
    if any(module.gradients_unused for module in record.modules):
        yield ScriptSettings(no_grad=True)
    if any((loader.padding or 0.0) > PADDING for loader in record.loaders):
        yield ScriptSettings(trim_padding=True)
    if any(module.convolutions and module.channels_last < 1 for module in record.modules):
        yield ScriptSettings(channels_last=True)
    own = [optimizer for optimizer in record.optimizers if optimizer.kernel in ("single", "foreach")]
    if any(optimizer.can_fuse for optimizer in own):
        yield ScriptSettings(optimizer="fused")
    elif any(optimizer.kernel == "single" for optimizer in own):
        yield ScriptSettings(optimizer="foreach")
    if any(each.recompiles for each in record.recompiles):
        yield ScriptSettings(compile_dynamic=True)
    if any(optimizer.zero_filled for optimizer in record.optimizers):
        yield ScriptSettings(set_to_none=True)
    memory = record.memory
    if memory is not None and record.device == "cpu" and memory.page_faults * FAULT_MS > FAULTS * record.step_ms:
        if memory.huge_pages:
            yield ScriptSettings(environment=memory.huge_pages)
        yield ScriptSettings(keep_freed=True)


def _loader(loader: LoaderRecord, record: ProbeRecord) -> Iterator[LoaderSettings]:
    waits = _waits(loader, record)
    batched = (loader.batch_fetch or loader.tensors) and not loader.iterable
    if batched and (waits > WAITS or loader.workers):
        yield LoaderSettings(workers=0, batch_fetch=True) if loader.workers else LoaderSettings(batch_fetch=True)
    if loader.iterable or loader.draws:
        return
    if loader.workers and waits > WAITS:
        yield LoaderSettings(workers=0)
    spare = record.cores - 1
    if spare > 0 and waits > WAITS and not batched:
        more = sorted({1, min(spare, 4)} - {loader.workers})
        for workers in more:
            yield LoaderSettings(workers=workers, persistent=True)
    if loader.workers and loader.iterators > 1 and not loader.persistent:
        yield LoaderSettings(persistent=True)
    if record.device.startswith("cuda") and not loader.pin_memory:
        yield LoaderSettings(pin_memory=True)
