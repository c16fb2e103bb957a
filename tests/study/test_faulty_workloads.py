"""Faults of a workload. Each ends in the right state with a sentence, and nothing is lost."""

from __future__ import annotations

import pytest

import trimtab
from _faulty import run
from trimtab.core.trial import State
from trimtab.errors import WorkloadError


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    ctypes.string_at(0)
            def made(): return workload(Bad)
            """,
            r"failed in its dry run, before the first trial. It crashed with a segmentation fault \(SIGSEGV\); its log has",
            id="segfault",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    os._exit(7)
            def made(): return workload(Bad)
            """,
            r"It exited with code 7 without a result, as if the code called os._exit or sys.exit",
            id="os._exit",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    time.sleep(3600)
            def made(): return workload(Bad)
            """,
            r"after its time limit of 12 s and was killed; see its log for where it hung, or give it longer with --trial-time",
            id="hang",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    self.kept = getattr(self, "kept", []) + [torch.ones(50_000_000)]
                    time.sleep(0.1)
                    return self.forward(x)
            def made(): return workload(Bad)
            """,
            r"It used \d+ MB, more than its memory limit of 1500 MB, and was killed",
            id="memory",
        ),
        pytest.param(
            """
            def raises(output, target): raise KeyError("label")
            def made(): return workload(score=raises)
            """,
            r"Evaluation score raised: KeyError: 'label'",
            id="score-raises",
        ),
        pytest.param(
            "def made(): return workload(score=lambda o, t: 'good')",
            r"Evaluation score returned 'good', a str; it must return a tensor with one score per example",
            id="score-string",
        ),
        pytest.param(
            "def made(): return workload(score=lambda o, t: torch.tensor(0.5))",
            r"Evaluation score returned 1 score for a batch of \d+; it must return one per example.*use metric=... instead",
            id="score-mean",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    return self.layer(x) / 0 * 0
            def made(): return workload(Bad)
            """,
            r"The model as written gives NaN: \d+ of \d+ values of output 0 on batch 0",
            id="nan",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    return self.layer(torch.log(x))
            def made():
                x, t = data()
                evaluation = trimtab.Evaluation(data=(x.abs() + 0.1, t), score=top1)
                return trimtab.Workload(name="faulty", model=Bad, inputs=-torch.ones(1, 8), evaluation=evaluation)
            """,
            r"The model gives NaN for the workload's inputs: 4 of 4 values of 'output'.*Take inputs from the data",
            id="nan-example",
        ),
        pytest.param(
            """
            class Bad(Model):
                calls = 0
                def forward(self, x):
                    Bad.calls += 1
                    return self.layer(x).repeat(1, 1 + Bad.calls % 3)
            def made(): return workload(Bad)
            """,
            r"gives outputs of .* and then of .* for the same input|axes for one size|output 'output'|different",
            id="shapes",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    return nn.functional.dropout(self.layer(x), 0.5, training=True)
            def made(): return workload(Bad)
            """,
            r"gives different values for the same input \(by up to .*\). Turn off what is random in it",
            id="random",
        ),
    ],
)
def test_a_workload_that_fails_is_said_to_fail(tmp_path, body: str, message: str) -> None:
    limits = {"trial_seconds": 12} if "3600" in body else {"worker_memory_mb": 1500} if "50_000_000" in body else {}
    with pytest.raises(WorkloadError, match=message):
        run(tmp_path, body, **limits)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            """
            class Plain(nn.Module):
                def forward(self, x):
                    return torch.stack([x.sum(1) * -1, x.sum(1)], 1)
            def made(): return workload(Plain)
            """,
            id="no-parameters",
            marks=pytest.mark.long,
        ),
        pytest.param(
            """
            class Odd(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a = nn.Linear(8, 8)
                    self.b = nn.Linear(8, 8)
                    self.b.weight = self.a.weight
                def forward(self, x, y=None):
                    return self.b(self.a(x))[:, :2]
            def made():
                batch = lambda x: (x, torch.zeros(len(x), 3))
                x, t = data()
                evaluation = trimtab.Evaluation(data=[(batch(a), b) for a, b in zip(x.split(20), t.split(20))], score=top1)
                inputs = batch(torch.randn(2, 8))
                return trimtab.Workload(name="faulty", model=Odd().train(), inputs=inputs, evaluation=evaluation)
            """,
            id="training-mode, unused-input, shared-weights",
        ),
    ],
)
def test_an_odd_workload_works(tmp_path, body: str) -> None:
    result = run(tmp_path, body, trials=2)
    states = {str(trial.recipe): (trial.state, trial.reason) for trial in result.trials}
    assert result.status in ("improved", "kept_original"), states
    assert result.best is not None
    assert result.best.artifact is not None, result.best.trial.notes
    assert result.trials[0].state is State.COMPLETE


@pytest.mark.long
def test_control_flow_on_data_is_caught_by_parity_or_refused(tmp_path) -> None:
    body = """
    class Branches(Model):
        def forward(self, x):
            if x.sum() > 0:
                return self.layer(x)
            return -2 * self.layer(x)
    def made(): return workload(Branches)
    """
    result = run(tmp_path, body, trials=4)
    for trial in result.trials:
        if trial.state is State.COMPLETE:
            assert trial.parity is not None
            assert trial.parity.ok, trial
        else:
            assert trial.reason, trial
    assert {trial.recipe.backend.name for trial in result.trials if trial.state is State.COMPLETE} >= {"eager"}


def test_a_recipe_that_crashes_its_process_loses_nothing(tmp_path) -> None:
    body = """
    class Crashes(Model):
        def forward(self, x):
            if torch.jit.is_tracing() or torch.compiler.is_compiling():
                os.abort()
            return self.layer(x)
    def made(): return workload(Crashes)
    """
    result = run(tmp_path, body, trials=4)
    failed = [trial for trial in result.trials if trial.state is State.FAILED]
    assert failed
    assert all(trial.reason == "It aborted (SIGABRT); its log has the stack." for trial in failed), failed
    assert all((tmp_path / "run" / str(trial.log)).read_text() for trial in failed)
    assert result.status in ("kept_original", "improved")


@pytest.mark.parametrize(
    "asked",
    [pytest.param({"objective": "size"}, marks=pytest.mark.long), {"limits": trimtab.Limits(max_drop=0.1, memory_mb=5000)}],
)
def test_an_original_without_a_form_of_its_own_is_kept_and_never_called_an_improvement(tmp_path, asked) -> None:
    """Its size is unknown, and so is what a tuned form of it needs of memory: neither is a limit that was missed."""
    body = """
    class Picks(Model):
        def __init__(self):
            super().__init__()
            self.choices = [lambda y: y, lambda y: y * 1.0]
        def forward(self, x):
            y = self.layer(x)
            return self.choices[int(y.sum() > 0)](y)
    def made(): return workload(Picks)
    """
    result = run(tmp_path, body, trials=1, **asked)
    assert [trial.state for trial in result.trials] == [State.COMPLETE] * 2
    assert [trial.size_mb for trial in result.trials] == [None] * 2, "it has a form: take another model"
    assert result.status == "kept_original", result.sentence
    assert result.best is not None
    assert result.best.artifact is None
    assert not result.best.confirmation.again, "the original is not confirmed against itself"
    assert not (tmp_path / "run" / "confirm").exists()
    assert result.to_json()["best"]["speedup"]["value"] == 1.0
