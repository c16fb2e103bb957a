"""One loaded version of a model: its queue, its instances, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.hardware import system
from trimtab.serve.batcher import Answer, Batcher, Item
from trimtab.serve.connection import Instance, StartError
from trimtab.serve.drift import InputDrift
from trimtab.serve.frames import unpack
from trimtab.serve.metrics import ModelMetrics
from trimtab.serve.protocol import Bytes, Call, Interface, Refusal
from trimtab.serve.shadow import Shadow

SWEEP_S = 0.02
"""Seconds between two checks for expired requests and hanging instances."""
SAMPLE_INPUTS_S = 0.05
"""Least seconds between two requests whose inputs are sampled for :class:`InputDrift`."""
RETRY_DELAY_S = 0.02
"""Seconds between the end of an instance and the retry of its requests: others that were killed with it have ended by then."""
STALLED_S = 60.0
"""Seconds after which an instance that computes one batch counts as hanging and is killed."""
STABLE_S, LONGEST_PAUSE_S = 10.0, 30.0
"""An instance that ends within ``STABLE_S`` of its start is restarted after a pause, doubled up to ``LONGEST_PAUSE_S``."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Number of instances, threads of each (``None``: as the artifact says), and rows of the largest batch."""

    instances: int = 1
    threads: int | None = None
    rows: int = 16
    pinned: bool = False
    """Whether each instance runs on cores of its own."""


