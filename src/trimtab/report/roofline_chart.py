"""The roofline: measured peaks of the machine, and both models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trimtab.evaluation.explain import Explanation
from trimtab.hardware.environment import Peaks
from trimtab.measure.roofline import Roofline
from trimtab.report import formatting as words
from trimtab.report.charts import Chart, scatter
from trimtab.study.record import Record

DASHES = {"float32": "solid", "bfloat16": "dot", "float16": "dot", "int8": "dash"}
"""Line styles of the roofs by dtype."""
SIDES = {"as_written": "as written", "best": "what ships"}
COLOURS = {"as_written": "@quiet", "best": "@accent"}


def placed(record: Record) -> list[tuple[str, Explanation, Roofline]]:
    """The models with a place in the roofline: name, explanation, place."""
    found = [(name, record.explanations.get(name)) for name in SIDES]
    return [(name, each, each.roofline) for name, each in found if each is not None and each.roofline is not None]


def roofline(record: Record) -> Chart | None:
    """Operations per second against operations per byte, both on logarithmic axes."""
    models = placed(record)
    if record.peaks is None or not models:
        return None
    roofs = list(_roofs(record.peaks, models))
    if not roofs:
        return None
    ridges = [peak / memory for _, _, peak, memory in roofs]
    intensities = [place.intensity for _, _, place in models]
    low, high = min(*ridges, *intensities) / 5, max(*ridges, *intensities) * 8
    under = _under(record.peaks, models)
    roofs.sort(key=lambda roof: roof[:2] in under)  # used roofs are drawn last, above the others
    data = [_roof(*roof, under.get(roof[:2], []), low, high) for roof in roofs]
    data += [_model(name, place) for name, _, place in models]
    description = "; ".join(
        f"{SIDES[name]} reaches {words.digits(place.achieved)} of {words.digits(place.attainable)} billion operations a second "
        f"({words.share(place.share, 0)}), bound by {place.bound}"
        for name, _, place in models
    )
    layout = {
        "xaxis": {"type": "log", "title": {"text": "operations per byte moved"}, "exponentformat": "power", "dtick": 1},
        "yaxis": {"type": "log", "title": {"text": "billion operations a second"}, "exponentformat": "power", "dtick": 1},
        "legend": {"orientation": "h", "y": -0.24, "x": 0},
        "hovermode": "closest",
        "annotations": _labels([(*roof[:3], under[roof[:2]]) for roof in roofs if roof[:2] in under]),
    }
    return Chart("roofline", f"Roofline of this machine with the models on it: {description}.", data, layout, 430)


def _under(peaks: Peaks, models: list[tuple[str, Explanation, Roofline]]) -> dict[tuple[str, int], list[str]]:
    """Names of the models under each roof, by ``(dtype, threads)``."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, each, _ in models:
        found.setdefault((each.dtype, each.threads or peaks.threads), []).append(name)
    return found


def _labels(roofs: list[tuple[str, int, float, list[str]]]) -> list[dict[str, Any]]:
    """Label of each roof with models, at its right end: above the highest roof, below the others."""
    top = max((peak for _, _, peak, _ in roofs), default=0.0)
    return [
        {
            "text": f"{dtype}, {words.count(threads, 'thread')}: {' and '.join(SIDES[name] for name in names)}",
            **{"xref": "paper", "x": 1, "xanchor": "right", "y": math.log10(peak), "showarrow": False},
            "yanchor": "bottom" if peak == top else "top",
            "font": {"color": "@ink", "size": 12},
        }
        for dtype, threads, peak, names in roofs
    ]


def _roofs(peaks: Peaks, models: list[tuple[str, Explanation, Roofline]]) -> Iterator[tuple[str, int, float, float]]:
    """``(dtype, threads, peak, memory)`` of every roof at the models' numbers of threads."""
    for threads in sorted({threads for _, threads in _under(peaks, models)}):
        memory = peaks.find("memory", "cpu", threads)
        for dtype in DASHES:
            peak = peaks.find(dtype, "cpu", threads)  # type: ignore[arg-type]
            if peak and memory:
                yield dtype, threads, peak, memory


def _roof(dtype: str, threads: int, peak: float, memory: float, names: list[str], low: float, high: float) -> dict[str, Any]:
    """A roof, in the colour of its model if there is only one."""
    colour = "@grid-strong 0.6" if not names else COLOURS[names[0]] if len(names) == 1 else "@ink"
    ridge = peak / memory
    unit = "GOP/s" if dtype == "int8" else "GFLOP/s"
    name = f"{dtype}, {words.count(threads, 'thread')}"
    hover = f"{name}: {words.digits(peak)} {unit}, memory {words.digits(memory)} GB/s<extra></extra>"
    line = {"color": colour, "width": 2 if names else 1.2, "dash": DASHES[dtype]}
    x, y = [low, ridge, max(high, ridge)], [low * memory, peak, peak]
    return scatter("lines", name, x, y, line=line, hovertemplate=hover)


def _model(name: str, place: Roofline) -> dict[str, Any]:
    side, symbol = ("bottom right", "circle") if name == "best" else ("bottom left", "diamond")
    marker = {"size": 13, "symbol": symbol, "color": COLOURS[name], "line": {"color": "@ink", "width": 1}}
    text = {"text": [SIDES[name]], "textposition": side, "textfont": {"color": "@ink"}}
    hover = (
        f"<b>{SIDES[name]}</b><br>{words.digits(place.achieved)} of {words.digits(place.attainable)} billion operations "
        f"a second<br>{words.share(place.share, 0)} of what {place.bound} allows here<extra></extra>"
    )
    x, y = [place.intensity], [place.achieved]
    return scatter("markers+text", SIDES[name], x, y, marker=marker, hovertemplate=hover, **text)
