"""Adjusting a run while it goes on: where its updates slow down, what may help is tried, measured, and undone if it does not.

Updates are judged in windows, the stretches between two :class:`~trimtab.train.events.Progressed` (``log_every`` updates). A
change counts only when it shows in :data:`WINDOWS` of them in a row, and a remedy is kept only if each window with it was
faster than each before it. Where updates are still slower with it than they usually were, what had slowed them down may have
passed by itself: the remedy is then taken back once more, and each window without it must be slower again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trimtab._machine import usable_cores
from trimtab._said import of_type
from trimtab.errors import WorkloadError
from trimtab.train.compiling import WORTH_S, CompiledStep
from trimtab.train.crossing import why_not_read, why_not_shared
from trimtab.train.draws import drew_in_worker
from trimtab.train.events import Adjusted, Event, Progressed
from trimtab.train.feed import Feed, Seekable
from trimtab.train.loader import Loader

if TYPE_CHECKING:
    from trimtab.train.position import Position
    from trimtab.train.prepare import Ready
    from trimtab.train.trainer import Trainer

WINDOWS = 3
"""If nothing changed, each of three windows is faster than each of three others once in twenty times."""
GROWN = 1.3
"""What takes so many times as long as it did has changed."""
MATTERS = 0.1
"""What makes an update longer by a smaller share than this is left alone."""
SLACK = 0.01
"""What is slower than it was by no more than this is as fast."""
STARVED = 0.25
"""A share of the time that waiting for data may take before something is tried, even where it always did."""
MOST_WORKERS = 16


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
    """A change that may help, and that can be undone."""

    what: str
    """In words, such as ``loader workers 0 -> 2``."""

    def why_not(self) -> str | None:
        """Why it cannot be tried, in a sentence."""

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> None:
        """Take it back."""

    def works(self, position: Position) -> bool:
        """Whether updates at ``position`` are made with it."""


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
        self._trial: _Trial | None = None
        self._queue: list[Remedy] = []
        self._begun = False
        self._told: set[str] = set()

    def __call__(self, trainer: Trainer, event: Event) -> None:
        """Take a window into account."""
        if not isinstance(event, Progressed):
            return
        if not self._begun:  # the first window warms up
            self._begun = True
            return
        window = _window(trainer, event)
        if self._trial is not None:
            self._judge(trainer, window, self._trial)
            return
        self._recent.append(window)
        if len(self._recent) == WINDOWS:
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
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
                self._trial = _Trial(remedy, tuple(self._recent))
                return
            if reason not in self._told:
                self._told.add(reason)
                trainer.note(f"{remedy.what} was not tried: {reason}")
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

    def _judge(self, trainer: Trainer, window: Window, trial: _Trial) -> None:
        """Keep or undo the remedy under trial, once it was seen in enough windows."""
        if not trial.takes(window, trainer.position):
            return
        assert self.usual is not None
        without = trial.back or trial.before
        after, before = _typical(trial.after), _typical(without)
        kept = max(one.step for one in trial.after) < min(one.step for one in without)
        if kept and not trial.back and after.step > (1 + SLACK) * self.usual.step:
            trial.remedy.undo()
            trial.again()
            return
        if kept and trial.back:
            trial.remedy.apply()
        elif not kept and not trial.back:
            trial.remedy.undo()
        trainer.emit(
            Adjusted(
                update=trainer.position.update,
                epoch=trainer.position.epoch,
                what=trial.remedy.what,
                before=before.step,
                after=after.step,
                unit="ms per update",
                kept=kept,
            )
        )
        times = f"{before.step:.3g} -> {after.step:.3g} ms per update"
        trainer.note(f"{trial.remedy.what}: {times}, {'kept' if kept else 'undone'} at update {trainer.position.update}.")
        self._trial = None
        usual, self._recent = self.usual, collections.deque(without, WINDOWS)
        if kept or not self._queue or (trial.back and self._symptom(usual, before, False) is None):
            self._settle(after if kept else before)
        else:
            self._look(trainer)

    def _settle(self, now: Window) -> None:
        """From here on, ``now`` is what is usual."""
        self.usual, self._queue = now, []
        self._recent.clear()


@dataclasses.dataclass
class _Trial:
    remedy: Remedy
    before: Sequence[Window]
    after: list[Window] = dataclasses.field(default_factory=list)
    back: list[Window] = dataclasses.field(default_factory=list)
    """Without the remedy again, where that is looked at."""
    seen: bool = False

    def takes(self, window: Window, position: Position) -> bool:
        """Whether ``window`` was the last one needed. The first with the remedy does not count: it begins or warms up."""
        if not self.seen:
            self.seen = self.remedy.works(position)
            return False
        now = self.back if len(self.after) == WINDOWS else self.after
        now.append(window)
        return len(now) == WINDOWS

    def again(self) -> None:
        """The remedy was taken back: the windows that come are without it."""
        self.seen = False


class Workers:
    """More processes that load: for a loader that can begin anywhere at once, for torch's from the next epoch on."""

    def __init__(self, feed: Feed, position: Position, count: int) -> None:
        self.feed, self.position, self.count = feed, position, count
        self.loader: Any = feed.batches
        self.before = workers_of(self.loader) or 0
        self.what = f"loader workers {self.before} -> {count}"
        self._epoch = position.epoch

    def why_not(self) -> str | None:
        """Nothing but the time may change: neither the order of the examples nor the random numbers in them."""
        if workers_of(self.loader) is None:
            return f"the loader, {of_type(self.loader)}, has no workers. Use trimtab.train.Loader."
        if isinstance(self.loader, Seekable):
            if not hasattr(self.loader, "retune"):
                return f"{of_type(self.loader)} has no retune(workers=...)."
            return why_not_shared(self.loader) or (why_not_read(self.loader) if isinstance(self.loader, Loader) else None)
        if getattr(type(self.loader), "__iter__", None) is not DataLoader.__iter__:
            return f"{of_type(self.loader)}, a loader class of its own, cannot be made anew. Use trimtab.train.Loader."
        if self.loader.batch_sampler is None or isinstance(self.loader.dataset, IterableDataset):
            return "the loader's dataset divides itself, so that other workers would give other batches."
        if reason := why_not_shared(self.loader):
            return reason
        try:
            random = drew_in_worker(self.loader)
        except WorkloadError as error:
            return f"a worker cannot read its dataset. {_last_line(error)}"
        if random:
            return "the dataset draws random numbers, which would be others with other workers. Use trimtab.train.Loader."
        return None

    def apply(self) -> None:
        """Have ``count`` workers."""
        self._use(self.count)

    def undo(self) -> None:
        """Have as many as before."""
        self._use(self.before)

    def works(self, position: Position) -> bool:
        """At once where the loader can begin anywhere."""
        return isinstance(self.loader, Seekable) or position.epoch > self._epoch

    def _use(self, count: int) -> None:
        self._epoch = self.position.epoch
        if isinstance(self.loader, Seekable):
            self.loader.retune(workers=count)  # type: ignore[attr-defined]
            self.feed.begin(self.position.epoch, self.feed.taken)
        else:
            self.feed.batches = self.loader if count == self.before else with_workers(self.loader, count)


