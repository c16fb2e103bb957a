"""The charts as data for plotly. Colours are names that the page looks up in its theme, so that charts follow it; a number
after a name is the share of that colour in a mix with the paper's."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trimtab._internal.text import plain
from trimtab.core.measurement import Interval
from trimtab.core.trial import State
from trimtab.report import formatting as words
from trimtab.report.trial_table import Row, has_files, labelled
from trimtab.study import ranking
from trimtab.study.record import Record

SERIES = 8
"""Number of backend colours in the theme; further backends reuse them."""
MAX_DIAMETER = 34
"""Diameter of the largest point in pixels."""
MIN_SIZE_MB = 1e-9
"""Size in MB of a point without a size: plotly draws none for 0, and the smallest for this value."""
DOMINATED_OPACITY = 0.35
"""Share of its colour in a dominated point; the rest is the paper's, so that overlapping points do not darken."""
REACH = 3.0
"""Maximum height of the chart, relative to the fastest trial, to show a limit that nothing meets."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart, and a sentence that describes it for readers who cannot see it."""

    name: str
    about: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 380


@dataclasses.dataclass(frozen=True)
class Point:
    """A trial in the plane of speed and loss."""

    row: int
    x: float
    low: float
    high: float
    speed: Interval
    size: float | None
    backend: str
    keeps: bool
    complete: bool
    hover: str


def escaped(text: str) -> str:
    """``text`` escaped for plotly, which reads tags."""
    return html.escape(plain(text), quote=False)


def wrapped(text: str, width: int = 46) -> str:
    """``text`` in lines of about ``width`` letters, at most four lines."""
    lines: list[str] = []
    line = ""
    for word in words.clipped(text, 4 * width).split():
        if line and len(line) + len(word) >= width:
            lines, line = [*lines, line], word
        else:
            line = f"{line} {word}".strip()
    return "<br>".join(escaped(each) for each in [*lines, line])


