"""Time blocks of steps of the running script on request of the driver, which alternates between two scripts or settings.

The end of a step blocks on a UNIX socket and speaks the protocol of :mod:`trimtab.measure.remote`, with a further request:
``set`` applies settings from the next step on. :data:`MIXED_EVERY` in the settings says that steps with an evaluation count.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from multiprocessing import AuthenticationError
from typing import Any

import torch

from trimtab.measure.host import any_runnable, computed_ns, waited_ns, waits
from trimtab.measure.remote import LONGEST_REQUEST, listening
from trimtab.measure.timer import pace, unrecorded_calls
from trimtab.probe.inside import loaders, roots, steps
from trimtab.probe.inside.ending import end_process
from trimtab.probe.inside.plan import PLAN, rank, write_out
from trimtab.probe.inside.remedies import apply

SOCKET = "turns"
"""Name of the socket in ``PLAN["out"]``."""
SETTINGS = "settings.json"
"""Name of the file there in which rank 0 passes settings to the other ranks."""
IDLE_NS = 20_000_000
"""After a longer pause, loader workers have read ahead: see :data:`UNSTEADY`."""
UNSTEADY = 2
"""Steps after a pause that are not recorded, as a multiple of the batches that workers have read ahead. Steps wait neither for
those batches, nor in full for the next ones, which the workers read meanwhile. Without workers, as many steps fill the queue of
a thread again, such as that of a TensorBoard writer."""
RECORDED = 2
"""Recorded steps of a block, at least, as a multiple of the batches that workers read ahead. Of a script with one worker that
reads for 60 ms on two cores, the times of blocks of 2, 4 and 16 steps varied by 50%, 18% and 9%."""
MIXED_EVERY = "mixed_every"
"""Steps per step with an evaluation or a save. Blocks then hold such steps, and a multiple of as many steps."""
MOST_REST_S, REST_POLL_S, REST_SHARE = 2.0, 0.02, 0.1
"""Most seconds to wait for loader workers and threads of the script, seconds between two looks at their CPU time, and the share
of a CPU below which they count as idle."""
MOST_IDLE_NS = 2_000_000
"""CPU time of the script's threads for one step, up to which samples of the main thread alone tell the time of a step. Threads
that only wait, such as the one of a progress bar, have less."""
MOST_MIXED = 20
"""After this many mixed steps in a row, mixed steps are recorded too. A mixed step holds an evaluation or a new iterator."""
Steps = Generator[None, tuple[int, bool], Any]
"""A coroutine that yields to run one step, and is sent the ns of the step and whether it was mixed."""


def start() -> None:
    """Serve the driver from the end of the first step on. Further ranks follow the settings of rank 0."""
    mixed = _watch_mixed()
    session: Steps | None = None
    started = 0

    def ended(number: int) -> None:
        nonlocal session, started
        ns = time.perf_counter_ns() - started
        if session is None:
            session = _serve_driver() if rank() == 0 else _follow_rank_zero()
            next(session)
        else:
            session.send((ns, mixed()))
        mixed()
        started = time.perf_counter_ns()

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


def _serve_driver() -> Steps:
    server = _Server()
    yield from server.watch_threads()  # before a driver connects, which waits seconds for an answer and not for a step
    with listening(os.path.join(PLAN["out"], SOCKET), bytes.fromhex(PLAN["key"])) as listener:
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
                        end_process()
                    answer = yield from server.answer(request)
                    peer.send_bytes(json.dumps(answer).encode())


class _Server:
    """Answers requests. A method that needs steps of the script is a generator, which yields for each step."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.idle = IDLE_NS + 1
        """Nanoseconds since the last recorded step; the script has waited for the driver."""
        self.done = 1
        """Steps since the script began to serve."""
        self._mixed_every = 0
        self._unsettled = 0
        self.hands_over = False
        """Whether the first step handed work to threads of the script."""
        self._threads_work = False
        """Whether steps hand work to threads of the script, which these do in the pauses too."""
        self._threads_rest = True
        """Whether these threads come to rest. Nothing waits for those that compute without end, such as an actor's."""
        self._pending: Mapping[str, Any] | None = None

    def answer(self, request: Mapping[str, Any]) -> Steps:
        verb, calls, count = request["do"], int(request.get("calls", 1)), int(request.get("count", 1))
        if verb == "hello":
            known = waits(self.pid) and not self.hands_over
            return {"pid": self.pid, "threads": torch.get_num_threads() if known else None}
        if verb == "pace":
            return {"ns": pace()}
        if verb == "set":
            self._set(request["settings"])
            return {}
        if verb == "block":
            yield from self._run_unrecorded(unrecorded_calls(calls))
            least = max(1, RECORDED * _most_read_ahead(), self._mixed_every)
            begun, before = time.perf_counter_ns(), computed_ns(_threads())
            times = yield from self._steps(math.ceil(calls / least) * least)
            works = computed_ns(threads := _threads()) - before > REST_SHARE * (time.perf_counter_ns() - begun)
            self._threads_work |= works
            waited = _await_rest(_workers() + (threads if works and self._threads_rest else []))
            self._threads_rest &= waited < 1e9 * MOST_REST_S
            self.idle += waited
            return {"ns": times}
        if verb == "samples":
            yield from self._run_unrecorded(0)
            return {"samples": (yield from self._samples(count, calls))}
        return {"error": f"There is no request {verb!r}."}

    def watch_threads(self) -> Steps:
        """Find :attr:`hands_over` in one step, if the script has threads."""
        if threads := _threads():
            before = computed_ns(threads)
            yield from self._step()
            _await_rest(threads)
            self.hands_over = computed_ns(threads) - before > MOST_IDLE_NS

    def _set(self, settings: Mapping[str, Any]) -> None:
        self._mixed_every = int(settings.get(MIXED_EVERY) or 0)
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            # the other ranks end their step before this one takes part in the next: all switch at the end of that
            write_out(SETTINGS, {"step": self.done + 1, "settings": settings})
            self._pending = settings
        else:
            apply(settings)
        self._unsettled = 1

    def _run_unrecorded(self, steps: int) -> Steps:
        """Run steps that are not recorded: settings take effect in them, or their batches were read during the pause."""
        if self._pending is not None:
            yield from self._step()
            apply(self._pending)
            self._pending = None
        read = UNSTEADY * max(_most_read_ahead(), self._threads_work) if self.idle > IDLE_NS else 0
        for _ in range(max(self._unsettled, steps, read)):
            yield from self._step()
        self._unsettled = self.idle = 0

    def _step(self) -> Steps:
        ns, mixed = yield
        self.done += 1
        return ns, mixed

    def _steps(self, calls: int) -> Steps:
        times: list[int] = []
        left_out = 0
        while len(times) < calls:
            ns, mixed = yield from self._step()
            if mixed and not self._mixed_every and left_out < MOST_MIXED:
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


