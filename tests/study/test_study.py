"""The logic of a study without any process: what the ladder asks, what is kept, who keeps the limits."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
import traceback
import types
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import sqlalchemy

from _studies import ENVIRONMENT, record
from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.limits import Limits
from trimtab.core.measurement import Drop, Interval, Measurement
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Pass
from trimtab.core.trial import State, Trial
from trimtab.errors import StorageError, UsageError
from trimtab.evaluation.evaluate import per_second
from trimtab.hardware import environment
from trimtab.passes.threads import Threads
from trimtab.study import ranking
from trimtab.study.final_selection import ahead, worth_confirming
from trimtab.study.options import Options
from trimtab.study.record import claim
from trimtab.study.run_folder import exclusive, starting_afresh
from trimtab.study.samplers.ladder import Ladder, as_written, first_asks
from trimtab.study.samplers.sampler import SearchState
from trimtab.study.samplers.tpe import Tpe
from trimtab.study.storage import Storage, hide_password, sqlite_url

IDENTITY = {"workload": "abc", "objective": "latency"}
EAGER = Recipe(backend=BACKENDS["eager"]())


def speed(value: float) -> Interval:
    return Interval(value, value * 0.98, value * 1.02)


def latency(ms: float) -> Measurement:
    return Measurement(unit="ms", n=100, median=ms, interval=Interval(ms, ms * 0.99, ms * 1.01))


def complete(recipe: Recipe, value: float, **more) -> Trial:
    return Trial(recipe=recipe, state=State.COMPLETE, speedup=speed(value), latency_ms=latency(10 / value), size_mb=1.0, **more)


def drop(value: float, upper: float, limit: float, decided: bool | None, low: float = 0.0) -> Drop:
    needed = 900 if decided is None else None
    return Drop(value=value, low=low, upper=upper, n=400, limit=limit, decided=decided, n_needed=needed, share=True)


def facts(limits: Limits = Limits(), throughput: bool = False) -> SearchState:
    return SearchState(
        throughput=throughput,
        feasible=lambda trial: ranking.feasible(trial, limits),
        value=lambda trial: ranking.value(trial, "latency"),
    )


def test_where_the_original_is_slow_other_runtimes_come_before_it_is_tuned() -> None:
    done, usual = [complete(as_written(), 1.0)], facts()
    slow = dataclasses.replace(usual, slow_original=True)
    assert Ladder().ask(done, usual).recipe == EAGER
    stages = []
    while not stages or stages[-1] != "tuned":
        ask = Ladder().ask(done, slow)
        stages.append(ask.stage)
        done.append(complete(ask.recipe, 2.0))
    assert (stages[0], done[-1].recipe) == ("lossless", EAGER)
    assert len(stages) > 2


def test_a_runtime_for_which_the_time_was_too_short_was_not_measured() -> None:
    other = Recipe(backend=BACKENDS["onnxruntime"]())
    cut = Trial(recipe=other, state=State.STOPPED, seconds=20.0, ended_by="time", limit=20.0)
    slow = Trial(recipe=other, state=State.STOPPED, reason="Rule 'speed'")
    broken = Trial(recipe=other, state=State.FAILED, ended_by="time")
    assert ranking.other_runtimes([complete(EAGER, 1.0), cut, slow, broken]) == [slow, broken]


def walk(outcome, limits: Limits = Limits(), throughput: bool = False) -> list[Trial]:
    """Let the ladder run to its end with ``outcome(recipe) -> Trial``."""
    trials: list[Trial] = []
    for _ in range(500):
        ask = Ladder().ask(trials, facts(limits, throughput))
        if ask is None:
            return trials
        trials.append(dataclasses.replace(outcome(ask.recipe), stage=ask.stage))
    raise AssertionError("the ladder does not end")


def by_backend(recipe: Recipe) -> Trial:
    """A machine on which openvino is fast, int8 twice as fast again, and onnxruntime slow."""
    base = {"eager": 1.0, "torchscript": 1.2, "onnxruntime": 0.5, "openvino": 3.0, "inductor": 2.0, "aoti": 2.1}
    return complete(recipe, base[recipe.backend.name] * (1.0 if recipe.exact else 2.0))


@pytest.mark.parametrize("convolves", [True, False])
def test_eight_bits_come_first_and_calibrated_where_the_model_convolves(convolves: bool) -> None:
    known = dataclasses.replace(facts(), convolves=convolves)
    trials: list[Trial] = []
    while (ask := Ladder().ask(trials, known)) is not None and len(trials) < 12:
        trials.append(dataclasses.replace(by_backend(ask.recipe), stage=ask.stage))
    lossy = [trial.recipe.backend for trial in trials if trial.stage == "precision"]
    order = ["int8_static", "bf16", "int8_weights"] if convolves else ["int8_weights", "int8_static", "bf16"]
    assert [getattr(backend, "precision", None) for backend in lossy[:3]] == order


@pytest.mark.parametrize(("gain", "small", "tried"), [(2.0, False, "last"), (1.2, False, "never"), (1.2, True, "early")])
def test_four_bits_are_tried_last_and_where_eight_gain(gain: float, small: bool, tried: str) -> None:
    known, trials = dataclasses.replace(facts(), small=small), list[Trial]()
    while (ask := Ladder().ask(trials, known)) is not None:
        trials.append(dataclasses.replace(complete(ask.recipe, 1.0 if ask.recipe.exact else gain), stage=ask.stage))
    found = [n for n, trial in enumerate(trials) if getattr(trial.recipe.backend, "precision", "") == "int4_weights"]
    lossless = [n for n, trial in enumerate(trials) if trial.stage == "lossless"]
    assert {"last": [lossless[-1] + 1], "never": [], "early": [n for n in found if n < lossless[-1]]}[tried] == found
    assert bool(found) == (tried != "never")


@pytest.mark.parametrize("vnni", [True, False])
def test_without_vnni_other_forms_of_static_int8_are_tried_where_it_is_close(vnni: bool, monkeypatch) -> None:
    monkeypatch.setattr(environment, "has_vnni", lambda: vnni)

    def outcome(recipe: Recipe) -> Trial:
        close = {("onnxruntime", "f32"): 3.1, ("onnxruntime", "int8_static"): 2.9}
        key = recipe.backend.name, getattr(recipe.backend, "precision", "")
        return complete(recipe, close.get(key, 0.5 if recipe.backend.quantizes else 1.0))

    found = [
        str(t.recipe) for t in walk(outcome) if t.stage == "precision" and "onnxruntime(precision=int8_static" in str(t.recipe)
    ]
    forms = ["form=qoperator", "full_range=True", "ranges=percentile", "ranges=entropy"]
    more = [f"onnxruntime(precision=int8_static, {form})" for form in forms]
    assert found == ["onnxruntime(precision=int8_static)", *(more if not vnni else [])]


def test_smaller_networks_come_before_other_forms_of_int8_that_are_close(monkeypatch) -> None:
    monkeypatch.setattr(environment, "has_vnni", lambda: False)
    known, trials = dataclasses.replace(facts(), compress=("prune",)), list[Trial]()
    while (ask := Ladder().ask(trials, known)) is not None and len(trials) < 40:
        trials.append(dataclasses.replace(complete(ask.recipe, 1.0 if ask.recipe.exact else 1.05), stage=ask.stage))
    first = next(n for n, trial in enumerate(trials) if trial.stage == "compressed")
    assert "onnxruntime(precision=int8_static)" in [str(trial.recipe) for trial in trials[:first]]
    finer = [n for n, trial in enumerate(trials) if "form=qoperator" in str(trial.recipe) and trial.stage == "precision"]
    assert finer
    assert min(finer) > first


def test_the_ladder_climbs_in_order_and_asks_nothing_twice() -> None:
    trials = walk(by_backend)
    hashes = [trial.recipe.hash for trial in trials]
    assert len(hashes) == len(set(hashes))
    assert trials[0].recipe == as_written()
    stages = list(dict.fromkeys(trial.stage for trial in trials))
    assert stages == ["as_written", "tuned", "lossless", "knobs", "precision"]
    begins = next(n for n, trial in enumerate(trials) if trial.stage == "precision")
    quick = {backend.name for backend in search_space.backends() if backend.cost == "seconds"}
    assert {trial.recipe.backend.name for trial in trials[:begins]} == quick, "each once, before any is timed at length"
    assert trials[begins].recipe.backend.name == "openvino", "the most promising backend is tried with less precision first"
    assert {t.recipe.backend.name for t in trials if t.stage == "lossless"} == set(BACKENDS) - {"eager"}
    precise = {t.recipe.backend.name for t in trials if t.stage == "precision"}
    assert "openvino" in precise
    assert "onnxruntime" not in precise, "a backend at a sixth of the best lossless speed does not promise to pay"


def test_a_short_call_is_tried_with_one_thread_before_less_precision() -> None:
    trials = walk(by_backend)
    one = next(n for n, trial in enumerate(trials) if str(trial.recipe) == "threads(count=1) + openvino")
    assert all(trial.stage != "precision" for trial in trials[:one])
    assert sum(trial.stage == "lossless" for trial in trials[:one]) == 3


def compressing(
    outcome, how: tuple[str, ...] = ("prune",), most: int = 400, known: SearchState | None = None, *, whole: bool = False
) -> list[Trial]:
    """The trials of a ladder that compresses, those of the stage ``compressed`` only unless ``whole``."""
    known, trials = known or dataclasses.replace(facts(), compress=how), list[Trial]()
    while (ask := Ladder().ask(trials, known)) is not None and len(trials) < most:
        trials.append(dataclasses.replace(outcome(ask.recipe), stage=ask.stage))
    assert ask is None, "the ladder does not end"
    return [trial for trial in trials if whole or trial.stage == "compressed"]


def by_ratio(recipe: Recipe, *, floor: float = 0.12, holds: float = 0.5, longer: float = 0.3, misses: float = 0.05) -> Trial:
    """A machine on which time falls with the channels down to ``floor``, and a model that recovers down to ``holds``, and with
    800 updates down to ``longer``; else it loses ``misses``."""
    found = by_backend(recipe)
    steps = {step.name: step for step in recipe.passes}
    if "prune_units" in steps or "drop_layers" in steps:
        return Trial(recipe=recipe, state=State.SKIPPED, reason="It is no transformer.")
    if (step := steps.get("prune_channels")) is None or found.speedup is None:
        return found
    keep = step.keep  # type: ignore[attr-defined]
    found = complete(recipe, by_backend(Recipe(backend=recipe.backend)).speedup.value / max(keep, floor))  # type: ignore[union-attr]
    kept = "recover" in steps and (keep >= holds or (steps["recover"].updates == 800 and keep >= longer))  # type: ignore[attr-defined]
    missed = misses if "recover" in steps else 0.5
    lost = drop(0.0 if kept else missed, 0.01 if kept else missed + 0.1, 0.02, kept)
    return dataclasses.replace(found, drop=lost, state=State.COMPLETE if kept else State.STOPPED)


def asked(trials: list[Trial], backend: str) -> list[str]:
    """The ratio and the updates of each trial of a backend, in the form in which its smaller networks are timed."""
    found = [t.recipe for t in trials if t.recipe.backend.name == backend and t.state is not State.SKIPPED]
    found = [recipe for recipe in found if recipe.backend == found[0].backend]
    plain = [recipe for recipe in found if all(step.compresses for step in recipe.passes)]
    steps = [{step.name: step for step in recipe.passes} for recipe in plain]
    return [
        f"{s['prune_channels'].keep} {getattr(s.get('recover'), 'updates', '')}".strip() for s in steps if "prune_channels" in s
    ]  # type: ignore[attr-defined]


def test_nothing_is_compressed_unless_asked_for() -> None:
    assert not any(step.compresses for trial in walk(by_backend) for step in trial.recipe.passes)
    assert compressing(by_ratio, ()) == []


def test_half_is_timed_then_trained_and_harder_ones_follow_while_the_limit_holds() -> None:
    trials = compressing(by_ratio)
    wanted = ["0.5", "0.5 200", "0.25", "0.25 200", "0.35", "0.35 200"]
    assert asked(trials, "openvino") == wanted, "three trainings are the most"
    assert {trial.recipe.backend.name for trial in trials} <= {"openvino", "aoti", "inductor"}, "the fastest two runtimes"
    of_openvino = [trial.recipe.backend for trial in trials if trial.recipe.backend.name == "openvino"]
    assert not any(backend.exact for backend in of_openvino), "where 8 bits keep the limit, smaller networks have 8 bits"

    def rounded(recipe: Recipe) -> Trial:
        found = by_ratio(recipe)
        if getattr(recipe.backend, "float_layers", 0):
            return Trial(recipe=recipe, state=State.FAILED, reason="No layer is left to quantize.")
        if recipe.exact or recipe.compresses:
            return found
        return dataclasses.replace(found, state=State.STOPPED, drop=drop(0.5, 0.6, 0.02, False))

    trials = compressing(rounded)
    assert asked(trials, "openvino") == wanted
    lossy = [trial.recipe for trial in trials if not trial.recipe.backend.exact]
    assert lossy, "the best smaller network is tried with less precision"
    assert {step.keep for recipe in lossy for step in recipe.passes if step.name == "prune_channels"} == {0.5}  # type: ignore[attr-defined]


def test_threads_of_the_smaller_network_come_before_a_second_runtime() -> None:
    plain = {name: by_backend(Recipe(backend=BACKENDS[name]())).speedup.value for name in ("openvino", "onnxruntime")}  # type: ignore[union-attr]

    def close(recipe: Recipe) -> Trial:
        found = by_ratio(recipe, holds=0.2)
        if recipe.backend.name != "onnxruntime" or found.speedup is None:
            return found
        faster = found.speedup.value * 0.8 * plain["openvino"] / plain["onnxruntime"]
        return dataclasses.replace(found, speedup=complete(recipe, faster).speedup)

    trials = compressing(close, whole=True)
    smaller = [(trial.recipe.backend.name, trial.stage) for trial in trials if trial.recipe.compresses]
    second = smaller.index(("onnxruntime", "compressed"))
    assert ("openvino", "knobs") in smaller[:second]


def test_a_ratio_that_does_not_pay_is_not_trained() -> None:
    def floor(recipe: Recipe) -> Trial:
        return by_ratio(recipe, floor=0.9)

    assert asked(compressing(floor), "openvino") == ["0.5", "0.25", "0.12"]


def test_few_trainings_reach_the_hardest_ratio_that_holds() -> None:
    def world(**how: float) -> list[str]:
        return asked(compressing(functools.partial(by_ratio, **how)), "openvino")

    assert world(holds=0.1) == ["0.5", "0.5 200", "0.25", "0.25 200", "0.12", "0.12 200"]
    assert world(holds=0.2, longer=0.1) == ["0.5", "0.5 200", "0.25", "0.25 200", "0.12", "0.12 200"]
    assert world(holds=0.3) == ["0.5", "0.5 200", "0.25", "0.25 200", "0.35", "0.35 200"], "a milder one gains too"
    close = ["0.5", "0.5 200", "0.25", "0.25 200", "0.25 800", "0.12"]
    assert world(holds=0.3, longer=0.2, misses=0.035) == close, "one that is close to the limit is trained on"
    assert world(holds=0.7, longer=0.7) == ["0.5", "0.5 200", "0.5 800", "0.75", "0.75 200"]
    assert world(holds=0.7, misses=0.2) == ["0.5", "0.5 200", "0.75", "0.75 200"]


def test_a_student_is_timed_before_it_is_trained() -> None:
    def student(recipe: Recipe) -> Trial:
        found, names = by_backend(recipe), {step.name: step for step in recipe.passes}
        if "student" not in names or found.speedup is None:
            return found
        kept = "recover" in names and names["recover"].updates == 800  # type: ignore[attr-defined]
        lost = drop(0.0 if kept else 0.5, 0.01 if kept else 0.6, 0.02, kept)
        return dataclasses.replace(complete(recipe, 2 * found.speedup.value), drop=lost)

    trials = [trial.recipe for trial in compressing(student, ("distill",)) if trial.recipe.backend.name == "openvino"]
    trials = [recipe for recipe in trials if recipe.backend == trials[0].backend]
    assert [[str(getattr(step, "updates", step.name)) for step in recipe.passes] for recipe in trials] == [
        ["student"],
        ["student", "200"],
        ["student", "800"],
    ]


def test_a_network_that_misses_the_limit_is_trained_once_for_longer_and_a_milder_one_follows() -> None:
    def hard(recipe: Recipe) -> Trial:
        return by_ratio(recipe, holds=0.9)

    wanted = ["0.5", "0.5 200", "0.5 800", "0.35", "0.35 800", "0.25"]
    assert asked(compressing(hard), "openvino") == wanted, "harder ratios begin with the longer training"

    def mild(recipe: Recipe, *, short: bool = False) -> Trial:
        found, steps = by_ratio(recipe, holds=0.7), {step.name: step for step in recipe.passes}
        keep, updates = (
            getattr(steps.get(name), field, 0) for name, field in (("prune_channels", "keep"), ("recover", "updates"))
        )
        if short and updates == 800:
            return Trial(recipe=recipe, state=State.SKIPPED, reason="The budget is too short.")
        if not updates or keep > 0.7 or found.speedup is None:
            return found
        return dataclasses.replace(found, drop=drop(0.05, 0.06, 0.02, False), state=State.STOPPED)

    assert asked(compressing(mild), "openvino") == ["0.5", "0.5 200", "0.5 800", "0.75", "0.75 200"]
    short = functools.partial(mild, short=True)
    assert asked(compressing(short), "openvino") == ["0.5", "0.5 200", "0.75", "0.75 200"], "no time for the longer training"


def test_a_network_that_keeps_the_limit_by_little_is_trained_for_longer_unless_a_harder_ratio_holds() -> None:
    def near(recipe: Recipe, *, holds: float = 0.2, untrained: float = 1.0) -> Trial:
        found, steps = by_ratio(recipe), {step.name: step for step in recipe.passes}
        if "prune_channels" not in steps or found.speedup is None:
            return found
        keep = steps["prune_channels"].keep  # type: ignore[attr-defined]
        kept = keep >= (holds if "recover" in steps else untrained)
        lost = drop(0.006, 0.018, 0.02, True) if kept else drop(0.5, 0.6, 0.02, False)
        return dataclasses.replace(found, drop=lost, state=State.COMPLETE if kept else State.STOPPED)

    assert asked(compressing(near), "openvino") == ["0.5", "0.5 200", "0.35", "0.35 800", "0.25", "0.25 800", "0.12"]
    only = functools.partial(near, holds=0.4)
    found = asked(compressing(only), "openvino")
    assert found == ["0.5", "0.5 200", "0.35", "0.35 800", "0.5 800"], "the harder one failed"
    free = functools.partial(near, holds=0.3, untrained=0.4)
    wanted = ["0.5", "0.35", "0.35 200", "0.25", "0.25 800", "0.35 800"]
    assert asked(compressing(free), "openvino") == wanted, "what keeps the limit untrained is not trained"
    known = dataclasses.replace(facts(), compress=("prune",), updates=(200, 800, 3200), trainings=9)
    more = asked(compressing(functools.partial(by_ratio, holds=0.3, misses=0.035), known=known), "openvino")
    wanted = ["0.5", "0.5 200", "0.25", "0.25 200", "0.25 800", "0.25 3200", "0.35", "0.35 200"]
    assert more == wanted, "a budget for training that the user gave"


def test_passes_that_remove_other_parts_are_tried_on_top_of_each_other() -> None:
    def deep(recipe: Recipe) -> Trial:
        found, names = by_backend(recipe), [step.name for step in recipe.passes]
        if "prune_channels" in names or found.speedup is None:
            return Trial(recipe=recipe, state=State.SKIPPED, reason="It is a transformer.")
        share = 1.0
        for step in recipe.passes:
            share *= getattr(step, "keep", 1.0)
        kept = "recover" in names and share > 0.36
        lost = drop(0.0 if kept else 0.5, 0.01 if kept else 0.6, 0.02, kept)
        plain = by_backend(Recipe(backend=recipe.backend)).speedup.value  # type: ignore[union-attr]
        return dataclasses.replace(complete(recipe, plain / share), drop=lost if share < 1 else None)

    found = [trial for trial in compressing(deep, ("auto",)) if trial.drop is not None and trial.drop.decided]
    best = max(found, key=lambda trial: trial.speedup.value if trial.speedup else 0.0)
    shares = {step.name: step.keep for step in best.recipe.passes if hasattr(step, "keep")}
    assert shares == {"prune_units": 0.5, "drop_layers": 0.75}


def test_parts_that_can_go_untrained_go_before_anything_is_trained() -> None:
    def shallow(recipe: Recipe) -> Trial:
        found, steps = by_backend(recipe), {step.name: step for step in recipe.passes if step.compresses}
        if "prune_channels" in steps or found.speedup is None:
            return Trial(recipe=recipe, state=State.SKIPPED, reason="It is a transformer.")
        shares = {name: getattr(step, "keep", 1.0) for name, step in steps.items()}
        kept = "recover" in steps or (shares.get("prune_units", 1.0) == 1.0 and shares.get("drop_layers", 1.0) >= 0.5)
        lost = drop(0.0 if kept else 0.5, 0.01 if kept else 0.6, 0.02, kept)
        plain = by_backend(Recipe(backend=recipe.backend)).speedup.value  # type: ignore[union-attr]
        return dataclasses.replace(complete(recipe, plain / math.prod(shares.values())), drop=lost if steps else None)

    asked = [trial.recipe for trial in compressing(shallow, ("auto",)) if trial.recipe.backend.name == "openvino"]
    parts = [[(step.name, step.keep) for step in recipe.parts if hasattr(step, "keep")] for recipe in asked]
    assert parts[:4] == [
        [("prune_units", 0.5)],
        [("drop_layers", 0.5)],
        [("drop_layers", 0.35)],
        [("drop_layers", 0.5), ("prune_channels", 0.5)],
    ]
    first = next(n for n, recipe in enumerate(asked) if recipe.training is not None)
    assert parts[first] == [("drop_layers", 0.5), ("prune_units", 0.5)]
    assert all(len({name for name, _ in each}) == len(each) for each in parts), "no pass twice"
    assert [("prune_units", 0.12), ("drop_layers", 0.35)] in parts, "a pass that went untrained goes on with training"


def test_the_whole_network_is_confirmed_if_all_smaller_ones_fail_on_the_test_data() -> None:
    openvino, onnxruntime = BACKENDS["openvino"], BACKENDS["onnxruntime"]

    def cut(keep: float) -> tuple[Pass, ...]:
        return (PASSES["prune_channels"](keep=keep),)  # type: ignore[call-arg]

    half, same, third, quarter = (Recipe(passes=cut(keep), backend=openvino()) for keep in (0.5, 0.5, 0.35, 0.25))
    again = dataclasses.replace(same, backend=onnxruntime())
    int8, exact = Recipe(backend=openvino(precision="int8_static")), Recipe(backend=openvino())  # type: ignore[call-arg]
    recipes = [half, again, third, quarter, int8, exact, Recipe(backend=onnxruntime())]
    trials = [complete(recipe, 20.0 - place) for place, recipe in enumerate(recipes)]
    chosen = [trial.recipe for trial in ranking.to_confirm(trials)]
    assert chosen == [half, third, quarter, int8, exact], "each network once, then the whole one, then a lossless form"
    assert [trial.recipe for trial in ranking.to_confirm(trials[4:])] == recipes[4:]
    assert [trial.recipe for trial in ranking.to_confirm(trials[2:6])] == [third, quarter, int8, exact]


def test_a_pass_that_cannot_run_is_asked_once_for_each_form() -> None:
    trials = compressing(by_ratio, "auto")
    units = [t.recipe for t in trials if any(step.name in ("prune_units", "drop_layers") for step in t.recipe.passes)]
    forms = {str((recipe.backend, [step for step in recipe.passes if not step.compresses])) for recipe in units}
    assert len(units) == 2 * len(forms) > 0


def test_the_ladder_goes_on_where_it_was_killed() -> None:
    whole = walk(by_backend)
    for cut in (1, 4, len(whole) // 2):
        ask = Ladder().ask(whole[:cut], facts())
        assert ask is not None
        assert ask.recipe == whole[cut].recipe


def test_batch_is_tried_for_throughput_only() -> None:
    def has_batch(trials: list[Trial]) -> bool:
        return any(step.name == "batch" for trial in trials for step in trial.recipe.passes)

    assert not has_batch(walk(by_backend))
    assert has_batch(walk(by_backend, throughput=True))


def test_failed_backends_do_not_stop_the_ladder() -> None:
    def outcome(recipe: Recipe) -> Trial:
        if recipe.backend.name == "eager":
            return complete(recipe, 1.0)
        return Trial(recipe=recipe, state=State.FAILED, reason="It broke.")

    trials = walk(outcome)
    assert {t.recipe.backend.name for t in trials if t.state is State.FAILED} == set(BACKENDS) - {"eager"}


def test_tpe_covers_the_space_and_repeats_nothing(tmp_path) -> None:
    storage = Storage(f"sqlite:///{tmp_path}/study.db", "x", identity=IDENTITY)
    sampler, trials = Tpe(storage, seed=1), []
    for _ in range(25):
        ask = sampler.ask(trials, facts())
        assert ask is not None
        trial = by_backend(ask.recipe)
        value = ranking.value(trial, "latency")
        trials.append(storage.finish(sampler.pending, trial, value) if sampler.pending else storage.add(trial, value))
    first = [ask.recipe for ask in first_asks()]
    assert [trial.recipe for trial in trials[: len(first)]] == first, "as the ladder begins"
    assert len({trial.recipe.hash for trial in trials}) == 25
    assert [t.recipe for t in storage.trials()] == [t.recipe for t in sorted(trials, key=lambda t: t.number)]
    assert len({trial.recipe.backend.name for trial in trials}) >= 4


def test_storage_keeps_trials_and_optuna_opens_it(tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    storage = Storage(url, "x", identity=IDENTITY)
    good = complete(Recipe(passes=(PASSES["threads"](),), backend=BACKENDS["eager"]()), 2.0)
    bad = Trial(recipe=as_written(), state=State.FAILED, reason="It crashed.", traceback="Traceback ...")
    storage.add(good, 2.0)
    storage.add(bad, None)
    again = Storage(url, "x", identity=IDENTITY)
    assert again.trials() == [good, dataclasses.replace(bad, number=1)]
    study = optuna.load_study(study_name="x", storage=url)
    assert study.best_value == 2.0
    assert study.best_params["backend"] == "eager"
    assert study.trials[1].state == optuna.trial.TrialState.FAIL
    with pytest.raises(UsageError, match="was made for another objective: 'latency' there, 'size' now"):
        Storage(url, "x", identity={**IDENTITY, "objective": "size"})


def test_a_study_goes_on_with_other_techniques_than_it_began_with(tmp_path, monkeypatch) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    storage = Storage(url, "x", identity=IDENTITY)
    storage.add(complete(as_written(), 1.0), 1.0)
    found = search_space.parameters

    def fewer(recipe: Recipe) -> Any:
        values, spaces = found(recipe)
        return values, {**spaces, "backend": optuna.distributions.CategoricalDistribution(["eager", "new"])}

    monkeypatch.setattr("trimtab.study.storage.parameters", fewer)
    other = storage.add(complete(Recipe(backend=BACKENDS["eager"]()), 1.5), 1.5)
    assert [trial.number for trial in Storage(url, "x", identity=IDENTITY).trials()] == [0, other.number]


def test_a_trial_of_a_technique_that_is_gone_is_left_out(tmp_path) -> None:
    storage = Storage(f"sqlite:///{tmp_path}/study.db", "x", identity=IDENTITY)
    kept = storage.add(complete(as_written(), 1.0), 1.0)
    storage.add(complete(EAGER, 2.0), 2.0)
    assert len(storage.trials()) == 2
    assert storage.notes == []
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute(
            "update trial_user_attributes set value_json = replace(value_json, ?, ?) where trial_id = 2",
            tuple(f'name\\": \\"{name}' for name in ("eager", "gone")),
        )
    again = Storage(f"sqlite:///{tmp_path}/study.db", "x", identity=IDENTITY)
    assert again.trials() == [kept]
    assert len(again.notes) == 1
    assert again.notes[0].startswith("One trial is left out, because this installation cannot read what was tried: There is no")
    assert again.add(complete(EAGER, 2.0), 2.0).number == 2


def test_a_run_folder_whose_owner_cannot_be_read_is_refused_in_words(tmp_path) -> None:
    for text in ("", "[1]", "[" * 100_000, '{"code": [1]}', '{"study": "latency"}', '{"environment": null}'):
        (tmp_path / "workload.json").write_text(text)
        with pytest.raises(StorageError, match="workload.json, which says what the run folder is for, cannot be read"):
            claim(tmp_path, PREPARED, ENVIRONMENT, IDENTITY)


def test_a_run_folder_is_for_one_process_at_a_time(tmp_path) -> None:
    with exclusive(tmp_path / "run"):
        with pytest.raises(UsageError, match=r"Another process is at work in .*run. Wait for it"), exclusive(tmp_path / "run"):
            pass
        with starting_afresh(tmp_path / "run"):
            pass
        assert [entry.name for entry in (tmp_path / "run").iterdir()] == [".lock"]
    with exclusive(tmp_path / "run"):
        pass


def test_suggestions_that_do_not_fit_end_the_search(tmp_path) -> None:
    storage = Storage(f"sqlite:///{tmp_path}/study.db", "x", identity=IDENTITY)
    sampler = Tpe(storage, seed=1)
    known = [complete(ask.recipe, 1.0) for ask in first_asks()]
    left: list[Trial] = []
    while True:
        ask = sampler.ask([*known, *left], facts())
        assert ask is not None
        left.append(Trial(recipe=ask.recipe, state=State.SKIPPED))
        if sampler.declined(len(left)):
            break
    assert len(left) == 10
    assert not any(trial.state == optuna.trial.TrialState.RUNNING for trial in storage.study.trials)
    words = f"The budget was too short to try {left[0].recipe}, {left[1].recipe} and 8 more, which the report lists."
    assert ranking.too_short(left).startswith(words)


@pytest.mark.parametrize(("name", "why"), [("openvino", ""), ("aoti", " Runtimes that compile in seconds come first.")])
def test_what_a_budget_leaves_out_is_named_and_why_it_came_late(name: str, why: str) -> None:
    left = Trial(recipe=Recipe(backend=BACKENDS[name]()), state=State.SKIPPED)
    words = f"The budget was too short to try {name}.{why} The same command goes on with them."
    assert ranking.too_short([left]) == words


def test_storage_says_what_is_wrong_with_the_file(tmp_path) -> None:
    (tmp_path / "study.db").write_bytes(b"this is not a database at all, but a text of some length" * 50)
    with pytest.raises(StorageError, match="cannot be opened: .*file is not a database"):
        Storage(f"sqlite:///{tmp_path}/study.db", "x", identity=IDENTITY)
    with pytest.raises(StorageError, match="cannot be opened"):
        Storage(f"sqlite:///{tmp_path}/no/such/folder/study.db", "x", identity=IDENTITY)


@pytest.mark.parametrize("name", ["what? 100%41 #1 {a} + ü", "mod\udce9l"])
def test_a_run_folder_may_have_any_name(tmp_path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    kept = Storage(sqlite_url(folder / "study.db"), "x", identity=IDENTITY).add(complete(EAGER, 1.0), 1.0)
    assert (folder / "study.db").exists()
    assert Storage(sqlite_url(folder / "study.db"), "x", identity=IDENTITY).trials() == [kept]
    assert list(tmp_path.iterdir()) == [folder]


def test_of_a_recipe_that_was_tried_again_the_last_trial_counts(tmp_path) -> None:
    storage = Storage(f"sqlite:///{tmp_path}/study.db", "x", identity=IDENTITY)
    storage.add(Trial(recipe=EAGER, state=State.FAILED, ended_by="time", limit=8.0), None)
    kept = [storage.add(complete(as_written(), 1.0), 1.0), storage.add(complete(EAGER, 2.0), 2.0)]
    assert storage.trials() == kept


@pytest.mark.parametrize(
    ("ended_by", "limit", "more"),
    [
        ("time", 8.0, True),
        ("time", 60.0, False),
        ("memory", 500.0, True),
        ("memory", 950.0, False),
        ("memory", 0.0, True),
        (None, None, False),
    ],
)
def test_a_trial_that_a_limit_ended_is_tried_again_with_a_higher_one(ended_by: Any, limit: float | None, *, more: bool) -> None:
    trial = Trial(recipe=EAGER, state=State.FAILED, ended_by=ended_by, limit=limit)
    assert ranking.limit_was_raised(trial, seconds=60.0, memory_mb=1000.0) is more


@pytest.mark.parametrize(("left", "needed", "most"), [(40.0, [8.0, 6.0], 26.0), (18.0, [8.0, 7.0], 9.0), (30.0, [], 30.0)])
def test_a_first_form_takes_what_others_do_not_need_and_at_least_half(left: float, needed: list[float], most: float) -> None:
    assert ranking.share_s(left, needed) == most


def test_a_trial_that_time_ended_tells_how_long_its_own_runtime_takes_and_nothing_of_others() -> None:
    slow, other = BACKENDS["onnxruntime"](), BACKENDS["openvino"]()
    cut = Trial(recipe=Recipe(backend=slow), state=State.STOPPED, seconds=20.0, ended_by="time", limit=20.0)
    assert ranking.likely_s(slow, [cut], as_written(), 2.0) > cut.seconds
    assert ranking.likely_s(other, [cut], as_written(), 2.0) == ranking.likely_s(other, [], as_written(), 2.0)
    assert ranking.limit_was_raised(cut, seconds=600.0, memory_mb=1000.0), "the same command tries it again"


def test_a_study_that_was_deleted_meanwhile_is_the_storage_s_fault_for_every_sampler(tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    storage = Storage(url, "x", identity=IDENTITY)
    sampler, known = Tpe(storage, seed=1), [complete(ask.recipe, 1.0) for ask in first_asks()]
    assert sampler.ask(known, facts()) is not None
    optuna.delete_study(study_name="x", storage=url)
    with pytest.raises(StorageError, match="cannot be written: .* Finished trials are kept"):
        sampler.declined(1)
    with pytest.raises(StorageError, match="cannot be written"):
        sampler.ask(known, facts())


def test_of_what_a_database_refuses_its_drivers_words_are_told(tmp_path) -> None:
    """SQLAlchemy puts advice for who writes code before them, on a line of its own."""
    storage = Storage(sqlite_url(tmp_path / "study.db"), "x", identity=IDENTITY)
    full = sqlite3.OperationalError("database or disk is full")
    flushed = sqlalchemy.exc.OperationalError("(raised as a result of autoflush)\nUPDATE", {}, full)
    told = r"cannot be written: database or disk is full\. If the disk is full"
    with pytest.raises(StorageError, match=told), storage.guard("written"):
        raise optuna.exceptions.StorageInternalError("An exception is raised during the commit.") from flushed


PREPARED = dataclasses.replace(record().prepared, code={"net": "1", "the model's classes": "2"})


@pytest.mark.parametrize(
    ("changes", "elsewhere", "message"),
    [
        ({"code": {"net": "9", "the model's classes": "9"}}, {}, r"for other code \(changed since: net\), whose figures may"),
        ({"code": {"net": "1", "the model's classes": "9"}}, {}, r"for other code \(changed since: the model's classes\)"),
        ({"threads": 1}, {}, "with torch on 2 threads, which now has 1"),
        ({"fingerprint": "f"}, {"cpu": "Another CPU"}, "on another machine, or with other versions of Python, trimtab or a"),
        ({"fingerprint": "f"}, {"python": "3.14.0"}, r"on another machine, .* with Python 3.11; this is .* with Python 3.14\)"),
        ({"fingerprint": "f"}, {}, r"for another workload \(digits, feedc0de; .* If you changed nothing, something in it is"),
        ({"identity": "i", "name": "other"}, {"cpu": "Another CPU"}, r"for another workload \(digits, .* forget the other\.$"),
    ],
)
def test_a_run_folder_says_what_is_not_as_it_was(tmp_path, changes: dict[str, Any], elsewhere, message: str) -> None:
    claim(tmp_path, PREPARED, ENVIRONMENT, IDENTITY)
    claim(tmp_path, PREPARED, ENVIRONMENT, IDENTITY)
    now, here = dataclasses.replace(PREPARED, **changes), dataclasses.replace(ENVIRONMENT, **elsewhere)
    with pytest.raises(UsageError, match=f"The run folder .* was made {message}"):
        claim(tmp_path, now, here, IDENTITY)
    with pytest.raises(UsageError, match="was made for another objective: 'latency' there, 'size' now"):
        claim(tmp_path, PREPARED, ENVIRONMENT, {**IDENTITY, "objective": "size"})


def test_a_trial_that_was_running_when_its_study_was_killed_is_not_a_finished_one(tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    storage = Storage(url, "x", identity=IDENTITY)
    storage.study.ask()
    assert storage.trials() == []
    with sqlite3.connect(tmp_path / "study.db") as database:
        assert database.execute("select count(*) from trials").fetchone() == (1,)


def test_no_password_and_no_driver(tmp_path) -> None:
    url = "mssql+pyodbc://me:secret@localhost/studies"
    with pytest.raises(StorageError) as caught:
        Storage(url, "x", identity=IDENTITY)
    assert str(caught.value) == (
        "The study's storage mssql+pyodbc://me:***@localhost/studies needs the database driver pyodbc, which is not installed: "
        "pip install pyodbc."
    )
    with pytest.raises(StorageError, match=r"The study's storage nonsense cannot be opened: Could not parse SQLAlchemy URL"):
        Storage("nonsense", "x", identity=IDENTITY)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://me:p@ss:w0rd@db/x", "it cannot be read as a URL. Write signs such as @ : / { in the password as %40"),
        ("postgresql:/me:w0rd@db/x", "Could not parse SQLAlchemy URL"),
    ],
)
def test_no_part_of_a_password_is_told(url: str, reason: str) -> None:
    with pytest.raises(StorageError) as caught:
        Storage(url, "x", identity=IDENTITY)
    assert str(caught.value).startswith(f"The study's storage postgresql://***@db/x cannot be opened: {reason}")
    assert "w0rd" not in "".join(traceback.format_exception(caught.value))
    assert hide_password("postgresql:///x?host=db&password=w0rd&user=me") == "postgresql:///x?host=db&password=***&user=me"


def test_braces_in_a_password_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    def opened(url: str, **options: Any) -> None:
        seen.append(url)
        raise ConnectionError

    monkeypatch.setattr("sqlalchemy.engine.create_engine", opened)
    with pytest.raises(StorageError, match=r"storage postgresql://me:\*\*\*@db/x cannot be opened: ConnectionError"):
        Storage("postgresql://me:{x}w0rd{@db/x", "x", identity=IDENTITY)
    assert seen == ["postgresql://me:{x}w0rd{@db/x"]


def test_a_database_of_another_optuna_is_a_sentence(tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    Storage(url, "x", identity=IDENTITY)
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute("update alembic_version set version_num = 'v2.4.0.a'")
    with pytest.raises(StorageError, match="cannot be opened: The runtime optuna version .* is no longer compatible with the"):
        Storage(url, "x", identity=IDENTITY)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("trial_params", "distribution_json", "x"),
        ("trial_params", "distribution_json", "[]"),
        ("trial_params", "param_value", None),
        ("trial_user_attributes", "value_json", '"one' + chr(7)),
        ("trials", "number", "one"),
        ("trials", "state", "[]"),
        ("trials", "datetime_complete", "now"),
        ("study_user_attributes", "value_json", "NaN"),
    ],
)
def test_a_database_that_a_disk_damaged_is_a_sentence(tmp_path, table: str, column: str, value: str | None) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    storage = Storage(url, "x", identity=IDENTITY)
    for recipe in (as_written(), Recipe(backend=BACKENDS["torchscript"]())):
        storage.add(complete(recipe, 1.0), 1.0)
    with sqlite3.connect(tmp_path / "study.db") as database:
        changed = database.execute(f"update {table} set {column} = ? where rowid = 1", (value,))
        assert changed.rowcount == 1
    with pytest.raises(StorageError, match=r"study.db cannot be (read: .*\. Put back a copy of it|opened: .*\. Mend that)"):
        Storage(url, "x", identity=IDENTITY).trials()
    Storage(url, "y", identity=IDENTITY)


@pytest.fixture
def postgres(tmp_path) -> Iterator[str]:
    """A PostgreSQL server of the test's own; its URL."""
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")) or [shutil.which("pg_ctl")]
    if found[0] is None or (os.geteuid() == 0 and "postgres" not in {entry.pw_name for entry in pwd.getpwall()}):
        pytest.skip("no PostgreSQL server is installed here (apt-get install postgresql)")
    own = {"user": "postgres"} if os.geteuid() == 0 else {}  # the server refuses to run as root
    with tempfile.TemporaryDirectory(prefix="pg-") as place:
        if own:
            shutil.chown(place, "postgres")
        control = [str(found[-1]), "-D", f"{place}/data", "-w"]
        quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **own}
        subprocess.run([*control, "init", "-o", "-A trust -U trim"], **quiet)
        subprocess.run([*control, "start", "-o", f"-k {place} -c listen_addresses='' -c fsync=off"], **quiet)
        try:
            yield f"postgresql+psycopg://trim:secret@/postgres?host={place}"
        finally:
            subprocess.run([*control, "stop", "-m", "immediate"], **quiet)


