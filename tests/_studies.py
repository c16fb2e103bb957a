"""Records of studies that never ran, for what shows them: of any size, in any state, with any text in them."""

from __future__ import annotations

import json
import pathlib
import random
import re
from collections.abc import Mapping
from typing import Any

from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend
from trimtab.core.limits import Limits
from trimtab.core.measurement import Comparison, Drop, Interval, Measurement, Parity, operator_shares
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.explain import Explanation
from trimtab.hardware.environment import Environment
from trimtab.hardware.peaks import Peaks, Rate
from trimtab.measure.roofline import roofline
from trimtab.passes.batch import Batch
from trimtab.passes.threads import Threads
from trimtab.study import ranking, waterfall
from trimtab.study.record import Prepared, Record
from trimtab.study.samplers.ladder import as_written

BACKENDS: tuple[Backend, ...] = (
    OpenVino(precision="int8_static"),
    OnnxRuntime(precision="int8_static"),
    OpenVino(),
    OnnxRuntime(),
    TorchScript(),
    OpenVino(precision="int8_weights"),
    OnnxRuntime(precision="int8_dynamic"),
)
WRITTEN_MS = 0.42
PEAKS = Peaks(
    fingerprint="0123456789ab",
    threads=2,
    rates=(
        *(
            Rate(kind=kind, device="cpu", threads=threads, unit=unit, value=value * threads)  # type: ignore[arg-type]
            for threads in (1, 2)
            for kind, unit, value in (("float32", "GFLOP/s", 98.0), ("int8", "GOP/s", 390.0), ("memory", "GB/s", 11.0))
        ),
        Rate(kind="bfloat16", device="cpu", threads=2, unit="GFLOP/s", value=None, reason="this processor has no bfloat16"),
    ),
)
ENVIRONMENT = Environment(
    cpu="Example CPU 9000",
    machine="x86_64",
    isa=("avx2", "avx512f", "avx512_vnni"),
    physical_cores=2,
    logical_cores=4,
    cpu_quota=None,
    usable_cores=2,
    memory_mb=16_000.0,
    memory_limit_mb=None,
    gpus=(),
    os="Debian GNU/Linux 12",
    python="3.11.7",
    compiler="g++ 12.2.0",
    versions={"torch": "2.13.0", "openvino": "2026.4.1", "onnxruntime": "1.31.1", "trimtab": "0.1.0"},
)


def interval(value: float, spread: float = 0.03) -> Interval:
    return Interval(value, value * (1 - spread), value * (1 + spread))


def measured(ms: float, unit: str = "ms") -> Measurement:
    return Measurement(unit=unit, n=400, median=ms, interval=interval(ms, 0.01), p90=1.1 * ms)


def comparison(speed: float) -> Comparison:
    return Comparison(
        ratio=interval(speed),
        pairs=120,
        candidate=measured(WRITTEN_MS / speed),
        rival=measured(WRITTEN_MS),
        discarded=3,
        noise=0.021,
        foreign=0.004,
        stolen=0.0,
        process_noise=0.008,
    )


def drop(value: float, limit: float, upper: float | None = None) -> Drop:
    upper = value + 0.004 if upper is None else upper
    decided = True if upper <= limit else False if value - 0.004 > limit else None
    return Drop(value=value, low=value - 0.004, upper=upper, n=500, limit=limit, decided=decided, n_needed=2400, share=True)


def recipes(count: int) -> list[Recipe]:
    """As written, tuned, then others without end."""
    found = [as_written(), Recipe(backend=Eager())]
    for number in range(count):
        backend = BACKENDS[number % len(BACKENDS)]
        turn = number // len(BACKENDS)
        passes = (Threads(count=turn),) if turn else ()
        found.append(Recipe(passes=passes, backend=backend))
    return found[:count]


