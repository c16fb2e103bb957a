"""Figures of a report: which of them belong together, of what they are, and what is claimed where nothing was looked at."""

from __future__ import annotations

import dataclasses
import html as escapes
import pathlib
import random
import re
import types
from html import escape
from typing import Any

import pytest

from _studies import WRITTEN_MS, comparison, confirmed, interval, measured, record, throughput, trial
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend
from trimtab.core.limits import Limits
from trimtab.core.measurement import Drop, Interval, Measurement
from trimtab.core.recipe import Recipe
from trimtab.core.trial import Trial
from trimtab.report import (
    charts,
    headline,
    html,
    operator_breakdown,
    reliability,
    roofline_chart,
    side_by_side,
    text,
    trial_table,
)
from trimtab.study import conclusions, ranking
from trimtab.study.options import Options
from trimtab.study.record import Record
from trimtab.study.result import Best, Result
from trimtab.study.samplers.ladder import as_written


def said(found: Record, folder: pathlib.Path) -> str:
    """What a person reads on the page."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", html(found, folder), flags=re.DOTALL)
    return " ".join(escapes.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def tiles(found: Record) -> dict[str, tuple[str, str]]:
    return {tile.name: (tile.value, tile.below) for tile in headline.tiles(found)}


def confirmed_as(found: Record, **figures: Any) -> Record:
    """``found`` with other figures in its confirmation."""
    assert found.confirmation is not None
    return dataclasses.replace(found, confirmation=dataclasses.replace(found.confirmation, **figures))


@pytest.mark.parametrize(
    ("value", "upper", "name", "tile", "fact"),
    [
        (0.012, 0.03, "drop of the score", ("1.20%", "at most 3.00%; score"), "1.20% (≤ 3.00%)"),
        (0.0, 0.03, "drop of the score", ("0.00%", "drops by 3.00% at most; score"), "0.00% (≤ 3.00%)"),
        (
            -0.011,
            0.02,
            "improvement of the score",
            ("1.10%", "drops by 2.00% at most; score"),
            "improvement of 1.10% (drop ≤ 2.00%)",
        ),
    ],
)
def test_a_score_that_rises_is_an_improvement(value: float, upper: float, name: str, tile: tuple[str, str], fact: str) -> None:
    found = confirmed_as(record(12), drop=Drop(value=value, low=value - 0.01, upper=upper, n=500, share=True))
    shown, below = tiles(found)[name]
    assert (shown, below[: len(tile[1])]) == tile
    assert dict(reliability.confirmation(found))["drop of the score on the test data"].startswith(fact)


# ---- what was timed in turns stands together


def test_latencies_side_by_side_were_timed_in_turns_and_divide_to_the_speed_up(tmp_path: pathlib.Path) -> None:
    times = dataclasses.replace(comparison(4.0), candidate=measured(0.125), rival=measured(0.5))
    found = confirmed_as(record(12), speedup=interval(4.0), latency_ms=measured(0.125), comparison=times)
    ladder = [ranking.entry(found.winner, found.limits, rung="best", confirmed=found.confirmation)]  # type: ignore[arg-type]
    found = dataclasses.replace(found, ladder=(*found.ladder[:-1], *ladder))
    assert found.ladder[0]["latency_ms"]["median"] == WRITTEN_MS  # of another minute
    assert tiles(found)["median latency"] == ("0.125 ms", "0.500 ms as written, in turns with it")
    assert tiles(found)["speed-up over as written"][0] == "4.00x"
    page = said(found, tmp_path)
    assert "those of other rows are of other minutes, so their quotient is another number." in page
    assert "Bars are speed-ups and whiskers 95% intervals" in page
    alone = confirmed_as(found, comparison=None)
    assert tiles(alone)["median latency"] == ("0.125 ms", "0.420 ms as written")


def result(trials: list[Trial], best: Trial, speed: float = 5.0, **figures: Any) -> Result:
    again = dataclasses.replace(confirmed(best, labels=True, limit=0.02), speedup=interval(speed), **figures)
    study: Any = types.SimpleNamespace(
        options=Options(limits=Limits(max_drop=0.02)),
        trials=trials,
        baseline=as_written(),
        to_beat=trials[1],
        prepared=record(1).prepared,
    )
    return Result(
        study=study, status="improved", sentence="", best=Best(trial=best, confirmation=again, artifact=None), seconds=1.0
    )


def rungs(found: Result) -> dict[str, Any]:
    return {rung["rung"]: rung for rung in found.ladder().rungs}


def test_one_recipe_has_one_figure_on_the_ladder() -> None:
    trials = list(record(8, failed=0).trials)
    exact = next(t for t in ranking.ranked(trials, Limits(max_drop=0.02), "latency") if t.recipe.exact)
    ladder = rungs(result(trials, exact))
    assert ladder["lossless"]["recipe"] == ladder["best"]["recipe"]
    assert ladder["lossless"] | {"rung": "best"} == ladder["best"]
    assert ladder["best"]["speedup"]["value"] == 5.0
    assert ladder["tuned"]["speedup"]["value"] == pytest.approx(1.06)  # of the search, as it is not what ships
    tuned = rungs(result(trials, trials[1], 1.2))
    assert tuned["tuned"]["speedup"] == tuned["best"]["speedup"]
    assert tuned["lossless"]["recipe"] != tuned["best"]["recipe"]
    refused = rungs(result(trials, trials[1], ok=False, comparison=None))
    assert refused["tuned"]["speedup"]["value"] == 5.0


def test_what_was_written_is_once_as_fast_as_itself_also_where_its_copy_ships() -> None:
    trials = list(record(8, failed=0).trials)
    ladder = rungs(result(trials, trials[0], 0.96))
    assert ladder["as_written"]["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert ladder["best"]["speedup"]["value"] == 0.96
    nothing = result(trials, trials[1])
    assert nothing.best is not None
    bare = dataclasses.replace(nothing.best.confirmation, speedup=None)
    nothing = dataclasses.replace(nothing, best=dataclasses.replace(nothing.best, confirmation=bare))
    assert rungs(nothing)["tuned"]["speedup"]["value"] == pytest.approx(1.06)  # the search's, as there is no other


def test_the_front_shows_the_search_and_says_what_the_confirmation_said(tmp_path: pathlib.Path) -> None:
    found = record(12, failed=0)
    chart = charts.pareto(found, trial_table.rows(found))
    assert chart is not None
    (label,) = (note for note in chart.layout["annotations"] if note["text"].startswith("ships"))
    assert label["text"] == "ships<br>(3.91x when measured again)"
    assert found.winner is not None
    assert found.winner.speedup is not None
    assert label["y"] == found.winner.speedup.value
    assert "Points show what the search measured." in said(found, tmp_path)
    chart = charts.pareto(confirmed_as(found, again=False), trial_table.rows(found))
    assert chart is not None
    assert [note["text"] for note in chart.layout["annotations"]].count("ships") == 1


# ---- what the data was shown to, and what it could not decide


@pytest.mark.parametrize(
    ("tried", "test"),
    [
        ((), "497 examples: only recipes that are confirmed see it"),
        (("a",), "497 examples: only recipes that were confirmed saw it, one after the other: 1 here"),
        (
            ("a", "b"),
            "497 examples: only recipes that were confirmed saw it, one after the other: 2 here, each of them a chance more "
            "to pass by luck",
        ),
    ],
)
def test_the_report_says_how_many_recipes_saw_the_test_data(tried: tuple[str, ...], test: str) -> None:
    assert dict(reliability.data(record(4, tried=tried)))["test"] == test


def test_exact_recipes_that_the_data_could_not_decide_are_counted(tmp_path: pathlib.Path) -> None:
    found = record(12, failed=0)
    kept = dataclasses.replace(found.trials[0].drop, decided=True)  # type: ignore[type-var]
    clear = [dataclasses.replace(t, drop=dataclasses.replace(kept)) for t in found.trials]
    nothing = "Nothing: every drop that was measured is clearly within its limit or clearly beyond it"
    assert nothing in said(dataclasses.replace(found, trials=tuple(clear)), tmp_path)
    open_ = dataclasses.replace(kept, decided=None)
    trials = [dataclasses.replace(t, drop=open_) if t.recipe.exact else t for t in clear]
    exact = sum(t.recipe.exact for t in trials)
    found = dataclasses.replace(found, trials=tuple(trials))
    sentence = f"{exact} exact recipes are undecided by the data; they were held to floating-point noise instead."
    page = said(found, tmp_path)
    assert sentence in page
    assert "exact recipes that the data cannot decide are held to rounding instead" in page
    assert nothing not in page
    assert f"undecidable trials: 0, and {exact} exact, held to rounding instead" in " ".join(text(found).split())
    row = next(row for row in trial_table.rows(found) if row.trial.recipe.exact)
    facts = dict(trial_table._facts(row.trial, found))
    assert facts["limit of the drop"].endswith(
        "undecidable with 500 examples, but it is exact and was held to rounding instead"
    )
    one = dataclasses.replace(found, trials=tuple(t for t in trials if not t.recipe.exact or t.recipe == as_written()))
    assert (
        reliability.exact_recipes_note(one)
        == "1 exact recipe is undecided by the data; it was held to floating-point noise instead."
    )


@pytest.mark.parametrize(
    ("backend", "known"),
    [(Eager(), True), (OpenVino(), True), (OnnxRuntime(), True), (TorchScript(), False)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_silence_of_a_runtime_is_a_finding_only_where_it_would_have_spoken(backend: Backend, known: bool) -> None:
    found = record(4, failed=0)
    best = dataclasses.replace(found.trials[0], recipe=Recipe(backend=backend), notes=())
    found = dataclasses.replace(found, trials=(best,), best=best.recipe.hash)
    assert not operator_breakdown.runtime_notes(found)
    assert ("no operator that the runtime could not run natively" in operator_breakdown.no_notes(found)) == known
    assert ("does not say which operators" in operator_breakdown.no_notes(found)) != known


# ---- doubtful figures


def test_processes_that_run_unlike_each_time_are_not_blamed_on_a_busy_machine() -> None:
    unlike = dataclasses.replace(
        comparison(2.0), ratio=Interval(2.0, 1.6, 2.5), process_noise=0.12, starts=5, rival_ms=(0.4123, 0.52)
    )
    found = confirmed_as(record(8), speedup=unlike.ratio, against_tuned=None, comparison=unlike)
    assert headline.doubt(found) == (
        "Each time they start the two run at another ratio, by 12% over 5 starts; the baseline took 0.412 to 0.52 ms: the "
        "interval of the speed-up goes from 1.60 to 2.50. Quote the interval, not the number. That is how they run here: more "
        "time or a quieter machine would narrow it little."
    )
    busy = dataclasses.replace(unlike, foreign=0.4)
    assert headline.doubt(confirmed_as(found, comparison=busy)).startswith("The machine was too busy")


def test_starts_in_which_threads_met_slowly_are_counted_in_the_report() -> None:
    left = dict(reliability.noise(confirmed_as(record(8), comparison=comparison(2.0))))
    assert not [fact for fact in left if "slowly" in fact]
    for more, fact in (
        ({"starts_left_out": 3}, "further starts, not counted, in which the original's threads met slowly"),
        ({"starts_corrected": 3}, "starts in which the original's threads met slowly, with its time in the search"),
    ):
        found = dataclasses.replace(comparison(2.0), starts=12, **more)
        assert dict(reliability.noise(confirmed_as(record(8), comparison=found)))[fact] == "3"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Interval(2.5, 2.4, 2.6), "openvino is 2.50x as fast as written (95% interval 2.40 to 2.60) and "),
        (
            Interval(9.0, 3.0, 27.0),
            "openvino is at least 3.00x as fast as written (95% interval 3.00 to 27.00) and ",
        ),
        (
            Interval(1.5, 0.5, 27.0),
            "openvino is faster or slower than as written, which the timings leave unclear (0.50 to 27.00) and ",
        ),
    ],
)
def test_the_verdict_quotes_no_number_that_the_page_says_not_to_quote(ratio: Interval, words: str) -> None:
    best = trial(2, Recipe(backend=OpenVino()), labels=True, limit=0.02, draw=random.Random(0))
    again = dataclasses.replace(confirmed(best, labels=True, limit=0.02), speedup=ratio)
    study: Any = types.SimpleNamespace(trials=[best], options=Options(), thread_limit=None)
    sentence = conclusions.improved(study, Best(trial=best, confirmation=again, artifact=None), [], best)
    assert sentence.startswith(words + "3.62x the tuned original (3.50 to 3.75)")


# ---- conditions beside figures


def busy_server() -> Record:
    """A study whose winner takes eight examples at once."""
    found = record(8, failed=0, objective="throughput")
    trials = []
    for each in found.trials:
        several = each.recipe.backend.name == "openvino"
        single = Measurement(
            unit="ms",
            n=20,
            median=5.0 * (8 if several else 1),
            interval=interval(5.0),
            conditions={"examples": 8 if several else 1},
        )
        recipe = throughput(each.recipe) if several else each.recipe
        trials.append(dataclasses.replace(each, recipe=recipe, latency_ms=single))
    best = next(t for t in trials if t.recipe.backend.name == "openvino")
    rate = Measurement(unit="examples/s", n=20, median=800.0, interval=Interval(800.0, 780.0, 820.0))
    again = dataclasses.replace(confirmed(best, labels=True, limit=0.02), latency_ms=best.latency_ms, throughput=rate)
    ladder = (
        ranking.entry(trials[0], found.limits, rung="as_written"),
        ranking.entry(best, found.limits, rung="best", confirmed=again),
    )
    return dataclasses.replace(
        found,
        trials=tuple(trials),
        best=best.recipe.hash,
        confirmation=again,
        ladder=ladder,
    )


def test_latencies_of_other_batches_say_of_how_many_examples_they_are(tmp_path: pathlib.Path) -> None:
    found = busy_server()
    assert tiles(found)["median latency"] == ("40.0 ms", "for 8 examples; 5.00 ms as written for 1 example")
    assert [rung["examples a call"] for rung in headline.rungs(found)] == ["1", "8"]
    page = said(found, tmp_path)
    assert "A latency is that of one call alone, with as many examples as its recipe takes at once." in page
    names = [column.name for column in trial_table.columns(found)]
    for row in trial_table.rows(found):
        cells = dict(zip(names, row.cells, strict=True))
        assert cells["examples a call"].key == (8 if row.trial.recipe.backend.name == "openvino" else 1)
    assert "examples a call, from the top: 1, 8." in " ".join(text(found).split())
    assert all(len(text(found, columns).splitlines()) <= 40 for columns in (40, 80, 100))
    lines = {line.name: line.left for line in side_by_side(found, found).lines}
    assert lines["best"].endswith("40.0 ms for 8 examples, 0.130 MB")
    plain = record(8)
    assert "examples a call" not in headline.rungs(plain)[0]
    assert len(trial_table.columns(plain)) == len(trial_table.rows(plain)[0].cells)


def test_the_ladder_of_a_terminal_says_so_too() -> None:
    found = busy_server()
    best = next(t for t in found.trials if t.recipe.hash == found.best)
    said = str(result(list(found.trials), best).ladder()).splitlines()
    assert said[-2] == "A latency is that of one call alone; examples a call, from the top: 1, 1, 8, 8."
    shown = result(list(record(8).trials), record(8).trials[2])
    assert len(str(shown.ladder()).splitlines()) == 6
    assert repr(shown) == f"Result({shown.status}: {shown.sentence})"
    assert escape(str(shown.ladder())) in shown._repr_html_()


def test_a_score_on_other_data_is_said_to_be(tmp_path: pathlib.Path) -> None:
    """The best rung is scored on the test data, and the others on the selection data: side by side they mislead."""
    trials = list(record(8).trials)
    said = str(result(trials, trials[2]).ladder()).splitlines()
    assert said[-1] == "The score of best is on the test data, where the original scores 0.9760."
    assert "on the test data" not in str(result(trials, trials[2], score=None, baseline_score=None).ladder())
    found = record(8)
    sentence = "The score of the best is on the test data, where the model as written has 97.60%."
    assert headline.original_test_score(found) == sentence
    assert sentence in html(found, tmp_path)
    assert sentence in " ".join(text(found).split())
    assert found.confirmation is not None
    for other in (
        None,
        dataclasses.replace(found.confirmation, again=False),
        dataclasses.replace(found.confirmation, ok=False),
        dataclasses.replace(found.confirmation, baseline_score=found.prepared.score),  # one set of data served for both
    ):
        assert headline.original_test_score(dataclasses.replace(found, confirmation=other)) is None


def test_a_throughput_has_its_interval_and_what_it_was_as_written() -> None:
    found = busy_server()
    written = 800.0 / 3.91
    assert tiles(found)["throughput"] == ("800 examples/s", f"780 to 820; {written:.0f} as written, in turns with it")
    assert tiles(confirmed_as(found, comparison=None))["throughput"] == ("800 examples/s", "780 to 820")


def test_the_time_under_load_is_not_called_that_of_a_call() -> None:
    found = busy_server()
    for side in operator_breakdown.sides(found):
        assert "One call takes" not in side.summary
        assert "passes outside of them" not in side.summary
        assert side.summary.startswith("With 8 requests at once the inputs of one call are through every ")
    assert all(side.summary.startswith("One call takes ") for side in operator_breakdown.sides(record(8)))


def test_the_date_is_that_of_the_measurement_and_not_of_the_last_run(tmp_path: pathlib.Path) -> None:
    found = dataclasses.replace(record(8), started="2027-01-31T08:00:00+00:00")
    page = said(found, tmp_path)
    assert "Measured on Example CPU 9000 on 2026-11-21, 2 threads" in page
    assert dict(reliability.confirmation(found))["measured again at"] == "2026-11-21T15:00:00+00:00"
    facts = dict(reliability.study(found))
    assert facts["last run began"] == "2027-01-31T08:00:00+00:00"
    assert facts["last run took"] == "3 min 7 s"
    assert not {"began", "took"} & set(facts)
    running = dataclasses.replace(record(8, status=None), started="2027-01-31T08:00:00+00:00")
    assert "Measured on Example CPU 9000, last run on 2027-01-31, 2 threads" in headline.conditions(running)


# ---- charts that show what their caption says


def test_beaten_points_are_pale_without_shining_through_and_lie_below() -> None:
    found = record(24, failed=2)
    rows = trial_table.rows(found)
    best = {point.row for point in charts.front(charts.points(found, rows))}
    chart = charts.pareto(found, rows)
    assert chart is not None
    traces = [trace for trace in chart.data if "customdata" in trace]
    assert {n for trace in traces for n in trace["customdata"]} == {p.row for p in charts.points(found, rows)}
    pale = [trace["marker"]["color"].endswith(" 0.35") for trace in traces]
    assert pale == sorted(pale, reverse=True)
    assert {True, False} == set(pale)
    for faint, trace in zip(pale, traces, strict=True):
        assert trace["marker"]["opacity"] == 1.0
        assert {n in best for n in trace["customdata"]} == {not faint}
        assert trace["marker"]["size"] == sorted(trace["marker"]["size"], reverse=True)
    (line,) = (n for n, trace in enumerate(chart.data) if trace["mode"] == "lines")
    assert line == sum(pale)


def test_every_roof_that_is_used_has_its_name_and_the_colour_of_its_model() -> None:
    found = record(12)
    one, other = (found.explanations[name] for name in ("as_written", "best"))
    place = dataclasses.replace(other, dtype="float32", threads=1)
    threaded = dataclasses.replace(found, explanations={"as_written": one, "best": place})
    chart = roofline_chart.roofline(threaded)
    assert chart is not None
    lines = {trace["name"]: trace["line"]["color"] for trace in chart.data if trace["mode"] == "lines"}
    assert (lines["float32, 2 threads"], lines["float32, 1 thread"]) == ("@quiet", "@accent")
    notes = {note["text"]: note["yanchor"] for note in chart.layout["annotations"]}
    assert notes == {"float32, 2 threads: as written": "bottom", "float32, 1 thread: what ships": "top"}
    both = roofline_chart.roofline(dataclasses.replace(found, explanations={"as_written": one, "best": one}))
    assert both is not None
    assert [note["text"] for note in both.layout["annotations"]] == ["float32, 2 threads: as written and what ships"]
    assert {trace["line"]["color"] for trace in both.data if trace["name"] == "float32, 2 threads"} == {"@ink"}
