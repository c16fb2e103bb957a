"""What each step brought, the rung of an original that is kept, notes that are said once, and energy where it is counted."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any

import pytest

from _studies import comparison, interval, record
from trimtab._internal.serialization import from_json, to_json
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.core.measurement import Interval
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.evaluation.confirm import Confirmation
from trimtab.measure.energy import Counter, Meter
from trimtab.passes.autocast import Autocast
from trimtab.passes.channels_last import ChannelsLast
from trimtab.passes.threads import Threads
from trimtab.study import conclusions, waterfall
from trimtab.study import energy as study_energy
from trimtab.study.options import Options
from trimtab.study.record import KEPT_SPEEDUP, Record, is_kept_original, without_repeats
from trimtab.study.result import Best, Result
from trimtab.study.samplers.ladder import as_written

EAGER, INT8 = Recipe(backend=Eager()), OpenVino(precision="int8_static")
WINNER = Recipe(passes=(Threads(count=2),), backend=INT8)


def seen(recipe: Recipe, speed: float, **more: Any) -> Trial:
    return Trial(recipe=recipe, state=State.COMPLETE, speedup=interval(speed), comparison=comparison(speed), **more)


def chain(trials: list[Trial], best: Recipe, **more: Any) -> list[waterfall.Step]:
    return list(waterfall.steps(trials, best, **({"baseline": as_written(), "tuned": EAGER, "objective": "latency"} | more)))


def test_each_step_of_the_winner_has_its_measured_gain() -> None:
    trials = [
        dataclasses.replace(seen(as_written(), 1.0), speedup=Interval(1.0, 1.0, 1.0)),
        seen(EAGER, 1.01),
        seen(Recipe(backend=OpenVino()), 2.02),
        seen(Recipe(backend=INT8), 4.04, score=0.97),
        seen(WINNER, 4.1),
    ]
    found = chain(trials, WINNER)
    assert [step.name for step in found] == ["as written", "tuned eager", "runtime", "precision", "knobs"]
    assert [step.gain for step in found] == [None, *map(pytest.approx, (1.01, 2.0, 2.0, 4.1 / 4.04))]
    assert [step.sure for step in found] == [False, False, True, True, False]
    assert (found[3].score, found[-1].added) == (0.97, "2 threads")
    assert from_json(waterfall.Step, to_json(found[3])) == found[3]


def test_a_step_that_no_trial_has_is_kept_without_figures_and_the_next_gain_is_over_the_last_measured() -> None:
    trials = [seen(as_written(), 1.0), seen(EAGER, 1.0), seen(WINNER, 4.0)]
    found = chain(trials, WINNER)
    assert [step.speedup is None for step in found] == [False, False, True, True, False]
    assert found[-1].gain == pytest.approx(4.0)


def test_an_eager_winner_is_taken_apart_into_passes_and_an_original_into_nothing() -> None:
    best = Recipe(passes=(ChannelsLast(), Autocast(), Threads(count=1)), backend=Eager())
    names = {step.name: step.recipe for step in chain([], best)}
    assert list(names) == ["as written", "eager defaults", "rewrites", "precision", "knobs"]
    assert (names["rewrites"], "autocast" in names["precision"]) == ("channels_last + eager", True)
    assert chain([], as_written()) == []


def test_for_memory_and_size_a_gain_is_one_of_these() -> None:
    lossless, best = Recipe(backend=OnnxRuntime()), Recipe(backend=OnnxRuntime(precision="int8_static"))
    trials = [seen(EAGER, 1.0, size_mb=4.0), seen(lossless, 2.0, size_mb=4.0), seen(best, 2.0, size_mb=1.0)]
    found = chain(trials, best, objective="size")
    assert [(step.gain, step.sure) for step in found[-2:]] == [(1.0, False), (4.0, True)]


# ---- what a result says


class Study:
    """What a result reads of a study."""

    def __init__(self, trials: list[Trial], notes: tuple[str, ...] = ()) -> None:
        self.trials, self.options, self.baseline, self.to_beat = trials, Options(), as_written(), trials[0]
        self.prepared, self.notes, self.environment = record(2).prepared, list(notes), record(2).environment
        self.task, self.known = types.SimpleNamespace(mode="infer"), dict[str, Any]()
        self.storage = types.SimpleNamespace(
            get=self.known.get, put=lambda key, value: self.known.update({key: to_json(value)})
        )
        self.interrupted = lambda: False

    def record(self) -> Record:
        return record(2, status=None, notes=tuple(self.notes))


def result(trial: Trial, status: Any, ratio: float, *, notes: tuple[str, ...] = (), sentence: str = "") -> Result:
    again = dataclasses.replace(comparison(ratio), candidate=comparison(0.42 / 9.0).candidate)
    found = Confirmation(
        recipe=trial.recipe, ok=True, speedup=interval(ratio), comparison=again, latency_ms=again.candidate, baseline_score=0.9
    )
    trials = list({each.recipe: each for each in (seen(as_written(), 1.0, latency_ms=comparison(0.1).rival), trial)}.values())
    best = Best(trial=trial, confirmation=found, artifact=None)
    return Result(study=Study(trials, notes), status=status, sentence=sentence, best=best, seconds=1.0)  # type: ignore[arg-type]


def test_an_original_that_is_kept_is_at_one_and_at_its_own_latency() -> None:
    found = result(seen(as_written(), 1.0), "kept_original", 0.97)
    rungs = {rung["rung"]: rung for rung in found.ladder().rungs}
    assert is_kept_original(rungs["best"])
    assert not is_kept_original(rungs["as_written"])
    assert rungs["best"]["latency_ms"] == rungs["as_written"]["latency_ms"] == {"median": 0.42, "p90": pytest.approx(0.462)}
    assert KEPT_SPEEDUP in str(found.ladder())
    assert "0.97" not in str(found.ladder())
    assert found.to_json()["best"]["speedup"]["value"] == 1.0
    assert found.to_json()["steps"] == []


def test_the_latency_as_written_is_that_of_the_comparison_with_what_ships() -> None:
    found = result(seen(EAGER, 1.5), "improved", 1.5)
    rungs = {rung["rung"]: rung for rung in found.ladder().rungs}
    assert (rungs["as_written"]["latency_ms"]["median"], rungs["best"]["latency_ms"]["median"]) == (0.42, pytest.approx(9.0))
    assert rungs["best"]["speedup"]["value"] == 1.5
    assert [step["name"] for step in found.to_json()["steps"]] == ["as written", "eager defaults"]


def test_a_note_that_the_verdict_says_is_not_said_again() -> None:
    reason = "openvino: Measured again, it is 1.01x the tuned original (0.98 to 1.04), which does not prove that it is faster."
    notes = (f"It won the search but was not confirmed: {reason}", "No labels were given.", "No labels were given.")
    sentence = f"The original ships: {reason}"
    assert without_repeats(sentence, notes) == ["No labels were given."]
    found = result(seen(as_written(), 1.0), "kept_original", 1.0, notes=notes, sentence=sentence)
    assert found.all_notes().count("No labels were given.") == 1
    assert not any("It won the search" in note for note in (*found.all_notes(), *found.record().notes))


def test_a_search_that_the_confirmation_does_not_meet_is_told_with_both_figures() -> None:
    def apart(searched: float, confirmed: float) -> str:
        trial = seen(EAGER, searched)
        again = Confirmation(recipe=EAGER, ok=True, speedup=interval(confirmed))
        return conclusions.interval_mismatch(Best(trial=trial, confirmation=again, artifact=None))

    assert apart(4.4, 4.34) == ""
    assert "measured 6.17x (5.98 to 6.36)" in apart(6.17, 4.34)
    assert "confirmed 4.34x (4.21 to 4.47)" in apart(6.17, 4.34)


def test_a_machine_without_counters_says_why_and_runs_nothing(monkeypatch) -> None:
    monkeypatch.setattr(study_energy, "energy_meter", lambda: "Energy cannot be measured here: no counter.")
    found = study_energy.energy(types.SimpleNamespace(), "artifact", (0.001, 0.002))  # type: ignore[arg-type]
    assert (found.subject_j, found.reason) == (None, "Energy cannot be measured here: no counter.")


def test_energy_of_both_sides_is_metered_once(monkeypatch) -> None:
    ticks = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(study_energy, "energy_meter", lambda: Meter([Counter("package", lambda: next(ticks), 1e-6)]))
    monkeypatch.setattr(
        study_energy, "RemoteRunner", lambda address, key: types.SimpleNamespace(block=lambda calls: [1] * calls)
    )
    monkeypatch.setattr("trimtab.measure.energy.METERED_S", 0.001)
    begun: list[str] = []
    servers = types.SimpleNamespace(
        start_job=lambda name, what: begun.append(name),
        ready=lambda name, **more: {},
        stop=lambda name: None,
        addresses={"subject": "", "rival": ""},
        authkey=b"",
    )
    study = Study([seen(as_written(), 1.0)])
    study.runner = types.SimpleNamespace(servers=lambda *args, **more: contextlib.nullcontext(servers))  # type: ignore[attr-defined]
    first = study_energy.energy(study, "artifact", (0.001, 0.002))  # type: ignore[arg-type]
    assert first.subject_j is not None
    assert first.rival_j is not None
    assert study_energy.energy(study, "artifact", (0.001, 0.002)) == first  # type: ignore[arg-type]
    assert begun == ["subject", "rival"]
