"""What a study answers where things are not as its search saw them: limits, shipping, slow calls, throughput, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import textwrap
import types
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from _faulty import run, write
from trimtab.api.compare import compare
from trimtab.backends.eager import Eager
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.limits import Limits
from trimtab.core.measurement import Comparison, Drop, Interval, Measurement, Parity
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.errors import UsageError, WorkloadError
from trimtab.evaluation import evaluate
from trimtab.evaluation.confirm import Confirmation
from trimtab.execution.fork_pool import Workers
from trimtab.execution.jobs.inference import _at_batch_size
from trimtab.passes.batch import Batch
from trimtab.passes.channels_last import ChannelsLast
from trimtab.passes.keep_memory import KeepMemory
from trimtab.study import conclusions, ranking
from trimtab.study import final_selection as finishing
from trimtab.study.options import Options
from trimtab.study.result import ARTIFACT, Best
from trimtab.study.samplers.ladder import as_written
from trimtab.study.study import Study
from trimtab.study.task import TrainingTask

EAGER, OPENVINO, ORT = (Recipe(backend=BACKENDS[name]()) for name in ("eager", "openvino", "onnxruntime"))
INDUCTOR = Recipe(backend=BACKENDS["inductor"]())


def latency(ms: float) -> Measurement:
    return Measurement(unit="ms", n=100, median=ms, interval=Interval(ms, ms, ms))


def trial(recipe: Recipe, ms: float, **more) -> Trial:
    speed = Interval(10 / ms, 9.9 / ms, 10.1 / ms)
    figures = {"size_mb": 1.0, "peak_mb": 50.0} | more
    return Trial(recipe=recipe, state=State.COMPLETE, speedup=speed, latency_ms=latency(ms), **figures)


class Confirmed:
    """A study whose confirmations find the latencies or speed-ups that are given, or fail with the reason that is given."""

    def __init__(
        self,
        trials: list[Trial],
        limits: Limits,
        found: dict[Recipe, float | str | Interval],
        monkeypatch,
        comparison: Comparison | None = None,
        **options,
    ) -> None:
        self.comparison = comparison
        self.trials, self.options, self.found = trials, Options(limits=limits, **options), found
        self.to_beat = ranking.best_eager(trials, limits, self.options.objective)
        self.asked: list[Recipe] = []
        self.ask = lambda: None
        self.baseline, self.notes = as_written(), []
        self.own = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.own.name)
        self.refused: list[Confirmation] = []
        self.progress = types.SimpleNamespace(stage=lambda words: None)
        self.thread_limit = None
        self.task = types.SimpleNamespace(mode="infer", ships=True)
        self.report_load_change = lambda: None
        self.interrupted = lambda: False
        self.runner = types.SimpleNamespace(servers=lambda folder: contextlib.nullcontext())
        monkeypatch.setattr(finishing, "confirm", self.confirm)
        monkeypatch.setattr(finishing, "run_off", lambda study, ahead, until: ahead)

    def confirm(self, study, trial: Trial, eager: Trial, rivals, *, must_win: bool, end: float | None = None) -> Best:
        found = self.found[trial.recipe]
        self.asked.append(trial.recipe)
        if isinstance(found, Interval):
            reason = "no gain" if must_win and found.low <= 1 else None
            figures = {"speedup": found, "latency_ms": latency(10 / found.value), "comparison": self.comparison}
            confirmation = Confirmation(recipe=trial.recipe, ok=reason is None, reason=reason, **figures)
            if confirmation.ok:
                (self.folder / ARTIFACT).mkdir(exist_ok=True)
                (self.folder / ARTIFACT / "recipe").write_text(str(trial.recipe))
            return Best(trial=trial, confirmation=confirmation, artifact=object() if confirmation.ok else None)
        if isinstance(found, str):
            confirmation = Confirmation(recipe=trial.recipe, ok=False, reason=found)
        else:
            limit = self.options.limits.latency_ms or 0.0
            reason = f"Measured again, its latency is {found:.4g} ms; the limit is {limit:g} ms." if found > limit else None
            confirmation = Confirmation(recipe=trial.recipe, ok=reason is None, reason=reason, latency_ms=latency(found))
        return Best(trial=trial, confirmation=confirmation, artifact=None)


def test_an_original_that_misses_a_limit_is_none_that_others_must_be_smaller_than() -> None:
    original, faster = trial(EAGER, 6.0, peak_mb=50.0), trial(OPENVINO, 3.0, peak_mb=80.0)
    study = types.SimpleNamespace(trials=[original, faster], baseline=as_written(), to_beat=original)
    for objective in ("memory", "size"):
        study.options = Options(objective=objective, limits=Limits(latency_ms=4.0))
        assert finishing.ahead(study) == [faster]
        study.options = Options(objective=objective)
        assert finishing.ahead(study) == [], "without the limit it is an alternative, and as small"


def test_the_nearest_is_known_by_its_latest_figures(monkeypatch) -> None:
    trials = [trial(EAGER, 9.0), trial(OPENVINO, 3.95), trial(ORT, 6.2)]
    study = Confirmed(trials, Limits(latency_ms=4.0), {OPENVINO: 4.05}, monkeypatch)
    status, words, best = finishing.finish(study)
    assert (status, best) == ("limits_not_met", None)
    assert words.startswith("Nothing meets latency 4 ms. The nearest is openvino: its latency of 4.05 ms is above")
    study = Confirmed(trials, Limits(latency_ms=4.0), {OPENVINO: "On the test data: NaN."}, monkeypatch)
    assert "The nearest is onnxruntime: its latency of 6.2 ms" in finishing.finish(study)[1]
    assert [(each.recipe, each.reason) for each in study.refused] == [(OPENVINO, "On the test data: NaN.")]


def test_an_original_that_misses_its_limit_when_measured_again_ships_nothing(monkeypatch) -> None:
    study = Confirmed([trial(EAGER, 4.9), trial(OPENVINO, 9.0)], Limits(latency_ms=5.0), {EAGER: 5.1}, monkeypatch)
    status, words, best = finishing.finish(study)
    assert (status, best) == ("limits_not_met", None)
    assert "The nearest is eager: its latency of 5.1 ms is above the limit of 5 ms." in words


def sure(value: float) -> Interval:
    return Interval(value, 0.98 * value, 1.02 * value)


def seen(recipe: Recipe, speed: float, **more) -> Trial:
    return dataclasses.replace(trial(recipe, 10 / speed, **more), speedup=sure(speed))


def test_an_original_whose_form_is_surely_slower_is_no_reason_to_ship_that(monkeypatch) -> None:
    search = [trial(as_written(), 10.0), seen(ORT, 0.99), seen(OPENVINO, 0.7)]
    found = {as_written(): sure(0.66), ORT: sure(0.98)}
    study = Confirmed(search, Limits(), found, monkeypatch)
    status, words, best = finishing.finish(study)
    assert (status, best.trial) == ("kept_original", search[1])
    assert study.asked == [as_written(), ORT]
    assert words.endswith(
        "The form of eager(grad_mode=no_grad) that stands alone runs at 0.66x (0.65 to 0.67) of the model as written, so "
        "onnxruntime, which computes the same, ships in its place, at 0.98x (0.96 to 1.00). Where its class is at hand, go on "
        "using the model itself."
    )
    assert words.startswith("Nothing beats the original: none of 3 trials was surely faster")
    dark = [*search, dataclasses.replace(seen(OPENVINO, 0.9), speedup=Interval(0.9, 0.2, 4.0))]
    assert (
        "none of 4 trials was surely faster than the tuned original within the limits; of 1 the machine was too busy"
        in (finishing.finish(Confirmed(dark, Limits(), found, monkeypatch))[1])
    )
    study = Confirmed(search, Limits(size_mb=9), found, monkeypatch, objective="size")
    assert finishing.finish(study)[2].trial is search[0], "who asked for less memory or size did not ask for speed"
    study = Confirmed([search[0]], Limits(), found, monkeypatch)
    assert "In the form that stands alone it runs at 0.66x (0.65 to 0.67)" in finishing.finish(study)[1]
    study = Confirmed([search[0]], Limits(), {as_written(): sure(3.66)}, monkeypatch)
    assert finishing.finish(study)[1].endswith(
        "In the form that stands alone, which leaves out the Python around its operators and whatever else that does, it ran "
        "at 3.66x (3.59 to 3.73) of the model as written. It computes the same, and no tuning is behind it."
    )


@pytest.mark.parametrize(("written", "ships"), [(1.0, "as written"), (0.9, "tuned")])
def test_a_tuning_that_won_by_luck_gives_way_to_the_model_as_written(monkeypatch, written: float, ships: str) -> None:
    search = [trial(as_written(), 10.0), seen(EAGER, 1.03)]
    study = Confirmed(search, Limits(), {EAGER: sure(0.95), as_written(): sure(written)}, monkeypatch)
    assert study.to_beat is search[1]
    status, words, best = finishing.finish(study)
    assert (status, best.trial) == ("kept_original", search[ships == "tuned"])
    assert ("so eager(grad_mode=no_grad), which computes the same, ships in its place" in words) == (ships == "as written")
    assert study.asked == [EAGER, as_written()], "each is confirmed once"
    shipped = study.baseline if ships == "as written" else EAGER
    assert [path.read_text() for path in study.folder.rglob("*") if path.is_file()] == [str(shipped)]


def test_an_original_that_misses_its_limit_after_all_need_not_be_beaten(monkeypatch) -> None:
    search = [trial(as_written(), 10.0), seen(OPENVINO, 1.03), seen(ORT, 1.0)]
    study = Confirmed(search, Limits(latency_ms=10.2), {OPENVINO: sure(1.01), as_written(): 10.3}, monkeypatch)
    status, words, best = finishing.finish(study)
    assert (status, best.trial) == ("improved", search[1])
    assert study.asked == [OPENVINO, as_written(), OPENVINO]
    assert words.startswith(
        "The original misses a limit (Its latency of 10.3 ms is above the limit of 10.2 ms), which openvino"
    )
    study = Confirmed(search, Limits(latency_ms=10.2), {OPENVINO: "NaN.", ORT: sure(1.0), as_written(): 10.3}, monkeypatch)
    assert finishing.finish(study)[2].trial is search[2], "what was refused on the test data does not come back"
    assert study.asked == [OPENVINO, as_written(), ORT]


def test_an_original_that_the_search_saw_miss_a_limit_by_chance_has_to_be_beaten(monkeypatch) -> None:
    search = [trial(as_written(), 10.1), seen(OPENVINO, 1.005), seen(ORT, 1.2)]
    found = {as_written(): sure(1.001), OPENVINO: sure(1.005), ORT: sure(1.01)}
    study = Confirmed(search, Limits(latency_ms=10.0), found, monkeypatch)
    status, words, best = finishing.finish(study)
    assert (status, best.trial) == ("kept_original", search[0])
    assert study.asked == [as_written(), ORT, OPENVINO]
    assert words == "The original ships: onnxruntime: no gain openvino: no gain."
    study = Confirmed([trial(as_written(), 13.0), *search[1:]], Limits(latency_ms=10.0), found, monkeypatch)
    assert finishing.finish(study)[0] == "improved", "it misses it by far"
    assert study.asked == [ORT]


def test_an_original_that_cannot_be_written_is_not_said_to_ship(monkeypatch) -> None:
    study = Confirmed([trial(as_written(), 10.0)], Limits(latency_ms=20.0), {as_written(): 10.0}, monkeypatch)
    status, words, best = finishing.finish(study)
    assert (status, best.artifact) == ("kept_original", None)
    assert words.startswith("The original stays, for which there is no artifact: no other runtime was measured")


def test_nothing_is_said_to_meet_a_limit_before_everything_was_tried(monkeypatch) -> None:
    skipped = Trial(recipe=ORT, state=State.SKIPPED, reason="It is not here.")
    study = Confirmed([trial(as_written(), 9.0), skipped], Limits(latency_ms=4.0), {}, monkeypatch)
    assert finishing.finish(study)[:2] == (
        "limits_not_met",
        "Nothing but the original was tried. Its latency of 9 ms is above the limit of 4 ms. Where the time was too short for "
        "more, the same command goes on from here.",
    )
    more = "Not everything was tried when the search ended; the same command goes on from here."
    study = Confirmed([trial(as_written(), 9.0), trial(OPENVINO, 6.0)], Limits(latency_ms=4.0), {}, monkeypatch)
    assert more not in finishing.finish(study)[1]
    study.ask = lambda: object()
    assert finishing.finish(study)[1].endswith(f" would do. {more}")
    study.ask, study.interrupted = (lambda: None), (lambda: True)
    assert more in finishing.finish(study)[1]


def test_less_memory_or_size_is_less_than_any_form_of_the_original_has(monkeypatch) -> None:
    more = seen(Recipe(passes=(ChannelsLast(),), backend=EAGER.backend), 1.06, peak_mb=212.3)
    search = [trial(as_written(), 10.0, peak_mb=207.0), seen(EAGER, 0.99, peak_mb=206.2), more]
    study = Confirmed(search, Limits(), {}, monkeypatch, objective="memory")
    assert study.to_beat is search[0], "not the fastest, but of those that need the least, give or take what is noise"
    assert finishing.ahead(study) == []
    less = trial(OPENVINO, 10.0, peak_mb=203.0)
    study = Confirmed([*search, less], Limits(), {}, monkeypatch, objective="memory")
    assert finishing.ahead(study) == []
    study.to_beat = more
    assert finishing.ahead(study) == [], "it is to pay beside the model as written, too"
    study = Confirmed(
        [trial(as_written(), 10.0, size_mb=None), less], Limits(), {as_written(): sure(1.0)}, monkeypatch, objective="size"
    )
    assert finishing.ahead(study) == [], "an original of unknown size proves nothing"
    assert "its size was not measured, so nothing is known to need less" in finishing.finish(study)[1]


def test_without_labels_the_verdict_has_the_error_of_the_outputs_and_what_could_not_be_looked_at(monkeypatch) -> None:
    lossy = Recipe(backend=BACKENDS["openvino"](precision="int8_static"))
    parity = Parity(ok=True, reason=None, n=64, centred_error=0.0123)
    won = Confirmation(recipe=lossy, ok=True, speedup=sure(2.0), parity=parity)
    found = Best(trial=trial(lossy, 5.0), confirmation=won, artifact=None)
    first = trial(as_written(), 10.0)
    said = {
        limits: conclusions.improved(Confirmed([first], limits, {}, monkeypatch), found, [], first)
        for limits in (Limits(), Limits(max_drop=0.005))
    }
    assert [words.partition(" (95% interval 1.96 to 2.04)")[2] for words in said.values()] == [
        "; its outputs are off by 1.23% of what they vary by.",
        "; its outputs are off by 1.23% of what they vary by (limit 0.05; without labels max_drop 0.005 cannot be looked at).",
    ]


def test_the_verdict_says_what_errors_are_relative_to(monkeypatch) -> None:
    lossy = Recipe(backend=BACKENDS["openvino"](precision="int8_static"))
    first, ends = trial(as_written(), 10.0), []
    scored = Drop(value=0.0, low=0.0, upper=0.01, n=300, share=True)
    for drop in (None, scored, dataclasses.replace(scored, value=-0.011), dataclasses.replace(scored, value=0.005)):
        parity = Parity(ok=True, reason=None, n=64, centred_error=0.0123, relative_to="size")
        won = Confirmation(recipe=lossy, ok=True, speedup=sure(2.0), parity=parity, drop=drop)
        found = Best(trial=trial(lossy, 5.0), confirmation=won, artifact=None)
        said = conclusions.improved(Confirmed([first], Limits(), {}, monkeypatch), found, [], first)
        ends.append(said.partition(" (95% interval 1.96 to 2.04)")[2])
    assert ends == [
        "; its outputs are off by 1.23% of their size.",
        "; its score does not change (drops by 1.000% at most).",
        "; its score improves by 1.100% (drops by 1.000% at most).",
        "; its score drops by 0.500% (at most 1.000%).",
    ]


@pytest.mark.parametrize(("slowed", "words"), [(0.0, ""), (0.78, ", and the cores were slower than usual for 78% of the time")])
def test_a_wide_interval_above_one_has_a_figure_and_what_disturbed_it(slowed: float, words: str) -> None:
    one, ratio = dataclasses.replace(latency(1.0), conditions={"threads": 2}), Interval(14.0, 9.55, 19.48)
    comparison = Comparison(
        ratio=ratio,
        sampling=ratio,
        pairs=100,
        candidate=one,
        rival=one,
        foreign=0.04,
        stolen=0.03,
        slowed=slowed,
        starts=12,
    )
    study: Any = types.SimpleNamespace(thread_limit=None)
    found = conclusions._speed_text(study, Confirmation(recipe=ORT, ok=True, speedup=ratio, comparison=comparison))
    assert found == (
        "at least 9.55x as fast as written (95% interval 9.55 to 19.48), as things are (2 threads each, others used 7% of the "
        f"CPUs{words})"
    )
    narrow = Confirmation(recipe=ORT, ok=True, speedup=sure(3.0), comparison=comparison)
    assert conclusions._speed_text(study, narrow) == (
        "3.00x as fast as written (95% interval 2.94 to 3.06), as things are (2 threads each, others used 7% of the "
        f"CPUs{words})"
    )
    quiet = dataclasses.replace(narrow, comparison=dataclasses.replace(comparison, sampling=None))
    assert conclusions._speed_text(study, quiet) == "3.00x as fast as written (95% interval 2.94 to 3.06)"


def test_one_thread_each_on_a_busy_machine_is_said_with_what_others_used() -> None:
    one, study = latency(1.0), types.SimpleNamespace(thread_limit=1)
    kept = Comparison(ratio=sure(2.5), pairs=40, candidate=one, rival=one, foreign=0.8, stolen=0.05, undisturbed=0.6)
    found = Confirmation(recipe=ORT, ok=True, speedup=sure(2.5), comparison=kept)
    words = "2.50x as fast as written (95% interval 2.45 to 2.55), with one thread each"
    assert conclusions._speed_text(study, found) == f"{words} (others used 85% of the CPUs)"
    requests = dataclasses.replace(kept, undisturbed=None, sampling=sure(2.5))  # throughput is timed in quads
    assert conclusions._speed_text(study, dataclasses.replace(found, comparison=requests)) == (
        f"{words}, as things are (others used 85% of the CPUs)"
    )
    assert conclusions._speed_text(study, dataclasses.replace(found, comparison=None)) == words


def test_what_cannot_ship_is_never_what_would_do() -> None:
    held = trial(INDUCTOR, 3.0, size_mb=None, reason="It cannot ship: it has no form that stands alone.")
    words = ranking.unmet([trial(EAGER, 9.0), held], Limits(latency_ms=4.0))
    assert words == (
        "Nothing meets latency 4 ms. The nearest is eager: its latency of 9 ms is above the limit of 4 ms. The latency limit "
        f"is what binds: without it, eager would do. {held.recipe} would keep them. It cannot ship: it has no form that stands "
        "alone."
    )


@pytest.mark.parametrize("data", ["data=(x, y), test=(x + 1, y + 7)", "data=(x, held(x, y))"], ids=["given", "set aside"])
def test_test_data_that_cannot_be_scored_ends_the_study_at_its_begin(tmp_path, data: str) -> None:
    body = """
    from trimtab.data.splits import split

    def judged(**given):
        evaluation = trimtab.Evaluation(score=picky, **given)
        return trimtab.Workload(name="faulty", model=Model, inputs=torch.randn(2, 8), evaluation=evaluation)

    def held(x, y):  # with one that is no class where nobody but the winner is scored
        y[split(judged(data=(x, torch.arange(len(x))))).test[0].target[0]] = 9
        return y

    def picky(output, target):
        if target.max() > 1:
            raise ValueError("a target that is no class")
        return output.argmax(1) == target

    def made():
        x, y = data()
    """
    with pytest.raises(WorkloadError, match="a target that is no class"):
        run(tmp_path, f"{textwrap.dedent(body).rstrip()}\n    return judged({data})\n")
    assert not list((tmp_path / "run").glob("trials/*"))


@pytest.mark.parametrize("name", ["max_drop", "max_error", "latency_ms", "memory_mb", "size_mb"])
def test_a_limit_is_a_finite_number(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} is inf; a limit is a finite number. (Give a large one|Leave it out)"):
        Limits(**{name: float("inf")})


def test_slow_calls_are_not_timed_over_and_over(monkeypatch, tmp_path) -> None:
    asked: list[int] = []

    def block(calls: int) -> list[int]:
        asked.append(calls)
        return [3_000_000_000] * calls

    assert len(evaluate._single_calls(types.SimpleNamespace(block=block))) == sum(asked) == 2
    times: list[float] = []
    real = evaluate.compare
    monkeypatch.setattr(evaluate, "compare", lambda *args, **more: times.append(more["seconds"]) or real(*args, **more))
    assert len(run_slow(tmp_path)) == 1, "and no second, longer timing"
    assert times == [0.005]


def run_slow(folder: pathlib.Path) -> list[Trial]:
    """A recipe whose calls are longer than the time for them, evaluated in this process."""
    from trimtab.evaluation.prepared_workload import prepare
    from trimtab.evaluation.reference import reference_of

    class Slow(nn.Module):
        def forward(self, x):
            torch.ones(3).tolist()
            __import__("time").sleep(0.01)
            return 2 * x

    workload = trimtab.Workload(name="slow", model=Slow(), inputs=torch.randn(2, 4))
    subject = prepare(workload)
    executable = Eager().compile(subject.candidate)
    reference = reference_of(executable, subject.splits.selection, None)
    rival = evaluate.runner_for(executable, subject.candidate, subject, "latency")
    plan = evaluate.Plan(objective="latency", limits=Limits(), floor=0.0, quick_s=0.005, seconds=0.02, width=0.03)
    found = evaluate.evaluate(EAGER, subject, reference, rival, plan=plan, folder=folder)
    assert found.state is State.COMPLETE, found.reason
    return [found]


def test_what_is_made_for_a_batch_is_measured_at_it() -> None:
    leaves = [torch.randn(1, 4)]
    made = Candidate.of(nn.Linear(4, 2).eval(), tuple(leaves), dynamic={"input": {0: trimtab.Dim("batch", max=64)}})
    executable = Eager().compile(Batch(size=16).apply(made))
    assert [leaf.shape for leaf in _at_batch_size(leaves, executable)] == [(16, 4)]
    assert [leaf.shape for leaf in _at_batch_size(leaves, Eager().compile(made))] == [(1, 4)]


@pytest.mark.long
def test_an_artifact_and_its_workload_are_counted_in_the_same_unit(tmp_path) -> None:
    body = "def made(): return workload(model=lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)], nn.Linear(8, 4)))"
    found = run(tmp_path, body, objective="throughput", trials=1)
    assert found.best is not None
    assert found.best.artifact is not None
    timing = compare(found.best.artifact.path, write(tmp_path, body), objective="throughput", seconds=1.0)
    assert timing.comparison.ratio.value > 0.3, "eight requests are not one"


@pytest.mark.long
def test_the_memory_of_an_original_without_files_is_not_that_of_its_data(tmp_path) -> None:
    body = """
    class Odd(nn.Module):  # neither exported nor scripted
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)
        def forward(self, x):
            return self.layer(x) * {True: 1.0, False: 2.0}[bool(x.sum() > 0) if x.numel() else __import__("math").inf > 0]

    BIG = torch.zeros(100_000_000)

    def made():
        return workload(model=Odd)
    """
    with Workers() as workers:
        study = Study(write(tmp_path, body), tmp_path / "run", Options(timing_s=0.2), workers=workers)
        study.search(most=1)
    (found,) = study.trials
    assert found.state is State.COMPLETE, found.reason
    assert found.size_mb is None, "it has a form that stands alone after all"
    assert found.peak_mb is not None
    assert found.peak_mb < 200
    assert found.cold_s is not None
    assert found.cold_s > 0


@pytest.mark.long
def test_weights_that_are_drawn_anew_in_each_process_are_refused_and_early(tmp_path) -> None:
    body = """
    import numpy as np
    def made():
        model = Model()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.from_numpy(np.random.randn(*weight.shape)))
        return trimtab.Workload(name="drawn", model=model, inputs=torch.ones(2, 8))
    """
    with pytest.raises(WorkloadError, match=r"has other weights each time that it is built.*torch\.manual_seed\(0\) before"):
        run(tmp_path, body, trials=2)
    assert not list(tmp_path.glob("run/trials/*")), "found out before the first trial"


def test_inputs_that_are_drawn_anew_in_each_process_are_refused_before_the_first_trial(tmp_path) -> None:
    body = """
    import numpy as np
    def made():
        x = torch.from_numpy(np.random.randn(2, 8)).float()
        return trimtab.Workload(name="drawn", model=Model, inputs=x)
    """
    with pytest.raises(WorkloadError, match=r"The workload's inputs are others each time that it is read.*Seed what draws"):
        run(tmp_path, body, trials=3)
    assert not list(tmp_path.glob("run/trials/*"))


@pytest.mark.long
def test_data_that_is_shuffled_otherwise_each_time_is_read_once_and_the_same_for_all(tmp_path) -> None:
    body = """
    import random
    def made():
        examples = list(zip(*data()))
        random.shuffle(examples)
        batches = [(torch.stack(x), torch.stack(t)) for x, t in (zip(*examples[i:i + 40]) for i in range(0, 240, 40))]
        evaluation = trimtab.Evaluation(data=batches, score=top1)
        return trimtab.Workload(name="drawn", model=Model, inputs=torch.ones(2, 8), evaluation=evaluation)
    """
    found = run(tmp_path, body, trials=2)
    drops = [trial.drop for trial in found.study.trials if trial.recipe.exact]
    assert len(drops) > 1
    assert {drop and drop.value for drop in drops} == {0.0}


def test_a_search_without_an_original_to_beat_ends_at_once_and_again(tmp_path) -> None:
    body = """
    class Own(Model):
        def forward(self, x):
            return self.layer(x) + os.getpid() % 1000
    def made(): return workload(Own)
    """
    with Workers() as workers:
        study = Study(write(tmp_path, body), tmp_path / "run", Options(timing_s=0.2), workers=workers)
        for _ in range(2):
            study.search(most=5)
            assert [trial.recipe for trial in study.trials] == [as_written(), EAGER]
        assert {trial.state for trial in study.trials} == {State.MISMATCH}
        with pytest.raises(WorkloadError, match=r"could not be measured \(MISMATCH\).*start again with --fresh. Log: "):
            finishing.finish(study)


@pytest.mark.long
def test_buffers_that_a_call_changes_are_no_other_weights(tmp_path) -> None:
    body = """
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("calls", torch.zeros(()))
        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    def made():
        torch.manual_seed(0)
        return workload(model=Counting())
    """
    assert run(tmp_path, body).status in ("improved", "kept_original")


@pytest.mark.parametrize("measured", [True, False])
def test_a_training_that_fails_as_written_ends_the_search(measured: bool) -> None:
    first: Any = types.SimpleNamespace(comparison=object() if measured else None)
    assert TrainingTask().baseline_failed([first], first) is not measured
    assert not TrainingTask().baseline_failed([], None)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, " by process and minute, which the interval allows for."),
        (
            {"starts_left_out": 3},
            " by process and minute. In 3 of 15 starts its threads met more slowly than usual, because of the machine: the "
            "speed-up leaves these starts out.",
        ),
        (
            {"starts_corrected": 12},
            " by process and minute. In 12 of 12 starts its threads met more slowly than usual, because of the machine: the "
            "speed-up uses the model's times in the search for these starts.",
        ),
    ],
)
def test_the_range_of_the_originals_times_is_told_with_what_it_means(more: dict[str, int], words: str) -> None:
    study: Any = types.SimpleNamespace(trials=[], task=types.SimpleNamespace(mode="infer"))
    found = Comparison(ratio=Interval(13.4, 13.1, 13.7), pairs=72, candidate=latency(0.03), rival=latency(0.36), discarded=0)
    wide = dataclasses.replace(found, starts=12, rival_ms=(0.354, 0.533), **more)
    assert conclusions.baseline_spread(study, wide) == ["The model as written took 0.354 to 0.533 ms," + words]
    assert conclusions.baseline_spread(study, dataclasses.replace(wide, rival_ms=(0.354, 0.36))) == []


KEPT = Recipe(passes=(KeepMemory(),), backend=BACKENDS["eager"]())


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        (
            Interval(1.41, 1.36, 1.46),
            " The cause is memory that it gives back to the system after each call and takes again: with keep_memory it is "
            "1.41x (1.36 to 1.46) as fast.",
        ),
        (
            Interval(1.02, 0.99, 1.05),
            " The memory that it gives back is not the cause: with keep_memory it is 1.02x (0.99 to 1.05) as fast.",
        ),
        (Interval(1.2, 0.6, 2.4), ""),
        (None, ""),
    ],
)
def test_keep_memory_tells_whether_memory_is_why_the_originals_times_differ(speedup: Interval | None, words: str) -> None:
    elsewhere = Recipe(passes=(KeepMemory(),), backend=BACKENDS["torchscript"]())
    trials = [seen(elsewhere, 1.5), dataclasses.replace(trial(KEPT, 10.0), speedup=speedup)]
    study: Any = types.SimpleNamespace(trials=trials, task=types.SimpleNamespace(mode="infer"))
    moved = Comparison(ratio=sure(4.0), pairs=72, candidate=latency(5.0), rival=latency(24.0), rival_ms=(17.0, 39.0))
    expected = f"The model as written took 17 to 39 ms, by process and minute, which the interval allows for.{words}"
    assert conclusions.baseline_spread(study, moved) == [expected]
    busy = dataclasses.replace(moved, foreign=0.3, stolen=0.1)
    assert conclusions.baseline_spread(study, busy) == [f"{expected} Other processes used 40% of the CPUs."]


@pytest.mark.parametrize(
    ("limits", "found", "status"),
    [
        (Limits(), {OPENVINO: sure(1.03)}, "improved"),
        (Limits(), {OPENVINO: "NaN.", as_written(): sure(1.0)}, "kept_original"),
        (Limits(latency_ms=10.2), {OPENVINO: sure(1.01), as_written(): 10.3}, "improved"),
    ],
    ids=["winner", "original", "limits"],
)
def test_every_verdict_with_a_figure_tells_how_the_originals_time_moved(
    monkeypatch, limits: Limits, found: dict[Recipe, float | str | Interval], status: str
) -> None:
    moved = Comparison(ratio=sure(1.0), pairs=72, candidate=latency(10.0), rival=latency(24.0), rival_ms=(17.0, 39.0))
    study = Confirmed([trial(as_written(), 10.0), seen(OPENVINO, 1.03)], limits, found, monkeypatch, comparison=moved)
    assert finishing.finish(study)[0] == status
    (note,) = [note for note in study.notes if note.startswith("The model as written took")]
    assert note == "The model as written took 17 to 39 ms, by process and minute, which the interval allows for."
