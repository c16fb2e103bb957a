"""trimtab.tune: what a training workload states, the guard of its losses, and whole studies with real processes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trimtab
from trimtab._internal.serialization import from_json
from trimtab.api.tune import _python_call
from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.limits import Limits
from trimtab.core.measurement import Drop, Interval
from trimtab.core.recipe import Recipe
from trimtab.core.settings import DataSettings, OptimizerSettings, Settings
from trimtab.core.technique import PASSES, Pass
from trimtab.core.trial import State, Trial
from trimtab.core.workload import Training, Workload
from trimtab.errors import NonFiniteError, UsageError, WorkloadError
from trimtab.evaluation.evaluate import Plan
from trimtab.evaluation.prepared_workload import prepare
from trimtab.evaluation.training.timer import Updates
from trimtab.evaluation.training.trial import STILL, _loss_problem, confirm, trial_timing, try_recipe
from trimtab.evaluation.training.workload import TrainingSubject, first_batches, prepared
from trimtab.measure import pairs
from trimtab.study import ranking
from trimtab.study.options import Options
from trimtab.study.record import Record
from trimtab.study.samplers.greedy import GreedySampler, trained_as_written
from trimtab.study.samplers.sampler import SearchState
from trimtab.study.study import Study
from trimtab.study.task import TrainingTask
from trimtab.train.data.loader import Loader
from trimtab.train.loss.loss_parity import BaselineLosses, increase, parity, too_coarse

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = """
import torch, trimtab
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

def batches():
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4, shuffle=True)

def workload():
    return trimtab.Workload(
        name="tiny",
        mode="train",
        model=model,
        training=trimtab.Training(
            data=batches,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
            settings=trimtab.Settings(data=trimtab.DataSettings(accumulate=16), threads=1),
        ),
    )
