"""The winner is measured again; what neighbours disturbed is neither believed nor held against it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import trimtab
from _faulty import write
from trimtab._internal.serialization import to_json
from trimtab.api.optimize import _explaining_s
from trimtab.artifact.artifact import write_artifact
from trimtab.artifact.test_vectors import Golden
from trimtab.core.backend import BACKENDS
from trimtab.core.measurement import LEAST_GAIN, Comparison, Interval, Measurement
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES
from trimtab.core.trial import State, Trial
from trimtab.evaluation import confirm as module
from trimtab.evaluation.confirm import Confirmation, confirm
from trimtab.evaluation.evaluate import Plan, build, save
from trimtab.evaluation.prepared_workload import prepare
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.fork_pool import Workers
from trimtab.execution.process import Outcome
from trimtab.hardware.environment import Environment
from trimtab.measure.pooled import MOST_STARTS, STARTS, pooled
from trimtab.measure.timer import LocalRunner
from trimtab.study import confirmation, ranking
from trimtab.study import confirmation_starts as starts
from trimtab.study.confirmation import _costs, _rivals
from trimtab.study.options import Options
from trimtab.study.study import Study

NOTHING = starts.EarlierStarts({"as_written": []})


def confirmed(
    monkeypatch: pytest.MonkeyPatch, ratio: Interval, folder: pathlib.Path, *, written: Interval | None = None, **asked: Any
) -> Confirmation:
    """A real confirmation, but for the machine: comparisons give ``ratio``, or ``written`` with the model as written."""
    recipe = Recipe(backend=BACKENDS["eager"]())
    figure = Measurement(unit="ms", n=10, median=1.0, interval=Interval(1.0, 0.9, 1.1))
    subject = prepare(trimtab.Workload(name="small", model=torch.nn.Linear(4, 2), inputs=torch.randn(3, 4)))
    rivals = {"as_written": LocalRunner(lambda: None), "tuned": LocalRunner(lambda: None)}

    def compare(runner: LocalRunner, rival: LocalRunner, **options: Any) -> Comparison:
        told = written if written is not None and rival is rivals["as_written"] else ratio
        return Comparison(ratio=told, pairs=9, candidate=figure, rival=figure)

    monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(module, "pooled", lambda starts, seen=(): starts[-1])  # what processes differ by is told elsewhere
    asked = {"plan": Plan()} | asked
    save(build(recipe, subject.candidate)[0], folder)
    return confirm(recipe, folder, subject, rivals, must_win=True, **asked)[0]


def test_a_ratio_that_is_sure_is_believed(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(1.3, 1.25, 1.36), tmp_path)
    assert found.ok
    assert not found.undecided
    assert found.reason is None


def test_a_ratio_of_a_starved_machine_proves_nothing_and_deserves_another_try(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(325.7, 0.27, 83238.7), tmp_path)
    assert not found.ok
    assert found.undecided
    assert found.reason == (
        "Measured again, it is between 0.27 and 8.32e+04 times as fast as the tuned original: the machine was too busy "
        "to tell. The same command measures it once more; run it when the machine is quiet."
    )


@pytest.mark.parametrize("ratio", [Interval(7.36, 4.44, 12.2), Interval(2.0, 1.3, 3.1), Interval(325.7, 1.27, 83238.7)])
def test_an_interval_wholly_above_one_is_a_gain_however_wide(monkeypatch, tmp_path, ratio: Interval) -> None:
    assert confirmed(monkeypatch, ratio, tmp_path).ok


def test_a_ratio_that_is_sure_and_too_small_is_held_against_it(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(1.01, 0.99, 1.03), tmp_path)
    assert not found.ok
    assert not found.undecided
    assert found.reason == (
        "Measured again, it is 1.01x the tuned original (0.99 to 1.03), which does not prove that it is faster."
    )


def test_less_than_two_percent_is_no_gain_however_sure(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(1.013, 1.003, 1.023), tmp_path)
    assert not found.ok
    assert found.reason == (
        "Measured again, it is 1.01x the tuned original (1.00 to 1.02), less than the 2% that two processes of one program may "
        "differ by."
    )


def test_what_beats_the_tuned_original_and_not_the_one_as_written_is_refused(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(1.05, 1.02, 1.08), tmp_path, written=Interval(0.97, 0.95, 0.99))
    assert not found.ok
    assert not found.undecided
    assert found.reason == (
        "Measured again, it is 0.97x as fast as written (0.95 to 0.99), which is slower, though the tuned original was slower "
        "still."
    )
    assert confirmed(monkeypatch, Interval(1.05, 1.02, 1.08), tmp_path, written=Interval(0.99, 0.97, 1.01)).ok
    assert confirmed(monkeypatch, Interval(1.05, 1.02, 1.08), tmp_path, written=Interval(0.5, 0.2, 0.9)).undecided


@pytest.mark.parametrize(
    ("peak_mb", "original_mb", "reason"),
    [
        (97.0, 100.0, None),
        (99.0, 100.0, "Measured again, its peak memory is 99 MB and that of the tuned original 100 MB, no gain."),
        (1.0, None, "Measured again, the peak memory of the tuned original is not known, which proves no gain."),
        (None, 100.0, "Measured again, its peak memory is not known, which proves no gain."),
    ],
)
def test_where_memory_counts_the_winner_has_to_need_less_of_it(monkeypatch, tmp_path, peak_mb, original_mb, reason) -> None:
    costs = {"cold_s": 0.5, "peak_mb": peak_mb, "original_mb": original_mb}
    found = confirmed(monkeypatch, Interval(0.5, 0.4, 0.6), tmp_path, plan=Plan(objective="memory"), costs=costs)
    assert found.reason == reason
    assert found.ok is (reason is None)
    assert {name: getattr(found, name) for name in costs} == costs


@pytest.mark.long
def test_what_it_costs_to_start_is_measured_again_in_the_way_of_the_search(tmp_path) -> None:
    reference = write(tmp_path, "def made(): return trimtab.Workload(model=nn.Linear(2000, 2000), inputs=torch.randn(1, 2000))")
    with Workers() as workers:
        study = Study(reference, tmp_path / "run", Options(objective="memory", timing_s=0.1), workers=workers)
        study.search(most=1)
        (eager,) = study.trials
        # the same program once more: it needs as much
        other = dataclasses.replace(eager, recipe=Recipe(backend=BACKENDS["eager"]()), cold_s=1e6, peak_mb=1e6)
        shutil.copytree(study.runner.files(eager), study.runner.files(other))
        with BaselineServers(study.runner.job(), study.folder / "rivals") as rivals:
            found = confirmation.confirm(study, other, eager, rivals, must_win=True).confirmation
    assert found.cold_s is not None
    assert found.cold_s < 1e6
    assert found.peak_mb is not None
    assert found.peak_mb == pytest.approx(eager.peak_mb, rel=0.1)
    assert found.original_mb == pytest.approx(eager.peak_mb, rel=0.1)
    assert found.ok is (found.peak_mb < (1 - LEAST_GAIN) * found.original_mb)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Study, Trial]]:
    """A study that allows no drop and has measured the model as written, and the trial of that."""
    folder = tmp_path_factory.mktemp("searched")
    options = Options(timing_s=3, limits=trimtab.Limits(max_drop=0.0))
    with Workers() as workers:
        study = Study(write(folder, "def made(): return workload()"), folder / "run", options, workers=workers)
        study.search(most=1)
        (trial,) = study.trials
        yield study, trial


def test_the_starts_before_a_confirmation_are_processes_of_their_own(searched) -> None:
    study, trial = searched
    wanted = {"as_written": study.baseline}
    plan = to_json(study.plan(seconds=0.3))
    common = study.runner.job() | {
        "recipe": trial.recipe.to_json(),
        "files": str(study.runner.files(trial)),
        "plan": plan,
        "seconds": 60,
    }
    common |= {"weights": study.prepared.weights, "ships": True}
    begun = time.monotonic()
    found = starts.run_earlier_starts(study, trial, wanted, common, 2, None)
    took = time.monotonic() - begun
    timed = found.comparisons["as_written"]
    assert 2 <= len(timed) < MOST_STARTS, "more than two where they differ"
    assert {each.process_noise for each in timed} == {0.0}, "the pooled figure adds it"
    assert pooled(timed).starts == len(timed)
    assert found.judged is not None
    assert found.judged.ok
    assert (found.judged.score, found.judged.latency_ms) == (found.judged.baseline_score, None)
    assert starts.run_earlier_starts(study, trial, wanted, common, 2, time.monotonic() + took / 100) == NOTHING
    assert (starts.expected(study, trial, 10.0), starts.expected(study, trial, 0.7)) == (STARTS, 1)
    assert trial.comparison is not None
    slow = dataclasses.replace(trial.comparison, rival=dataclasses.replace(trial.comparison.rival, median=1000.0))
    assert starts.expected(study, dataclasses.replace(trial, comparison=slow), 10.0) == 1


def test_starts_in_which_threads_met_slowly_are_repeated(searched, monkeypatch: pytest.MonkeyPatch) -> None:
    study, trial = searched
    made: list[float] = []

    def met_in(ns: float) -> Comparison:
        assert trial.comparison is not None
        rival = dataclasses.replace(trial.comparison.rival, median=ns, conditions={"fork_join_ns": ns})
        even = Interval(2.0, 1.99, 2.01)
        found = dataclasses.replace(trial.comparison, rival=rival, ratio=even, sampling=None, estimates=None)
        return dataclasses.replace(found, foreign=0.0, stolen=0.0, slowed=0.0)

    def one_start(*_: object) -> Outcome:
        made.append(7_000.0 if len(made) in slow[0] else 5_000.0)
        comparisons = {"as_written": to_json(met_in(made[-1]))}
        return Outcome(reason=None, seconds=0.0, result={"judged": None, "judging_s": 0.0, "comparisons": comparisons})

    seen = dataclasses.replace(trial, comparison=met_in(5_000.0))
    monkeypatch.setattr(starts, "run_with_rivals", one_start)
    monkeypatch.setattr(study, "_trials", [seen] * 20)
    slow = [range(0)]
    for slow[0], expected in ((range(0), 6), (range(2, 6), 10), (range(100), 12)):
        made.clear()
        found = starts.run_earlier_starts(study, trial, {"as_written": study.baseline}, {}, 6, None)
        assert len(found.comparisons["as_written"]) == expected


def test_an_original_that_stays_is_timed_if_another_runtime_was_measured_and_time_is_left(
    searched: tuple[Study, Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, eager = searched
    assert _rivals(study, eager, eager, itself=True, late=False) == {}
    other = dataclasses.replace(eager, recipe=Recipe(backend=BACKENDS["onnxruntime"]()))
    monkeypatch.setattr(study, "_trials", [eager, other])
    assert _rivals(study, eager, eager, itself=True, late=False) == {"as_written": study.baseline}
    assert _rivals(study, eager, eager, itself=True, late=True) == {}
    assert set(_rivals(study, other, eager, itself=False, late=True)) == {"as_written"}, "what wins is timed in any case"


def test_an_original_that_is_not_timed_again_keeps_the_cold_start_and_memory_of_its_trial(
    searched: tuple[Study, Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, eager = searched
    monkeypatch.setattr(study.runner, "costs", lambda *_: (2.0, 300.0))
    known = dataclasses.replace(eager, cold_s=1.0, peak_mb=200.0)
    assert _costs(study, known, None, again=False) == {"cold_s": 1.0, "peak_mb": 200.0, "original_mb": None}
    measured = {"cold_s": 2.0, "peak_mb": 300.0, "original_mb": None}
    assert _costs(study, known, None, again=True) == measured
    assert _costs(study, dataclasses.replace(eager, peak_mb=None), None, again=False) == measured, "its probe was cut off"


def test_explanations_of_a_slow_model_are_expected_to_take_its_calls(
    searched: tuple[Study, Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, eager = searched
    call = Measurement(unit="ms", n=8, median=2000.0, interval=Interval(2000.0, 1990.0, 2010.0), conditions={})
    slow = dataclasses.replace(eager, recipe=study.baseline, latency_ms=call)
    monkeypatch.setattr(study, "_trials", [])
    start_s = _explaining_s(study)
    monkeypatch.setattr(study, "_trials", [slow])
    assert _explaining_s(study) - start_s == pytest.approx(16.0)


def test_a_probe_ends_with_the_budget_and_the_trial_stands_unless_memory_decides(searched: tuple[Study, Trial]) -> None:
    study, eager = searched
    other = dataclasses.replace(eager, recipe=Recipe(backend=BACKENDS["eager"]()), cold_s=40.0, peak_mb=None)

    def probed(until: float | None, **limits: float) -> Trial:
        plan = Plan(limits=trimtab.Limits(**limits))
        with study.runner.servers("rivals") as servers:
            found = study.runner._probed(other, study.runner.files(eager), servers, plan, until)
        assert found is not None
        return found

    whole = probed(None)
    assert None not in (whole.cold_s, whole.peak_mb)
    late = probed(time.monotonic())
    assert (late.state, late.cold_s, late.peak_mb) == (State.COMPLETE, None, None)
    assert late.speedup == eager.speedup
    assert late.notes[-1] == "The time ended before its cold start and peak memory were measured."
    unknown = probed(time.monotonic(), memory_mb=1e6)
    assert unknown.state is State.STOPPED
    assert str(unknown.reason).endswith("The same command tries it again.")
    assert ranking.limit_was_raised(unknown, seconds=study.options.trial_s, memory_mb=study.runner.memory_mb)


def test_what_the_test_data_refuse_is_not_timed(searched) -> None:
    study, eager = searched
    lossy = dataclasses.replace(eager, recipe=Recipe(passes=[PASSES["autocast"]()], backend=BACKENDS["eager"]()))
    assert starts.expected(study, lossy, 6.0) > 1
    with BaselineServers(study.runner.job(), study.folder / "rivals") as rivals:
        found = confirmation.confirm(study, lossy, eager, rivals, must_win=True).confirmation
    assert not found.ok
    assert str(found.reason).startswith("On the test data it is undecidable ")
    assert found.parity is not None
    assert (found.latency_ms, found.speedup, found.undecided) == (None, None, False)
    assert not (study.folder / confirmation.CONFIRM_FOLDER).exists(), "one process judged it, and no other was started"
    assert (study.folder / str(found.log)).is_file()
    assert study.storage.get("tried") == [str(lossy.recipe)]


@pytest.mark.parametrize(
    ("fault", "error"),
    [pytest.param("raise KeyError(7)", "WorkloadError", marks=pytest.mark.long), ("os._exit(3)", "MeasurementError")],
)
def test_a_rival_that_cannot_be_had_is_a_reason_and_no_end(tmp_path, fault: str, error: str) -> None:
    reference = write(tmp_path, "def made(): return workload()")
    study = Study(reference, tmp_path / "run", Options(timing_s=0.1))
    write(tmp_path, f"def made(): {fault}")
    job = study.runner.job() | {
        "kind": "start",
        "recipe": study.baseline.to_json(),
        "files": "",
        "seconds": 60,
        "plan": to_json(Plan()),
    }
    with BaselineServers(study.runner.job(), study.folder / "rivals") as rivals:
        found = starts.run_with_rivals(study, rivals, {"as_written": study.baseline}, job, study.folder / "start")
        assert found.result is None
        assert found.error == error
        assert ("KeyError: 7" if error == "WorkloadError" else "The process that holds as_written ended") in str(found.reason)
        wanted = {"as_written": study.baseline}
        assert starts.run_earlier_starts(study, None, wanted, job, 0, None) == NOTHING


def test_what_is_handed_over_rests_on_several_starts(tmp_path) -> None:
    found = trimtab.compare(write(tmp_path, "def made(): return workload()"), seconds=1.2, objective="throughput")
    assert 2 <= found.comparison.starts <= MOST_STARTS, "more than two where they differ"
    assert found.throughput is not None
    assert found.throughput.median == pytest.approx(2e3 / found.comparison.candidate.median), "of two examples a call"
    assert f"{found.throughput.median:.4g} examples/s" in str(found)


def to_confirm(folder: pathlib.Path, recipe: Recipe, noted: dict[str, object], **work: object) -> tuple[Any, Trial, Any]:
    """A study that confirms ``recipe`` by ``work`` that is no process, the trial of it, and rivals that stand by."""
    study = types.SimpleNamespace(
        options=Options(),
        storage=types.SimpleNamespace(get=noted.get, put=noted.__setitem__),
        baseline=recipe,
        to_beat=None,
        trials=[],
        prepared=types.SimpleNamespace(weights={}, threads=1),
        thread_limit=None,
        task=types.SimpleNamespace(ships=False),
        folder=folder,
        environment=None,
        plan=lambda **figures: Plan(),
        interrupted=lambda: False,
        runner=types.SimpleNamespace(
            startup_s=1.0, load_s=0.1, files=lambda trial: folder, job=dict, costs=lambda trial, place: (None, None), **work
        ),
    )
    rivals = types.SimpleNamespace(alive=lambda name: True, addresses={})
    return study, Trial(recipe=recipe, state=State.COMPLETE, size_mb=1.0), rivals


def test_a_confirmation_that_crashed_names_its_log_and_keeps_its_traceback(tmp_path) -> None:
    recipe = Recipe(backend=BACKENDS["eager"]())
    crashed = Outcome(reason="It raised KeyError: 3.", seconds=1.0, traceback="Traceback ...")
    study, trial, rivals = to_confirm(
        tmp_path, recipe, {}, worker=lambda *job, **how: contextlib.nullcontext(), wait_for=lambda worker, **how: crashed
    )
    found = confirmation.confirm(study, trial, trial, rivals, must_win=True).confirmation
    assert (found.ok, found.reason) == (False, "The confirmation failed: It raised KeyError: 3.")
    assert (found.traceback, found.log) == ("Traceback ...", f"confirm/{recipe.hash}/log.txt")


@pytest.mark.parametrize(
    ("intervals", "shown", "jobs"),
    [
        ([Interval(3.7, 2.3, 6.0), Interval(3.9, 3.7, 4.1)], "3.9 (3.7 to 4.1)", 2),
        ([Interval(3.7, 2.3, 6.0)] * 3, "3.7 (2.3 to 6)", 2),
        ([Interval(1.01, 0.99, 1.03)] * 2, "1.01 (0.99 to 1.03)", 1),
    ],
)
def test_what_proved_nothing_is_confirmed_once_more(tmp_path, intervals, shown, jobs) -> None:
    """And only that: a ratio that is sure and too small gets no second throw of the dice."""
    recipe = Recipe(backend=BACKENDS["eager"]())
    told = iter(intervals)
    asked: list[pathlib.Path] = []
    noted: dict[str, object] = {}

    @contextlib.contextmanager
    def worker(job, folder, **options):
        asked.append(folder)
        yield None

    def outcome(worker, **options):
        ratio = next(told)
        ok = not ratio.vague and ratio.low > 1
        found = Confirmation(recipe=recipe, ok=ok, speedup=ratio, undecided=ratio.vague, reason=None if ok else "because")
        return Outcome(reason=None, seconds=1.0, result=to_json(found))

    study, trial, rivals = to_confirm(tmp_path, recipe, noted, worker=worker, wait_for=outcome)
    best = confirmation.confirm(study, trial, trial, rivals, must_win=True)
    assert str(best.confirmation.speedup) == shown
    assert len(asked) == jobs
    assert best.confirmation.log == f"confirm/{recipe.hash}/log.txt"
    assert noted.pop("tried") == [str(recipe)]  # it saw the test data, however often and whatever came of it
    assert len(noted) == (not best.confirmation.undecided)
    if noted and not best.confirmation.ok:  # what was refused for want of a gain may ship where none is asked for
        assert confirmation.confirm(study, trial, trial, rivals, must_win=False).confirmation is not None
        assert len(asked) == (jobs := jobs + 1)
    if noted:  # another day keeps the figures, and says of which day they are
        assert confirmation.confirm(study, trial, trial, rivals, must_win=True).confirmation == best.confirmation
        assert best.confirmation.measured_at is not None
        assert len(asked) == jobs


def test_an_artifact_that_is_not_as_it_was_written_is_made_again(tmp_path: pathlib.Path) -> None:
    recipe = Recipe(backend=BACKENDS["eager"]())
    candidate = prepare(trimtab.Workload(name="small", model=torch.nn.Linear(4, 2), inputs=torch.randn(3, 4))).candidate
    executable = build(recipe, candidate)[0]
    artifact = write_artifact(
        tmp_path / "artifact",
        executable=executable,
        recipe=recipe,
        workload_name="small",
        golden=Golden.of(candidate, executable.signature),
        evidence={},
        environment=Environment.capture(),
    )
    study, trial = types.SimpleNamespace(folder=tmp_path), Trial(recipe=recipe, state=State.COMPLETE)
    assert confirmation.shipped(study, trial) == artifact
    (artifact.path / "README.md").write_text("our note")
    assert confirmation.shipped(study, trial) is None
