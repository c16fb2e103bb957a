"""Metrics: means of one value per example, and those that exist over the whole set only."""

from __future__ import annotations

import pathlib
import signal
from typing import Any

import pytest
import torch
from torch import nn

from _ranks import failure, on_ranks
from _runs import trainer
from trimtab import PrecisionSettings, Settings, Trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.telemetry.events import Callback, Event, Progressed, Validated

pytestmark = pytest.mark.usefixtures("one_thread")
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.round() == targets


class F1:
    """Of two classes, over everything that was seen since ``reset``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hits = self.found = self.wanted = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        found = outputs > 0
        self.hits += int((found & (targets > 0)).sum())
        self.found, self.wanted = self.found + int(found.sum()), self.wanted + int((targets > 0).sum())

    def compute(self) -> float:
        return 2 * self.hits / max(self.found + self.wanted, 1)


def signs() -> Batches:
    """Three batches of unequal size in which positives are seldom."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 8, 1, generator=random)
    targets = (inputs + torch.randn(3, 8, 1, generator=random) > 1).float()
    return [(inputs[index, : 3 + 2 * index], targets[index, : 3 + 2 * index]) for index in range(3)]


class Own(nn.Module):
    """Computes its loss itself, from a mapping with the labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"logits": logits} if labels is None else {"loss": (logits - labels).square().mean(), "logits": logits}


class F1OfAnswers(F1):
    def update(self, outputs: Any, targets: Any) -> None:
        super().update(outputs["logits"], targets["labels"])


def test_metrics_of_a_model_with_its_own_loss_get_its_answer_and_the_batch() -> None:
    batches = [{"inputs": inputs, "labels": targets} for inputs, targets in signs()]
    metrics = {"f1": F1OfAnswers(), "right": lambda answer, batch: (answer["logits"] > 0) == (batch["labels"] > 0)}
    torch.manual_seed(0)
    made = trainer(Own(), loss=None, metrics=metrics)
    found = made.fit(batches, batches, epochs=1).metrics
    inputs, targets = (torch.cat(parts) for parts in zip(*signs(), strict=True))
    with torch.no_grad():
        logits = made.model(inputs)["logits"]
    whole = F1()
    whole.update(logits, targets)
    assert found["f1"] == whole.compute() > 0
    assert found["right"] == pytest.approx(float(((logits > 0) == (targets > 0)).float().mean()))


def test_a_metric_of_the_whole_set_is_no_mean_over_batches() -> None:
    seen: list[float] = []
    made = trainer(metrics={"f1": F1()}, callbacks=[lambda _, event: seen.extend(getattr(event, "metrics", {}).values())])
    made.context.early_stopping = EarlyStopping(metric="f1", mode="max")
    summary = made.fit(signs(), signs(), epochs=3)
    whole = F1()
    with torch.no_grad():
        whole.update(made.model(torch.cat([x for x, _ in signs()])), torch.cat([y for _, y in signs()]))
    assert 0 < whole.compute() == made.position.best
    assert len(seen) == 2 * 3
    assert not summary.notes


def test_a_metric_that_gives_one_number_per_batch_is_told_of() -> None:
    metrics = {"mean": lambda outputs, targets: (outputs - targets).mean(), "right": right}
    (note,) = trainer(metrics=metrics).fit(signs(), signs(), epochs=2).notes
    assert note.startswith("metrics={'mean'} gave one number per batch, of which the mean is shown.")
    assert not trainer(metrics=metrics).fit(signs(), signs()[:1], epochs=1).notes  # of one batch it is that of the whole set
    alone = [(inputs[:1], targets[:1]) for inputs, targets in signs()]
    assert not trainer(metrics=metrics).fit(alone, alone, epochs=1).notes


@pytest.mark.parametrize("options", [{}, {"ema": 0.5}, {"early_stopping": EarlyStopping(patience=9)}], ids=str)
def test_a_test_set_is_judged_as_the_validation_is(options: dict[str, Any]) -> None:
    made = trainer(
        metrics={"f1": F1(), "right": right}, settings=Settings(precision=PrecisionSettings(autocast="auto")), **options
    )
    before = made.validate(signs())
    assert made.model.training
    summary = made.fit(signs(), signs(), epochs=2)
    after = made.validate(signs())
    assert after["loss"] < before["loss"]
    assert summary.metrics.keys() == after.keys()
    if "early_stopping" not in options:  # which puts the parameters of another validation back
        assert after == pytest.approx(summary.metrics)
    other = trainer(
        metrics={"f1": F1(), "right": right}, settings=Settings(precision=PrecisionSettings(autocast="auto")), **options
    )
    other.fit(signs(), signs(), epochs=2)
    made.fit(data := signs(), data, epochs=3)
    other.fit(data, data, epochs=3)
    torch.testing.assert_close(made.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)


def test_a_test_set_is_judged_by_the_average_that_a_checkpoint_has(tmp_path: pathlib.Path) -> None:
    summary = trainer(ema=0.9, checkpoint=tmp_path).fit(signs(), signs(), epochs=2)
    made = trainer(ema=0.9, checkpoint=tmp_path).resume()
    last = {name: value.clone() for name, value in made.model.state_dict().items()}
    assert made.validate(signs()) == pytest.approx(summary.metrics)
    torch.testing.assert_close(made.model.state_dict(), last, rtol=0, atol=0)


def test_a_callback_that_judges_a_test_set_leaves_no_trace_in_the_run() -> None:
    def run(callbacks: list[Callback]) -> nn.Module:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        trainer(network, callbacks=callbacks, ema=0.9, log_every=1).fit(signs(), epochs=2)
        return network

    found: list[dict[str, float]] = []
    judged = run([lambda made, event: found.append(made.validate(signs())) if isinstance(event, Progressed) else None])
    assert len(found) == 6
    torch.testing.assert_close(judged.state_dict(), run([]).state_dict(), rtol=0, atol=0)


def test_a_callback_may_judge_a_test_set_while_a_signal_ends_the_run() -> None:
    found: list[float] = []

    def judge(made: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            signal.raise_signal(signal.SIGTERM)
            found.append(made.validate(signs())["loss"])

    made = trainer(callbacks=[judge])
    assert made.fit(signs(), signs(), epochs=3).epochs == 1
    assert found == pytest.approx([made.results["loss"]])


class Pair(F1):
    def compute(self) -> Any:
        return {"f1": 1.0, "hits": 2.0}


class NoTargets(F1):
    def update(self, outputs: torch.Tensor) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (F1, r"The metric 'mine' is F1, a class\. Give what it makes: F1\(\.\.\.\)\."),
        (NoTargets(), r"The metric 'mine' cannot be called with \(outputs, targets\): too many"),
        (Pair(), r"compute\(\) of the metric 'mine' gave a dict, not one number\. Several figures are several metrics"),
        (lambda outputs, targets: {"f1": 1.0}, r"The metric 'mine' gave a dict\. Let it give one value per example"),
    ],
)
def test_a_metric_that_is_none_is_said(metric: Any, said: str) -> None:
    with pytest.raises((UsageError, WorkloadError), match=said):
        trainer(metrics={"mine": metric}).fit(signs(), signs(), epochs=1)


class SharedF1(F1):
    def compute(self) -> float:
        seen = torch.tensor([self.hits, self.found, self.wanted])
        torch.distributed.all_reduce(seen)
        return 2 * int(seen[0]) / max(int(seen[1] + seen[2]), 1)


def over_processes(folder: pathlib.Path) -> dict[str, Any]:
    made, whole = trainer(metrics={"f1": SharedF1()}), F1()
    made.fit(signs(), signs(), epochs=1)
    with torch.no_grad():
        whole.update(made.model(torch.cat([x for x, _ in signs()])), torch.cat([y for _, y in signs()]))
    own = trainer(metrics={"f1": F1()})
    return {
        "f1": made.results["f1"],
        "again": made.validate(signs())["f1"],
        "whole": whole.compute(),
        "own": failure(lambda: own.fit(signs(), signs(), epochs=1)),
    }


def test_processes_bring_a_metric_of_the_whole_set_together_or_it_is_refused(tmp_path: pathlib.Path) -> None:
    for found in on_ranks(over_processes, tmp_path):
        assert 0 < found["f1"] == found["whole"] == found["again"]
        assert found["own"][0] == "WorkloadError"
        assert "compute() of the metric 'f1' gave each process the figure of its own share." in found["own"][1]