"""
RUN = """
import json, sys, trimtab
found = trimtab.tune("train.py", out="run", updates=8, timing_seconds=0.4, trials=int(sys.argv[1]))
print(json.dumps(found.to_json()))
"""


def network(*between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 32), *(make() for make in between), nn.ReLU(), nn.Linear(32, 3))


def data() -> DataLoader[Any]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def workload(model: Any = None, settings: Settings = Settings(), **more: Any) -> Workload:
    training = Training(**{"data": data, "optimizer": adam, "loss": nn.CrossEntropyLoss(), "settings": settings} | more)
    return Workload(name="tiny", mode="train", model=model or network(), training=training)


def recipe(*passes: Pass) -> Recipe:
    return Recipe(passes=passes, backend=BACKENDS["eager"]())


def tried(subject: TrainingSubject, step: Pass, **plan: Any) -> Trial:
    """The trial of one pass, with a rival in this very process."""
    seed = subject.workload.seed
    rival = Updates(subject, subject.settings, seed=seed)
    written = dataclasses.replace(subject.reference(seed=seed), still=subject.reference_still(seed=seed))
    return try_recipe(recipe(step), subject, written, rival, plan=Plan(seconds=0.2, quick_s=0.1, **plan))


# What a workload states.


def test_a_training_workload_needs_no_inputs_and_one_for_inference_does() -> None:
    assert workload().inputs is None
    with pytest.raises(UsageError, match="has no inputs"):
        Workload(name="a", model=network())
    with pytest.raises(UsageError, match=r"mode='train' but no training"):
        Workload(name="a", model=network(), mode="train")


def test_what_cannot_be_called_or_gone_through_is_refused_when_it_is_stated() -> None:
    with pytest.raises(UsageError, match="Training optimizer is an AdamW, which cannot be called"):
        workload(optimizer=adam(network()().parameters()))
    with pytest.raises(UsageError, match="Training data is an int"):
        workload(data=5)


def test_optimize_and_tune_send_each_other_their_workloads(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"is for training: trimtab.tune"):
        prepare(workload())
    with pytest.raises(UsageError, match=r"does not say how it is trained. Give it training=trimtab.Training"):
        prepared(Workload(name="a", model=network(), inputs=torch.zeros(1, 8)), 8)


@pytest.mark.parametrize(("limits", "name"), [(Limits(latency_ms=3), "latency_ms"), (Limits(size_mb=3), "size_mb")])
def test_limits_that_mean_nothing_in_training_are_refused(limits: Limits, name: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=f"Limits {name}=3 is for inference"):
        trimtab.tune(workload(), limits=limits, out=tmp_path / "run")
    with pytest.raises(UsageError, match="updates is 3"):
        trimtab.tune(workload(), updates=3, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loader_that_gives_nothing_is_named() -> None:
    with pytest.raises(WorkloadError, match="The loader gave 0 batches and then no more, but 8 are needed"):
        prepared(workload(data=[]), 8)
    with pytest.raises(WorkloadError, match="gave 2 batches and then no more, but 5"):
        first_batches(iter([torch.zeros(1), torch.zeros(1)]), 5)


def test_what_decides_itself_is_off_as_written() -> None:
    subject = prepared(
        workload(settings=Settings(compile="auto", adjust=True, optimizer=OptimizerSettings(implementation="auto"))), 8
    )
    assert subject.settings == Settings()
    assert subject.notes == (
        "What would decide itself is off in the settings as written: adjust, compile, optimizer.implementation.",
    )


# The guard.


def test_losses_as_written_repeat_to_the_bit_and_a_model_that_is_given_is_not_trained() -> None:
    model = network()()
    before = [p.detach().clone() for p in model.parameters()]
    subject = prepared(workload(model), 12)
    assert subject.losses(Settings(), seed=0) == subject.losses(Settings(), seed=0)
    assert len(subject.losses(Settings(), seed=0)) == 12
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_training_that_keeps_something_from_run_to_run_is_refused() -> None:
    norm = nn.BatchNorm1d(32)
    with pytest.raises(WorkloadError, match="Two runs from the same seed begin with different losses"):
        prepared(workload(network(lambda: norm)), 8).reference(seed=0)


def test_the_tolerance_grows_with_how_much_a_training_amplifies_rounding() -> None:
    calm = prepared(workload(optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)), 24).reference(seed=0)
    wild = prepared(workload(network(lambda: nn.Linear(32, 32)), optimizer=lambda p: torch.optim.Adam(p, lr=0.1)), 24)
    assert max(calm.tolerance) < 1e-3 * max(calm.losses)
    assert wild.reference(seed=0).tolerance[-1] > 2 * calm.tolerance[-1]


@pytest.mark.parametrize("step", [PASSES["micro_batch"](size=4), PASSES["joined"](), PASSES["optimizer"](kernels="foreach")])
def test_exact_settings_at_the_same_effective_batch_have_the_losses_as_written(step: Pass) -> None:
    subject = prepared(workload(settings=Settings(data=DataSettings(accumulate=3))), 10)
    settings = subject.settings_of(recipe(step))
    assert settings != subject.settings
    found = parity(subject.reference(seed=0), subject.losses(settings, seed=0), exact=True)
    assert found.ok
    assert found.max_relative is not None
    assert found.max_relative < 1e-4
    assert subject.examples == 48


def test_a_split_batch_norm_is_a_mismatch_that_says_why() -> None:
    found = tried(prepared(workload(network(lambda: nn.BatchNorm1d(32))), 8), PASSES["micro_batch"](size=4))
    assert found.state is State.MISMATCH
    assert found.reason is not None
    assert "rounding explains a difference of" in found.reason
    assert "BatchNorm" in found.reason


class Dropping(nn.Module):
    """Drops by a function, in attention, between recurrent layers and by a layer."""

    def __init__(self, *norm: nn.Module) -> None:
        super().__init__()
        self.norm = nn.Sequential(*norm)
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) to (B, 3)."""
        x = self.encoder(self.lstm(self.norm(x).unflatten(1, (2, 4)))[0])
        return self.head(nn.functional.dropout(x.flatten(1), 0.2, self.training))