def ladder(record: Record) -> Chart | None:
    """The speed-up of each rung with its interval."""
    rungs = [(rung, found) for rung in record.ladder if _usable(found := words.rung_interval(rung)) and found is not None]
    if not rungs:
        return None
    names = [words.RUNG_WORDS.get(rung["rung"], str(rung["rung"])) for rung, _ in rungs]
    intervals = [found for _, found in rungs]
    clear = [not found.vague for found in intervals]
    reach = max((found.high for found, sure in zip(intervals, clear, strict=True) if sure), default=1.0)
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": [found.value if sure else None for found, sure in zip(intervals, clear, strict=True)],
        "text": [f" {words.rung_speed(rung)}" for rung, _ in rungs],
        "textposition": "none",
        "width": 0.42,
        "marker": {"color": ["@accent" if name == "best" else "@quiet" for name in names]},
        "error_x": _error_bars(
            [(f.value - f.low, f.high - f.value) if sure else (0.0, 0.0) for f, sure in zip(intervals, clear, strict=True)]
        ),
        "hovertext": [f"<b>{escaped(n)}</b><br>{wrapped(r['recipe'])}" for n, (r, _) in zip(names, rungs, strict=True)],
        "hovertemplate": "%{hovertext}<br>%{text}<extra></extra>",
    }
    labels = [_label(name, words.rung_speed(rung)) for name, (rung, _) in zip(names, rungs, strict=True)]
    description = "; ".join(f"{name} {words.rung_speed(rung)}" for name, (rung, _) in zip(names, rungs, strict=True))
    layout = {
        "xaxis": {"title": {"text": "speed-up over as written"}, "range": [0, 1.06 * reach], "ticksuffix": "x"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
        "annotations": labels,
        "shapes": [_line(x=1.0, colour="@grid-strong")],
        "showlegend": False,
    }
    return Chart(
        "ladder", f"Speed-up of each rung over the model as written: {description}.", [bars], layout, 90 + 62 * len(rungs)
    )


def _usable(found: Interval | None) -> bool:
    return found is not None and all(words.known(value) is not None for value in (found.value, found.low, found.high))


def _label(y: str, text: str) -> dict[str, Any]:
    """The figures of a bar, above its beginning, where narrow screens have room for them."""
    place = {"x": 0, "y": y, "xanchor": "left", "yanchor": "bottom", "yshift": 13}
    return place | {"text": escaped(text), "showarrow": False, "font": {"color": "@ink"}}


def _error_bars(both: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Error bars that extend ``(down, up)`` from each point."""
    return {
        "type": "data",
        "symmetric": False,
        "arrayminus": [max(0.0, down) for down, _ in both],
        "array": [max(0.0, up) for _, up in both],
        "color": "@ink",
        "thickness": 1.4,
        "width": 0,
    }


def _line(*, x: float | None = None, y: float | None = None, colour: str = "@bad") -> dict[str, Any]:
    """A dotted line across the whole chart."""
    line = {"type": "line", "line": {"color": colour, "width": 1.4, "dash": "dot"}, "layer": "below"}
    if x is not None:
        return line | {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    return line | {"y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1}


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other point beats in both speed and loss, smallest loss first. Only complete trials count."""
    found: list[Point] = []
    for point in sorted((p for p in points if p.complete), key=lambda p: (p.x, -p.speed.value)):
        if not found or point.speed.value > found[-1].speed.value:
            found.append(point)
    return found


def points(record: Record, rows: Sequence[Row]) -> list[Point]:
    """The trials with known speed and loss."""
    return [point for index, row in enumerate(rows) if (point := _point(index, row, record)) is not None]


def drawable(speed: Interval | None) -> bool:
    """Whether a speed-up is known and narrow enough to draw."""
    return speed is not None and _usable(speed) and not speed.vague


def _point(index: int, row: Row, record: Record) -> Point | None:
    trial = row.trial
    scale = 100.0 if words.in_percent(record) else 1.0
    if labelled(record):
        drop = trial.drop
        figures = None if drop is None else (drop.value * scale, drop.low * scale, drop.upper * scale)
    else:
        error = trial.parity.centred_error if trial.parity else None
        figures = None if error is None else (error, error, error)
    speed = trial.speedup
    if speed is None or not drawable(speed) or figures is None or any(words.known(figure) is None for figure in figures):
        return None
    return Point(
        *(index, *figures, speed, words.known(trial.size_mb), trial.recipe.backend.name, row.keeps),
        complete=trial.state is State.COMPLETE,
        hover=_hover(row, record),
    )


def _hover(row: Row, record: Record) -> str:
    trial = row.trial
    loss = (
        f"{words.terms(record).drop}: {words.change(trial.drop, record) if trial.drop else words.UNKNOWN}"
        if labelled(record)
        else f"error {words.error(trial.parity.centred_error if trial.parity else None)}"
    )
    size = [f"size {words.megabytes(trial.size_mb)}"] if has_files(record) else []
    state = f"{trial.state}{_limits_text(row, record)}"
    return "<br>".join((f"<b>{wrapped(row.recipe)}</b>", escaped(words.speed(trial.speedup)), loss, *size, state))


def _limits_text(row: Row, record: Record) -> str:
    """Whether limits are kept, to follow the state; empty for a trial that ended early, which was not compared with them."""
    if row.keeps or row.trial.state is not State.COMPLETE:
        return ", within the limits" if row.keeps else ""
    return ", not within the limits" if ranking.misses(row.trial, record.limits) else ", not in a form that ships"


def pareto(record: Record, rows: Sequence[Row]) -> Chart | None:
    """Speed against loss: area is size, colour is backend, dominated points are pale, limits are lines."""
    found = points(record, rows)
    if not found:
        return None
    best = front(found)
    place = _axis(found, log=not labelled(record))
    largest = max((point.size or 0.0 for point in found), default=0.0) or 1.0
    backends = sorted({point.backend for point in found})
    colours = {backend: f"@series-{index % SERIES}" for index, backend in enumerate(backends)}
    dominated = [point for point in found if point not in best]
    data = [  # later traces cover earlier ones
        *_traces(dominated, colours, place, largest, pale=True),
        _front_line(best, place),
        *_traces(best, colours, place, largest, pale=False),
        *(_legend_entry(backend, colour) for backend, colour in colours.items()),
    ]
    against = words.terms(record).lost if labelled(record) else "error of the outputs"
    about = (
        f"Speed-up against {against} of {len(found)} trials; {len(best)} of them are not beaten in both. The table of trials "
        "holds the same figures."
    )
    return Chart("pareto", about, data, _pareto_layout(record, rows, found, place), 460)


def _axis(found: Sequence[Point], *, log: bool) -> Callable[[float], float]:
    """The position of a loss: unchanged, or on a logarithmic axis, where zero loss is left of the smallest loss."""
    if not log:
        return lambda x: x
    least = min((point.x for point in found if point.x > 0), default=1e-7)
    return lambda x: max(x, least / 10)


def scatter(mode: str, name: str, x: Iterable[float | None], y: Iterable[float | None], **more: Any) -> dict[str, Any]:
    """Points, lines or both; ``more`` holds further keys of plotly."""
    return {"type": "scatter", "mode": mode, "name": escaped(name), "x": list(x), "y": list(y), **more}


def _front_line(best: Sequence[Point], place: Callable[[float], float]) -> dict[str, Any]:
    line = {"shape": "hv", "color": "@grid-strong", "width": 1.5}
    x, y = [place(point.x) for point in best], [point.speed.value for point in best]
    return scatter("lines", "not beaten", x, y, line=line, hoverinfo="skip", showlegend=False)


def _traces(
    found: Sequence[Point], colours: Mapping[str, str], place: Callable[[float], float], largest: float, *, pale: bool
) -> list[dict[str, Any]]:
    """A trace for each backend, large points below small ones. Only points that no other beats have error bars."""
    own = {name: sorted((p for p in found if p.backend == name), key=lambda p: -(p.size or 0.0)) for name in colours}
    return [_trace(name, colours[name], points, place, largest, pale=pale) for name, points in own.items() if points]


def _trace(
    name: str, colour: str, own: Sequence[Point], place: Callable[[float], float], largest: float, *, pale: bool
) -> dict[str, Any]:
    across = [(0.0, 0.0) if pale else (p.x - p.low, p.high - p.x) for p in own]
    along = [(0.0, 0.0) if pale else (p.speed.value - p.speed.low, p.speed.high - p.speed.value) for p in own]
    colour = f"{colour} {DOMINATED_OPACITY}" if pale else colour
    error = {"color": colour}
    marker = {"color": colour, "sizemode": "area", "sizeref": 2 * largest / MAX_DIAMETER**2, "sizemin": 5, "opacity": 1.0} | {
        "size": [point.size or MIN_SIZE_MB for point in own],
        "symbol": ["circle" if point.keeps else "circle-open" for point in own],
        "line": {"width": [1 if pale and p.keeps else 2 for p in own], "color": "@paper" if pale else colour},
    }
    x, y = [place(point.x) for point in own], [point.speed.value for point in own]
    hover = {"hovertext": [point.hover for point in own], "hovertemplate": "%{hovertext}<extra></extra>"}
    more = hover | {
        "customdata": [point.row for point in own],
        "error_x": _error_bars(across) | error,
        "error_y": _error_bars(along) | error,
    }
    return scatter("markers", name, x, y, marker=marker, legendgroup=name, showlegend=False, **more)


def _legend_entry(name: str, colour: str) -> dict[str, Any]:
    """The backend's entry in the legend, which would otherwise look like its first point."""
    return scatter("markers", name, [None], [None], legendgroup=name, marker={"color": colour, "size": 11})


def _pareto_layout(
    record: Record, rows: Sequence[Row], found: Sequence[Point], place: Callable[[float], float]
) -> dict[str, Any]:
    top = max(min(point.speed.high, 1.3 * point.speed.value) for point in found)
    asked = _required_speedup(record)
    if asked is not None and asked <= REACH * top:
        top = max(top, asked)
    shapes, notes = _limit_lines(record, top)
    spots = [point.x if labelled(record) else math.log10(place(point.x)) for point in found]
    middle = (min(spots) + max(spots)) / 2
    notes += [
        _winner_note(record, x, point.speed.value, right=x > middle)
        for x, point in zip(spots, found, strict=True)
        if rows[point.row].ships
    ]
    across: dict[str, Any] = {"title": {"text": words.terms(record).lost}, "zeroline": True}
    if not labelled(record):
        across = {"title": {"text": "error of the outputs"}, "type": "log", "exponentformat": "power", "dtick": 1}
    elif words.in_percent(record):
        across["ticksuffix"] = "%"
    return {
        "xaxis": across,
        "yaxis": {"title": {"text": "speed-up over as written"}, "range": [0, 1.15 * top], "ticksuffix": "x"},
        "shapes": shapes,
        "annotations": notes,
        "legend": {"orientation": "h", "y": -0.24, "x": 0},
        "hovermode": "closest",
    }


def _winner_note(record: Record, x: float, y: float, *, right: bool) -> dict[str, Any]:
    """Name and confirmed speed-up of what ships; the text is left of the point in the ``right`` half, otherwise right of it."""
    again = record.confirmation.speedup if record.confirmation is not None and record.confirmation.again else None
    text = "ships" if again is None else f"ships<br>({words.quoted(again)} when measured again)"
    arrow = {"showarrow": True, "arrowcolor": "@ink", "arrowwidth": 1, "ax": 0, "ay": -34}
    side = "right" if right else "left"
    return arrow | {"x": x, "y": y, "text": text, "font": {"color": "@ink"}, "xanchor": side, "align": side}


def _required_speedup(record: Record) -> float | None:
    """The speed-up at which the model as written would meet the latency limit, if there is one."""
    medians = (rung["latency_ms"]["median"] for rung in record.ladder if rung.get("rung") == "as_written")
    written, limit = words.known(next(medians, None)), record.limits.latency_ms
    return written / limit if record.objective == "latency" and limit and written else None


def _limit_lines(record: Record, top: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of the limits, up to ``top``. A latency limit above that is a note instead."""
    shapes, notes = [], []
    scale = 100.0 if words.in_percent(record) else 1.0
    base = words.known(record.prepared.score)
    if labelled(record) and base is not None:
        limit = record.limits.drop_limit(base)
        shapes.append(_line(x=limit * scale))
        notes.append(_limit_note(f"limit {words.lost(limit, record)}", x=limit * scale))
    elif not labelled(record):
        shapes.append(_line(x=record.limits.max_error))
        notes.append(_limit_note(f"limit {words.error(record.limits.max_error)}", x=math.log10(record.limits.max_error)))
    if (asked := _required_speedup(record)) is not None:
        limit_ms = f"limit {words.milliseconds(record.limits.latency_ms)}"
        if asked <= top:
            shapes.append(_line(y=asked))
            notes.append(_limit_note(limit_ms, y=asked))
        else:
            notes.append(_limit_note(f"{limit_ms}: above, at {words.times(asked)}"))
    return shapes, notes


def _limit_note(text: str, *, x: float | None = None, y: float | None = None) -> dict[str, Any]:
    """A label beside the line of a limit, or at the upper edge if there is no line."""
    note = {"text": text, "showarrow": False, "font": {"color": "@bad", "size": 12}}
    if x is not None:
        return note | {"x": x, "yref": "paper", "y": 1, "yanchor": "bottom"}
    right = note | {"xref": "paper", "x": 1, "xanchor": "right"}
    return right | ({"y": y, "yanchor": "bottom"} if y is not None else {"yref": "paper", "y": 1, "yanchor": "top"})
