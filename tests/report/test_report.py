"""The report without a browser: what it says, what it leaves out, how large it gets, and the commands that make it."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import pytest

from _studies import BACKENDS, comparison, confirmed, data, interval, recipes, record, with_logs
from trimtab._internal.serialization import from_json, to_json
from trimtab.cli.report import report_command
from trimtab.core.backend import BACKENDS as REGISTERED
from trimtab.core.measurement import Drop, Interval
from trimtab.core.network import Layer, Network
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Technique
from trimtab.core.trained import Trained
from trimtab.core.trial import State
from trimtab.core.workload import Limits
from trimtab.errors import StorageError, UsageError
from trimtab.evaluation.confirm import Confirmation
from trimtab.report import charts, formatting, html, reliability, side_by_side, text, trial_table, write
from trimtab.report import logs as _logs
from trimtab.study.record import Record


def page(found: Record, folder: pathlib.Path) -> str:
    """The report without plotly's own source."""
    whole = html(found, folder)
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", whole, count=1, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path


# ---- figures and recipes in words


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "not measured"),
        (math.nan, "not measured"),
        (math.inf, "not measured"),
        (0.0, "0"),
        (1234.6, "1,235"),
        (0.00123456, "0.00123"),
        (12.345, "12.3"),
        (-2.5, "-2.50"),
        (1e9, "1.00e+09"),
    ],
)
def test_numbers_read_well_and_unknown_ones_are_said_to_be(value: float | None, shown: str) -> None:
    assert formatting.digits(value) == shown


@pytest.mark.parametrize(
    ("ms", "shown"), [(0.0004, "400 ns"), (0.025, "25.0 µs"), (0.42, "0.420 ms"), (81.0, "81.0 ms"), (2500.0, "2.50 s")]
)
def test_latencies_come_in_the_unit_that_suits_them(ms: float, shown: str) -> None:
    assert formatting.milliseconds(ms) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.31, "0.31 s"), (59.9, "60 s"), (60.0, "1 min 0 s"), (187.0, "3 min 7 s"), (3900.0, "1 h 5 min")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert formatting.duration(seconds) == shown


def test_a_vague_speed_up_is_quoted_by_its_lower_bound() -> None:
    assert formatting.quoted(Interval(2.5, 2.4, 2.6)) == "2.50x"
    assert formatting.quoted(Interval(149.0, 3.88, 5722.0)) == "at least 3.88x"
    assert formatting.speed(Interval(149.0, 3.88, 5722.0)) == "at least 3.88x (3.88 to >1000)"
    assert formatting.speed(Interval(149.0, 0.88, 5722.0)) == "unclear (0.88 to >1000)"
    assert formatting.speed(Interval(2.0, math.nan, math.nan)) == "2.00x"


@pytest.mark.parametrize("cls", [*PASSES.values(), *REGISTERED.values()], ids=lambda cls: cls.name)
def test_every_technique_says_what_it_is(cls: type[Technique]) -> None:
    words = cls().describe()
    assert words
    assert words == words.strip().rstrip(".")
    assert "\n" not in words
    assert len(words) < 80


def test_a_recipe_in_words_names_data_and_threads() -> None:
    found = record(12)
    static, threaded = recipes(2 + 7)[2], recipes(20)[16]
    assert formatting.recipe(static, found) == ("OpenVINO, int8 weights and activations, calibrated on 256 examples, 2 threads")
    assert formatting.recipe(threaded, found).count("thread") == 1


def test_scores_that_are_no_shares_are_not_shown_in_percent(folder: pathlib.Path) -> None:
    found = record(6)
    prepared = dataclasses.replace(found.prepared, score=23.4, share=False)
    found = dataclasses.replace(found, prepared=prepared, limits=Limits(max_drop=0.5))
    assert ("drop of the score", "0.500") in formatting.limits(found)
    assert formatting.drop(Drop(value=0.25, low=0.1, upper=0.4, n=10), found) == "0.250 (≤ 0.400)"
    axis = charts.pareto(found, trial_table.rows(found))
    assert axis is not None
    assert "ticksuffix" not in axis.layout["xaxis"]