def _most_read_ahead() -> int:
    """Number of batches that the workers of a loader prefetch; of several loaders the largest.

    Workers deliver in bursts: one step waits for all of them, and the next ones for none. So a block has a multiple of twice
    as many steps. Single steps gave 1.9 (0.8 to 9757) where workers made a script 0.9 times as fast.
    """
    return max((_read_ahead(entry.ref()) for entry in loaders.loaders), default=0)


def _workers() -> list[int]:
    """Processes of loader workers that read ahead."""
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None] if _most_read_ahead() else []


def _threads() -> list[int]:
    """Threads that the script has started in Python, such as the one of a TensorBoard writer."""
    main = threading.current_thread()
    found = [each for each in threading.enumerate() if each is not main and each.name != "trimtab"]
    return [each.native_id for each in found if each.native_id is not None]


def _await_rest(ids: list[int]) -> int:
    """Wait until processes and threads are at rest, because they would take the CPUs of the other side's turn. Returns the
    nanoseconds that it took; at most :data:`MOST_REST_S`."""
    begun = time.perf_counter_ns()
    before = computed_ns(ids)
    while ids and time.perf_counter_ns() - begun < 1e9 * MOST_REST_S:
        time.sleep(REST_POLL_S)
        now = computed_ns(ids)
        if now - before < 1e9 * REST_SHARE * REST_POLL_S and not any_runnable(ids):  # not: kept from a core by others
            break
        before = now
    return time.perf_counter_ns() - begun


def _read_ahead(loader: Any) -> int:
    return 0 if loader is None else loader.num_workers * (loader.prefetch_factor or 0)


def _follow_rank_zero() -> Steps:
    """Apply the settings that rank 0 wrote, at the end of the step that it named."""
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