def test_where_dropout_falls_differently_an_exact_recipe_is_held_to_a_training_without() -> None:
    subject = prepared(workload(Dropping), 8)
    step = PASSES["micro_batch"](size=4)
    written = subject.reference(seed=0)
    assert written.draws
    assert not parity(written, subject.losses(subject.settings_of(recipe(step)), seed=0), exact=True).ok
    found = tried(subject, step)
    assert found.state is State.COMPLETE, found.reason
    assert found.parity is not None
    assert found.parity.still
    assert found.parity.max_relative is not None
    assert found.parity.max_relative < 1e-4
    assert found.notes[0] == STILL
    assert found.score != written.final  # which is that of the training as it is
    split = tried(prepared(workload(lambda: Dropping(nn.BatchNorm1d(8))), 8), step)
    assert split.state is State.MISMATCH
    assert split.reason is not None
    assert split.reason.startswith("With dropout and the like off: The loss of update 1 is ")
    assert split.reason.endswith("as where BatchNorm sees other batches.")
    rival = Updates(subject, subject.settings, seed=0)
    again = confirm(recipe(step), subject, rival, plan=Plan(seconds=0.2), seed=1, must_win=False)
    assert again.ok, again.reason
    assert again.parity is not None
    assert again.parity.still


def test_a_winner_that_trains_something_else_from_other_parameters_is_not_confirmed_and_says_so() -> None:
    subject = prepared(workload(lambda: Dropping(nn.BatchNorm1d(8))), 8)
    rival = Updates(subject, subject.settings, seed=0)
    step = PASSES["micro_batch"](size=4)
    found = confirm(recipe(step), subject, rival, plan=Plan(seconds=0.2), seed=1, must_win=False)
    assert not found.ok
    assert found.reason is not None
    assert found.reason.startswith("From other parameters: With dropout and the like off: The loss of update 1 is ")


def test_a_training_without_dropout_that_fails_once_shaken_is_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = prepared(workload(Dropping), 4)
    run = TrainingSubject._run

    def failing(self: TrainingSubject, settings: Settings, seed: int, shake: int | None = None, still: bool = False) -> Any:
        if still and shake is not None:
            raise NonFiniteError("The loss is not finite.")
        return run(self, settings, seed, shake, still)

    monkeypatch.setattr(TrainingSubject, "_run", failing)
    assert subject.reference(seed=0).draws
    assert subject.reference_still(seed=0) is None


def test_what_is_drawn_on_an_apple_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            there[0] = there[0] + 1
            return super().forward(x)

    there = [torch.tensor([1, 2], dtype=torch.uint8)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: there[0])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: there.__setitem__(0, state))
    assert prepared(workload(lambda: Drawing(8, 3)), 2).reference(seed=0).draws


class Noisy(nn.Module):
    """Draws in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) to (B, 3)."""
        return self.head(x + 0.1 * torch.randn(x.shape[1], len(x)).T)


class Masked(nn.Module):
    """Has a buffer of floats beside dropout of its own, as attention with a mask of its own has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) to (B, 3)."""
        kept = nn.functional.dropout(x * self.mask, 0.1, self.training)
        return nn.functional.dropout(self.head(kept), 0.1, self.training)


def test_a_module_whose_buffers_stay_as_they_are_is_kept_from_drawing() -> None:
    subject = prepared(workload(Masked), 8)
    assert subject.statistics_modules == frozenset()
    found = tried(subject, PASSES["micro_batch"](size=4))
    assert found.state is State.COMPLETE, found.reason
    assert found.parity is not None
    assert found.parity.still
    assert prepared(workload(lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))), 2).statistics_modules == {"0"}


def test_what_cannot_be_kept_from_drawing_is_held_to_the_losses_as_written() -> None:
    assert not prepared(workload(network(nn.ReLU)), 4).reference(seed=0).draws
    noisy = prepared(workload(Noisy), 8)
    assert noisy.reference(seed=0).draws
    assert noisy.reference_still(seed=0) is None
    found = tried(noisy, PASSES["micro_batch"](size=4))
    assert found.state is State.MISMATCH
    assert found.reason is not None
    assert found.reason.startswith("The loss of update 1 is ")
    assert tried(noisy, PASSES["optimizer"](kernels="foreach")).state is State.COMPLETE