# ---- charts


def test_the_front_is_what_no_other_trial_beats() -> None:
    found = record(24, failed=2)
    points = charts.points(found, trial_table.rows(found))
    best = charts.front(points)
    assert best == sorted(best, key=lambda point: point.x)
    for point in points:
        beaten = any(p.x <= point.x and p.speed.value >= point.speed.value and p is not point for p in best)
        assert (point in best) or beaten


def test_colours_size_and_limits_of_the_front() -> None:
    found = record(24, failed=2, limits=Limits(max_drop=0.02, latency_ms=0.2))
    chart = charts.pareto(found, trial_table.rows(found))
    assert chart is not None
    keys = {trace["name"]: trace["marker"]["color"] for trace in chart.data if trace.get("showlegend", True)}
    assert set(keys) == {"eager", "onnxruntime", "openvino", "torchscript"}
    assert len(set(keys.values())) == 4
    assert [note["text"] for note in chart.layout["annotations"]][:2] == ["limit 2.00%", "limit 0.200 ms"]
    assert {trace["marker"]["sizemode"] for trace in chart.data if "customdata" in trace} == {"area"}


def test_without_labels_the_front_is_drawn_over_the_error_of_the_outputs() -> None:
    found = record(12, labels=False)
    chart = charts.pareto(found, trial_table.rows(found))
    assert chart is not None
    assert chart.layout["xaxis"]["type"] == "log"
    assert all(x > 0 for trace in chart.data for x in trace["x"] if x is not None)  # the exact original too
    assert "limit 5.00%" in [note["text"] for note in chart.layout["annotations"]]


def test_what_is_hardly_known_is_not_drawn_and_that_is_said(folder: pathlib.Path) -> None:
    found = record(8, failed=0)
    vague = dataclasses.replace(found.trials[3], speedup=Interval(50.0, 0.01, 1e20))
    found = dataclasses.replace(found, trials=(*found.trials[:3], vague, *found.trials[4:]))
    assert len(charts.points(found, trial_table.rows(found))) == 7
    assert "Not drawn: 1 trial," in page(found, folder)


def test_a_busy_machine_is_said_to_be_one_at_the_top(folder: pathlib.Path) -> None:
    found = record(8)
    assert found.confirmation is not None
    wide = dataclasses.replace(found.confirmation, speedup=Interval(9.0, 3.0, 27.0))
    wide = dataclasses.replace(wide, comparison=dataclasses.replace(comparison(9.0), ratio=Interval(9.0, 3.0, 27.0)))
    found = dataclasses.replace(found, confirmation=wide)
    said = page(found, folder)
    assert "digits: at least 3.00x as fast as written" in said
    assert "The machine was too busy while this was measured: the interval of the speed-up goes from 3.00 to 27.00." in said
    assert "The machine was too busy" in text(found)


def test_figures_that_are_not_finite_become_unknown_and_never_break_the_page(folder: pathlib.Path) -> None:
    found = record(8)
    strange = dataclasses.replace(
        found.trials[3],
        speedup=Interval(math.nan, math.nan, math.inf),
        size_mb=math.nan,
        drop=dataclasses.replace(found.trials[3].drop, upper=math.inf),  # type: ignore[type-var]
    )
    found = dataclasses.replace(found, trials=(*found.trials[:3], strange, *found.trials[4:]))
    again = from_json(Record, json.loads(json.dumps(to_json(found))))
    for each in (found, again):
        assert "NaN" not in json.dumps(data(page(each, folder)))
        assert text(each)


# ---- the page