def test_postgresql_keeps_trials_too(postgres: str) -> None:
    storage = Storage(postgres, "x", identity=IDENTITY)
    kept = [storage.add(complete(as_written(), 1.0), 1.0), storage.add(complete(EAGER, 2.0, notes=("a → b",)), 2.0)]
    storage.put("confirmed", {"ok": True})
    again = Storage(postgres, "x", identity=IDENTITY)
    assert again.trials() == kept
    assert again.get("confirmed") == {"ok": True}
    assert "secret" not in again.url
    other = {"identity": {**IDENTITY, "objective": "size"}}
    assert Storage(postgres, "y", **other, fresh=True).trials() == []
    with pytest.raises(UsageError, match="was made for another objective"):
        Storage(postgres, "x", **other)
    assert Storage(postgres, "x", **other, fresh=True).trials() == []


def test_a_connection_that_was_cut_while_it_lay_idle_is_made_again(postgres: str) -> None:
    storage = Storage(postgres, "x", identity=IDENTITY)
    kept = storage.add(complete(EAGER, 1.0), 1.0)
    with sqlalchemy.create_engine(postgres).connect() as other:
        cut = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() and usename = 'trim'"
        assert other.execute(sqlalchemy.text(cut)).fetchall() != []
    assert storage.trials() == [kept]


