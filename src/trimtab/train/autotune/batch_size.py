"""Find the micro-batch size with the highest training throughput (examples/s) that fits in memory.

The largest size need not be the fastest: once the cores or the GPU are busy, larger batches only leave the caches. So sizes are
timed on real updates, in turns. Parameters, optimizer state, buffers and random generators are copied and restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from trimtab._internal.units import positive
from trimtab.core.measurement import Interval
from trimtab.errors import UsageError, WorkloadError
from trimtab.hardware.system import free_mb
from trimtab.measure.stats import median_interval
from trimtab.measure.timer import synchronizer
from trimtab.train.data.batch_structure import join, split
from trimtab.train.data.peek import peeking
from trimtab.train.engine import setup
from trimtab.train.engine.step import Step
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.memory.activation_budget import Verified, choose
from trimtab.train.memory.peak_activations import peak_activations
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import raise_unless_retryable
from trimtab.train.runtime.snapshots import rolled_back, why_parts_differ, zero_learning_rates
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import running

TIE = 0.02
"""Sizes whose throughput differs by a smaller fraction count as equally fast."""
_CLOSE, _FINALISTS = 0.15, 3
"""Sizes within this fraction of the fastest are timed again, and at least so many."""
_PATIENCE, _SWEEP_TIMINGS = 2, 3
"""Sizes in a row without an improvement after which the sweep ends; timings of each size, of which the best counts."""
_RAM_SHARE = 0.8
"""Fraction of the host's free memory that the search may use."""
_ROUNDS = 15
"""Most timings per finalist."""
_MAX_SHARE, _MIN_SAMPLES = 0.1, 8
"""A search takes at most this fraction of the run; it does not begin if that is less than so many samples or updates."""
_SAMPLE_S = 0.03
"""Seconds per sample: shorter samples depend on the scheduler if other processes use the same cores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """One size that was tried."""

    size: int
    """Examples per micro-batch."""
    rate: Interval | None = None
    """Examples per second, with the loader's time; ``None`` if the size did not run."""
    peak_mb: float | None = None
    """Peak of the activations in MB (10**6 bytes), if it was measured."""
    reason: str = ""
    """Why it did not run."""
    finalist: bool = False
    """Whether it was among the fastest of the sweep, and so was timed again."""

    def __str__(self) -> str:
        """A line for a person."""
        if self.rate is None:
            return f"{self.size}: {self.reason}"
        memory = "" if self.peak_mb is None else f", {self.peak_mb:,.1f} MB of activations"
        return f"{self.size}: {self.rate.value:,.1f} examples/s ({self.rate.low:,.1f} to {self.rate.high:,.1f}){memory}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The best size, and all that were tried, in order of size."""

    size: int
    tried: tuple[Tried, ...]
    loader_examples_per_s: float | None = None
    """Throughput of the loader alone."""

    def __str__(self) -> str:
        """A line per size."""
        return "\n".join([f"{self.size} examples at once.", *map(str, self.tried)])


class HasContext(Protocol):
    """The part of a Trainer that the search uses."""

    context: RunContext


def find_batch(
    trainer: HasContext,
    batches: Iterable[Batch],
    *,
    largest: int | None = None,
    limit_mb: float | None = None,
    seconds: float = 10.0,
) -> Found:
    """The batch size with the highest throughput for ``trainer``, including the loader's time; tries 1, 2, 4 and so on.

    The trainer is unchanged afterwards: its first update is the one that it would have made.

    Args:
        trainer: whose model, loss, optimizer and settings are timed.
        batches: a loader; as many batches are drawn as the largest size needs.
        largest: the largest size to try; by default 16 times a batch of the loader.
        limit_mb: most memory for activations, in MB (10**6 bytes); by default what the machine has.
        seconds: no new round of timing begins after this time.

    Raises:
        UsageError: a limit is not above zero, not even one example keeps it, or the loss makes its own steps.
        WorkloadError: the loader gives nothing, or batches that cannot be split or joined.
    """
    for name, value in (("largest", largest), ("limit_mb", limit_mb), ("seconds", seconds)):
        positive(1 if value is None else value, f"find_batch {name}")
    context = trainer.context
    if context.objective.manual:
        raise UsageError(
            "find_batch times updates of one backward pass and one step, and loss is a function that makes its own. Try "
            "several batch sizes in short runs, and compare their speeds: fit(train, steps=100).examples_per_s."
        )
    drawn, load_s = _read_batches(batches, largest)
    own, world = sum(examples(batch) for batch in drawn), context.world
    count, load_s = min(world.gathered(own)), world.average(load_s / own)  # seconds per example; processes try the same sizes
    pool = join(drawn)
    overlaps = bool(getattr(batches, "num_workers", 0)) or context.device.type == "cuda"
    called = world.wrap(context.model, context.settings, fresh=False)
    move = setup.apply_memory_format(context.model, context.settings, context.device)
    step = Step(called, context.objective, context.optimizer, context.settings, world, HostClock())
    sizes = [2**power for power in range(count.bit_length()) if 2**power <= min(count, largest or count)]
    was = {module: module.training for module in context.model.modules()}
    context.modes.find_frozen()
    context.modes.train()
    try:
        with context.eval_weights.modes.training(), running(context.settings):
            search = _Search(context, step, limit_mb, seconds, None)
            entries = search.run((size, [move(split(pool, size)[0])]) for size in sizes)
    finally:
        for module, training in was.items():
            module.training = training
    tried = tuple(entry.record(load_s, overlaps=overlaps) for entry in entries)
    return Found(size=_fastest(tried, smallest=True), tried=tried, loader_examples_per_s=1 / load_s if load_s else None)


