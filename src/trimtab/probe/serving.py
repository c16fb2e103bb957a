"""Run a script in its own process, and time its steps on request."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import statistics
import time
from types import TracebackType
from typing import Any, Self

from trimtab._internal.serialization import to_json
from trimtab.core.evidence import ProbeRecord
from trimtab.core.script_settings import ScriptSettings
from trimtab.errors import MeasurementError
from trimtab.measure.remote import RemoteRunner
from trimtab.measure.timer import Sample
from trimtab.probe.command import Command
from trimtab.probe.launch import ScriptProcess
from trimtab.probe.patch import moved_site

SOCKET, MIXED_EVERY = "turns", "mixed_every"
"""As in :mod:`trimtab.probe.inside.turns`, which only the script's process imports."""
POLL_S = 0.02
CONNECT_S = 20.0
ENDS_S = 5.0
"""Seconds that a process may take to end after its connection was lost."""
NEXT_STEP_S, NEXT_STEPS, READ_AHEAD = 15.0, 30, 4
"""While lines are left out, a step may never end, as where a line ends a loop. An answer may then take as many seconds, and as
many times a step as written; for each batch that workers read ahead, as many more."""
SLOWER_START = 3.0
"""A start fails after this multiple of the time to the first step. Two processes that start at once take longer than one."""


class ScriptFailed(Exception):
    """The script ended with an error; the message is its sentence."""


class ScriptEnded(Exception):
    """The script ended by itself, before enough steps were timed."""


class ServedScript:
    """The script with ``settings``, waiting at the end of its first step. It is a context manager, which ends the script.

    Raises:
        ScriptFailed, ScriptEnded: on entering.
        MeasurementError: no step ended in time.
    """

    def __init__(
        self, command: Command, record: ProbeRecord, settings: ScriptSettings, *, seconds: float, in_place: bool
    ) -> None:
        self._key = secrets.token_hex(16)
        self._seconds = max(20.0, min(seconds, SLOWER_START * record.start_s + 20.0))
        self._limit_s = max(30.0, seconds)
        ahead = sum(loader.workers * (loader.prefetch or 2) for loader in record.loaders)
        rare_s = sum(record.run_s.get(name, 0.0) for name in ("evaluation", "saving", "epoch start"))
        self._next_step_s = NEXT_STEP_S + rare_s + (NEXT_STEPS + READ_AHEAD * ahead) * record.step_ms / 1e3
        anchor = anchor_of(record) | {"site": moved_site(record.anchor_site, command.folder, settings.files)}
        plan = {"mode": "turns", "anchor": anchor, "settings": to_json(settings), "key": self._key}
        self.has_workers = any(loader.workers for loader in record.loaders) or any(
            loader.workers for loader in settings.loaders.values()
        )
        """Whether loader workers read the data. The script's own threads do not show how long these wait for a core."""
        self.settings = dataclasses.replace(settings, files={})
        """Settings that the script has started with, without the changed files."""
        self.current: dict[str, Any] = to_json(self.settings)
        self.process = ScriptProcess(command, plan, in_place=in_place)

    def __enter__(self) -> Self:
        self.process.__enter__()
        try:
            address = self.process.out / SOCKET
            deadline = time.monotonic() + self._seconds
            while not address.exists():
                self.check()
                if time.monotonic() > deadline:
                    raise MeasurementError(
                        f"No step of the script ended within {self._seconds:.0f} s, where its first step took "
                        "less when it was watched. Give more time with --budget."
                    )
                time.sleep(POLL_S)
            self.remote = RemoteRunner(address, bytes.fromhex(self._key), connect_s=CONNECT_S, timeout_s=self._limit_s)
        except BaseException:
            self.process.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(AttributeError):
            self.remote.close()
        self.process.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raise ``ScriptEnded`` or ``ScriptFailed`` if the script is not running any more."""
        code = self.process.poll()
        if code is None:
            return
        if code == 0:
            raise ScriptEnded
        raise ScriptFailed(why_ended(self.process, code))

    def end_reason(self, error: MeasurementError) -> Exception:
        """The reason why the script ended, after a lost connection raised ``error``."""
        deadline = time.monotonic() + ENDS_S
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        try:
            self.check()
        except (ScriptEnded, ScriptFailed) as found:
            return found
        if self.current["without"] == "lines" and self.process.poll() is None:
            return ScriptFailed(f"Without these lines no step ended within {self._next_step_s:.0f} s.")
        return ScriptFailed(str(error))

    def change(self, settings: dict[str, Any]) -> None:
        """Use ``settings``, as JSON, from the next step on."""
        self.remote.change(settings)
        self.remote.timeout_s = min(self._limit_s, self._next_step_s) if settings["without"] == "lines" else self._limit_s
        self.current = settings

    def runner(self, settings: ScriptSettings, mixed_every: int = 0) -> StepRunner:
        """A runner that times steps with ``settings``. With ``mixed_every``, the number of steps per evaluation or save,
        steps with an evaluation count too."""
        return StepRunner(self, settings, mixed_every)


class StepRunner:
    """A :class:`~trimtab.measure.timer.Runner` of a script's steps. It applies its settings before each block.

    Every call of a block gets the mean of the block, so that occasional costs, such as a log, count with their share. With
    loader workers a block has more steps than calls.
    """

    def __init__(self, script: ServedScript, settings: ScriptSettings, mixed_every: int = 0) -> None:
        self._script, self._settings = script, to_json(settings) | ({MIXED_EVERY: mixed_every} if mixed_every else {})
        self.pid = script.remote.pid
        single = script.remote.threads == 1 and settings.threads in (None, 1) and not (script.has_workers or mixed_every)
        self.threads = 1 if single else None

    def block(self, calls: int) -> list[int]:
        """Nanoseconds of each of ``calls`` steps."""
        self._switch()
        ns = self._script.remote.block(calls)
        return [round(statistics.fmean(ns))] * calls

    def samples(self, count: int, calls: int) -> list[Sample]:
        """``count`` samples of ``calls`` steps each."""
        self._switch()
        return self._script.remote.samples(count, calls)

    def pace(self) -> int:
        """Nanoseconds of a fixed piece of work on the core of the script's process."""
        return self._script.remote.pace()

    def _switch(self) -> None:
        if self._script.current != self._settings:
            self._script.change(self._settings)