LOSSY = Recipe(passes=(PASSES["autocast"](),), backend=BACKENDS["eager"]())


@pytest.mark.parametrize(
    ("trial", "limits", "missed"),
    [
        (complete(EAGER, 2.0), Limits(latency_ms=5.1), []),
        (complete(EAGER, 2.0), Limits(latency_ms=4.9), ["Its latency of 5 ms is above the limit of 4.9 ms."]),
        (complete(EAGER, 2.0), Limits(memory_mb=9), ["Its memory was not measured, so it cannot be said to keep 9 MB."]),
        (complete(EAGER, 2.0), Limits(size_mb=0.5), ["Its size of 1 MB is above the limit of 0.5 MB."]),
        (
            complete(EAGER, 2.0),
            Limits(throughput=9),
            ["Its throughput was not measured, so it cannot be said to keep 9 examples/s."],
        ),
        (
            complete(EAGER, 2.0, throughput=per_second(latency(5.0), 5)),
            Limits(throughput=2e3),
            ["Its throughput of 1000 examples/s is below the limit of 2000 examples/s."],
        ),
        (complete(EAGER, 2.0, throughput=per_second(latency(5.0), 5)), Limits(throughput=1e3), []),
        (complete(LOSSY, 2.0, drop=drop(0.001, 0.004, 0.005, True)), Limits(), []),
        (
            complete(LOSSY, 2.0, drop=drop(0.02, 0.03, 0.005, False, 0.01)),
            Limits(),
            ["Its drop of 2.000% is beyond the limit of 0.500%."],
        ),
        (
            complete(LOSSY, 2.0, drop=drop(0.0, 0.0074, 0.005, None)),
            Limits(),
            [
                "Undecidable with 400 examples: its score does not change, but a drop of up to 0.740% cannot be "
                "excluded and the limit is 0.500%; about 900 would."
            ],
        ),
        (complete(EAGER, 2.0, drop=drop(0.0, 0.0074, 0.005, None)), Limits(), []),
        (complete(EAGER, 2.0), Limits(max_drop=0), []),
        (complete(LOSSY, 2.0), Limits(max_drop=0.005), []),
        (
            complete(LOSSY, 2.0),
            Limits(max_drop=0),
            ["It may lose accuracy, and without labels nobody sees that it keeps max_drop 0."],
        ),
    ],
)
def test_limits_are_kept_or_missed_in_words(trial: Trial, limits: Limits, missed: list[str]) -> None:
    assert [miss.words for miss in ranking.misses(trial, limits)] == missed