def trial(number: int, recipe: Recipe, *, labels: bool, limit: float, draw: random.Random) -> Trial:
    """A finished one, faster with fewer bits."""
    bits = 1.8 if not recipe.exact else 1.0
    base = {"eager": 1.0, "torchscript": 1.3, "onnxruntime": 1.9, "openvino": 2.2}[recipe.backend.name]
    speed = 1.0 if recipe == as_written() else 1.06 if recipe.backend.name == "eager" else base * bits * draw.uniform(0.8, 1.1)
    error = 1e-6 * draw.uniform(0.5, 2) if recipe.exact else draw.uniform(0.01, 0.08)
    return Trial(
        recipe=recipe,
        state=State.COMPLETE,
        number=number,
        stage="as_written" if number == 0 else "lossless",
        speedup=Interval(1.0, 1.0, 1.0) if number == 0 else interval(speed),
        comparison=comparison(speed),
        latency_ms=measured(WRITTEN_MS / speed),
        score=0.978 if labels else None,
        drop=drop(0.0 if recipe.exact else draw.uniform(-0.002, 0.03), limit) if labels else None,
        parity=Parity(ok=True, reason=None, n=256, centred_error=0.0 if number == 0 else error, tail_error=4 * error),
        size_mb=0.35 if recipe.exact else 0.13,
        peak_mb=210.0 if recipe.backend.name == "eager" else 88.0,
        cold_s=1.4 if recipe.backend.name == "eager" else 0.3,
        seconds=12.5,
        dims=("batch",),
        notes=("OpenVINO could not run NonMaxSuppression natively.",) if recipe.backend.name == "openvino" else (),
        log=f"trials/{recipe.hash}/log.txt",
    )


def broken(number: int, recipe: Recipe, reason: str, traceback: str = "Traceback ...\nRuntimeError: no kernel") -> Trial:
    return Trial(
        recipe=recipe,
        state=State.FAILED,
        reason=reason,
        number=number,
        stage="lossless",
        seconds=3.0,
        log=f"trials/{recipe.hash}/log.txt",
        traceback=traceback,
    )


def explanation(recipe: Recipe, rows: list[tuple[str, int, float]], ms: float, dtype: Any = "float32") -> Explanation:
    flops, moved = 5_400_000, 350_000
    return Explanation(
        recipe=str(recipe),
        source="torch's profiler",
        operators=tuple(operator_shares(rows, 1)),
        dtype=dtype,
        threads=2,
        seconds=ms / 1e3,
        flops=flops,
        uncounted=("aten::sort",),
        bytes_moved=moved,
        roofline=roofline(flops, moved, ms / 1e3, PEAKS, dtype=dtype, threads=2),
    )