class Micro:
    """Micro-batches of another size: as many examples per update, in more or fewer parts."""

    def __init__(self, feed: Feed, model: nn.Module, size: int, against: Callable[[], str | None] | None = None) -> None:
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

    def works(self, position: Position) -> bool:
        """From the next update on."""
        return True


class Compiled:
    """The model compiled where it was not, or as it was written where it was compiled."""

    def __init__(self, step: CompiledStep, seconds_left: float) -> None:
        self.step, self.seconds_left = step, seconds_left
        self.to = step.model is step.plain
        self.what = f"compile {not self.to} -> {self.to}"

    def why_not(self) -> str | None:
        """Compiling must be paid back."""
        if self.to and self.step.failure is not None:
            return f"the model cannot be compiled. {self.step.failure}"
        if self.to and self.seconds_left < WORTH_S:
            return f"about {self.seconds_left:.0f} s are left of the run, too little to pay back what compiling costs."
        return None

    def apply(self) -> None:
        """Compile, or leave off."""
        self.step.use(self.to)

    def undo(self) -> None:
        """As before."""
        self.step.use(not self.to)

    def works(self, position: Position) -> bool:
        """From the next update on."""
        return True


def adjuster(trainer: Trainer, ready: Ready) -> Adjuster:
    """What adjusts a run by its loader's workers, its micro-batches and its compilation."""

    def data(now: Window) -> Iterator[Remedy]:
        count = workers_of(ready.feed.batches) or 0
        for more in sorted({max(2 * count, 2), usable_cores()}):
            if count < more <= MOST_WORKERS:
                yield Workers(ready.feed, trainer.position, more)

    def compute(now: Window) -> Iterator[Remedy]:
        feed, step = ready.feed, ready.step
        against = functools.partial(trainer.run.room.against_parts, step)
        whole = round(now.examples / trainer.settings.accumulate)
        micro = min(feed.micro or whole, whole)
        if micro > 1:
            yield Micro(feed, trainer.model, -(-micro // 2), against)
        if micro < whole:
            yield Micro(feed, trainer.model, min(2 * micro, whole), against)
        if isinstance(step, CompiledStep):
            left = 0 if ready.updates is None else ready.updates - trainer.position.update
            yield Compiled(step, left * now.step / 1e3)

    return Adjuster({"data": data, "compute": compute})


def workers_of(loader: Any) -> int | None:
    """How many processes load for it; ``None`` where it knows no such thing."""
    found = getattr(loader, "num_workers" if isinstance(loader, DataLoader) else "workers", None)
    return found if isinstance(found, int) else None


def with_workers(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """A loader of the same batches in the same order, with ``count`` workers.

    Each epoch torch draws a seed for workers from the generator that the order may come from too, but for workers that stay
    only once. So this one draws as often as ``loader`` does, and where that has drawn its seed, from elsewhere.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores are right where they wait and do not compute: time will tell
        return DataLoader(
            loader.dataset,
            batch_sampler=loader.batch_sampler,
            num_workers=count,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator() if loader.persistent_workers else loader.generator,
            persistent_workers=loader.persistent_workers and count > 0,
            in_order=loader.in_order,
        )


def _window(trainer: Trainer, event: Progressed) -> Window:
    """The window that ends with ``event``, as all processes together see it."""
    spent = {phase: share * event.step_ms for phase, share in event.shares.items()}
    step = sum(ms for phase, ms in spent.items() if phase != "other")
    data, compute = spent["data"], spent["forward"] + spent["backward"]
    agreed = trainer.world.agreed
    examples = event.examples_per_s * event.step_ms / 1e3 / trainer.world.size  # the event has those of all processes
    return Window(agreed(step), agreed(data), agreed(compute), agreed(examples))


def _last_line(error: BaseException) -> str:
    """What ``error`` comes to; torch puts a worker's whole traceback into its words."""
    return str(error.__cause__ or error).strip().splitlines()[-1]


def _typical(windows: Iterable[Window]) -> Window:
    """The median of each figure."""
    rows = zip(*(dataclasses.astuple(window) for window in windows), strict=True)
    return Window(*map(statistics.median, rows))