def test_a_lossy_recipe_is_held_to_the_limit_of_the_loss() -> None:
    subject = prepared(workload(), 12)
    strict = tried(subject, PASSES["autocast"](), limits=Limits(max_drop=0.0))
    loose = tried(subject, PASSES["autocast"](), limits=Limits(max_drop=0.5))
    assert loose.state is State.COMPLETE
    assert loose.drop is not None
    assert loose.drop.decided is True
    assert loose.throughput is not None
    assert loose.throughput.unit == "examples/s"
    assert strict.state is State.STOPPED or (strict.drop is not None and strict.drop.decided is None)


def test_a_loss_that_is_no_number_is_a_mismatch() -> None:
    written = BaselineLosses.of([1.0, 0.5, 0.4], [[1.0, 0.5, 0.4]])
    found = parity(written, [1.0, math.nan, 0.4], exact=False)
    assert not found.ok
    assert found.reason == "The loss of update 2 is nan, where it is 0.5 as written."
    assert parity(written, [1.0, 0.6, 0.4], exact=False).ok
    assert not parity(written, [1.0, 0.6, 0.4], exact=True).ok


def test_the_interval_of_the_rise_decides() -> None:
    losses = [2.0 - 0.01 * i for i in range(40)]
    written = BaselineLosses.of(losses, [losses])
    assert increase(written, [loss + 0.1 for loss in losses], 0.05).decided is False
    assert increase(written, losses, 0.05).decided is True
    noisy = [loss + (0.3 if i % 2 else -0.2) for i, loss in enumerate(losses)]
    assert increase(written, noisy, 0.06).decided is None


def test_an_exception_of_the_training_fails_its_trial_only() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no kernel for this")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    subject = prepared(workload(loss=loss), 8)
    found = tried(subject, PASSES["autocast"]())
    assert found.state is State.FAILED
    assert found.reason is not None
    assert "no kernel for this" in found.reason


def test_an_update_of_one_thread_is_timed_while_its_thread_runs() -> None:
    """What neighbours take of the CPUs does not count then. Updates of several sizes are not alike: blocks are timed."""
    subject = prepared(workload(), 8)
    runner = Updates(subject, subject.settings, seed=0)
    assert [each.ns > 0 for each in runner.samples(3, 2)] == [True] * 3
    if runner.threads is None:
        pytest.skip("this system does not count how long threads wait for a core")
    assert runner.threads == 1
    trial = tried(subject, PASSES["optimizer"](kernels="foreach"))
    assert trial.comparison is not None
    assert trial.comparison.conditions.startswith("one thread each")

    def uneven() -> list[Any]:
        return [(torch.randn(n, 8), torch.randint(3, (n,))) for n in (16, 12)]

    mixed = prepared(workload(data=uneven), 8)
    assert Updates(mixed, mixed.settings, seed=0).threads is None


def test_code_for_all_sizes_is_tried_where_sizes_differ() -> None:
    def uneven() -> list[Any]:
        return [(torch.randn(n, 8), torch.randint(3, (n,))) for n in (16, 12)]

    dynamic, of_no_use = PASSES["compile"](dynamic=True), "Code for all sizes at once is of no use"
    assert str(prepared(workload(), 4).blocked(dynamic)).startswith(of_no_use)
    assert not str(prepared(workload(data=uneven), 4).blocked(dynamic)).startswith(of_no_use)
    assert not str(prepared(workload(), 4).blocked(PASSES["compile"]())).startswith(of_no_use)


class Restless:
    """Gives times of 1/1.3 of a millisecond, which wobble for the first blocks, by the factor ``by``."""

    pid = os.getpid()
    made = 0

    def __init__(self, by: float = 1.12) -> None:
        self.wobble = (1 / by, 1 / by, 1 / by, by, by, by)

    def block(self, calls: int) -> list[int]:
        time.sleep(0.001)
        self.made += 1
        return [round(1e6 / 1.3 * (self.wobble[self.made % 6] if self.made < 60 else 1.0))] * calls

    def pace(self) -> int:
        return 1000