def search_micro_batch(context: RunContext, step: Step, group: Sequence[Batch], *, updates: int | None) -> int:
    """The fastest size of micro-batches for the update of ``group``; writes it into the settings and notes it.

    The update itself stays the same. Among equally fast sizes it is the largest. It is the largest that fits, without a search,
    in two cases: a forward pass changes state, such as BatchNorm's statistics, which each micro-batch would change; or so few
    ``updates`` are to come that a search costs more than it saves. All processes get the same size.

    Raises:
        UsageError: not even one example fits.
        WorkloadError: batches cannot be split.
    """
    whole = int(step.world.average(float(max(examples(batch) for batch in group))))
    sizes = [max(whole >> power, 1) for power in range(max(whole, 1).bit_length())]
    search = _Search(context, step, None, 5.0, updates)
    candidates = ((size, parts(group, size)) for size in sizes)
    tried = tuple(entry.record(0.0) for entry in search.run(candidates, same_update=True))
    size = _fastest(tried, smallest=False)
    context.settings = context.settings.replaced({"data.micro_batch": size})
    context.decided["data.micro_batch"] = size
    kept = " Smaller ones are not tried, because the run is short." if search.short else ""
    kept = f" They are not made smaller for speed, because of {search.parts_differ}." if search.parts_differ else kept
    context.note(f"data.micro_batch={size}: examples, tried on updates of {whole}. " + "; ".join(map(str, tried)) + "." + kept)
    return size


def parts(group: Sequence[Batch], size: int) -> list[Batch]:
    """The batches of ``group``, split into parts of at most ``size`` examples."""
    return [part for batch in group for part in split(batch, size)]


@dataclasses.dataclass
class _Entry:
    """A size during the search."""

    size: int
    group: Sequence[Batch]
    examples: float
    """In ``group``; the mean over all processes."""
    plan: Verified | None = None
    peak: float | None = None
    """Of the activations, in bytes."""
    reason: str = ""
    updates: int = 1
    """Updates per timing."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Seconds per update, one per timing."""
    finalist: bool = False

    @property
    def rate(self) -> float:
        """Examples per second, by the best timing so far."""
        return self.examples / min(self.seconds)

    def record(self, load_s: float, *, overlaps: bool = False) -> Tried:
        """The result for the user. Loading takes ``load_s`` per example: before the update, or during it if it ``overlaps``."""
        peak = None if self.peak is None else self.peak / 1e6
        if self.reason:
            return Tried(size=self.size, peak_mb=peak, reason=self.reason)
        count = self.examples
        times = [max(one, load_s * count) if overlaps else one + load_s * count for one in self.seconds]
        rate = median_interval([count / one for one in times])
        return Tried(size=self.size, rate=rate, peak_mb=peak, finalist=self.finalist)


