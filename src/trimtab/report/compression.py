"""Compressed networks in the report: their layers, their training, and the figures of each compressed form."""

from __future__ import annotations

from trimtab._internal.text import counted, plain
from trimtab.core.network import Layer
from trimtab.core.recipe import Recipe
from trimtab.core.trained import Trained
from trimtab.core.trial import State, Trial
from trimtab.report import formatting as words
from trimtab.report.charts import Chart, escaped, scatter
from trimtab.study import ranking
from trimtab.study.record import Record

SHOWN = 40
"""Most compressed forms in the table."""
BARS = 25
"""Most layers in the chart of sensitivities."""
UNTRIED = (
    "Smaller networks were not tried. --compress auto (in Python, compress='auto') removes channels, layers or bits, trains "
    "the rest to follow the model, and judges the result like every other recipe."
)
FORM_HEADS = ("form", "state", "parameters", "zeros", "speed-up", "latency", "score", "drop at most", "size")
LAYER_HEADS = ("layer", "kind", "weights before", "weights now", "zeros", "bits")
SENSITIVITY_HEADS = ("layer", "change of the outputs in 8 bits")
TRAINING_HEADS = ("training", "state", "updates", "examples", "time", "held-out loss before", "after")


def forms(record: Record) -> list[Trial]:
    """The trials of compressed networks, best first within their state."""
    found = [trial for trial in record.trials if trial.recipe.compresses and trial.state is not State.SKIPPED]
    ranked = [trial.recipe.hash for trial in ranking.ranked(found, record.limits, record.objective)]
    place = {name: number for number, name in enumerate(ranked)}
    return sorted(found, key=lambda trial: place.get(trial.recipe.hash, len(place) + trial.number))[:SHOWN]


def form_rows(record: Record) -> list[tuple[str, ...]]:
    """A row of text for each form, with the columns :data:`FORM_HEADS`."""
    return [_form(trial, record) for trial in forms(record)]


def _form(trial: Trial, record: Record) -> tuple[str, ...]:
    network, drop = trial.network, trial.drop
    return (
        plain(words.recipe(trial.recipe, record)),
        str(trial.state),
        "–" if network is None else f"{network.parameters:,} ({words.share(network.share, 0)})",
        "–" if network is None else words.share(network.zeros, 0),
        words.speed(trial.speedup),
        words.milliseconds(None if trial.latency_ms is None else trial.latency_ms.median),
        words.score(trial.score, record),
        "–" if drop is None else words.lost(drop.upper, record),
        words.megabytes(trial.size_mb),
    )


def shown_form(record: Record) -> Trial | None:
    """The form whose layers are shown: what ships if it is compressed, else the best compressed one."""
    found = [trial for trial in forms(record) if trial.network is not None]
    return next((trial for trial in found if trial.recipe.hash == record.best), found[0] if found else None)


def layer_rows(record: Record) -> list[tuple[str, ...]]:
    """A row of text for each layer of :func:`shown_form`, with the columns :data:`LAYER_HEADS`."""
    trial = shown_form(record)
    if trial is None or trial.network is None:
        return []
    return [_layer(layer) for layer in trial.network.layers]


def _layer(layer: Layer) -> tuple[str, ...]:
    before = "–" if layer.original is None else _sizes(layer.original)
    return (
        plain(layer.name) or "(the model)",
        layer.kind,
        before,
        _sizes(layer.shape),
        words.share(layer.zeros, 0),
        str(layer.bits),
    )


def _sizes(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def sensitivities(record: Record) -> tuple[tuple[str, float], ...]:
    """Layers of the model as written, with the change of the outputs that their rounding makes; most sensitive first."""
    return next((trial.sensitivity for trial in record.trials if trial.sensitivity), ())


def sensitivity_rows(record: Record) -> list[tuple[str, ...]]:
    """A row of text for each layer, with the columns :data:`SENSITIVITY_HEADS`."""
    return [(plain(name), f"{value:.3g}") for name, value in sensitivities(record)]


def rounding(record: Record) -> Chart | None:
    """The sensitivity of each layer as a bar, most sensitive first."""
    found = [(escaped(words.clipped(name, 40)), value) for name, value in sensitivities(record)[:BARS]]
    if not found:
        return None
    names, values = zip(*found, strict=True)
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": list(names),
        "x": list(values),
        "marker": {"color": "@accent"},
        "hovertemplate": "%{y}<br>%{x:.3g} of the outputs' variance over the examples<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "change of the outputs, relative to their variance"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False, "automargin": True},
        "showlegend": False,
    }
    about = f"How much the outputs change when one layer alone is rounded to 8 bits; {names[0]} matters most, {values[0]:.3g}."
    return Chart("rounding", about, [bars], layout, 90 + 22 * len(found))