def test_the_answer_to_an_impossible_wish_names_the_nearest_and_what_binds() -> None:
    trials = [
        complete(EAGER, 1.0),
        complete(Recipe(backend=BACKENDS["torchscript"]()), 2.0),
        complete(LOSSY, 4.0, drop=drop(0.05, 0.06, 0.005, False, 0.04)),
    ]
    words = ranking.unmet(trials, Limits(latency_ms=4.0))
    assert words == (
        "Nothing meets latency 4 ms. The nearest is torchscript: its latency of 5 ms is above the limit of 4 ms. "
        "The accuracy limit is what binds: without it, autocast(dtype=bfloat16) + eager would do."
    )


def test_a_recipe_that_may_lose_accuracy_has_to_pay_for_it() -> None:
    exact = complete(Recipe(backend=BACKENDS["torchscript"]()), 2.0)
    slower = complete(EAGER, 1.0)

    def order(speedup: Interval) -> list[str]:
        lossy = dataclasses.replace(complete(LOSSY, 2.0), speedup=speedup)
        return [str(t.recipe) for t in ranking.ranked([slower, lossy, exact], Limits(), "latency")]

    assert order(Interval(2.05, 2.01, 2.1)) == [str(LOSSY), "torchscript", "eager"], "it is surely faster"
    assert order(Interval(2.05, 1.99, 2.1)) == ["torchscript", str(LOSSY), "eager"], "it may be no faster at all"
    assert order(Interval(0.9, 0.8, 0.95)) == ["torchscript", "eager", str(LOSSY)]