class _Search:
    """Sweeps sizes until throughput stops growing, then times the fastest ones in turns."""

    def __init__(self, context: RunContext, step: Step, limit_mb: float | None, seconds: float, updates: int | None) -> None:
        self.updates, self.short, self.parts_differ = updates, False, ""
        self.context, self.world = context, step.world
        model = getattr(step.model, "_orig_mod", step.model)  # compiling for each size takes longer than the search saves
        nonfinite = context.settings.optimizer.nonfinite
        waits = context.device.type == "cpu" or nonfinite in ("skip", "stop")  # for the device, in each update
        settings = context.settings.replaced({"optimizer.nonfinite": "skip" if waits else "ignore"})  # no error ends the search
        self.step = Step(model, context.objective, context.optimizer, settings, step.world, HostClock())
        self._wait = synchronizer(context.device)
        self.limit = None if limit_mb is None else limit_mb * 1e6
        self.seconds = seconds

    def run(self, candidates: Iterable[tuple[int, Sequence[Batch]]], *, same_update: bool = False) -> list[_Entry]:
        """The sizes that were tried, in order of size.

        Args:
            candidates: sizes and batches; no more are taken once throughput stops growing.
            same_update: whether all sizes must make the same update: the first that fits ends the sweep if a forward pass
                changes state.

        Raises:
            UsageError: none fits.
        """
        begun = time.perf_counter()
        model, optimizer, loss = self.context.model, self.context.optimizer, self.context.objective.module
        with rolled_back(model, optimizer, loss=loss) as kept, contextlib.ExitStack() as after:
            after.callback(self.world.drop_update)
            zero_learning_rates(optimizer)
            entries = self._sweep(candidates, lambda: why_parts_differ(kept, model) if same_update else "")
            able = [entry for entry in entries if not entry.reason]
            if not able:
                raise UsageError(f"No batch size can be used. {'; '.join(f'{e.size}: {e.reason}' for e in entries)}.")
            able.sort(key=lambda entry: entry.rate, reverse=True)
            final = [e for place, e in enumerate(able) if place < _FINALISTS or e.rate >= (1 - _CLOSE) * able[0].rate]
            for entry in final:
                entry.finalist = True
            for turn in range(_ROUNDS):
                if len(final) < 2 or self.world.any(time.perf_counter() - begun > self.seconds):
                    break
                for entry in final if turn % 2 else reversed(final):
                    entry.seconds.append(self._time(entry))
        return sorted(entries, key=lambda entry: entry.size)

    def _sweep(self, candidates: Iterable[tuple[int, Sequence[Batch]]], parts_differ: Callable[[], str]) -> list[_Entry]:
        entries: list[_Entry] = []
        best, behind, growing = 0.0, 0, False
        for size, group in candidates:
            growing = bool(entries) and size > entries[-1].size
            entry = _Entry(size, group, self.world.average(float(sum(map(examples, group)))))
            entry.reason = self._agreed(self._exceeds_memory(entries[-1], size) if growing else "") or self._attempt(entry)
            entries.append(entry)
            if entry.reason:
                if growing:  # what is larger will not fit either
                    break
                continue
            self.parts_differ = self._agreed(parts_differ(), "what another process has")
            if self.parts_differ or self.short:
                break
            behind = 0 if entry.rate > best * (1 + TIE) else behind + 1
            best = max(best, entry.rate)
            if behind >= _PATIENCE:
                break
        return entries

    def _attempt(self, entry: _Entry) -> str:
        """Run ``entry`` for the first time; the reason why it cannot run, or "", the same in all processes."""
        reason = self._guarded(self._fit, entry) or self._guarded(self._first_times, entry)  # processes make updates together
        if reason:
            self.step.discard()
            torch.cuda.empty_cache()  # no effect without a GPU
        return reason

    def _guarded(self, action: Callable[[_Entry], str], entry: _Entry) -> str:
        """The reason that ``action`` returns, or that it ran out of memory, or that BatchNorm refuses one example."""
        try:
            reason = action(entry)
        except (RuntimeError, MemoryError, ValueError) as error:
            if not (lonely := str(error).startswith("Expected more than 1 value per channel")):
                raise_unless_retryable(error, repeats=self.world.repeats)
            reason = "BatchNorm cannot be trained on one example" if lonely else "it does not fit into memory"
        return self._agreed(reason)

    def _first_times(self, entry: _Entry) -> str:
        first = self._time(entry)
        limit_s = math.inf if self.updates is None else _MAX_SHARE * (self.updates * first)
        self.seconds, self.short = min(self.seconds, limit_s), limit_s < _MIN_SAMPLES * max(first, _SAMPLE_S)
        entry.seconds += [first] if self.short else [self._time(entry) for _ in range(_SWEEP_TIMINGS)]
        return ""

    def _agreed(self, reason: str, others: str = "it does not fit into the memory of another process") -> str:
        """``reason``, or ``others`` if only another process has a reason: all processes go on alike."""
        return reason or others if self.world.any(bool(reason)) else ""

    def _fit(self, entry: _Entry) -> str:
        """Measure the activations of ``entry``, and plan their budget; the reason why it cannot be kept, or ""."""
        batch, context = max(entry.group, key=examples), self.context
        budget = context.settings.memory.activation_mb
        if budget is not None:
            try:
                entry.plan = plan_for(self.step, context.model, batch, budget, context.device)
            except UsageError as error:
                return str(error).partition(". ")[0]
            entry.peak = entry.plan.peak
        else:
            with discarding_gradients(self.step):
                entry.peak = peak_activations(lambda: backward(self.step, batch), context.model.parameters(), context.device)
            self.step.discard()
        limit = self.limit
        return "" if limit is None or entry.peak <= limit else f"it takes {entry.peak / 1e6:,.1f} MB of {limit / 1e6:g} allowed"

    def _exceeds_memory(self, before: _Entry, size: int) -> str:
        """Why ``size`` must not be tried, or "": a host that runs out of memory kills the process instead of raising."""
        expected = (before.peak or 0.0) * size / before.size
        free = 1e6 * free_mb() if self.context.device.type == "cpu" else math.inf
        return f"it would take about {expected / 1e6:,.0f} MB of {free / 1e6:,.0f} free" if expected > free * _RAM_SHARE else ""

    def _time(self, entry: _Entry) -> float:
        """Seconds per update, the mean over all processes."""
        recomputed = None if entry.plan is None else entry.plan.apply()
        try:
            self._wait()
            begun = time.perf_counter()
            for _ in range(entry.updates):
                self.step(entry.group)
            self._wait()
            taken = self.world.average(time.perf_counter() - begun) / entry.updates
            entry.updates = max(entry.updates, math.ceil(_SAMPLE_S / taken))
            return taken
        finally:
            if recomputed is not None:
                recomputed.undo()