class Deployment:
    """The instances of one version of a model, and the requests that wait for them."""

    def __init__(
        self,
        path: pathlib.Path,
        layout: Layout,
        metrics: ModelMetrics,
        log: Callable[..., None],
        *,
        trust: bool = False,
        queue: int = 256,
        max_wait_s: float = 0.0,
        shadow: Shadow | None = None,
    ) -> None:
        self.path, self.layout, self.trust, self.metrics = path, layout, trust, metrics
        self.batcher = Batcher(rows=layout.rows, limit=queue, max_wait_s=max_wait_s)
        self.instances: list[Instance] = []
        self.interface: Interface | None = None
        self.description: dict[str, Any] = {}
        self.stopping = False
        self._shadow = shadow
        self._next_sample = 0.0
        self._log, self._pause_s = log, 0.0
        self._tasks = set[asyncio.Task[Any]]()
        self._loop, self._work = asyncio.get_running_loop(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False

    @property
    def ready(self) -> bool:
        """Whether an instance can take requests now."""
        return not self.stopping and any(instance.state == "ready" for instance in self.instances)

    @property
    def busy(self) -> bool:
        """Whether requests wait or are being computed."""
        return bool(self.batcher.size) or any(instance.batch for instance in self.instances)

    async def start(self) -> None:
        """Start all instances and wait until each has replayed the test vectors.

        Raises:
            StartError: one of them did not become ready; all are stopped.
        """
        self.instances = [self._instance(number) for number in range(self.layout.instances)]
        try:
            starting = [one.start() for one in self._processes()]
            found = await asyncio.gather(*starting, return_exceptions=True)
            if failed := [error for error in found if error is not None]:
                raise failed[0]
        except BaseException:  # cancelled, too: no process is left
            await self.stop()
            raise
        self.description = self.instances[0].description
        self.interface = Interface.from_json(self.description)
        if "known" in self.description:
            self.metrics.inputs = InputDrift(self.interface.inputs, self.description["known"])
        if self._shadow is not None:
            self.metrics.outputs = self._shadow.drift
        self._spawn(self._sweep())

    def _processes(self) -> list[Instance | Shadow]:
        return [*self.instances, *([] if self._shadow is None else [self._shadow])]

    def _instance(self, number: int) -> Instance:
        layout = self.layout
        settings = {"path": str(self.path), "trust": self.trust, "threads": layout.threads, "rows": layout.rows}
        return Instance(settings | {"cores": _cores(number, layout)}, self._on_reply, self._on_close)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, call: Call, timeout_s: float) -> asyncio.Future[Answer]:
        """Queue a request. The future gets its answer, or a ``Refusal``: 504 after ``timeout_s`` in the queue, 503 if the
        version is stopped, 500 or 400 if the model fails on these inputs alone.

        Raises:
            Refusal: 503 if the queue is full or the version is being stopped.
        """
        if self.stopping:
            raise Refusal(503, "The server is stopping and takes no further requests.", 1)
        if self.batcher.full:
            raise Refusal(503, f"The queue of {self.batcher.limit} requests is full. Try again later.", 1)
        now = self._loop.time()
        item = Item(call, now, now + timeout_s, self._loop.create_future())
        self.batcher.put(item)
        self._work.set()
        if not self._scheduled:  # once per turn of the event loop, so that requests that arrive together share a batch
            self._scheduled = True
            self._loop.call_soon(self._dispatch)
        return item.future

    def _dispatch(self) -> None:
        """Give batches to free instances."""
        self._scheduled = False
        for instance in self.instances:
            if not self.batcher.size:
                return
            if not instance.free:
                continue
            now = self._loop.time()
            batch, wait_s = self.batcher.take(now)
            if not batch:
                if wait_s and self._timer is None:
                    self._timer = self._loop.call_later(wait_s, self._on_timer)
                return
            for item in batch:
                item.taken = now
            if any(item.expires <= now or item.future.done() for item in batch):
                batch = self._without_expired(batch, now)
            if batch:
                instance.send(batch, now)

    def _on_timer(self) -> None:
        self._timer = None
        self._dispatch()

    def _without_expired(self, batch: list[Item], now: float) -> list[Item]:
        for item in batch:
            if item.expires <= now:
                _refuse(item, Refusal(504, "The deadline passed while the request was in the queue; it was not begun."))
        return [item for item in batch if not item.future.done()]

    def _on_reply(self, instance: Instance, head: dict[str, Any], body: memoryview) -> None:
        batch, instance.batch, now = instance.batch, [], self._loop.time()
        wait_s, instance.since = instance.free_s if self.batcher.max_wait_s else 0.0, now
        self._dispatch()  # before the answers are written, so that the instance is not idle
        if "error" in head:
            self._retry_or_refuse(batch, Refusal(400 if head["input"] else 500, head["error"]))
            return
        assert self.interface is not None
        compute_s, rows = head["compute"], sum([item.call.rows for item in batch])
        self.metrics.count_batch(rows, compute_s, head["cpu"])
        shadow = self._shadow
        for item, answer in zip(batch, _split(batch, self.interface, head["shapes"], body, rows), strict=True):
            if item.future.done():
                continue
            waited = item.taken - item.arrived
            answer.wait_s = min(waited, wait_s)
            answer.queue_s, answer.compute_s, answer.batch_rows = waited - answer.wait_s, compute_s, rows
            item.future.set_result(answer)
            if shadow is not None and shadow.sampled():
                self._loop.call_soon(shadow.compare, item.call, answer)  # after the answer has been written
        if now >= self._next_sample and self.metrics.inputs is not None:
            self._next_sample = now + SAMPLE_INPUTS_S
            self._loop.call_soon(self.metrics.inputs.add, batch[0].call.tensors)

    def _retry_or_refuse(self, batch: list[Item], refusal: Refusal) -> None:
        """Refuse a request that failed on its own. Requests of a failed batch are retried one by one."""
        for item in batch:
            if len(batch) == 1:
                _refuse(item, refusal)
            else:
                self.batcher.put_back(item)
        self._dispatch()

    def _on_close(self, instance: Instance) -> None:
        """Start another instance, and retry each request of the dead one once, on its own."""
        if not self.stopping and self.interface is not None:
            self._spawn(self._replace(instance))

    async def _replace(self, instance: Instance) -> None:
        await asyncio.sleep(RETRY_DELAY_S)  # a retry must not go to an instance that was killed in the same moment
        if instance not in self.instances:
            return  # it was replaced already
        for item in instance.batch:
            item.tries += 1
            if item.tries > 1:
                _refuse(item, Refusal(500, "The request ended the process of the model twice, the second time alone."))
            elif not item.future.done():
                self.batcher.put_back(item)
        instance.batch = []
        slot = self.instances.index(instance)
        self.instances[slot] = self._instance(slot)
        self.metrics.restarts += 1
        self._log("instance ended", model=self.metrics.model, pid=instance.pid)
        self._spawn(self._restart(self.instances[slot]))
        self._dispatch()

    async def _restart(self, instance: Instance) -> None:
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, 0.5), LONGEST_PAUSE_S)
        if self.stopping:
            return
        try:
            await instance.start()
        except StartError as error:
            self._log("instance not restarted", model=self.metrics.model, reason=str(error))
            self._on_close(instance)
            return
        self._log("instance restarted", model=self.metrics.model, pid=instance.pid)
        self._dispatch()
        await asyncio.sleep(STABLE_S)
        if instance.state == "ready":
            self._pause_s = 0.0

    async def _sweep(self) -> None:
        """Answer requests whose deadline passes in the queue, and kill instances that hang."""
        while True:
            if not self.busy:  # an idle server takes no CPU time
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(SWEEP_S)
            now = self._loop.time()
            if self.batcher.size:
                for item in self.batcher.remove(now):
                    _refuse(item, Refusal(504, "The deadline passed while the request was in the queue; it was not begun."))
            for instance in self.instances:
                if instance.batch and now - instance.since > STALLED_S:
                    self._log("instance hangs", model=self.metrics.model, pid=instance.pid)
                    instance.kill()

    async def drain(self) -> None:
        """Wait until nothing waits and nothing is computed."""
        while self.busy:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop all instances. Requests that still wait are answered 503."""
        self.stopping = True
        for task in list(self._tasks):
            task.cancel()
        for item in [*self.batcher.remove(), *(item for instance in self.instances for item in instance.batch)]:
            _refuse(item, Refusal(503, "The server stopped before the request was computed.", 1))
        for instance in self.instances:
            instance.batch = []
        await asyncio.gather(*[one.stop() for one in self._processes()])


def _refuse(item: Item, refusal: Refusal) -> None:
    if not item.future.done():
        item.future.set_exception(refusal)


def _split(batch: list[Item], interface: Interface, shapes: list[list[int]], body: memoryview, rows: int) -> list[Answer]:
    """Cut the outputs of a batch into those of its requests."""
    outputs = unpack(body, [math.prod(shape) * form.itemsize for shape, form in zip(shapes, interface.outputs, strict=True)])
    if len(batch) == 1:
        return [Answer(list(outputs), shapes)]
    answers, start = list[Answer](), 0
    for item in batch:
        end = start + item.call.rows
        tensors = list[Bytes]()
        for output in outputs:
            each = len(output) // rows
            tensors.append(output[start * each : end * each])
        answers.append(Answer(tensors, [[item.call.rows, *shape[1:]] for shape in shapes]))
        start = end
    return answers


def _cores(number: int, layout: Layout) -> list[int] | None:
    """The cores of instance ``number``; ``None`` for all."""
    if not layout.pinned or not hasattr(os, "sched_getaffinity"):
        return None
    return cores_of(number, layout.instances, system.numa_nodes(os.sched_getaffinity(0)))


def cores_of(number: int, instances: int, nodes: Sequence[Sequence[int]]) -> list[int]:
    """The cores of instance ``number``: an equal share of the cores of one NUMA node. Nodes are assigned round-robin."""
    node = nodes[number % len(nodes)]
    on_node = len(range(number % len(nodes), instances, len(nodes)))
    share, slot = max(len(node) // on_node, 1), number // len(nodes)
    return [node[(slot * share + i) % len(node)] for i in range(share)]