@pytest.mark.parametrize("objective", ["memory", "size"])
def test_also_in_memory_or_size_and_for_more_than_noise(objective: str) -> None:
    def of(recipe: Recipe, mb: float) -> Trial:
        return dataclasses.replace(complete(recipe, 1.0), peak_mb=mb, size_mb=mb)

    exact = of(EAGER, 40.0)
    assert ranking.ranked([of(LOSSY, 39.9), exact], Limits(), objective)[0] is exact
    assert ranking.ranked([exact, lossy := of(LOSSY, 39.0)], Limits(), objective)[0] is lossy


def test_what_may_be_faster_on_a_busy_machine_is_looked_at_again() -> None:
    eager = complete(EAGER, 1.0)

    def seen(value: float, low: float, backend: str) -> Trial:
        trial = complete(Recipe(backend=BACKENDS[backend]()), 1.0)
        return dataclasses.replace(trial, speedup=Interval(value, low, 2 * value - low))

    surely, unsure, likely = seen(1.2, 1.1, "torchscript"), seen(1.1, 0.8, "onnxruntime"), seen(1.3, 0.9, "openvino")
    hardly = seen(1.04, 0.9, "inductor")

    def ahead(*trials: Trial, objective: str = "latency") -> list[Trial]:
        return ranking.ahead([eager, *trials], Limits(), objective, eager)

    assert ahead(unsure, likely, surely) == [surely], "what is sure comes first, and goes to the confirmation alone"
    assert ahead(unsure, likely, hardly) == [likely]
    assert [ranking.surely_ahead(trial, eager, "latency") for trial in (surely, likely)] == [True, False]
    assert ahead(hardly) == []
    assert ahead(dataclasses.replace(likely, recipe=EAGER)) == [], "the tuned original is the best of these already"
    assert ahead() == []
    assert ahead(likely, objective="size") == []


