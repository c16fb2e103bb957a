"""A stored record of a script, and findings on it."""

from __future__ import annotations

import json
import pathlib

from trimtab._internal.serialization import from_json
from trimtab.core.diagnosis import Bound, Diagnosis, Together
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.measurement import Interval
from trimtab.core.script_settings import CodeEdit, LoaderSettings, ScriptSettings
from trimtab.probe.score import score

FILE = pathlib.Path(__file__).parent / "data" / "probe_record.json"
WORKERS = ScriptSettings(loaders={"train.py:30": LoaderSettings(workers=1, persistent=True)})
FUSED = ScriptSettings(optimizer="fused")
NO_DATA, NO_LOGGING = ScriptSettings(without="data"), ScriptSettings(without="logging")


def record() -> ProbeRecord:
    """The record of a training that waits for its data."""
    return from_json(ProbeRecord, json.loads(FILE.read_text(encoding="utf-8")))


def findings(*, measured: bool = True) -> list[Finding]:
    """What checks find on it; ``measured`` with gains."""
    workers = {"gain": Interval(1.6, 1.5, 1.7), "losses": "equal", "most": Interval(2.0, 1.9, 2.1)} if measured else {}
    fused = {"gain": Interval(1.03, 1.025, 1.035), "losses": "within rounding"} if measured else {}
    logging = {"most": Interval(1.06, 1.05, 1.07)} if measured else {}
    return [
        Finding(
            rule="workers_few",
            level="note",
            message="52% of a step waits for data, and no worker reads ahead.",
            category="data",
            where="train.py:30",
            evidence={"wait_ms": 52.0},
            settings=WORKERS,
            ceiling=NO_DATA,
            share=0.52,
            **workers,  # type: ignore[arg-type]
        ),
        Finding(
            rule="optimizer_loop",
            level="note",
            message="Adam updates 30 tensors in 5 ms.",
            settings=FUSED,
            share=0.05,
            **fused,  # type: ignore[arg-type]
        ),
        Finding(
            rule="logging",
            level="note",
            message="add_scalar is called at every step.",
            category="run",
            where="train.py:43",
            edit=CodeEdit(
                site="train.py:43", advice="write it at every 50th step", replacement="if step % 50 == 0:\n    log()"
            ),
            ceiling=NO_LOGGING,
            share=0.06,
            **logging,  # type: ignore[arg-type]
        ),
        Finding(
            rule="memory_growth",
            level="error",
            message="Memory grows by 8 MB at each step.",
            category="memory",
            where="train.py:42",
            edit=CodeEdit(site="train.py:42", advice="append loss.item() instead of loss"),
        ),
        Finding(
            rule="threads",
            level="note",
            message="Two threads share two cores with workers.",
            settings=ScriptSettings(threads=1),
            unmeasured="the machine was busy",
        ),
    ]


def diagnosis() -> Diagnosis:
    """A diagnosis of it."""
    seen, found = record(), findings()
    together = Together(settings=WORKERS.merged(FUSED), gain=Interval(1.66, 1.55, 1.75), losses="within rounding")
    return Diagnosis(
        words=("train.py", "--", "--epochs", "1"),
        record=seen,
        findings=(found[3], *found[:3], found[4]),
        score=score(seen, [found[3], *found[:3], found[4]], together),
        bound=Bound(kind="data", sentence="52% of a step waits for data."),
        together=together,
        seconds=60.0,
        budget_s=180.0,
    )
