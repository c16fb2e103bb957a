"""Blocks of steps of the running script, timed on request: its steps wait for a driver, which measures in turns.

The end of a step blocks on a UNIX socket and speaks the protocol of :mod:`trimtab.measure.remote`, with a further request:
``set`` applies settings from the next step on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Generator, Mapping
from multiprocessing import AuthenticationError
from typing import Any

import torch

from trimtab.measure.host import waited_ns, waits
from trimtab.measure.remote import LONGEST_REQUEST, listening
from trimtab.measure.timer import pace, unrecorded_calls
from trimtab.probe.inside import loaders, roots, steps
from trimtab.probe.inside.ending import leave
from trimtab.probe.inside.plan import PLAN, rank, tell
from trimtab.probe.inside.remedies import apply

SOCKET = "turns"
"""Name of the socket in ``PLAN["out"]``."""
SETTINGS = "settings.json"
"""Name of the file there by which rank 0 tells others its settings."""
IDLE_NS = 20_000_000
"""After a longer pause the workers of a loader have read ahead, and as many steps are not recorded."""
MOST_MIXED = 20
"""After as many mixed steps in a row mixed ones are recorded too: each step of the script is."""
Steps = Generator[None, tuple[int, bool], Any]
"""Yields to run a step; is sent its nanoseconds, and whether it is mixed."""


def start() -> None:
    """Serve from the end of the first step on; in further ranks follow what the first one switches."""
    mixed = _watch_mixed()
    conversation: Steps | None = None
    begun = 0

    def ended(number: int) -> None:
        nonlocal conversation, begun
        ns = time.perf_counter_ns() - begun
        if conversation is None:
            conversation = _conversation() if rank() == 0 else _following()
            next(conversation)
        else:
            conversation.send((ns, mixed()))
        mixed()
        begun = time.perf_counter_ns()

    steps.on_step_end(ended)


def _watch_mixed() -> Callable[[], bool]:
    """A function that tells whether there was an evaluation, or a new iterator, since its last call."""
    seen = {"mixed": False}

    def note(entry: Any) -> None:
        seen["mixed"] = True

    trains = (PLAN.get("anchor") or {}).get("kind") not in ("batch", "forward")

    def after(module: torch.nn.Module) -> None:
        if trains and not module.training:
            seen["mixed"] = True

    loaders.on_epoch(note)
    roots.after_calls(after)  # whose modules are looked for now, and not when a setting is switched on

    def mixed() -> bool:
        found, seen["mixed"] = seen["mixed"], False
        return found

    return mixed


def _conversation() -> Steps:
    with listening(os.path.join(PLAN["out"], SOCKET), bytes.fromhex(PLAN["key"])) as listener:
        server = _Server()
        while True:
            try:
                peer = listener.accept()
            except (EOFError, ConnectionError, AuthenticationError):
                continue
            with peer, contextlib.suppress(EOFError, OSError):
                while True:
                    waiting = time.perf_counter_ns()
                    request = json.loads(peer.recv_bytes(LONGEST_REQUEST))
                    server.idle += time.perf_counter_ns() - waiting
                    if request["do"] == "stop":
                        peer.send_bytes(b"{}")
                        peer.close()
                        leave()
                    answer = yield from server.answer(request)
                    peer.send_bytes(json.dumps(answer).encode())


class _Server:
    """Answers requests; every method that needs steps of the script is a generator that yields for each."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.idle = 0
        self.done = 1
        """Steps since the script began to serve."""
        self._whole = False
        self._settle = 0
        self._pending: Mapping[str, Any] | None = None

    def answer(self, request: Mapping[str, Any]) -> Steps:
        verb, calls, count = request["do"], int(request.get("calls", 1)), int(request.get("count", 1))
        if verb == "hello":
            return {"pid": self.pid, "threads": torch.get_num_threads() if waits(self.pid) else None}
        if verb == "pace":
            return {"ns": pace()}
        if verb == "set":
            self._set(request["settings"])
            return {}
        if verb == "block":
            yield from self._lead(unrecorded_calls(calls))
            return {"ns": (yield from self._steps(calls))}
        if verb == "samples":
            yield from self._lead(0)
            return {"samples": (yield from self._samples(count, calls))}
        return {"error": f"There is no request {verb!r}."}

    def _set(self, settings: Mapping[str, Any]) -> None:
        self._whole = settings.get("without") in ("evaluation", "saving")
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            # the other ranks end their step before this one takes part in the next: all switch at the end of that
            tell(SETTINGS, {"step": self.done + 1, "settings": settings})
            self._pending = settings
        else:
            apply(settings)
        self._settle = 1

    def _lead(self, steps: int) -> Steps:
        """Steps that are not recorded: in which settings take effect, and whose batches were read during the pause."""
        if self._pending is not None:
            yield from self._step()
            apply(self._pending)
            self._pending = None
        read = max((_read_ahead(entry.ref()) for entry in loaders.loaders), default=0) if self.idle > IDLE_NS else 0
        for _ in range(max(self._settle, steps, read)):
            yield from self._step()
        self._settle = self.idle = 0

    def _step(self) -> Steps:
        ns, mixed = yield
        self.done += 1
        return ns, mixed

    def _steps(self, calls: int) -> Steps:
        times: list[int] = []
        left_out = 0
        while len(times) < calls:
            ns, mixed = yield from self._step()
            if mixed and not self._whole and left_out < MOST_MIXED:
                left_out += 1
                continue
            left_out = 0 if not mixed else left_out
            times.append(ns)
        return times

    def _samples(self, count: int, calls: int) -> Steps:
        found = []
        for _ in range(count):
            before = waits(self.pid)
            ns = max(1, sum((yield from self._steps(calls))))
            found.append((ns / calls, min(1.0, waited_ns(before, waits(self.pid)) / ns)))
        return found


def _read_ahead(loader: Any) -> int:
    """Batches that the workers of ``loader`` read while nobody asks."""
    return 0 if loader is None else loader.num_workers * (loader.prefetch_factor or 0)


def _following() -> Steps:
    """Apply what rank 0 wrote, at the end of the step that it named."""
    path, done, seen = os.path.join(PLAN["out"], SETTINGS), 1, 0
    pending: dict[str, Any] | None = None
    while True:
        yield
        done += 1
        with contextlib.suppress(OSError):
            if (changed := os.stat(path).st_mtime_ns) != seen:
                seen = changed
                with open(path, encoding="utf-8") as file:
                    pending = json.load(file)
        if pending is not None and done >= pending["step"]:
            apply(pending["settings"])
            pending = None
