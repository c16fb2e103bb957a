"""The queue of one model: bounded, grouped by sizes, and emptied in batches by instances that are free."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from typing import Any

from trimtab.serve.protocol import Bytes, Call


@dataclasses.dataclass(slots=True)
class Answer:
    """The outputs of one request, and where its time went, in seconds."""

    tensors: list[Bytes]
    shapes: list[list[int]]
    queue_s: float = 0.0
    """While all instances were busy."""
    wait_s: float = 0.0
    """While an instance was free and waited for a fuller batch, which only ``--max-wait`` makes it do."""
    compute_s: float = 0.0
    batch_rows: int = 1

    def facts(self) -> dict[str, float]:
        """What a log of requests tells; times in milliseconds."""
        queue, wait, compute = (round(seconds * 1e3, 3) for seconds in (self.queue_s, self.wait_s, self.compute_s))
        return {"queue_ms": queue, "batch_wait_ms": wait, "compute_ms": compute, "batch_rows": self.batch_rows}


@dataclasses.dataclass(slots=True, eq=False)
class Item:
    """A request in the queue. Times are seconds of the event loop's clock."""

    call: Call
    arrived: float
    expires: float
    future: asyncio.Future[Answer]
    tries: int = 0
    """How often its instance died or failed while it held this request."""
    taken: float = 0.0


class Batcher:
    """A bounded queue. An instance that is free takes the oldest request and those that can be joined with it.

    Work-conserving: with ``max_wait_s=0`` a free instance never waits for a fuller batch. Batches form while instances work.
    """

    def __init__(self, *, rows: int, limit: int, max_wait_s: float = 0.0) -> None:
        self.rows, self.limit, self.max_wait_s = rows, limit, max_wait_s
        self.size = 0
        """Number of requests in the queue."""
        self._groups = dict[Any, collections.deque[Item]]()
        self._alone = itertools.count()

    @property
    def full(self) -> bool:
        """Whether no further request is accepted."""
        return self.size >= self.limit

    def put(self, item: Item) -> None:
        """Append a request."""
        key: Any = next(self._alone) if item.call.key is None else item.call.key
        self._groups.setdefault(key, collections.deque()).append(item)
        self.size += 1

    def put_back(self, item: Item) -> None:
        """Return a request that an instance did not answer. It keeps its time of arrival, and so its turn, and runs alone."""
        self._groups[next(self._alone)] = collections.deque([item])
        self.size += 1

    def take(self, now: float) -> tuple[list[Item], float]:
        """The next batch; or nothing, and the seconds after which the oldest request has waited long enough (0: empty)."""
        if not self._groups:
            return [], 0.0
        if len(self._groups) == 1:
            key, group = next(iter(self._groups.items()))
        else:
            key, group = min(self._groups.items(), key=lambda entry: entry[1][0].arrived)
        left = group[0].arrived + self.max_wait_s - now if self.max_wait_s else 0.0
        if left > 0 and not isinstance(key, int) and sum(item.call.rows for item in group) < self.rows:
            return [], left
        batch, rows = [group.popleft()], 0
        rows = batch[0].call.rows
        while group and rows + group[0].call.rows <= self.rows:
            batch.append(group.popleft())
            rows += batch[-1].call.rows
        if not group:
            del self._groups[key]
        self.size -= len(batch)
        return batch, 0.0

    def remove(self, late: float | None = None) -> list[Item]:
        """Remove and return the requests that expired at the time ``late``; all of them without it."""
        removed = list[Item]()
        for key, group in list(self._groups.items()):
            gone = [item for item in group if late is None or item.expires <= late or item.future.done()]
            if gone:
                removed += gone
                kept = [item for item in group if item not in gone]
                if kept:
                    self._groups[key] = collections.deque(kept)
                else:
                    del self._groups[key]
        self.size -= len(removed)
        return removed
