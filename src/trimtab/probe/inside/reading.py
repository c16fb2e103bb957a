"""Watch the reading of batches in any process: its time and opened files; in workers also the lines of the script.

A worker is killed with the run, so it writes what it saw after each batch.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from time import perf_counter_ns
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from trimtab.probe.inside import audit, clock, hooks, line_counts, lines
from trimtab.probe.inside.plan import PLAN, READING
from trimtab.probe.inside.sites import Place, function_of, is_script, place_of, site, text_at

TRACED = 2
"""The batch of the first worker whose lines are counted. The first batch may open files that all later ones use."""
MOST = 500_000
"""Most lines that are counted."""

opens: dict[int, list[int]] = {}
"""Id of a data set -> files opened for reading, and examples read, in this process."""
places: dict[int, list[Any]] = {}
"""Id of a data set -> indices of the last batch that this process read."""


def watch() -> None:
    """Time the reading of batches from now on."""
    worker: list[_Worker] = []

    def make(original: Any) -> Callable[..., Any]:
        def fetch(self: Any, index: Any) -> Any:
            number = id(self.dataset)
            many = isinstance(index, list | tuple)
            if get_worker_info() is not None:
                if not worker:
                    worker.append(_Worker(fetch.__code__))
                return worker[0].read(lambda: original(self, index), self.dataset, len(index) if many else 1)
            start, opened = perf_counter_ns(), audit.opened
            batch = original(self, index)
            clock.add(("read", number), perf_counter_ns() - start)
            files = opens.setdefault(number, [0, 0])
            files[0] += audit.opened - opened
            files[1] += len(index) if many else 1
            places[number] = index if many else [index]
            return batch

        return fetch

    for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
        hooks.replace(fetcher, "fetch", make)


def _claim_trace() -> bool:
    """Whether this worker traces a batch: the first worker of a run that creates the file does."""
    try:
        os.close(os.open(os.path.join(PLAN["out"], "traced"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:  # it exists; on a full disk nothing is traced
        return False
    return True


class _Worker:
    """A worker of a loader. A thread samples the line that reads, as :mod:`trimtab.probe.inside.lines` does in the main
    process. For one batch, Python's tracing counts the lines."""

    def __init__(self, fetch_code: Any) -> None:
        self._fetch_code = fetch_code
        self._main = threading.get_ident()
        self._file = os.open(os.path.join(PLAN["out"], READING), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._samples: Counter[Place | None] = Counter()
        self._reads = False
        self._batches = 0
        lines.shorten_switch_interval()
        threading.Thread(target=self._sample, name="trimtab", daemon=True).start()

    def read(self, fetch: Callable[[], Any], dataset: Any, examples: int) -> Any:
        """Read a batch with ``fetch`` and write what was recorded meanwhile. Returns the batch."""
        self._batches += 1
        info = get_worker_info()
        traced = self._batches == TRACED and info is not None and info.id == 0 and sys.gettrace() is None and _claim_trace()
        start, opened, self._reads = perf_counter_ns(), audit.opened, True
        try:
            batch = line_counts.counted(fetch, MOST) if traced else fetch()
        finally:
            self._reads = False
        row = {
            "dataset": id(dataset),
            "name": type(dataset).__name__,
            "ns": 0 if traced else perf_counter_ns() - start,
            "opened": audit.opened - opened,
            "examples": examples,
        }
        runs = dict(line_counts.found) if traced else {}
        samples, self._samples = Counter() if traced else self._samples, Counter()
        seen = dict.fromkeys([*samples, *runs])
        row["lines"] = [
            ["", "", "", samples[place], 0]
            if place is None
            else [site(place), text_at(place), function_of(place), samples[place], runs.get(place, 0)]
            for place in seen
        ]
        os.write(self._file, f"{json.dumps(row)}\n".encode())
        return batch

    def _sample(self) -> None:
        while True:
            time.sleep(lines.EVERY_S)
            here = sys._current_frames().get(self._main) if self._reads else None
            if here is not None:
                self._samples[self._place(here)] += 1

    def _place(self, here: FrameType | None) -> Place | None:
        """The innermost line of the script below the call of ``fetch``; ``None`` if there is none."""
        while here is not None and here.f_code is not self._fetch_code:
            number: int | None = here.f_lineno
            if number is not None and is_script(here.f_code):
                return place_of(here.f_code, number)
            here = here.f_back
        return None
