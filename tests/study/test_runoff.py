"""What the search could not tell apart is timed directly, and the faster one goes on to the confirmation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest

from _faulty import write
from _studies import comparison
from trimtab._internal.serialization import to_json
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.torchscript import TorchScript
from trimtab.core.measurement import Interval
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.evaluation.evaluate import BUILT
from trimtab.execution.fork_pool import Workers
from trimtab.study.options import Options
from trimtab.study.runoff import _displaces, _key, contenders, run_off
from trimtab.study.samplers.sampler import Ask
from trimtab.study.study import Study

EXACT, LOSSY = Recipe(backend=OnnxRuntime()), Recipe(backend=OnnxRuntime(precision="int8_dynamic"))
# many small operators, each of which costs eager torch a call
BODY = """
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(60):
            x = torch.tanh(self.layer(x)) + 0.5
        return x

def made():
    torch.manual_seed(0)
    return trimtab.Workload(model=Chain(), inputs=torch.randn(1, 4))
"""


def trial(recipe: Recipe, value: float, low: float, high: float, threads: int | None = None) -> Trial:
    found = comparison(value)
    if threads is not None:
        found = dataclasses.replace(found, candidate=dataclasses.replace(found.candidate, conditions={"threads": threads}))
    return Trial(recipe=recipe, state=State.COMPLETE, speedup=Interval(value, low, high), size_mb=1.0, comparison=found)


def test_contenders_are_those_that_may_be_faster_than_the_first() -> None:
    first = trial(EXACT, 4.0, 3.9, 4.1)
    apart, close, open_question = (trial(EXACT, value, 3.0, high) for value, high in ((3.1, 3.2), (3.9, 4.15), (3.9, 4.3)))
    assert contenders([first, apart, close], "latency") == [first]
    assert contenders([first, close, open_question], "throughput") == [first, open_question]
    assert contenders([first, open_question], "size") == [first]
    assert contenders([first, apart, apart, open_question], "latency") == [first, open_question], "wherever it stands"
    left_in_the_dark = trial(EXACT, 3.5, 2.0, 7.0)
    many = [first, open_question, open_question, left_in_the_dark]
    assert contenders(many, "latency") == [first, left_in_the_dark, open_question], "two, and the likeliest"
    assert contenders([], "latency") == []


def test_who_may_lose_accuracy_meets_the_best_that_loses_nothing() -> None:
    lossy, near, far = trial(LOSSY, 4.0, 3.9, 4.1), trial(EXACT, 3.3, 3.2, 3.4), trial(EXACT, 3.1, 3.0, 3.2)
    assert contenders([lossy, near, far], "latency") == [lossy, near]
    assert contenders([lossy, far], "latency") == [lossy]
    assert contenders([lossy, lossy, lossy, near], "latency") == [lossy, near], "whose files are kept wherever it stands"
    open_question = trial(LOSSY, 3.9, 3.5, 4.3)
    assert contenders([lossy, near, open_question], "latency") == [lossy, open_question, near]
    assert contenders([near, lossy], "latency") == [near, lossy]


@pytest.mark.parametrize(
    ("other", "first", "ratio", "wins"),
    [
        (EXACT, EXACT, (1.02, 0.98, 1.06), True),
        (EXACT, EXACT, (0.99, 0.98, 1.06), False),
        (LOSSY, EXACT, (1.02, 0.98, 1.06), False),
        (LOSSY, EXACT, (1.05, 1.01, 1.09), True),
        (EXACT, LOSSY, (0.97, 0.93, 1.01), True),
        (EXACT, LOSSY, (0.95, 0.92, 0.98), False),
        (EXACT, LOSSY, (0.93, 0.77, 1.11), False),  # as good as unknown, but a loss of 7% rather than none
        (EXACT, EXACT, (1.5, 0.9, 2.5), False),
        (EXACT, EXACT, (2.5, 1.2, 5.5), True),
    ],
)
def test_who_may_lose_accuracy_must_surely_be_faster(
    other: Recipe, first: Recipe, ratio: tuple[float, float, float], *, wins: bool
) -> None:
    assert _displaces(trial(other, 1, 1, 1), trial(first, 1, 1, 1), Interval(*ratio)) is wins


def test_several_threads_meet_one_that_is_nearly_as_fast() -> None:
    first, one, slow = trial(EXACT, 14.4, 14.0, 14.8, 2), trial(EXACT, 13.6, 13.3, 13.9, 1), trial(EXACT, 9.0, 8.8, 9.2, 1)
    assert contenders([first, one, slow], "latency") == [first, one]
    assert contenders([first, slow], "latency") == [first], "threads that bring half as much again"
    assert contenders([trial(EXACT, 14.4, 14.0, 14.8), one], "latency")[1:] == [], "of unknown threads"
    assert contenders([first, trial(LOSSY, 13.6, 13.3, 13.9, 1)], "latency") == [first], "a loss for no gain"
    assert _displaces(one, first, Interval(0.97, 0.96, 0.98))
    assert not _displaces(one, first, Interval(0.93, 0.92, 0.94))
    assert not _displaces(first, one, Interval(1.03, 1.02, 1.04))
    assert _displaces(first, one, Interval(1.08, 1.07, 1.09))
    vague = Interval(1.3, 0.9, 1.81)  # on a busy machine: more threads were not seen to bring anything
    assert vague.vague
    assert _displaces(one, first, vague)
    assert not _displaces(first, one, vague)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    folder = tmp_path_factory.mktemp("runoff")
    reference = write(folder, BODY)
    with Workers() as workers:
        found = Study(reference, folder / "run", Options(timing_s=2.0), workers=workers)
        asked = [found.baseline, Recipe(backend=TorchScript()), EXACT]
        recipes = iter([Ask("lossless", recipe) for recipe in asked])
        found.sampler.ask = lambda trials, facts: next(recipes, None)  # type: ignore[method-assign]
        found.search()
        assert [trial.state for trial in found.trials] == [State.COMPLETE] * 3, [trial.reason for trial in found.trials]
        yield found


def misjudged(study: Study) -> list[Trial]:
    """The slower of the two in front, as a noisy search leaves them."""
    _, slow, fast = study.trials
    assert isinstance(slow.recipe.backend, TorchScript)
    return [
        dataclasses.replace(slow, speedup=Interval(5.0, 4.9, 5.1)),
        dataclasses.replace(fast, speedup=Interval(4.9, 3.5, 8.0)),
    ]


def test_the_faster_one_goes_on(study: Study) -> None:
    slow, fast = misjudged(study)
    assert run_off(study, [slow, fast], until=time.monotonic()) == [slow, fast]  # no time is left
    assert run_off(study, [fast, slow])[0] is fast  # nothing is open
    assert study.notes == []
    for _ in range(5):
        order = run_off(study, [slow, fast])
        told = study.notes[-1]
        if order[0] is fast or "x to " not in told:  # beside other tests it may be, and is then asked anew
            break
    assert order == [fast, slow], study.notes
    assert told.startswith("Timed against each other, onnxruntime runs at ")  # how much faster, the machine's noise decides
    assert told.endswith(" of torchscript.")


def test_what_an_earlier_run_found_out_stands_however_little_time_there_is(study: Study) -> None:
    slow, fast = misjudged(study)
    assert fast.comparison is not None
    found = dataclasses.replace(fast.comparison, ratio=Interval(0.8, 0.7, 0.9))  # what the machine would not say
    study.storage.put(_key(fast, slow), to_json(found))
    assert run_off(study, [slow, fast], until=time.monotonic()) == [slow, fast]
    assert study.notes[-1] == "Timed against each other, onnxruntime runs at 0.80x (0.70 to 0.90) of torchscript."
    study.storage.put(_key(fast, slow), to_json(dataclasses.replace(found, ratio=Interval(1.2, 1.1, 1.3))))
    assert run_off(study, [slow, fast], until=time.monotonic()) == [fast, slow]
    one, two = trial(fast.recipe, 4.9, 4.8, 5.0, 1), trial(slow.recipe, 5.0, 4.9, 5.1, 2)
    study.storage.put(_key(one, two), to_json(dataclasses.replace(found, ratio=Interval(0.97, 0.96, 0.98))))
    assert run_off(study, [two, one], until=time.monotonic()) == [one, two]
    assert study.notes[-1].endswith("0.97x (0.96 to 0.98) of torchscript. 2 threads in place of 1 must bring 5%.")
    other = trial(Recipe(backend=OnnxRuntime(spinning=False)), 4.85, 4.8, 5.0, 1)
    assert run_off(study, [two, other], until=time.monotonic()) == [other, two], "without time the search's figures decide"
    said = "onnxruntime(spinning=False) goes before torchscript, by the search alone. 2 threads in place of 1 must bring 5%."
    assert study.notes[-1] == said


@pytest.mark.parametrize("side", ["first", "other"])
def test_what_cannot_be_timed_leaves_the_order_as_it_was(study: Study, side: str) -> None:
    slow, _ = misjudged(study)
    broken = dataclasses.replace(trial(LOSSY, 4.9, 3.5, 8.0))
    study.runner.files(broken).mkdir(exist_ok=True)
    (study.runner.files(broken) / BUILT).write_text("{}")
    slow = dataclasses.replace(slow, speedup=Interval(5.0, 4.0, 9.0))
    order = [slow, broken] if side == "other" else [broken, slow]
    began = time.monotonic()
    assert run_off(study, order) == order
    assert time.monotonic() - began < study.options.trial_s / 2  # nobody waits for a process that has ended
    other, first = order[1].recipe, order[0].recipe
    words = f"{other} and {first} could not be timed against each other: "
    assert study.notes[-1].startswith(words)
    assert "KeyError: 'settings'" in study.notes[-1]
    assert "\n" not in study.notes[-1]
