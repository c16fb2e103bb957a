"""The bounded request queue of one model. Requests are grouped by shape and taken in batches by free instances."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from typing import Any

from trimtab.serve.protocol import Bytes, Call


@dataclasses.dataclass(slots=True)
class Answer:
    """The outputs of one request, and its times in seconds."""

    tensors: list[Bytes]
    shapes: list[list[int]]
    queue_s: float = 0.0
    """Time in the queue while all instances were busy."""
    wait_s: float = 0.0
    """Time in the queue while a free instance waited for a fuller batch; 0 without ``--max-wait``."""
    compute_s: float = 0.0
    batch_rows: int = 1

    def facts(self) -> dict[str, float]:
        """Times in milliseconds and batch size, for the request log and spans."""
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
    """How often an instance ended while it computed this request."""
    taken: float = 0.0


class Batcher:
    """A bounded queue. A free instance takes the oldest request and those that can be batched with it.

    Work-conserving: with ``max_wait_s=0`` a free instance never waits for a fuller batch. Batches form while instances work.
    """

    def __init__(self, *, rows: int, limit: int, max_wait_s: float = 0.0) -> None:
        self.rows, self.limit, self.max_wait_s = rows, limit, max_wait_s
        self.size = 0
        """Number of requests in the queue."""
        self._groups = dict[Any, collections.deque[Item]]()
        self._single = itertools.count()

    @property
    def full(self) -> bool:
        """Whether no further request is accepted."""
        return self.size >= self.limit

    def put(self, item: Item) -> None:
        """Append a request."""
        key: Any = next(self._single) if item.call.key is None else item.call.key
        self._groups.setdefault(key, collections.deque()).append(item)
        self.size += 1

    def put_back(self, item: Item) -> None:
        """Put an unanswered request back for a batch of its own. It keeps its time of arrival, and so its position."""
        self._groups[next(self._single)] = collections.deque([item])
        self.size += 1

    def take(self, now: float) -> tuple[list[Item], float]:
        """The next batch and 0. If there is none yet, an empty list and the seconds until one is due; 0 for an empty queue."""
        if not self._groups:
            return [], 0.0
        if len(self._groups) == 1:
            key, group = next(iter(self._groups.items()))
        else:
            key, group = min(self._groups.items(), key=lambda entry: entry[1][0].arrived)
        left = group[0].arrived + self.max_wait_s - now if self.max_wait_s else 0.0
        if left > 0 and not isinstance(key, int) and sum(item.call.rows for item in group) < self.rows:
            return [], left
        batch = [group.popleft()]
        rows = batch[0].call.rows
        while group and rows + group[0].call.rows <= self.rows:
            batch.append(group.popleft())
            rows += batch[-1].call.rows
        if not group:
            del self._groups[key]
        self.size -= len(batch)
        return batch, 0.0

    def remove(self, now: float | None = None) -> list[Item]:
        """Remove and return the requests that have expired by ``now``; all requests without it."""
        removed = list[Item]()
        for key, group in list(self._groups.items()):
            expired = [item for item in group if now is None or item.expires <= now or item.future.done()]
            if expired:
                removed += expired
                kept = [item for item in group if item not in expired]
                if kept:
                    self._groups[key] = collections.deque(kept)
                else:
                    del self._groups[key]
        self.size -= len(removed)
        return removed
