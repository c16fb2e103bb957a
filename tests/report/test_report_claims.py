"""What a report claims, and whether it can be read: limits that nothing meets, slow calls, trainings, narrow terminals."""

from __future__ import annotations

import contextlib
import dataclasses
import html as escapes
import json
import math
import pathlib
import re
import types
from typing import Any

import pytest

from _studies import comparison, record, with_logs
from trimtab._internal.serialization import from_json, to_json
from trimtab.cli.report import compare_command, report_command
from trimtab.core.limits import Limits
from trimtab.core.measurement import Drop, Interval, Parity
from trimtab.core.trial import State
from trimtab.evaluation.confirm import Confirmation
from trimtab.report import charts, formatting, headline, html, reliability, side_by_side, text, trial_table
from trimtab.report.logs import tail
from trimtab.study.options import Options
from trimtab.study.progress import Progress
from trimtab.study.record import Record
from trimtab.study.result import Ladder, busy
from trimtab.study.training import finish


def said(found: Record, folder: pathlib.Path) -> str:
    """What a person reads on the page."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", html(found, folder), flags=re.DOTALL)
    return " ".join(escapes.unescape(re.sub(r"<[^>]+>", " ", page)).split())


# ---- a limit that nothing meets


def front(latency_ms: float) -> dict[str, Any]:
    """The layout of the front of a study with that limit; a call takes 0.42 ms as written, and about a quarter at best."""
    found = record(12, failed=0, limits=Limits(max_drop=0.02, latency_ms=latency_ms))
    chart = charts.pareto(found, trial_table.rows(found))
    assert chart is not None
    return chart.layout


@pytest.mark.parametrize("latency_ms", [0.3, 0.05])
def test_the_line_of_a_latency_limit_stands_in_the_picture_also_where_nothing_meets_it(latency_ms: float) -> None:
    layout = front(latency_ms)
    (line,) = (shape for shape in layout["shapes"] if "y0" in shape and shape.get("yref") != "paper")
    assert line["y0"] == pytest.approx(0.42 / latency_ms)
    assert layout["yaxis"]["range"][1] > 1.1 * line["y0"]
    (note,) = (note for note in layout["annotations"] if "ms" in note["text"] or "µs" in note["text"])
    assert note["y"] == line["y0"]


def test_a_limit_far_above_all_trials_is_a_note_at_the_upper_edge() -> None:
    layout = front(0.002)
    assert layout["yaxis"]["range"] == front(1.0)["yaxis"]["range"]  # the trials keep their room
    assert not [shape for shape in layout["shapes"] if shape.get("yref") != "paper"]
    (note,) = (note for note in layout["annotations"] if "above" in note["text"])
    assert note["text"] == "limit 2.00 µs: above, at 210x"
    assert (note["yref"], note["y"], note["yanchor"]) == ("paper", 1, "top")


# ---- figures that are hardly known


def measured(found: Record, ratio: Interval, **facts: Any) -> Record:
    """``found`` with a confirmation that came out like this."""
    assert found.confirmation is not None
    times = dataclasses.replace(comparison(ratio.value), ratio=ratio, **facts)
    return dataclasses.replace(
        found, confirmation=dataclasses.replace(found.confirmation, speedup=ratio, against_tuned=None, comparison=times)
    )


def test_slow_calls_are_not_taken_for_a_busy_machine(tmp_path: pathlib.Path) -> None:
    found = measured(record(8), Interval(2.0, 1.72, 2.35), pairs=6, foreign=0.0)
    page = said(found, tmp_path)
    assert (
        "The calls are so slow that only 6 pairs were measured: the interval of the speed-up goes from 1.72 to 2.35. "
        "Quote the interval, not the number. Give it more time: --timing 60s --fresh."
    ) in page
    assert "too busy" not in page
    trained = dataclasses.replace(found, mode="train")
    assert headline.doubt(trained).endswith("Give it more time: timing_seconds=60, fresh=True.")


def test_the_heading_does_not_quote_what_the_warning_says_not_to_quote(tmp_path: pathlib.Path) -> None:
    found = measured(record(8), Interval(2.0, 1.72, 2.35))
    page = said(found, tmp_path)
    assert "digits: 1.72 to 2.35 times as fast as written" in page
    assert "digits: 2.00x" not in page
    assert "The machine was too busy while this was measured" in page
    assert "Quote the interval, not the number. Run the study again with --fresh when the machine is quiet." in page
    vague = measured(record(8), Interval(9.0, 0.3, 27.0))
    assert "Quote no number from it. Run" in headline.doubt(vague)
    assert headline.headline(measured(record(8), Interval(2.0, 1.9, 2.1))) == "2.00x as fast as written"


def test_faster_is_only_what_surely_is() -> None:
    assert headline.headline(measured(record(8), Interval(9.0, 3.0, 27.0))) == "at least 3.00x as fast as written"
    assert headline.headline(measured(record(8), Interval(0.8, 0.5, 1.3))) == "keeps the limits, at what speed is unclear"


def test_nothing_is_said_to_ship_that_was_refused(tmp_path: pathlib.Path) -> None:
    kept = record(6, status="kept_original")
    first = kept.trials[0].recipe
    refused = Confirmation(recipe=first, ok=False, reason="On the test data: NaN.")
    found = dataclasses.replace(kept, best=first.hash, confirmation=refused, artifact=None, files={}, explanations={})
    page = said(found, tmp_path)
    assert "digits: nothing ships" in page
    assert "What ships:" not in page
    assert not [row for row in trial_table.rows(found) if row.ships]
    assert "confirmed no: On the test data: NaN." in page
    assert headline.headline(kept) == "nothing is faster than the original", "openvino ships, which computes the same"
    assert headline.headline(dataclasses.replace(kept, best=first.hash)) == "the original ships"


def test_a_drop_that_nobody_can_see_is_no_limit_that_was_kept() -> None:
    found = dict(reliability.study(record(6, labels=False, limits=Limits(max_drop=0.02))))
    assert found["limit: drop of the score"] == "0.02, which nothing shows without labels"


def test_slow_calls_and_busy_neighbours_are_counted_apart() -> None:
    found, wide = record(9, failed=1), Interval(2.0, 1.5, 2.5)
    slow = dataclasses.replace(comparison(2.0), ratio=wide, pairs=5)
    loud = dataclasses.replace(comparison(2.0), ratio=wide, foreign=0.4)

    def notes(*poor: Any) -> list[str]:
        trials = [dataclasses.replace(t, comparison=c) for t, c in zip(found.trials, poor, strict=False)]
        return busy(dataclasses.replace(found, trials=(*trials, *found.trials[len(trials) :])))

    few = "Few pairs were measured in the time for them"
    much = "The machine was too busy to measure well"
    poor = "3 of 8 ratios are known to no better than 30%."
    assert notes(slow, slow) == []
    assert notes(slow, slow, slow) == [f"{few}: {poor} Give it more: --timing 60s --fresh, and a longer budget if it has one."]
    assert notes(loud, loud, loud) == [f"{much}: {poor} Run it again with --fresh when it is quiet."]
    assert [note.split(":")[0] for note in notes(slow, loud, slow)] == [much, few]


def test_examples_that_a_lossy_recipe_has_lost_are_told_beside_its_error() -> None:
    parity = Parity(ok=True, reason=None, n=1024, centred_error=0.03, tail_error=9.0, unrelated=1)
    assert formatting.parity(parity, record(8)).endswith("on 1,024 examples; 1 example off by as much as the outputs vary")


# ---- trainings


def trained(status: Any = "improved", **confirmed: Any) -> Record:
    """A study of a training."""
    found = record(6, failed=0, status=status, limits=Limits(max_drop=0.01), explained=False)
    assert found.confirmation is not None
    rise = Drop(value=0.001, low=-0.002, upper=0.004, n=6, limit=0.01, decided=True)
    figures: dict[str, Any] = {"drop": rise, "parity": Parity(ok=True, reason=None, n=24, max_relative=2e-3), "score": 0.521}
    trials = [dataclasses.replace(t, **figures, size_mb=None) for t in found.trials]
    confirmation = dataclasses.replace(found.confirmation, **figures, baseline_score=0.52, loaded=False, **confirmed)
    prepared = dataclasses.replace(found.prepared, score=0.52, n=24, share=False, splits={}, inputs="64 per update", notes=())
    changes: dict[str, Any] = {"artifact": None, "files": {}, "command": "trimtab.tune('train.py', out='run', ...)"}
    return dataclasses.replace(
        found, mode="train", prepared=prepared, trials=tuple(trials), confirmation=confirmation, **changes
    )


OF_INFERENCE = ("test data", "selection data", "drop", "score", "What ships", "a build in memory")


def test_a_training_is_said_to_be_measured_over_updates_and_from_other_parameters(tmp_path: pathlib.Path) -> None:
    found = trained()
    facts = dict(reliability.confirmation(found))
    assert facts["measured from"] == "other parameters, with the data in another order, over 24 updates"
    assert facts["loss from other parameters"] == "0.5200 before, 0.5210 after, over the last 6 updates"
    assert facts["rise of the loss from other parameters"].startswith("0.00100 (≤ 0.00400); ")
    assert facts["rise of the loss from other parameters"].endswith(" in the search")
    assert facts["losses from other parameters"] == "apart by 0.20% at most, over 24 updates"
    assert dict(reliability.data(found)) == {"loss of the training as written": "0.5200 at the end of 24 updates"}
    page = said(found, tmp_path)
    assert "The last rung was measured again in fresh processes." in page
    assert "Speed against loss" in page
    assert "rise of the loss 0.00100" in page
    for words in OF_INFERENCE:
        assert words not in page, words
        assert words not in text(found), words
    assert "losses compared: 24 updates" in text(found)
    assert "rise at most" in text(found)
    assert side_by_side(found, found).differences == ()
    chart = charts.pareto(found, trial_table.rows(found))
    assert chart is not None
    sizes = [size for trace in chart.data if "customdata" in trace for size in trace["marker"]["size"]]
    assert len(sizes) == 6
    assert min(sizes) > 0  # settings have no size, and are drawn all the same


def test_where_the_settings_as_written_stay_no_confirmation_is_claimed(tmp_path: pathlib.Path) -> None:
    found = trained("kept_original", again=False, comparison=None)
    assert reliability.confirmation(found) == [
        ("confirmation", "none: nothing was measured again, the figures are those of the search")
    ]
    page = said(found, tmp_path)
    assert "nothing was measured again" in page
    assert "digits: the settings as written stay" in page
    assert "The last rung was measured again" not in page
    assert "confirmed yes" not in page
    assert "The last rung was measured again" not in said(record(6, status="limits_not_met"), tmp_path)


def test_settings_that_stay_are_kept_without_a_claim_that_they_were_measured_again(tmp_path: pathlib.Path) -> None:
    original = record(2, failed=0).trials[1]
    study: Any = types.SimpleNamespace(
        options=Options(objective="throughput"),
        to_beat=original,
        trials=[original],
        interrupted=lambda: False,
        progress=Progress(),
        notes=[],
        folder=tmp_path,
        runner=types.SimpleNamespace(servers=lambda folder: contextlib.nullcontext()),
    )
    status, _, best = finish(study)
    assert status == "kept_original"
    assert best is not None
    assert not best.confirmation.again
    assert best.confirmation.baseline_score == original.score


# ---- narrow terminals


def worst(found: Record) -> Record:
    long = "A sentence that goes on and on without any end in sight, " * 20
    return dataclasses.replace(
        found, workload="w" * 150, sentence=long, notes=(long, long, long), command="trimtab optimize " + "x/" * 300
    )


@pytest.mark.parametrize("columns", [40, 80, 99, 100, 200])
def test_the_text_fits_a_terminal_of_any_width_and_keeps_its_end(columns: int) -> None:
    for each in (record(24), record(200, failed=40), record(24, labels=False), worst(record(24)), trained()):
        lines = text(each, columns).splitlines()
        assert len(lines) <= 40
        assert max(map(len, lines)) <= min(columns, 100)
        assert any(line.startswith("Example CPU 9000, 2 of 4") for line in lines)


def test_a_narrow_terminal_has_the_recipes_on_lines_of_their_own() -> None:
    found = record(24)
    lines = text(found, 80).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("LADDER"))
    for number, rung in enumerate(found.ladder):
        figures, recipe = lines[begin + 1 + 2 * number : begin + 3 + 2 * number]
        assert len(figures) == 74
        assert recipe == f"{'':<12}{rung['recipe']}"
    assert any(line.startswith("LADDER") and line.endswith("  recipe") for line in text(found).splitlines())


@pytest.mark.parametrize("columns", [80, 100])
def test_columns_stay_below_their_heads_where_a_speed_up_is_unclear(columns: int) -> None:
    unclear = Interval(0.5, 0.000123, 9379.0)
    found = measured(record(24), unclear)
    rungs = tuple(rung | {"speedup": to_json(unclear)} if rung["rung"] == "best" else rung for rung in found.ladder)
    trials = tuple(dataclasses.replace(each, speedup=unclear) if each.number == 3 else each for each in found.trials)
    lines = text(dataclasses.replace(found, ladder=rungs, trials=trials), columns).splitlines()
    ladder = [line for line in lines if line.startswith(("LADDER", "as written ", "tuned ", "lossless ", "best "))]
    ends = {line.index(" ms") + 3 if " ms" in line else line.index("latency") + 7 for line in ladder}
    assert len(ends) == 1
    assert any("unclear (0.000123 to >1000)" in line for line in ladder)
    assert len({line.index("drop ≤") for line in lines if "drop ≤" in line}) == 1


def test_the_ladder_stays_in_its_columns_where_a_speed_up_is_unclear() -> None:
    found = record(24)
    unclear = tuple(rung | {"speedup": to_json(Interval(622.0, 41.31, 9379.53))} for rung in found.ladder)
    head, *lines = str(Ladder((*found.ladder, *unclear))).splitlines()
    assert {line.index(" ms") + 3 for line in lines} == {head.index("latency") + len("latency")}


def test_commands_on_a_terminal_take_its_width_and_files_do_not(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = with_logs(record(12, failed=0), tmp_path / "left")
    with_logs(dataclasses.replace(record(12), workload="another one with a long name"), tmp_path / "right")
    monkeypatch.setenv("COLUMNS", "80")
    report_command(left, as_text=True)
    assert capsys.readouterr().out == text(Record.read(left)) + "\n"  # no terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report_command(left, as_text=True)
    assert capsys.readouterr().out == text(Record.read(left), 80) + "\n"
    report_command(left, as_text=True, output=tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == text(Record.read(left)) + "\n"
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    compare_command(pathlib.Path("left"), pathlib.Path("right"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"  {'':<22} {'LEFT left':<27} RIGHT right"


# ---- what is said only where it is known


def test_what_was_given_up_early_is_not_said_to_miss_a_limit(tmp_path: pathlib.Path) -> None:
    trials = list(record(12, labels=False, failed=0).trials)
    trials[3] = dataclasses.replace(trials[3], state=State.STOPPED, reason="Rule 'hopeless': it reaches 0.50x.", notes=())
    trials[4] = dataclasses.replace(trials[4], size_mb=None, reason="It has no files.")
    trials[5] = dataclasses.replace(trials[5], size_mb=40.0)
    found = dataclasses.replace(record(12, labels=False, failed=0), trials=tuple(trials), limits=Limits(size_mb=10.0))
    rows = trial_table.rows(found)
    ends = {rows[point.row].trial.number: point.hover.split("<br>")[-1] for point in charts.points(found, rows)}
    assert [ends[number] for number in (2, 3, 4, 5)] == [
        "COMPLETE, within the limits",
        "STOPPED",
        "COMPLETE, not within the limits",  # a size that is not known cannot be said to keep one
        "COMPLETE, not within the limits",
    ]
    free = dataclasses.replace(found, limits=Limits())
    rows = trial_table.rows(free)
    ends = {rows[point.row].trial.number: point.hover.split("<br>")[-1] for point in charts.points(free, rows)}
    assert ends[4] == "COMPLETE, not in a form that ships"
    page = said(found, tmp_path)
    assert "rings miss a limit, were given up early or have no form that ships." in page
    assert "Limits bind the upper bound" not in page
    assert "Limits bind the upper bound of a drop, which is where a whisker ends" in said(record(8), tmp_path)


def test_a_training_has_no_size_that_was_not_measured() -> None:
    found = trained()
    assert all("size" not in point.hover for point in charts.points(found, trial_table.rows(found)))
    assert "not measured" not in text(found).split("TRIALS")[1].split("TRUST")[0]
    assert "88.0 MB of memory" in text(found)
    assert "88.0 MB of memory" in text(dataclasses.replace(record(12), objective="memory"))
    assert "of memory" not in text(record(12))


def test_settings_that_stay_have_no_speed_up_over_themselves() -> None:
    stays = trained("kept_original", again=False, comparison=None, against_tuned=None)
    assert not [tile for tile in headline.tiles(stays) if "speed-up" in tile.name]
    assert "speed-up over as written" in {tile.name for tile in headline.tiles(trained())}


def test_where_nothing_was_timed_nothing_is_said_to_be_measured() -> None:
    for found in (record(0, status=None), record(4, failed=4, status="limits_not_met")):
        assert headline.conditions(found).startswith("Nothing was timed on Example CPU 9000, last run on 2026-11-21, 2 threads")
    assert headline.conditions(record(4)).startswith("Measured on Example CPU 9000")


def test_the_noise_of_one_trial_is_one_figure() -> None:
    name = "spread of the original against itself, over the trials"
    assert dict(reliability.noise(record(1, failed=0, status=None)))[name] == "2.1%"
    assert dict(reliability.noise(record(4, failed=0)))[name] == "2.1% to 2.1%, half of them up to 2.1%"


def test_a_bound_that_is_not_finite_says_nothing() -> None:
    wide = Interval(1.2, 0.3, math.inf)
    for each in (wide, Interval(1.2, 0.3, math.nan)):  # as it comes back from JSON
        assert formatting.speed(each) == "unclear (0.30 to >1000)"
        assert formatting.bounds(each) == "0.30 to >1000, 95% interval"
    assert formatting.bounds(Interval(2.0, math.nan, math.nan)) == ""
    assert "goes from 0.30 to >1000. Quote no number from it." in headline.doubt(measured(record(8), wide))
    left = record(8, failed=0)
    trials = [dataclasses.replace(t, speedup=wide) if t.number == 3 else t for t in left.trials]
    right = from_json(Record, json.loads(json.dumps(to_json(dataclasses.replace(left, trials=tuple(trials))))))
    assert side_by_side(left, right).differences == ()


# ---- two sides: what they were asked and judged on


def test_two_sides_say_which_inputs_and_which_data_were_theirs() -> None:
    left = record(8)
    prepared = dataclasses.replace(left.prepared, splits={"selection": 50, "test": 50}, n=50)
    right = dataclasses.replace(left, prepared=prepared)
    found = side_by_side(left, right)
    lines = {line.name: line for line in found.lines}
    assert (lines["examples"].left, lines["examples"].right) == (
        "calibration 256, selection 500, test 497",
        "selection 50, test 50",
    )
    assert found.differences == (
        "They were judged on other data: their scores, and what they lost, do not compare one to one.",
    )
    other = dataclasses.replace(left.prepared, inputs="images: float32[32, 1, 8, 8]", identity="0ther")
    found = side_by_side(left, dataclasses.replace(left, prepared=other))
    (line,) = (line for line in found.lines if line.name == "inputs that must be fast")
    assert line.differs
    assert found.differences == (
        "These are two different workloads, or two states of one: their speed-ups do not compare one to one.",
    )


def test_two_trainings_are_compared_in_their_own_words_and_with_no_model() -> None:
    left = trained()
    other = next(
        trial for trial in left.trials if trial.recipe.hash != left.best and trial.recipe.backend.name == "onnxruntime"
    )
    found = side_by_side(left, dataclasses.replace(left, best=other.recipe.hash)).differences
    assert f"The settings on the right, {other.recipe}, are COMPLETE at" in found[1]
    alone = dataclasses.replace(left, trials=tuple(each for each in left.trials if each is not other))
    found = side_by_side(dataclasses.replace(left, best=other.recipe.hash), alone).differences
    assert found[0] == f"The settings on the left, {other.recipe}, were not tried on the right."
    assert side_by_side(record(6), left).differences == (
        "One is a model that was optimized, the other a training that was tuned: their figures do not compare.",
    )


def test_what_two_sides_say_has_no_control_characters() -> None:
    left, right = record(8), record(8, objective="late\x1b[31mncy\x07")
    assert "They look for different things: latency on the left, latency on the right." in side_by_side(left, right).differences


# ---- logs that cannot be shown


@pytest.mark.parametrize("log", ["trials/a\0b/log.txt", "x" * 5000, "trials"])
def test_a_log_that_cannot_be_opened_is_left_out(log: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "trials").mkdir()
    assert tail(tmp_path, log, 100) is None
