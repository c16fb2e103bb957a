"""Tune loader workers and micro-batch size during a run, where updates wait for data or slow down.

Updates are judged in windows: the ``log_every`` updates between two :class:`~trimtab.train.telemetry.events.Progressed` events.
A slowdown counts only if :data:`WINDOWS` windows in a row show it. A change is kept only if each of as many windows with it was
faster than each window before it; otherwise it is undone, and the next one is tried.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from trimtab._internal.text import of_type
from trimtab.hardware.system import usable_cores
from trimtab.train.data.loader import Loader
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.run_context import RunContext
from trimtab.train.telemetry.events import Adjusted, Event, Progressed

if TYPE_CHECKING:
    from trimtab.train.engine.setup import Ready
    from trimtab.train.run_context import Position

WINDOWS = 3
"""Windows before and after a change that are compared. Without an effect, three are faster than three others in 5% of cases."""
SLOWDOWN = 1.3
"""A phase has slowed down if it takes this many times as long as in the reference window."""
MIN_SHARE = 0.1
"""Slowdowns of a smaller share of an update are ignored."""
MAX_DATA_SHARE = 0.25
"""Share of an update spent waiting for data above which a change is tried even without a slowdown."""
MAX_WORKERS = 16


@dataclasses.dataclass(frozen=True)
class Window:
    """Means over the updates of one window."""

    step: float
    """Milliseconds per update, without validation and other work between updates."""
    data: float
    """Milliseconds of these that are spent waiting for data."""
    compute: float
    """Milliseconds of these that are spent in forward and backward passes."""
    examples: float
    """Examples per update and process."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A change that may make updates faster. It takes effect with the next update."""

    what: str
    """In words, such as ``loader workers 1 -> 2``."""
    apply: Callable[[], None]
    undo: Callable[[], None]
    why_not: Callable[[], str | None]
    """Returns why it cannot be tried, in a sentence; ``None`` if it can."""


class Adjuster:
    """A callback that watches a run and changes it.

    Args:
        changes: for the symptoms ``data`` (updates wait for data) and ``compute`` (updates are slow): a function that lists
            what can be tried, given the present window.
        target_ms: milliseconds per update; as long as updates take longer, something is tried although none has slowed down.
    """

    def __init__(self, changes: Mapping[str, Callable[[Window], Iterable[Change]]], target_ms: float | None = None) -> None:
        self.changes, self.target_ms = changes, target_ms
        self._exhausted: list[str] = []
        """Symptoms whose changes were tried for the target and not kept."""
        self.reference: Window | None = None
        """The window that slowdowns are measured against."""
        self._recent: collections.deque[Window] = collections.deque(maxlen=WINDOWS)
        self._before_change: collections.deque[Window] = collections.deque()
        """The windows before the change under trial."""
        self._trial: Change | None = None
        self._queue: list[Change] = []
        self._skip = True
        """Whether the next window is left out as a warm-up."""
        self._refusals: set[str] = set()
        """Reasons that were noted, so that each is noted once."""

    def __call__(self, context: RunContext, event: Event) -> None:
        """Take a window into account."""
        if not isinstance(event, Progressed):
            return
        if self._skip:
            self._skip = False
            return
        self._recent.append(_window(context, event))
        if len(self._recent) < WINDOWS:
            return
        if self._trial is None:
            self._try_next(context)
        else:
            self._judge(context, self._trial)

    def _try_next(self, context: RunContext) -> None:
        """Apply the next change if updates have slowed down."""
        first, now = self.reference is None, _median(self._recent)
        reference = self.reference = self.reference or now
        if not self._queue:
            symptom = self._symptom(reference, now, first) or self._over_target(context, now)
            if symptom is None:
                return
            self._queue = list(self.changes[symptom](now))
        while self._queue:
            change = self._queue.pop(0)
            if (reason := change.why_not()) is None:
                change.apply()
                self._trial, self._before_change, self._skip = change, self._recent.copy(), True
                self._recent.clear()
                return
            if reason not in self._refusals:
                self._refusals.add(reason)
                context.note(f"{change.what} was not tried: {reason}")
        self._set_reference(now)

    def _symptom(self, reference: Window, now: Window, first: bool) -> str | None:
        """The phase that has slowed down: ``data``, ``compute``, or ``None``."""
        if self._slowed_down(reference, now, "data") or (first and now.data > MAX_DATA_SHARE * now.step):
            return "data"
        return "compute" if self._slowed_down(reference, now, "compute") else None

    def _over_target(self, context: RunContext, now: Window) -> str | None:
        """The phase to improve if updates take longer than the target: the slower one first; ``None`` if there is none."""
        if self.target_ms is None or now.step <= self.target_ms:
            return None
        left = [each for each in sorted(self.changes, key=lambda name: -getattr(now, name)) if each not in self._exhausted]
        if left:
            self._exhausted.append(left[0])
            return left[0]
        context.note_once(
            f"target_ms is {self.target_ms:g}, and an update takes more, with what workers and micro-batch can do. Precision, "
            "compilation and layout are never changed within a run, because its losses would change; tune() compares them."
        )
        return None

    def _slowed_down(self, reference: Window, now: Window, phase: str) -> bool:
        """Whether ``phase`` has slowed down in every recent window, by an amount that matters to the update."""
        before = getattr(reference, phase)
        more = getattr(now, phase) - before
        return more > MIN_SHARE * now.step and all(getattr(window, phase) > SLOWDOWN * before for window in self._recent)

    def _judge(self, context: RunContext, change: Change) -> None:
        """Keep or undo the change under trial."""
        after, before, position = _median(self._recent), _median(self._before_change), context.position
        kept = max(window.step for window in self._recent) < min(window.step for window in self._before_change)
        if kept:
            self._exhausted = []
        else:
            change.undo()
        context.emit(
            Adjusted(
                update=position.update,
                epoch=position.epoch,
                what=change.what,
                before=before.step,
                after=after.step,
                unit="ms per update",
                kept=kept,
            )
        )
        times = f"{before.step:.3g} -> {after.step:.3g} ms per update"
        context.note(f"{change.what}: {times}, {'kept' if kept else 'undone'} at update {position.update}.")
        self._trial, self._recent = None, self._before_change
        if kept or not self._queue:
            self._set_reference(after if kept else before)
        else:
            self._try_next(context)

    def _set_reference(self, now: Window) -> None:
        """Measure later slowdowns against ``now``."""
        self.reference, self._queue = now, []
        self._recent.clear()


