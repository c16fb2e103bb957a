"""Losses of a script with settings against those of the script as written, over its first steps from equal seeds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

from trimtab._internal.serialization import to_json
from trimtab.core.evidence import ProbeRecord
from trimtab.core.script_settings import ScriptSettings
from trimtab.probe.command import Command
from trimtab.probe.launch import ScriptProcess
from trimtab.probe.serving import anchor_of, failure
from trimtab.train.loss.loss_parity import BaselineLosses

Losses = Literal["equal", "within rounding", "different", "not compared"]
Values = tuple[float, ...]
"""The loss of each backward pass of a run; without any, the size of each output."""
FILE = "losses.json"
CHAOS = 0.03
"""A loss whose tolerance is a larger share of it decides nothing: training has amplified rounding beyond comparison."""
FEWEST = 3
"""Losses that must decide."""
STEPS, LONGEST_S = 24, 12.0
"""Steps that are compared, and the time for them beyond which there are fewer."""
MOVES_DROPOUT = frozenset({"channels_last", "compile", "trim_padding", "autocast"})
"""Settings with which dropout hits other values."""


class RunFailed(Exception):
    """A run ended without losses; the message is a sentence."""


class LossRuns:
    """Runs of one script. Those as written are made once."""

    def __init__(self, command: Command, record: ProbeRecord, *, in_place: bool = False) -> None:
        self._command, self._record, self._in_place = command, record, in_place
        step_s = max(1e-4, record.step_ms / 1e3)
        self.steps = max(8, min(STEPS, int(LONGEST_S / step_s)))
        self._seconds = 3 * record.start_s + 4 * self.steps * step_s + 20.0
        self._written: dict[bool, tuple[Values, Values]] = {}
        self._at_once = 2 if record.cores >= 2 and record.device == "cpu" else 1

    @property
    def next_s(self) -> float:
        """Estimated seconds of the next comparison; the first one has three runs."""
        runs = 1 if self._written else math.ceil(3 / self._at_once)
        return runs * (self._record.start_s + self.steps * self._record.step_ms / 1e3)

    def compare(self, settings: ScriptSettings) -> Losses:
        """How the losses with ``settings`` differ from those as written.

        Where dropout falls elsewhere with a setting, both sides run without dropout as well.

        Raises:
            RunFailed: the script fails with the settings.
        """
        found = self._compare(settings, still=False)
        if found == "different" and MOVES_DROPOUT & settings.changes().keys():
            with contextlib.suppress(RunFailed):
                found = self._compare(settings, still=True)
        return found

    def _compare(self, settings: ScriptSettings, still: bool) -> Losses:
        plans: list[dict[str, Any]] = [{"settings": to_json(settings), "still": still}]
        if still not in self._written:
            plans += [{"still": still}, {"still": still, "shake": 1}]
        with concurrent.futures.ThreadPoolExecutor(self._at_once) as pool:
            jobs = [pool.submit(self._run, plan) for plan in plans]
        if len(jobs) > 1:
            try:
                self._written[still] = (jobs[1].result(), jobs[2].result())
            except RunFailed:
                return "not compared"  # the script does not run twice
        written, shaken = self._written[still]
        return verdict(written, shaken, jobs[0].result())

    def _run(self, plan: dict[str, Any]) -> Values:
        plan = {"mode": "losses", "anchor": anchor_of(self._record), "steps": self.steps} | plan
        with ScriptProcess(self._command, plan, in_place=self._in_place) as process:
            path, deadline = process.out / FILE, time.monotonic() + self._seconds
            while not path.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            code = process.poll()
            if not path.exists():
                ended = "It took too long." if code is None else failure(process.log(200), code)
                raise RunFailed(ended)
            found = json.loads(path.read_text(encoding="utf-8"))
        return tuple(found["losses"] or found["outputs"])


def verdict(written: Sequence[float], shaken: Sequence[float], other: Sequence[float]) -> Losses:
    """``other`` against ``written``, with the differences of ``shaken``, whose parameters were perturbed, as the measure.

    A loss whose tolerance is above :data:`CHAOS` of it does not count; fewer than :data:`FEWEST` others decide nothing.
    """
    n = min(len(written), len(shaken), len(other))
    if n < FEWEST:
        return "not compared"
    if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(written[:n], other[:n], strict=True)):
        return "equal"
    baseline = BaselineLosses.of(written[:n], [shaken[:n]])
    deciding = [i for i in range(n) if baseline.tolerance[i] <= CHAOS * abs(written[i])]
    if len(deciding) < FEWEST:
        return "not compared"
    return "within rounding" if all(abs(other[i] - written[i]) <= baseline.tolerance[i] for i in deciding) else "different"