def test_space_variants_are_all_different_and_parameters_are_stable() -> None:
    seen = [str(technique) for technique in search_space.techniques()]
    assert len(seen) == len(set(seen)) > 10
    names = [sorted(search_space.parameters(Recipe(backend=backend))[1]) for backend in search_space.backends()]
    common = set.intersection(*map(set, names))
    assert "backend" in common
    assert "pass.threads" in common


def test_a_few_bytes_less_are_no_improvement() -> None:
    def of(size_mb: float) -> Trial:
        return dataclasses.replace(complete(EAGER, 1.0), size_mb=size_mb)

    assert worth_confirming(of(0.97), of(1.0), "size")
    assert not worth_confirming(of(0.999), of(1.0), "size")
    assert worth_confirming(of(0.999), of(1.0), "latency"), "an interval decides there"
    assert not worth_confirming(of(0.5), dataclasses.replace(of(1.0), size_mb=None), "size"), "what is not known proves nothing"


def test_the_original_to_beat_keeps_the_limits_and_has_a_figure_if_any_has() -> None:
    written = dataclasses.replace(complete(as_written(), 1.0), peak_mb=100.0)
    tuned = dataclasses.replace(complete(EAGER, 1.2), peak_mb=300.0)
    assert ranking.best_eager([written, tuned]) is tuned
    assert ranking.best_eager([written, tuned], Limits(memory_mb=200)) is written
    assert ranking.best_eager([written, tuned], Limits(memory_mb=50)) is tuned, "neither keeps it"
    unknown = dataclasses.replace(tuned, peak_mb=None)
    assert ranking.best_eager([written, unknown]) is unknown
    assert ranking.best_eager([written, unknown], Limits(), "memory") is written
    assert ranking.best_eager([written, tuned], Limits(), "memory") is written, "it needs less"
    slow = dataclasses.replace(complete(Recipe(passes=(Threads(count=1),), backend=EAGER.backend), 0.5), peak_mb=99.0)
    assert ranking.best_eager([written, slow], Limits(), "memory") is written, "and that is noise"