class Steady(Restless):
    def block(self, calls: int) -> list[int]:
        time.sleep(0.001)
        return [1_000_000] * calls


def test_a_gain_that_a_timing_leaves_open_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "usage", lambda before, after: None)  # as if nobody else used the machine
    once, remark = trial_timing(Restless(), Steady(), Plan(seconds=0.001))
    assert remark is None
    assert once.ratio.low < 1 < once.ratio.value
    again, remark = trial_timing(Restless(), Steady(), Plan(seconds=0.001, again_s=5.0))
    assert str(remark).startswith("It was timed again for longer, because a first timing left open whether it gains: ")
    assert again.ratio.low > 1
    assert again.ratio.value == pytest.approx(1.3, rel=0.05)
    for by, over in ((1.12, 1.25), (1.12, 0.1), (1.4, 1.0)):
        remark = trial_timing(Restless(by), Steady(), Plan(seconds=0.001, again_s=5.0, over=over))[1]
        assert remark is None, "it seems no faster than that, or surely is, or an interval half as wide would not tell"


# The search.


def test_the_climb_tries_everything_alone_then_adds_up_what_pays() -> None:
    speeds = {"joined": 1.5, "threads": 1.2, "optimizer": 0.9, "autocast": 2.0}

    def value(trial: Trial) -> float:
        found = 1.0
        for step in trial.recipe.passes:
            found *= speeds.get(step.name, 0.8)
        return found

    facts, climb, done = SearchState(throughput=True, feasible=lambda trial: True, value=value), GreedySampler(), []
    while (ask := climb.ask(done, facts)) is not None:
        done.append(Trial(recipe=ask.recipe, state=State.COMPLETE, stage=ask.stage))
    assert done[0].recipe == trained_as_written()
    assert len({trial.recipe.hash for trial in done}) == len(done)
    exact = [step for step in search_space.training() if step.exact]
    compiled = [step for step in exact if step.name == "compile"]
    tried = [trial.recipe.passes for trial in done]
    assert {(step,) for step in exact if step not in compiled} <= set(tried)
    added_up = tried.index((PASSES["joined"](), PASSES["threads"]()))
    assert [tried.index((*tried[added_up], step)) > added_up for step in compiled] == [True] * len(compiled)
    best = max(done, key=value).recipe
    assert [step.name for step in best.passes] == ["joined", "threads", "autocast"]
    assert not any("infer" not in step.modes for step in search_space.passes(exact=True))


# Whole studies.