def test_the_page_says_what_the_record_holds(folder: pathlib.Path) -> None:
    found = record(24, failed=2)
    said = page(found, with_logs(found, folder))
    for words in (
        "digits: 3.91x as fast as written",
        "calibrated on 256 examples",
        "3.80 to 4.03, 95% interval",
        "at most 0.60%; score 97.60% to 97.40%",
        "Measured on Example CPU 9000 on 2026-11-21",
        "24 trials: 22 complete, 2 failed.",
        "Convolution (brgconv_avx512_1x1_I8)",
        "OpenVINO could not run NonMaxSuppression natively.",
        "is left in Convolution (brgconv_avx512_1x1_I8) (75%)",
        "256 examples: quantizers see it",
        "spread of the original against itself (A/A)",
        "trimtab optimize examples/digits.py --max-drop 2% --out runs/digits",
        "trimtab verify runs/digits/artifact",
        "ab" * 32,
        "not measured: this processor has no bfloat16",
        "No formula counts the operations of aten::sort",
    ):
        assert words in said.replace("&#39;", "'"), words


def test_machine_code_is_verified_with_trust() -> None:
    found = record(6)
    shipped = next(trial for trial in found.trials if trial.recipe.hash == found.best)
    code = dataclasses.replace(shipped, recipe=Recipe(backend=REGISTERED["aoti"]()))
    other = dataclasses.replace(found, trials=(code,), best=code.recipe.hash)
    assert reliability.commands(found)[-1] == "trimtab verify runs/digits/artifact"
    assert reliability.commands(other)[-1] == "trimtab verify runs/digits/artifact --trust"


def test_undecidable_trials_are_listed_with_what_would_decide(folder: pathlib.Path) -> None:
    found = record(12, failed=0)
    lossy = next(index for index, trial in enumerate(found.trials) if not trial.recipe.exact)
    open_ = Drop(value=0.018, low=0.01, upper=0.03, n=500, limit=0.02, decided=None, n_needed=9000, share=True)
    trials = [dataclasses.replace(t, drop=open_) if n == lossy else t for n, t in enumerate(found.trials)]
    said = page(dataclasses.replace(found, trials=tuple(trials)), folder)
    assert (
        "score drops by 1.80% (at most 3.00%), which 500 examples cannot decide against a limit of 2.00%; about 9,000" in said
    )


def test_a_page_fetches_nothing_and_its_policy_names_its_scripts(folder: pathlib.Path) -> None:
    whole = html(record(3), folder)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', whole)
    assert policy is not None
    assert "default-src &#39;none&#39;" in policy[1]
    assert policy[1].count("sha256-") == 3
    assert "unsafe-inline" not in policy[1].split("style-src")[0]
    links = re.findall(r'(?:src|href)="([^"]*)"', page(record(3), folder))
    assert all(link.startswith(("#", "data:")) for link in links)


def test_text_with_anything_in_it_is_escaped(folder: pathlib.Path) -> None:
    attack = "<script>alert(1)</script>\x00\x1b[31m\ud800"
    found = dataclasses.replace(record(4), workload=attack, sentence=attack, notes=(attack,), artifact=attack, command=attack)
    said = page(found, folder)
    assert "<script>alert" not in said
    assert "\x00" not in said
    assert "\x1b" not in said
    said.encode("utf-8")


@pytest.mark.parametrize("count", [200, 1500])
def test_the_page_stays_below_six_megabytes(count: int, folder: pathlib.Path) -> None:
    found = record(count, failed=3)
    long = "why " * 700
    trials = [dataclasses.replace(t, notes=(long,), reason=long, traceback=long * 3) for t in found.trials]
    found = dataclasses.replace(found, trials=tuple(trials))
    logs = {trial.number: "\x1b[1m<é>\u2028 " * 150_000 for trial in found.trials[-3:]}
    path = write(with_logs(found, folder, logs))
    assert path.stat().st_size < 6_000_000
    shown = data(path.read_text(encoding="utf-8"))["trials"]
    if count == 200:
        assert len(shown) == 200
        assert sum("log" in trial for trial in shown) == 200
    else:
        assert f"The last {count - len(shown)} of them have no room here" in path.read_text(encoding="utf-8")


