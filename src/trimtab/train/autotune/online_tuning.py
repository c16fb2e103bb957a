"""Adjusting a run while it goes on: where updates wait for data or slow down, try other workers or micro-batches.

Updates are judged in windows, the stretches between two :class:`~trimtab.train.telemetry.events.Progressed` (``log_every``
updates). A
slowdown counts only if :data:`WINDOWS` of them in a row show it. A change is kept only if each of as many windows with it was
faster than each before it; otherwise it is undone, and the next one is tried.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import io
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from trimtab._internal.text import of_type
from trimtab.errors import WorkloadError
from trimtab.hardware.system import usable_cores
from trimtab.train.data.loader import Loader
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.run_context import RunContext
from trimtab.train.telemetry.events import Adjusted, Event, Progressed

if TYPE_CHECKING:
    from trimtab.train.engine.setup import Ready
    from trimtab.train.run_context import Position

WINDOWS = 3
"""If nothing changed, each of three windows is faster than each of three others once in twenty times."""
GROWN = 1.3
"""What takes so many times as long as it did has changed."""
MATTERS = 0.1
"""What makes an update longer by a smaller share than this is left alone."""
STARVED = 0.25
"""A share of the time that waiting for data may take before something is tried, even where it always did."""
MOST_WORKERS = 16
_MOST_LOOKED_AT = 100_000
"""Objects within a dataset: longer lists hold more of the same."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Means over the updates of one window."""

    step: float
    """Milliseconds per update, without what comes between updates, such as validation."""
    data: float
    """Of these, waiting for data."""
    compute: float
    """Of these, in the forward and backward pass."""
    examples: float
    """Per update and process."""


class Remedy(Protocol):
    """A change that may help, which takes effect with the next update, and can be undone."""

    what: str
    """In words, such as ``loader workers 0 -> 2``."""

    def why_not(self) -> str | None:
        """Why it cannot be tried, in a sentence."""

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> None:
        """Take it back."""


class Adjuster:
    """A callback that watches a run and adjusts it.

    Args:
        remedies: for ``data``, waiting for it, and for ``compute``, slow updates: functions that list what there is to try
            where updates are as in a given window.
    """

    def __init__(self, remedies: Mapping[str, Callable[[Window], Iterable[Remedy]]]) -> None:
        self.remedies = remedies
        self.usual: Window | None = None
        """What updates took before anything changed."""
        self._recent: collections.deque[Window] = collections.deque(maxlen=WINDOWS)
        self._without: collections.deque[Window] = collections.deque()
        """The windows before the remedy under trial."""
        self._trial: Remedy | None = None
        self._queue: list[Remedy] = []
        self._skip = True
        """Whether the next window is not counted: it warms up."""
        self._told: set[str] = set()

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
            self._look(context)
        else:
            self._judge(context, self._trial)

    def _look(self, context: RunContext) -> None:
        """Find out whether updates have slowed down, and try the next remedy against it."""
        first, now = self.usual is None, _typical(self._recent)
        usual = self.usual = self.usual or now
        if not self._queue:
            symptom = self._symptom(usual, now, first)
            if symptom is None:
                return
            self._queue = list(self.remedies[symptom](now))
        while self._queue:
            remedy = self._queue.pop(0)
            if (reason := remedy.why_not()) is None:
                remedy.apply()
                self._trial, self._without, self._skip = remedy, self._recent.copy(), True
                self._recent.clear()
                return
            if reason not in self._told:
                self._told.add(reason)
                context.note(f"{remedy.what} was not tried: {reason}")
        self._settle(now)

    def _symptom(self, usual: Window, now: Window, first: bool) -> str | None:
        """What has become slow: ``data`` or ``compute``."""
        if self._grown(usual, now, "data") or (first and now.data > STARVED * now.step):
            return "data"
        return "compute" if self._grown(usual, now, "compute") else None

    def _grown(self, usual: Window, now: Window, phase: str) -> bool:
        """Whether ``phase`` takes longer than it did in every recent window, and that makes an update longer."""
        before = getattr(usual, phase)
        more = getattr(now, phase) - before
        return more > MATTERS * now.step and all(getattr(window, phase) > GROWN * before for window in self._recent)

    def _judge(self, context: RunContext, remedy: Remedy) -> None:
        """Keep or undo the remedy under trial, now that it was seen in enough windows."""
        after, before, position = _typical(self._recent), _typical(self._without), context.position
        kept = max(window.step for window in self._recent) < min(window.step for window in self._without)
        if not kept:
            remedy.undo()
        context.emit(
            Adjusted(
                update=position.update,
                epoch=position.epoch,
                what=remedy.what,
                before=before.step,
                after=after.step,
                unit="ms per update",
                kept=kept,
            )
        )
        times = f"{before.step:.3g} -> {after.step:.3g} ms per update"
        context.note(f"{remedy.what}: {times}, {'kept' if kept else 'undone'} at update {position.update}.")
        self._trial, self._recent = None, self._without
        if kept or not self._queue:
            self._settle(after if kept else before)
        else:
            self._look(context)

    def _settle(self, now: Window) -> None:
        """From here on, ``now`` is what is usual."""
        self.usual, self._queue = now, []
        self._recent.clear()


