"""Shadow mode in the front process: samples requests, and sends them to the process of the reference model."""

from __future__ import annotations

import asyncio
import pathlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

from trimtab.serve.batcher import Answer
from trimtab.serve.connection import Instance, StartError
from trimtab.serve.drift import OutputDrift
from trimtab.serve.protocol import Call

REFERENCE = "trimtab.serve.reference"
MOST_PENDING = 8
"""Most requests that wait for the reference; those beyond are skipped, so that memory is bounded."""
PAUSE_S = 10.0
"""Pause before a reference whose process ended is started again."""


class Shadow:
    """Sends ``share`` of the requests, with the answers that they got, to the reference.

    The reference is the original model that travels with the artifact ``path``, or the artifact ``other``.
    """

    def __init__(
        self, path: pathlib.Path, other: pathlib.Path | None, share: float, *, trust: bool, log: Callable[..., None]
    ) -> None:
        self.drift = OutputDrift((), ())
        self._settings = {"path": str(path), "other": None if other is None else str(other), "trust": trust, "threads": 1}
        self._share, self._log = share, log
        self._draw = random.Random()
        self._pending = 0
        self._tasks = set[asyncio.Task[None]]()
        self._process = self._new_process()

    def _new_process(self) -> Instance:
        return Instance(self._settings, lambda *_: None, self._on_close, REFERENCE)

    async def start(self) -> None:
        """Start the reference.

        Raises:
            StartError: there is no reference, or it cannot be loaded.
        """
        await self._process.start()
        found = self._process.description
        self.drift = OutputDrift(found["outputs"], found["tolerances"])

    def sampled(self) -> bool:
        """Whether the next request is compared: a random draw with probability ``share``."""
        return self._draw.random() < self._share

    def compare(self, call: Call, answer: Answer) -> None:
        """Send an answered request to the reference without waiting. Skipped if :data:`MOST_PENDING` are waiting."""
        if self._pending >= MOST_PENDING or self._process.state != "ready":
            self.drift.counts["skipped"] += 1
            return
        self._pending += 1
        self._spawn(self._compare(call, answer))

    async def _compare(self, call: Call, answer: Answer) -> None:
        parts = [[tensor] for tensor in (*call.tensors, *answer.tensors)]
        try:
            found = await self._process.ask({"shapes": [*call.shapes, *answer.shapes]}, parts)
        finally:
            self._pending -= 1
        if "error" not in found:
            self.drift.add(found["errors"])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_close(self, process: Instance) -> None:
        if process is self._process and self.drift.tolerances:
            self.drift.up = False
            self._log("shadow ended", path=self._settings["path"])
            self._spawn(self._restart())

    async def _restart(self) -> None:
        await asyncio.sleep(PAUSE_S)
        self._process = self._new_process()
        try:
            await self._process.start()
        except StartError as error:
            self._log("shadow not restarted", reason=str(error))
        else:
            self.drift.up = True

    async def stop(self) -> None:
        """End the process. Pending comparisons are dropped."""
        for task in list(self._tasks):
            task.cancel()
        await self._process.stop()