def test_only_logs_inside_the_run_folder_are_taken_along(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the password", encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    (run / "link.txt").symlink_to(secret)
    found = record(3)
    trials = [
        dataclasses.replace(trial, log=log)
        for trial, log in zip(found.trials, ("../secret.txt", str(secret), "link.txt"), strict=True)
    ]
    assert "the password" not in page(dataclasses.replace(found, trials=tuple(trials)), run)


def test_a_log_is_cut_to_its_end_and_says_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "log.txt").write_text("first\n" + "middle\n" * 5000 + "last", encoding="utf-8")
    found = _logs.tail(tmp_path, "log.txt", 2000)
    assert found is not None
    assert found.cut
    assert found.text.endswith("last")
    assert "first" not in found.text
    assert len(_logs.embedded(found.text)) <= 2000
    assert _logs.tail(tmp_path, "none.txt", 2000) is None


def test_what_was_refused_when_it_was_measured_again_is_shown_with_its_log(tmp_path: pathlib.Path) -> None:
    found = record(8, failed=0)
    trial = found.trials[5]
    log = f"confirm/{trial.recipe.hash}/log.txt"
    refused = Confirmation(
        recipe=trial.recipe,
        ok=False,
        reason="The confirmation failed: it crashed.",
        log=log,
        traceback="Traceback ...\nKeyError: 3",
    )
    found = dataclasses.replace(found, refused=(refused,))
    run = with_logs(found, tmp_path)
    (run / log).parent.mkdir(parents=True)
    (run / log).write_text("first words\n" + "between\n" * 9000 + "the last words of the confirmation\n")
    again = Record.read(run)
    assert again == found
    whole = page(again, run)
    place = next(n for n, row in enumerate(trial_table.rows(again)) if row.trial == trial)
    shown = data(whole)["trials"][place]["again"]
    assert shown.startswith("The confirmation failed: it crashed.\n\nTraceback ...\nKeyError: 3\n\n")
    assert shown.endswith("the last words of the confirmation")
    assert log in shown
    assert sum("again" in each for each in data(whole)["trials"]) == 1
    assert (
        "refused when measured again",
        f"{trial.recipe}: The confirmation failed: it crashed. ({log})",
    ) in reliability.confirmation(again)
    assert log in re.sub(r'<script type="application/json".*?</script>', "", whole, flags=re.DOTALL)
    many = [trial] * 200 + [found.trials[0]] * 200
    allowed = _logs.allowances(many, [trial.recipe.hash])
    assert allowed[0] > 3 * allowed[-1]


def test_where_nothing_held_it_is_not_said_that_nothing_was_measured_again() -> None:
    found = record(6, status="limits_not_met")
    facts = dict(
        reliability.confirmation(dataclasses.replace(found, refused=(Confirmation(recipe=found.trials[0].recipe, ok=False),)))
    )
    assert facts["confirmation"] == "none: what was measured again did not hold"
    assert facts["refused when measured again"].endswith(": the log says why")
    assert dict(reliability.confirmation(found))["confirmation"].startswith("none: nothing was measured again")


def test_a_record_of_an_earlier_version_is_read(tmp_path: pathlib.Path) -> None:
    found = record(6)
    found.write(tmp_path)
    path = tmp_path / "record.json"
    old = json.loads(path.read_text())
    del old["refused"], old["confirmation"]["log"], old["confirmation"]["traceback"]
    path.write_text(json.dumps(old))
    assert Record.read(tmp_path) == found


def test_embedded_json_cannot_leave_its_element() -> None:
    value = {"a": "</script><!--\u2028", "b": [1.5, None, math.nan]}
    written = _logs.embedded(value)
    assert "<" not in written
    assert "\u2028" not in written
    assert json.loads(written) == {"a": "</script><!--\u2028", "b": [1.5, None, None]}