def training_rows(record: Record) -> list[tuple[str, ...]]:
    """A row of text for each training, with the columns :data:`TRAINING_HEADS`."""
    return [_training(each) for each in record.trainings]


def _training(found: Trained) -> tuple[str, ...]:
    return (
        named(found.recipe),
        str(found.state),
        f"{found.update} of {found.updates}" if found.updates else "–",
        f"{found.examples:,} {found.labels}".strip() if found.examples else "–",
        words.duration(found.seconds),
        words.digits(found.before),
        words.digits(found.after),
    )


def reasons(record: Record) -> list[str]:
    """Why trainings did not finish, in sentences."""
    return [f"{named(each.recipe)}: {plain(each.reason)}" for each in record.trainings if each.reason]


def named(recipe: Recipe) -> str:
    """The passes of a training in words."""
    return plain("; ".join(step.describe() for step in recipe.passes))


def spent(record: Record) -> str | None:
    """The time of all trainings, in a sentence; ``None`` if there were none."""
    if not record.trainings:
        return None
    took = words.duration(sum(each.seconds for each in record.trainings))
    of = "" if record.train_s is None else f" of the {words.duration(record.train_s)} for it (--train-budget)"
    return f"{counted(len(record.trainings), 'training')} took {took}{of}. Each ran once; all trials load its weights."


def untried(record: Record) -> str | None:
    """A hint at compression, if the study did not try it; else ``None``."""
    return UNTRIED if record.mode == "infer" and record.status is not None and not record.compress else None


def curves(record: Record) -> Chart | None:
    """The loss of each training on its held-out examples, and on the examples it learns from."""
    data = []
    for number, each in enumerate(record.trainings):
        colour = f"@series-{number % 8}"
        for points, name, dash in ((each.losses, "training", "dot"), (each.held_out, "held out", "solid")):
            if not points:
                continue
            x, y = zip(*points, strict=True)
            title = f"{words.clipped(named(each.recipe), 60)}, {name}"
            data.append(scatter("lines", title, x, y, line={"color": colour, "dash": dash, "width": 2}))
    if not data:
        return None
    layout = {
        "xaxis": {"title": {"text": "updates"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "loss"}, "rangemode": "tozero"},
        "showlegend": True,
    }
    return Chart(
        "curves", "Losses of the trainings over their updates; the table shows where they began and ended.", data, layout
    )


def tradeoff(record: Record) -> Chart | None:
    """Latency against score of all forms, compressed and not compressed."""
    found = [trial for trial in record.trials if trial.latency_ms is not None and trial.score is not None]
    if not any(trial.recipe.compresses for trial in found):
        return None
    data = []
    for name, compressed, colour in (("not compressed", False, "@quiet"), ("compressed", True, "@accent")):
        own = [trial for trial in found if trial.recipe.compresses is compressed]
        x = [trial.latency_ms.median for trial in own if trial.latency_ms is not None]
        text = [escaped(words.clipped(words.recipe(trial.recipe, record), 90)) for trial in own]
        hover = "%{text}<br>%{x:.3g} ms, score %{y:.4f}<extra></extra>"
        marker = {"color": colour, "size": 10}
        y = [trial.score for trial in own]
        data.append(scatter("markers", name, x, y, text=text, hovertemplate=hover, marker=marker))
    layout = {
        "xaxis": {"title": {"text": "latency in ms"}, "type": "log"},
        "yaxis": {"title": {"text": "score on the data of the search"}},
        "showlegend": True,
    }
    return Chart("tradeoff", "Latency against score of compressed and other forms; the table shows the same.", data, layout)