def run(folder: pathlib.Path, trials: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(trials)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def wait_for_trial(folder: pathlib.Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if (folder / "run" / "record.json").exists() and Record.read(folder / "run").trials:
            return
        time.sleep(0.1)
    raise AssertionError("no trial ended")


@pytest.mark.slow
def test_a_study_ends_with_settings_a_ladder_and_a_report_and_goes_on(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = answer(run(tmp_path, 2))
    assert found["status"] in ("improved", "kept_original")
    rungs = {rung["rung"]: rung for rung in found["ladder"]}
    assert list(rungs) == ["as_written", "lossless", "best"]
    assert rungs["as_written"]["speedup"]["value"] == 1.0
    won = found["status"] == "improved"
    assert found["settings"]["data"]["joined"] is won  # of those two trials, the other one ran its batches as one
    assert not won or rungs["best"]["speedup"]["low"] > 1.0
    states = {trial["state"] for trial in found["trials"]}
    assert {"COMPLETE", "SKIPPED"} <= states <= {"COMPLETE", "SKIPPED", "STOPPED"}  # what is surely slower may end early
    assert all(trial["reason"] for trial in found["trials"] if trial["state"] == "SKIPPED")
    page = next((tmp_path / "run").glob("*-report.html")).read_text(encoding="utf-8")
    assert "joined" in page
    assert Record.read(tmp_path / "run").mode == "train"
    assert "test data" not in page
    assert ("nothing was measured again" in page) is not won
    settings = from_json(Settings, json.loads((tmp_path / "run" / "settings.json").read_text()))
    model = network()()
    summary = trimtab.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings).fit(data(), steps=2)
    assert summary.updates == 2

    before = Record.read(tmp_path / "run").trials
    again = answer(run(tmp_path, 1))
    after = Record.read(tmp_path / "run").trials
    assert after[: len(before)] == before
    measured = [trial for trial in again["trials"] if trial["state"] != "SKIPPED"]
    assert len(measured) == 4  # the original, and recipes: two, then one


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_study_that_is_cut_off_keeps_what_is_finished(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    process = run(tmp_path, 50)
    wait_for_trial(tmp_path)
    process.send_signal(number)
    if number == signal.SIGINT:  # ends cleanly, with the best so far
        assert answer(process)["status"] in ("improved", "kept_original")
        assert Record.read(tmp_path / "run").trials[0].recipe == trained_as_written()
        return
    process.wait(timeout=60)
    before = Record.read(tmp_path / "run").trials
    assert before[0].recipe == trained_as_written()
    assert answer(run(tmp_path, 1))["trials"][0]["recipe"] == "eager"
    assert Record.read(tmp_path / "run").trials[: len(before)] == before


def test_an_exact_recipe_whose_loss_is_surely_too_high_is_refused() -> None:
    written = BaselineLosses(
        losses=(1.0,) * 24, tolerance=(1e-4,) * 12 + (1.0,) * 12
    )  # rounding may do anything to the later losses
    same = parity(written, written.losses, exact=True)
    assert same.ok

    def refusal(decided: bool | None) -> str | None:
        drop = Drop(
            value=0.5, low=0.4, upper=0.6, n=8, limit=0.01, decided=decided, n_needed=None, method="paired", share=False
        )
        return _loss_problem(trained_as_written(), same, drop, written)

    assert refusal(False) is not None
    assert refusal(None) is None


def test_another_seed_is_another_order_of_the_data() -> None:
    data = TensorDataset(torch.arange(64.0)[:, None], torch.arange(64.0)[:, None])
    training = trimtab.Training(data=lambda: Loader(data, batch=8), optimizer=adam, loss=nn.MSELoss())
    workload = trimtab.Workload(model=lambda: nn.Linear(1, 1), inputs=torch.randn(1, 1), training=training)
    one, again, other = (prepared(workload, 6, seed=seed).batches for seed in (None, workload.seed, workload.seed + 1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


class Read(Dataset[Any]):
    """Zeros, after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.zeros(8), 0


def slow(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(0.04)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.alone
@pytest.mark.parametrize(("read_s", "loss", "ahead"), [(0.02, nn.CrossEntropyLoss(), 2), (0.0, slow, 0)])
def test_what_a_loader_has_read_ahead_is_used_up_before_updates_are_timed(read_s: float, loss: Any, ahead: int) -> None:
    subject = prepared(workload(data=lambda: DataLoader(Read(read_s), 1, num_workers=1), loss=loss), 1)
    updates = Updates(subject, subject.settings, seed=0)
    assert updates._read_ahead == 2
    for _ in range(2 if ahead else 20):  # others may have the cores for a while
        if updates._read_ahead:
            assert len(updates.block(3)) == 3
            time.sleep(0.1)
    assert updates._read_ahead == ahead  # where the loader is what updates wait for, it is looked at every time
    assert Updates(prepared(workload(), 1), Settings(), seed=0)._read_ahead == 0


def test_a_schedule_with_a_length_of_its_own_is_timed_too() -> None:
    def schedule(optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    subject = prepared(workload(schedule=schedule), 8)
    assert len(subject.losses(subject.settings, seed=0)) == 8
    assert len(Updates(subject, subject.settings, seed=0).block(12)) == 12


def test_targets_that_outputs_in_few_bits_cannot_come_close_to_are_found() -> None:
    outputs, targets = torch.randn(32, 1).bfloat16(), torch.randn(32, 1)
    assert too_coarse(outputs, targets, torch.bfloat16, 0.05) is None
    found = too_coarse(outputs.float(), 300 + targets, torch.bfloat16, 0.05)
    assert str(found).startswith("Its outputs are in steps of bfloat16, in which the targets are off by ")
    assert too_coarse(torch.randn(32, 1), 300 + targets, torch.bfloat16, 0.05) is None  # which are finer
    assert too_coarse(outputs, torch.zeros(32, dtype=torch.int64), torch.bfloat16, 0.05) is None

    def kelvins() -> Any:
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, 300 + x[:, :3]), batch_size=16)

    trial = tried(prepared(workload(data=kelvins, loss=nn.MSELoss()), 8), PASSES["autocast"]())
    assert trial.state is State.MISMATCH
    assert str(trial.reason).startswith("Its outputs are in steps of bfloat16")


def test_what_does_nothing_is_not_added_up() -> None:
    """All settings but two come out a little ahead of what they are tried on, as half of those that do nothing do."""

    def interval(trial: Trial) -> Interval:
        value = 1.0
        for step in trial.recipe.passes:
            value *= {"joined": 1.5, "autocast": 1.4}.get(step.name, 1.01)
        return Interval(value, 0.975 * value, 1.025 * value)

    facts = SearchState(throughput=True, feasible=lambda trial: True, value=lambda trial: interval(trial).low)
    climb, done, bars = GreedySampler(), list[Trial](), dict[tuple[str, int], set[float]]()
    while (ask := climb.ask(done, facts)) is not None:
        bars.setdefault((ask.stage, len(ask.recipe.passes)), set()).add(ask.over)
        trial = Trial(recipe=ask.recipe, state=State.COMPLETE, stage=ask.stage)
        done.append(dataclasses.replace(trial, speedup=interval(trial)))
    best = max(done, key=lambda trial: interval(trial).low).recipe
    assert {step.name for step in best.passes} == {"joined", "autocast"}
    assert (bars["lossless", 1], bars["precision", 2]) == ({1.0}, {1.5}), "what a recipe must exceed is the speed of its base"


def test_exact_settings_that_a_busy_machine_could_not_tell_are_looked_at_again() -> None:
    original = Trial(recipe=trained_as_written(), state=State.COMPLETE, speedup=Interval(1.0, 0.97, 1.03))
    for step in (PASSES["optimizer"](), PASSES["autocast"]()):
        noisy = Trial(recipe=recipe(step), state=State.COMPLETE, speedup=Interval(1.5, 0.95, 2.3))
        assert ranking.ahead([original, noisy], Limits(), "throughput", original, tuned=False) == [noisy]
    assert ranking.ahead([original], Limits(), "throughput", original, tuned=False) == []


def test_time_is_kept_for_the_confirmation_of_a_gain_that_is_not_sure() -> None:
    study: Any = object.__new__(Study)
    study.options, study.task = Options(objective="throughput"), TrainingTask()
    original = Trial(recipe=trained_as_written(), state=State.COMPLETE, speedup=Interval(1.0, 0.97, 1.03))
    for value, found in ((1.2, True), (1.02, False)):
        other = Trial(recipe=recipe(PASSES["joined"]()), state=State.COMPLETE, speedup=Interval(value, 0.9, 1.5))
        study._trials = [original, other]
        assert study._has_candidate() is found


def test_a_budget_is_for_the_dry_run_too(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(UsageError, match=r"The budget was over before the dry run was, which makes 8 updates .* three times"):
        trimtab.tune(f"{tmp_path}/train.py", budget=0.01, updates=8, out=tmp_path / "run")


def test_the_call_that_goes_on_has_what_is_not_at_its_default() -> None:
    options = Options(trial_s=600.0, timing_s=1.0, worker_mb=900.0)
    spoken = _python_call("train.py", options, budget=None, updates=24, out="run")
    assert spoken == "trimtab.tune('train.py', out='run', worker_memory_mb=900.0, timing_seconds=1.0)"
    spoken = _python_call("train.py", Options(storage="postgresql://me:secret@host/db"), out="run")
    assert spoken == "trimtab.tune('train.py', out='run', storage='postgresql://me:***@host/db')", "and no password"