def test_compressed_forms_their_layers_and_trainings_have_a_section(folder: pathlib.Path) -> None:
    found = record(24)
    said = re.sub(r"\s+", " ", page(found, folder))
    assert "What else could be tried" in said
    assert "--compress auto" in said
    assert "Not tried: smaller networks (--compress auto)." in " ".join(text(found).split())
    passes = (PASSES["prune_channels"](), PASSES["recover"]())
    layer = Layer(name="conv", kind="Conv2d", shape=(8, 3, 3, 3), original=(16, 3, 3, 3), zeros=0.0, bits=32)
    trial = dataclasses.replace(
        found.trials[4],
        recipe=Recipe(passes=passes, backend=found.trials[4].recipe.backend),
        network=Network(parameters=250, original=1000, zeros=0.0, layers=(layer,)),
        sensitivity=(("conv", 0.0625), ("head", 0.0078)),
    )
    training = Trained(
        recipe=Recipe(passes=passes, backend=REGISTERED["eager"]()),
        **{"state": State.STOPPED, "reason": "The training was stopped after 120 of 200 updates.", "seconds": 61.0},
        **{"update": 120, "updates": 200, "examples": 800, "labels": "without labels", "before": 2.5, "after": 0.5},
        **{"losses": ((10, 2.0), (20, 1.0)), "held_out": ((15, 1.5),)},
    )
    trials = (*found.trials[:4], trial, *found.trials[5:])
    found = dataclasses.replace(found, trials=trials, trainings=(training,), compress=("prune",), train_s=1200.0)
    found = from_json(Record, to_json(found))
    said = re.sub(r"\s+", " ", page(found, folder))
    for words in (
        "250 (25%)",
        "16 × 3 × 3 × 3",
        "8 × 3 × 3 × 3",
        "120 of 200",
        "800 without labels",
        "stopped after 120 of 200",
        "Sensitivity of the layers to 8 bits",
        "0.0625",
    ):
        assert words in said, words
    assert "1 training took 1 min 1 s of the 20 min 0 s for it (--train-budget)" in said
    assert '"curves"' in said
    assert '"tradeoff"' in said
    assert '"rounding"' in said
    assert "What else could be tried" not in said
    assert "SMALLER 25% of the weights" in " ".join(text(found).split())


# ---- text and two sides


@pytest.mark.parametrize(
    "options",
    [
        {"count": 0, "status": None},
        {"count": 6, "status": None},
        {"count": 1, "failed": 0, "status": "kept_original"},
        {"count": 5, "failed": 5, "status": "limits_not_met"},
        {"count": 200, "failed": 40},
        {"count": 24, "labels": False},
    ],
)
def test_the_text_fits_a_screen(options: dict[str, Any]) -> None:
    found = record(**options)
    long = "A sentence that goes on and on without any end in sight, " * 20
    worst = dataclasses.replace(
        found, workload="w" * 150, sentence=long, notes=(long, long, long), command="trimtab optimize " + "x/" * 300
    )
    for each in (found, worst):
        lines = text(each).splitlines()
        assert 5 <= len(lines) <= 40
        assert max(map(len, lines)) <= 100


def test_the_text_says_the_same() -> None:
    said = text(record(24))
    for words in ("digits: 3.91x as fast as written", "as written", "TRIALS 24 trials", "WHY ", "TRUST ", "AGAIN ", "* 4."):
        assert words.strip() in " ".join(said.split()) or words in said, words