def test_the_model_as_written_is_nobody_ahead_of_its_own_tuned_form() -> None:
    written = dataclasses.replace(complete(as_written(), 1.0), peak_mb=80.0)
    tuned = dataclasses.replace(complete(EAGER, 1.2), peak_mb=100.0)
    less = dataclasses.replace(complete(Recipe(backend=BACKENDS["torchscript"]()), 0.9), peak_mb=60.0)
    study = types.SimpleNamespace(
        options=Options(objective="memory"), trials=[written, tuned, less], baseline=as_written(), to_beat=tuned
    )
    assert ahead(study) == [less]


@pytest.mark.parametrize(("exact", "best"), [(True, 2.9), (False, 5.8)])
def test_a_first_timing_is_held_against_the_best_that_the_recipe_could_take_the_place_of(exact: bool, best: float) -> None:
    lossy = Recipe(backend=BACKENDS["openvino"](precision="int8_static"))
    trials = [complete(as_written(), 1.0), complete(Recipe(backend=BACKENDS["onnxruntime"]()), 3.0), complete(lossy, 6.0)]
    recipe = Recipe(backend=BACKENDS["openvino"]() if exact else BACKENDS["openvino"](precision="int8_weights"))
    ranked = ranking.ranked(trials, Limits(), "latency")
    low = {trial.recipe: trial.speedup.low for trial in ranked if trial.speedup}
    found = ranking.speed_thresholds(recipe, trials, Limits(), "latency")
    assert found == {"floor": ranking.HOPELESS * low[lossy], "best": low[lossy if not exact else trials[1].recipe]}
    assert found["best"] == pytest.approx(best, abs=0.11)
    assert ranking.speed_thresholds(recipe, trials, Limits(), "size") == {}