def plan_for(step: Step, model: nn.Module, batch: Batch, budget_mb: float, device: torch.device) -> Verified:
    """The plan of modules to recompute so that the activations of ``batch`` stay within ``budget_mb`` (10**6 bytes).

    Raises:
        UsageError: no plan does; the message names the smallest budget that can be kept.
    """

    def loss() -> torch.Tensor:
        with step.precision():
            plain = getattr(step.model, "_orig_mod", step.model)
            return step.world.forward_alone(lambda: step.objective(plain, batch))[0]

    with discarding_gradients(step):
        return choose(model, loss, budget_mb * 1e6, device, loss=step.objective.module, world=step.world)


def discarding_gradients(step: Step) -> contextlib.AbstractContextManager[object]:
    """A block for backward passes whose gradients are discarded: processes do not exchange them.

    With FSDP they do, because FSDP adds gradients that were not exchanged to those of the next update.
    """
    return step.world.exchanging(now=step.settings.distributed.sharding != "replicate")


def backward(step: Step, batch: Batch) -> None:
    """A forward and backward pass as in ``step``, to measure it."""
    with step.precision():
        loss, _ = step.world.forward_alone(lambda: step.objective(step.model, batch))
    loss.backward()  # type: ignore[no-untyped-call]


def _read_batches(batches: Iterable[Batch], largest: int | None) -> tuple[list[Batch], float]:
    """Batches with ``largest`` examples in all, by default 16 batches, and the seconds that the loader took."""
    begun, drawn, count = time.perf_counter(), list[Batch](), 0
    with peeking(batches) as peeked:
        for batch in itertools.islice(peeked, None if largest else 16):
            drawn.append(batch)
            count += examples(batch)
            if largest and count >= largest:
                break
    if not drawn:
        raise WorkloadError("The loader gave no batch, so no batch size can be found. Give one with examples in it.")
    return drawn, time.perf_counter() - begun


def _fastest(tried: Sequence[Tried], *, smallest: bool) -> int:
    """The fastest finalist; among equally fast ones the smallest or the largest."""
    rates = {one.size: one.rate.value for one in tried if one.rate is not None and one.finalist}
    able = [size for size, rate in rates.items() if rate >= (1 - TIE) * max(rates.values())]
    return min(able) if smallest else max(able)