def test_two_studies_side_by_side_name_what_differs() -> None:
    left = record(12, failed=0)
    changed = [
        dataclasses.replace(t, state=State.FAILED, reason="It crashed.", speedup=None) if n == 4 else t
        for n, t in enumerate(left.trials)
    ]
    changed[5] = dataclasses.replace(changed[5], speedup=interval(40.0))
    other = next(trial for trial in left.trials if trial.recipe.backend.name == "torchscript")
    right = dataclasses.replace(
        left,
        trials=tuple(changed),
        limits=Limits(max_drop=0.01),
        best=other.recipe.hash,
        confirmation=confirmed(other, labels=True, limit=0.02),
        environment=dataclasses.replace(
            left.environment, cpu="Another CPU", versions={**left.environment.versions, "torch": "2.14"}
        ),
    )
    found = side_by_side(left, right, ("runs/digits", "runs/" + "server" * 7))
    lines = {line.name: line for line in found.lines}
    assert lines["processor"].differs
    assert (lines["version of torch"].left, lines["version of torch"].right) == ("2.13.0", "2.14")
    assert "version of openvino" not in lines
    assert not lines["system"].differs
    said = "\n".join(found.differences)
    assert "Their limits differ" in said
    assert "The machines differ" in said
    assert f"{left.trials[4].recipe} is COMPLETE on the left and FAILED on the right: It crashed." in said
    assert f"{left.trials[5].recipe}: " in said
    assert f"What ships on the right, {other.recipe}, is COMPLETE at" in said
    assert all(len(line) <= 100 for line in str(found).splitlines())
    head, more = str(found).splitlines()[:2]
    assert head.split()[:3] == ["LEFT", "runs/digits", "RIGHT"]
    assert head.split()[3] + more.strip() == "runs/" + "server" * 7
    assert to_json(found)["names"] == ["runs/digits", "runs/" + "server" * 7]
    assert to_json(found)["lines"][0] == {"name": "workload", "left": "digits", "right": "digits", "differs": False}


def test_equal_studies_differ_in_nothing() -> None:
    found = side_by_side(record(12), record(12))
    assert found.differences == ()
    assert str(found).endswith("Nothing that matters differs.")


def test_recipes_of_every_backend_have_a_place_in_the_builder() -> None:
    assert len({recipe.hash for recipe in recipes(3 * len(BACKENDS))}) == 3 * len(BACKENDS)


# ---- files and commands


def test_a_report_that_cannot_be_written_or_read_is_a_sentence(tmp_path: pathlib.Path) -> None:
    run = with_logs(record(2), tmp_path)
    with pytest.raises(UsageError, match=r"The report cannot be written to .*: no such file or directory\. Name a file in a"):
        write(run, tmp_path / "none" / "report.html")
    (run / "record.json").write_text('{"schema": 1}', encoding="utf-8")
    with pytest.raises(StorageError, match="record.json cannot be read: Record: field 'workload' is missing"):
        write(run)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("ladder",), 5, "Record.ladder: expected a list, got int."),
        (("ladder", 0), {}, "Record.ladder[0]: field 'rung' is missing."),
        (("ladder", 0, "latency_ms"), 3.5, "Record.ladder[0].latency_ms: expected an object, got float."),
        (("ladder", 0, "latency_ms", "median"), "fast", "Record.ladder[0].latency_ms.median: expected float, got 'fast'."),
        (("ladder", 0, "colour"), "red", "Record.ladder[0]: unknown field 'colour'; known are rung, recipe, state, "),
        (("trials", 0, "recipe", "passes"), 5, "A recipe is an object with a list of 'passes' and a 'backend', got "),
        (("trials", 0, "recipe", "backend", "name"), [], "A technique is written as an object with a name, got "),
        (("objective",), "joy", "Record.objective: 'joy' is not one of "),
        (("seconds",), 10**400, "Record.seconds: a whole number of 401 digits is too large."),
    ],
)
def test_a_record_of_another_shape_is_told_with_the_place(
    place: tuple[str | int, ...], value: Any, said: str, tmp_path: pathlib.Path
) -> None:
    record(3).write(tmp_path)
    path = tmp_path / "record.json"
    whole = found = json.loads(path.read_text())
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = value
    path.write_text(json.dumps(whole))
    with pytest.raises(StorageError) as caught:
        write(tmp_path)
    assert str(caught.value).startswith(f"{path} cannot be read: {said}")
    assert str(caught.value).endswith("The same optimize command writes it anew.")


def test_the_json_of_a_report_is_the_record(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = record(3)
    report_command(with_logs(found, tmp_path), json=True)
    assert from_json(Record, json.loads(capsys.readouterr().out)) == found
    report_command(tmp_path, as_text=True, output=tmp_path / "report.txt")
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == text(found) + "\n"
    with pytest.raises(UsageError, match="nowhere is not a folder. Give the run folder of a study"):
        report_command(pathlib.Path("nowhere"))