def anchor_of(record: ProbeRecord) -> dict[str, Any]:
    """The plan's ``anchor`` for the steps of ``record``."""
    return {"kind": record.anchor, "site": record.anchor_site, "index": 0}


_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failed)\b.*)$")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def why_ended(process: ScriptProcess, code: int) -> str:
    """One sentence about a script that ended with ``code`` and should not have."""
    refused = process.refused_write()
    if refused is None:
        return failure(process.log(200), code)
    return f"The script {refused}. Its writes cannot be kept apart on this machine; let it write with --in-place."


def failure(log: str, code: int) -> str:
    """One sentence about a script that failed: the last exception of its log with the line of the script, or its exit code."""
    lines = log.splitlines()
    crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")), None)
    if crash is not None:  # faulthandler prints the innermost frame first
        return f"{lines[crash].rstrip('.')}{_script_line(lines[crash:], 0)}."
    for i in range(len(lines) - 1, -1, -1):
        match = _ERROR.match(lines[i])
        if match is not None:
            return f"{match[1][:300].rstrip('.')}{_script_line(lines[max(0, i - 60) : i], -1)}."
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"The script ended with {ended}" + (f": {last[:200]}" if last else ".")


def _script_line(lines: list[str], place: int) -> str:
    """The script's line at index ``place`` of the traceback, as ``" (train.py:7)"``; empty if the traceback has none."""
    sites = [found for line in lines if (found := _LINE.search(line))]
    own = [found for found in sites if "site-packages" not in found[1] and "/lib/python" not in found[1]]
    return f" ({os.path.basename(own[place][1])}:{own[place][2]})" if own else ""