class Workers:
    """Another number of worker processes for a :class:`~trimtab.train.data.loader.Loader`; its batches stay the same."""

    def __init__(self, feed: MicroBatcher, position: Position, count: int) -> None:
        self.feed, self.position, self.count = feed, position, count
        self.before = workers_of(feed.batches) or 0
        self.what = f"loader workers {self.before} -> {count}"

    def why_not(self) -> str | None:
        """Why the loader gets no other workers: it has none, or its dataset cannot be read in a process that is forked."""
        loader = self.feed.batches
        if not isinstance(loader, Loader):
            return f"the loader is {of_type(loader)}. Use trimtab.train.Loader, whose workers can be changed during a run."
        if (held := _unshareable((loader.dataset, loader._source))) is not None:
            return (
                f"its dataset holds what processes cannot share, {held}. Give the loader workers from the start, and have the "
                "dataset open such things when it reads its first example."
            )
        return _why_not_read(loader)

    def apply(self) -> None:
        """Have ``count`` workers."""
        self._use(self.count)

    def undo(self) -> None:
        """Have as many as before."""
        self._use(self.before)

    def _use(self, count: int) -> None:
        self.feed.batches.retune(workers=count)  # type: ignore[attr-defined]
        self.feed.begin(self.position.epoch, self.feed.taken)


class Micro:
    """Micro-batches of another size: as many examples per update, in more or fewer parts."""

    def __init__(
        self, feed: MicroBatcher, model: nn.Module, size: int, against: Callable[[], str | None] | None = None
    ) -> None:
        self.feed, self.model, self.before, self.size, self.against = feed, model, feed.micro, size, against
        self.what = f"micro-batch {self.before or 'whole'} -> {size}"

    def why_not(self) -> str | None:
        """Statistics over a batch, and losses that compare its examples, must stay those of the same batch."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in self.model.modules()):
            return "BatchNorm would see other batches."
        return None if self.against is None else self.against()

    def apply(self) -> None:
        """Take batches apart like this, as long as they can be."""
        self.feed.attempt(self.size)

    def undo(self) -> None:
        """As before."""
        self.feed.micro, self.feed.fallback = self.before, None


def adjuster(context: RunContext, ready: Ready) -> Adjuster:
    """What adjusts a run by the workers of its :class:`~trimtab.train.data.loader.Loader` and its micro-batches."""

    def data(now: Window) -> Iterator[Remedy]:
        count = workers_of(ready.feed.batches) or 0
        for more in sorted({max(2 * count, 2), usable_cores()}):
            if count < more <= MOST_WORKERS:
                yield Workers(ready.feed, context.position, more)

    def compute(now: Window) -> Iterator[Remedy]:
        feed = ready.feed
        against = functools.partial(context.fit.memory_plan.against_parts, ready.step)
        whole = round(now.examples / context.settings.data.accumulate)
        micro = min(feed.micro or whole, whole)
        if micro > 1:
            yield Micro(feed, context.model, -(-micro // 2), against)
        if micro < whole:
            yield Micro(feed, context.model, min(2 * micro, whole), against)

    return Adjuster({"data": data, "compute": compute})


def workers_of(loader: Any) -> int | None:
    """How many processes load for it; ``None`` where it knows no such thing."""
    found = getattr(loader, "num_workers" if isinstance(loader, DataLoader) else "workers", None)
    return found if isinstance(found, int) else None


def _unshareable(dataset: Any) -> str | None:
    """What ``dataset`` holds that forked processes cannot share: a tensor on a GPU, or something that is open.

    An open file has one position for all processes, so that each moves it for the others, who then silently read something
    else. Connections do not work in a forked process. What has a ``close()`` is taken for such a thing.
    """
    waiting, seen = collections.deque([dataset]), dict[int, Any]()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        item = waiting.popleft()
        if id(item) in seen or isinstance(item, (type, ModuleType, io.BytesIO, io.StringIO)):
            continue
        seen[id(item)] = item  # which is held, so that no other gets its id
        if isinstance(item, torch.Tensor):
            if item.device.type != "cpu":
                return f"a tensor on {item.device}"
        elif isinstance(item, np.ndarray):
            waiting.extend(item.flat if item.dtype.hasobject else ())
        elif callable(getattr(type(item), "close", None)):
            streams = (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr)
            if not getattr(item, "closed", False) and all(item is not stream for stream in streams):
                return f"{getattr(item, 'name', of_type(item))}, which is open"
        elif isinstance(item, FunctionType):  # its globals are no part of it
            waiting.extend((*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__))
        else:
            waiting.extend(itertools.islice(gc.get_referents(item), _MOST_LOOKED_AT))
    return None


def _why_not_read(loader: Loader) -> str | None:
    """Why a worker of ``loader`` cannot read its dataset, in a sentence; found out by having one read a batch."""
    trial = copy.copy(loader)
    trial.persistent = False
    trial.retune(workers=1, prefetch=1, pin=False)
    batches = iter(trial)
    try:
        next(batches)
    except WorkloadError as error:
        return f"a worker cannot read its dataset. {error}"
    finally:
        batches.close()  # type: ignore[attr-defined]
    return None


def _window(context: RunContext, event: Progressed) -> Window:
    """The window that ends with ``event``, as all processes together see it."""
    spent = {phase: share * event.step_ms for phase, share in event.shares.items()}
    step = sum(ms for phase, ms in spent.items() if phase != "other")
    data, compute = spent["data"], spent["forward"] + spent["backward"]
    agreed = context.world.agreed
    examples = event.examples_per_s * event.step_ms / 1e3 / context.world.size  # the event has those of all processes
    return Window(agreed(step), agreed(data), agreed(compute), agreed(examples))


def _typical(windows: Iterable[Window]) -> Window:
    """The median of each figure."""
    rows = zip(*(dataclasses.astuple(window) for window in windows), strict=True)
    return Window(*map(statistics.median, rows))
