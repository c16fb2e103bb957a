"""The roofline: the measured peaks of the machine, and both models under them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimtab.environment import Peaks
from trimtab.explain import Explanation
from trimtab.measure.roofline import Roofline
from trimtab.report import _words as words
from trimtab.report._charts import Chart
from trimtab.study.record import Record

DTYPES = ("float32", "bfloat16", "float16", "int8")
SIDES = {"as_written": "as written", "best": "what ships"}


def placed(record: Record) -> list[tuple[str, Explanation, Roofline]]:
    """The models that have a place under the roof: which, all that is known, the place."""
    found = [(name, record.explanations.get(name)) for name in SIDES]
    return [(name, each, each.roofline) for name, each in found if each is not None and each.roofline is not None]


def roofline(record: Record) -> Chart | None:
    """Operations per second against operations per byte, both on axes of powers of ten."""
    models = placed(record)
    if record.peaks is None or not models:
        return None
    roofs = list(_roofs(record.peaks, models))
    if not roofs:
        return None
    ridges = [peak / memory for _, _, peak, memory, _ in roofs]
    intensities = [place.intensity for _, _, place in models]
    low, high = min(*ridges, *intensities) / 5, max(*ridges, *intensities) * 8
    data = [_roof(*roof, low, high) for roof in roofs]
    data += [_model(name, place) for name, _, place in models]
    said = "; ".join(
        f"{SIDES[name]} reaches {words.digits(place.achieved)} of {words.digits(place.attainable)} billion operations a second "
        f"({words.share(place.share, 0)}), bound by {place.bound}"
        for name, _, place in models
    )
    layout = {
        "xaxis": {"type": "log", "title": {"text": "operations per byte moved"}, "exponentformat": "power", "dtick": 1},
        "yaxis": {"type": "log", "title": {"text": "billion operations a second"}, "exponentformat": "power", "dtick": 1},
        "legend": {"orientation": "h", "y": -0.24, "x": 0},
        "hovermode": "closest",
    }
    return Chart("roofline", f"Roofline of this machine with the models on it: {said}.", data, layout, 430)


def _roofs(peaks: Peaks, models: list[tuple[str, Explanation, Roofline]]) -> Iterator[tuple[str, int, float, float, bool]]:
    """``(dtype, threads, peak, memory, whether a model is computed in it)`` of every roof at the models' numbers of threads."""
    used = {(each.dtype, each.threads or peaks.threads) for _, each, _ in models}
    for threads in sorted({threads for _, threads in used}):
        memory = peaks.find("memory", "cpu", threads)
        for dtype in DTYPES:
            peak = peaks.find(dtype, "cpu", threads)  # type: ignore[arg-type]
            if peak and memory:
                yield dtype, threads, peak, memory, (dtype, threads) in used


def _roof(dtype: str, threads: int, peak: float, memory: float, used: bool, low: float, high: float) -> dict[str, Any]:
    ridge = peak / memory
    unit = "GOP/s" if dtype == "int8" else "GFLOP/s"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{dtype}, {words.count(threads, 'thread')}",
        "x": [low, ridge, max(high, ridge)],
        "y": [low * memory, peak, peak],
        "line": {"color": "@ink" if used else "@grid-strong", "width": 2 if used else 1.2, "dash": _dash(dtype)},
        "hovertemplate": (
            f"{dtype}, {words.count(threads, 'thread')}: {words.digits(peak)} {unit}, "
            f"memory {words.digits(memory)} GB/s<extra></extra>"
        ),
    }


def _dash(dtype: str) -> str:
    return {"float32": "solid", "int8": "dash"}.get(dtype, "dot")


def _model(name: str, place: Roofline) -> dict[str, Any]:
    ours = name == "best"
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": SIDES[name],
        "x": [place.intensity],
        "y": [place.achieved],
        "text": [SIDES[name]],
        "textposition": "bottom right" if ours else "bottom left",
        "textfont": {"color": "@ink"},
        "marker": {
            "size": 13,
            "symbol": "circle" if ours else "diamond",
            "color": "@accent" if ours else "@quiet",
            "line": {"color": "@ink", "width": 1},
        },
        "hovertemplate": (
            f"<b>{SIDES[name]}</b><br>{words.digits(place.achieved)} of {words.digits(place.attainable)} billion operations "
            f"a second<br>{words.share(place.share, 0)} of what {place.bound} allows here<extra></extra>"
        ),
    }