def workers_change(feed: MicroBatcher, position: Position, count: int) -> Change:
    """Have ``count`` worker processes read for the :class:`~trimtab.train.data.loader.Loader`; its batches stay the same.

    It is refused if the loader has no workers yet, because its dataset might not be readable in another process. For instance,
    an open file has one position for all processes, which would silently read other data.
    """
    before = workers_of(feed.batches) or 0

    def use(count: int) -> None:
        feed.batches.retune(workers=count)  # type: ignore[attr-defined]
        feed.begin(position.epoch, feed.taken)

    def why_not() -> str | None:
        if not isinstance(feed.batches, Loader):
            return (
                f"the loader is {of_type(feed.batches)}. Use trimtab.train.Loader, whose workers can be changed during a run."
            )
        if before:
            return None
        return "the loader reads in this process. Give it workers=1 if its dataset can be read in other processes."

    return Change(f"loader workers {before} -> {count}", lambda: use(count), lambda: use(before), why_not)


def micro_batch_change(
    feed: MicroBatcher, model: nn.Module, size: int, why_not_split: Callable[[], str | None] | None = None
) -> Change:
    """Have micro-batches of ``size`` examples; an update has as many examples as before.

    It is refused where a smaller batch gives other updates: with BatchNorm, or for the reason that ``why_not_split`` returns.
    """
    before = feed.micro

    def undo() -> None:
        feed.micro, feed.fallback = before, None

    def why_not() -> str | None:
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in model.modules()):
            return "BatchNorm would see other batches."
        return None if why_not_split is None else why_not_split()

    return Change(f"micro-batch {before or 'whole'} -> {size}", lambda: feed.attempt(size), undo, why_not)


def adjuster(context: RunContext, ready: Ready) -> Adjuster:
    """The callback that tunes the workers of the loader and the micro-batch size of a run."""

    def data(now: Window) -> Iterator[Change]:
        count = workers_of(ready.feed.batches) or 0
        for more in sorted({max(2 * count, 2), usable_cores()}):
            if count < more <= MAX_WORKERS:
                yield workers_change(ready.feed, context.position, more)

    def compute(now: Window) -> Iterator[Change]:
        feed = ready.feed
        why_not_split = functools.partial(context.fit.memory_plan.sizer.why_not_split, ready.step)
        whole = round(now.examples / context.settings.data.accumulate)
        micro = min(feed.micro or whole, whole)
        if micro > 1:
            yield micro_batch_change(feed, context.model, -(-micro // 2), why_not_split)
        if micro < whole:
            yield micro_batch_change(feed, context.model, min(2 * micro, whole), why_not_split)

    return Adjuster({"data": data, "compute": compute}, context.settings.target_ms)


def workers_of(loader: Any) -> int | None:
    """The number of worker processes of a ``DataLoader`` or ``Loader``; ``None`` for another loader."""
    found = getattr(loader, "num_workers" if isinstance(loader, DataLoader) else "workers", None)
    return found if isinstance(found, int) else None


def _window(context: RunContext, event: Progressed) -> Window:
    """The window that ends with ``event``: the mean of all processes."""
    spent = {phase: share * event.step_ms for phase, share in event.shares.items()}
    step = sum(ms for phase, ms in spent.items() if phase != "other")
    data, compute = spent["data"], spent["forward"] + spent["backward"]
    average = context.world.average
    examples = event.examples_per_s * event.step_ms / 1e3 / context.world.size  # the event counts those of all processes
    return Window(average(step), average(data), average(compute), average(examples))


def _median(windows: Iterable[Window]) -> Window:
    """The median of each value."""
    rows = zip(*(dataclasses.astuple(window) for window in windows), strict=True)
    return Window(*map(statistics.median, rows))