def record(
    count: int = 12,
    *,
    labels: bool = True,
    status: ranking.Status | None = "improved",
    failed: int = 1,
    limits: Limits | None = None,
    explained: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Record:
    """A study of ``count`` trials, the last ``failed`` of which broke."""
    draw = random.Random(seed)
    limits = limits or Limits(max_drop=0.02)
    limit = limits.drop_limit(0.978)
    found = [trial(n, recipe, labels=labels, limit=limit, draw=draw) for n, recipe in enumerate(recipes(count))]
    kept = max(0, count - failed)
    found[kept:] = [broken(t.number, t.recipe, "onnxruntime has no kernel for this operator.") for t in found[kept:]]
    ranked = ranking.ranked(found, limits, "latency")
    best = ranked[0] if ranked and status in ("improved", "kept_original") else None
    values: dict[str, Any] = {
        "workload": "digits",
        "command": "trimtab optimize examples/digits.py --max-drop 2% --out runs/digits",
        "started": "2026-11-21T15:00:00+00:00",
        "seconds": 187.0,
        "objective": "latency",
        "sampler": "ladder",
        "limits": limits,
        "prepared": Prepared(
            name="digits",
            fingerprint="feedc0de",
            identity="00c0ffee",
            score=0.978 if labels else None,
            n=500 if labels else None,
            blocked={},
            notes=() if labels else ("No labels were given, so accuracy is judged by the outputs alone.",),
            inputs="images: float32[1, 1, 8, 8]",
            threads=2,
            splits={"calibration": 256, "selection": 500, "test": 497},
            share=labels,
        ),
        "environment": ENVIRONMENT,
        "trials": tuple(found),
        "status": status,
    }
    if status is not None:
        values |= _ended(found, best, limits, explained=explained, labels=labels, limit=limit)
    return Record(**(values | changes))


def _ended(
    found: list[Trial], best: Trial | None, limits: Limits, *, explained: bool, labels: bool, limit: float
) -> dict[str, Any]:
    confirmation = None if best is None else confirmed(best, labels=labels, limit=limit)
    rungs = [ranking.entry(found[0], limits, rung="as_written")] if found else []
    if len(found) > 1:
        rungs.append(ranking.entry(found[1], limits, rung="tuned"))
    exact = [t for t in ranking.ranked(found, limits, "latency") if t.recipe.exact]
    rungs += [ranking.entry(t, limits, rung="lossless") for t in exact[:1]]
    if best is None:
        return {"ladder": tuple(rungs), "sentence": "Nothing meets latency 0.001 ms. The nearest is openvino."}
    rungs.append(ranking.entry(best, limits, rung="best", confirmed=confirmation))
    values: dict[str, Any] = {
        "ladder": tuple(rungs),
        "sentence": f"{best.recipe} is 3.91x as fast as written (95% interval 3.80 to 4.03).",
        "best": best.recipe.hash,
        "confirmation": confirmation,
        "artifact": "artifact",
        "files": {"model/model.xml": "ab" * 32, "manifest.json": "cd" * 32},
        "steps": waterfall.steps(
            found, best.recipe, baseline=found[0].recipe, tuned=found[min(1, len(found) - 1)].recipe, objective="latency"
        ),
    }
    if explained:
        first = [(f"aten::operator_{n}", 1.0, 0.3 / (n + 1)) for n in range(20)]
        last = [("Convolution (brgconv_avx512_1x1_I8)", 5.0, 0.06), ("Reorder (jit_uni_I8)", 2.0, 0.02)]
        values |= {
            "peaks": PEAKS,
            "explanations": {
                "as_written": explanation(found[0].recipe, first, WRITTEN_MS),
                "best": explanation(best.recipe, last, WRITTEN_MS / 3.91, "int8"),
            },
        }
    return values


def confirmed(best: Trial, *, labels: bool, limit: float) -> Confirmation:
    return Confirmation(
        recipe=best.recipe,
        ok=True,
        speedup=Interval(3.91, 3.8, 4.03),
        against_tuned=Interval(3.62, 3.5, 3.75),
        comparison=comparison(3.91),
        latency_ms=measured(WRITTEN_MS / 3.91),
        baseline_score=0.976 if labels else None,
        score=0.974 if labels else None,
        drop=drop(0.002, limit) if labels else None,
        parity=Parity(ok=True, reason=None, n=256, centred_error=0.021, tail_error=0.08),
        cold_s=0.31,
        peak_mb=88.5,
        measured_at="2026-11-21T15:00:00+00:00",
    )


def with_logs(found: Record, folder: pathlib.Path, texts: Mapping[int, str] | None = None) -> pathlib.Path:
    """A run folder with the record in it, and a log for each trial: as given by its number, else a short one."""
    for each in found.trials:
        assert each.log is not None
        path = folder / each.log
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((texts or {}).get(each.number, f"trial {each.number} says hello\n"), encoding="utf-8")
    found.write(folder)
    return folder


def throughput(found: Recipe) -> Recipe:
    """The same recipe for several examples at once."""
    return Recipe(passes=(Batch(size=8), *found.passes), backend=found.backend)


def data(whole: str) -> dict[str, Any]:
    """What the page of a report hands to its script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', whole, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
