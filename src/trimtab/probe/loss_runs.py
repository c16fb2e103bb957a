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
from trimtab.probe.serving import anchor_of, why_ended
from trimtab.train.loss.loss_parity import BaselineLosses

Losses = Literal["equal", "within rounding", "different", "not compared"]
Values = tuple[float, ...]
"""The loss of each backward pass of a run; without any, the size of each output."""
FILE = "losses.json"
MOST_TOLERANCE = 0.03
"""A loss is ignored if its tolerance is a larger share of it: training has amplified rounding errors beyond comparison."""
LEAST_DECIDING = 3
"""Least number of losses that are not ignored."""
STEPS, LONGEST_S = 24, 12.0
"""Steps that are compared. There are fewer if they would take more than ``LONGEST_S`` seconds."""
CHANGES_DROPOUT = frozenset({"channels_last", "compile", "trim_padding", "autocast"})
"""Settings that change which values dropout hits."""


class RunFailed(Exception):
    """A run ended without losses; the message is a sentence."""


class LossRuns:
    """Runs of one script for its losses. The runs as written are made once."""

    def __init__(self, command: Command, record: ProbeRecord, *, in_place: bool = False) -> None:
        self._command, self._record, self._in_place = command, record, in_place
        step_s = max(1e-4, record.step_ms / 1e3)
        self.steps = max(8, min(STEPS, int(LONGEST_S / step_s)))
        self._seconds = 3 * record.start_s + 4 * self.steps * step_s + 20.0
        self._written: dict[bool, tuple[Values, Values]] = {}
        self._parallel = 2 if record.cores >= 2 and record.device == "cpu" else 1

    @property
    def next_s(self) -> float:
        """Estimated seconds of the next comparison; the first one has three runs."""
        runs = 1 if self._written else math.ceil(3 / self._parallel)
        return runs * (self._record.start_s + self.steps * self._record.step_ms / 1e3)

    def compare(self, settings: ScriptSettings) -> Losses:
        """Compare the losses with ``settings`` to those as written.

        If the losses differ with one of :data:`CHANGES_DROPOUT`, both sides are compared again without dropout.

        Raises:
            RunFailed: the script fails with the settings.
        """
        found = self._compare(settings, no_dropout=False)
        if found == "different" and CHANGES_DROPOUT & settings.changes().keys():
            with contextlib.suppress(RunFailed):
                found = self._compare(settings, no_dropout=True)
        return found

    def _compare(self, settings: ScriptSettings, no_dropout: bool) -> Losses:
        plans: list[dict[str, Any]] = [{"settings": to_json(settings), "no_dropout": no_dropout}]
        if no_dropout not in self._written:
            plans += [{"no_dropout": no_dropout}, {"no_dropout": no_dropout, "perturbation": 1}]
        with concurrent.futures.ThreadPoolExecutor(self._parallel) as pool:
            jobs = [pool.submit(self._run, plan) for plan in plans]
        if len(jobs) > 1:
            try:
                self._written[no_dropout] = (jobs[1].result(), jobs[2].result())
            except RunFailed:
                return "not compared"  # the script does not run twice
        written, perturbed = self._written[no_dropout]
        return verdict(written, perturbed, jobs[0].result())

    def _run(self, plan: dict[str, Any]) -> Values:
        plan = {"mode": "losses", "anchor": anchor_of(self._record), "steps": self.steps} | plan
        with ScriptProcess(self._command, plan, in_place=self._in_place) as process:
            path, deadline = process.out / FILE, time.monotonic() + self._seconds
            while not path.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            code = process.poll()
            if not path.exists():
                ended = "It took too long." if code is None else why_ended(process, code)
                raise RunFailed(ended)
            found = json.loads(path.read_text(encoding="utf-8"))
        return tuple(found["losses"] or found["outputs"])


def verdict(written: Sequence[float], perturbed: Sequence[float], other: Sequence[float]) -> Losses:
    """Compare losses ``other`` with ``written``; ``perturbed``, after a tiny change of the parameters, give the tolerance.

    Losses with a tolerance above :data:`MOST_TOLERANCE` are ignored. Fewer than :data:`LEAST_DECIDING` others decide nothing.
    """
    n = min(len(written), len(perturbed), len(other))
    if n < LEAST_DECIDING:
        return "not compared"
    if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(written[:n], other[:n], strict=True)):
        return "equal"
    baseline = BaselineLosses.of(written[:n], [perturbed[:n]])
    deciding = [i for i in range(n) if baseline.tolerance[i] <= MOST_TOLERANCE * abs(written[i])]
    if len(deciding) < LEAST_DECIDING:
        return "not compared"
    return "within rounding" if all(abs(other[i] - written[i]) <= baseline.tolerance[i] for i in deciding) else "different"