def test_a_training_that_is_hopeless_is_stopped_though_it_is_exact_and_eager() -> None:
    trials = [complete(as_written(), 1.0), complete(Recipe(backend=BACKENDS["eager"]()), 4.0)]
    slow = Recipe(passes=(PASSES["channels_last"](),), backend=BACKENDS["eager"]())
    assert ranking.speed_thresholds(slow, trials, Limits(), "throughput")["floor"] > 1


def by_sensitivity(recipe: Recipe, *, back: int = 0) -> Trial:
    """A machine on which int8 is fast, and a model that keeps its score with at least three layers in float, or trained. In the
    model itself at most ``back`` layers can go back."""
    found = by_backend(recipe)
    steps = {step.name: step for step in recipe.passes}
    if "prune_channels" in steps or "prune_units" in steps or "drop_layers" in steps:
        return Trial(recipe=recipe, state=State.SKIPPED, reason="It cannot be pruned.")
    if not recipe.backend.quantizes and "fake_quant" not in steps:
        plain = by_backend(Recipe(backend=BACKENDS[recipe.backend.name]()))
        return found if recipe.exact else dataclasses.replace(found, speedup=plain.speedup)
    floating = max(getattr(each, "float_layers", 0) for each in (recipe.backend, *steps.values()))
    if floating > back and "fake_quant" in steps:
        return Trial(recipe=recipe, state=State.FAILED, reason="No layer is left to quantize.")
    kept = floating >= 3 or getattr(steps.get("recover"), "updates", 0) == 800
    lost = drop(0.0 if kept else 0.5, 0.01 if kept else 0.6, 0.02, kept)
    fast = complete(recipe, 6.0 - 0.1 * floating)
    return dataclasses.replace(fast, drop=lost, state=State.COMPLETE if kept else State.STOPPED)


def test_layers_go_back_to_float_until_the_limit_holds_and_no_more_than_needed() -> None:
    counts = [getattr(t.recipe.backend, "float_layers", 0) for t in walk(by_sensitivity) if t.recipe.backend.name == "openvino"]
    assert [count for count in counts if count][:8] == [1, 2, 4, 3] * 2, "each of the two int8 forms"

    def slower(recipe: Recipe) -> Trial:
        found = by_sensitivity(recipe)
        return (
            found if not getattr(recipe.backend, "float_layers", 0) else dataclasses.replace(found, speedup=Interval(2, 2, 2))
        )

    counts = [getattr(t.recipe.backend, "float_layers", 0) for t in walk(slower) if t.recipe.backend.name == "openvino"]
    assert {count for count in counts if count} == {1}, "nothing was left of the gain"


def test_quantization_is_trained_where_the_runtimes_own_misses_the_limit_and_pays() -> None:
    def asked_of(how: tuple[str, ...], back: int = 0) -> list[str]:
        trials = compressing(functools.partial(by_sensitivity, back=back), how)
        quantized = [t.recipe for t in trials if t.recipe.backend == BACKENDS["openvino"]()]
        said = [[f"{s.name}{getattr(s, 'updates', getattr(s, 'float_layers', ''))}" for s in r.passes] for r in quantized]
        return [" ".join(names) for names in said]

    assert asked_of(("quantize",), 9) == ["fake_quant0", "fake_quant1", "fake_quant2", "fake_quant4", "fake_quant3"], (
        "with three layers in float it is nearly as fast, and needs no training"
    )
    wanted = ["fake_quant0", "fake_quant1", "fake_quant0 recover200", "fake_quant0 recover800"]
    assert asked_of(("quantize",)) == wanted
    assert [each for each in asked_of(("auto",)) if "fake_quant" in each] == wanted
    assert not any("fake_quant" in each for each in asked_of(("prune",)))
    assert not any(step.name == "fake_quant" for t in compressing(by_ratio, ("quantize",)) for step in t.recipe.passes), (
        "the runtime's own int8 form keeps the limit"
    )
