"""Validations: mistakes that are told before the run, and those that fail or are cut off, which cost no epoch."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from _runs import DATA, EPOCH, LOADERS_THAT_END, Drawing, Line, loader, trainer
from trimtab import Trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.checkpoint.weights import weights
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.telemetry.events import EpochEnded, Event, Validated

pytestmark = pytest.mark.usefixtures("one_thread")
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def batches(count: int = 3) -> Batches:
    return [(torch.full((2, 1), float(index)), torch.ones(2, 1)) for index in range(count)]


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.round() == targets


def failing(*_: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("options", "validate", "said"),
    [
        ({"early_stopping": EarlyStopping(metric="acc", mode="max"), "metrics": {"right": right}}, batches(),
         r"EarlyStopping watches 'acc', but the validation has loss, right\. Name one of these, or give metrics"),
        ({"early_stopping": EarlyStopping()}, None, r"EarlyStopping goes by the validation, and there is none\. Give fit\("),
        ({"metrics": {"right": right}}, None, r"metrics={'right'} go by the validation, and there is none\. Give fit\("),
        ({}, [], r"validate has no batch: its len\(\) is 0\. Give it data, or leave it out\."),
    ],
)  # fmt: skip
def test_what_can_be_known_is_refused_before_the_run(options: dict[str, Any], validate: Batches | None, said: str) -> None:
    made = trainer(**options)
    with pytest.raises(UsageError, match=said):
        made.fit(batches(), validate, epochs=1)
    assert made.position.update == 0


def test_metrics_get_what_the_model_returned_to_the_loss() -> None:
    batches, calls = [{"x": torch.ones(2, 1), "y": torch.zeros(2, 1)}], []

    def twice(model: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = (model(batch["x"]) - model(batch["y"])).pow(2).mean()
        return found

    def difference(outputs: Any, batch: Any) -> torch.Tensor:
        calls.append(outputs)
        found: torch.Tensor = outputs[0] - outputs[1] if isinstance(outputs, list) else outputs
        return found

    made = trainer(loss=twice, metrics={"difference": difference})
    found = made.fit(batches, batches, epochs=1).metrics
    assert found["difference"] ** 2 == pytest.approx(found["loss"], rel=1e-5)
    once = trainer(loss=lambda model, batch: model(batch["x"]).mean(), metrics={"mean": difference})
    found = once.fit(batches, batches, epochs=1).metrics
    assert found["mean"] == pytest.approx(found["loss"], rel=1e-6)
    assert len(calls) == 2, "the model is not called once more for metrics"
    hidden = trainer(loss=lambda model, batch: model.forward(batch["x"]).mean(), metrics={"mean": difference})
    with pytest.raises(UsageError, match=r"needs the outputs of the model, and the loss calls its methods.*call model"):
        hidden.fit(batches, batches, epochs=1)


class Evaluated(Line):
    """Fails in evaluation only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else failing()


def broken() -> Iterator[Any]:
    yield from loader()
    failing()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: trainer().fit(loader(), broken(), epochs=1), "The validation loader raised: KeyError: 'mine'"),
        (
            lambda: trainer(Evaluated()).fit(loader(), loader(), epochs=1),
            "In validation the model or its loss raised: KeyError",
        ),
        (
            lambda: trainer(metrics={"mine": failing}).fit(loader(), loader(), epochs=1),
            "The metric 'mine' raised: KeyError",
        ),
    ],
)
def test_what_fails_in_validation_is_said(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        call()


def hidden(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss whose outputs no metric can see."""
    return nn.functional.mse_loss(model.forward(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("make", "data", "kind"),
    [
        (lambda folder: trainer(metrics={"mine": failing}, checkpoint=folder), batches(), WorkloadError),
        (lambda folder: trainer(metrics={"mine": failing}, checkpoint=folder, ema=0.5), batches(), WorkloadError),
        (
            lambda folder: trainer(loss=hidden, metrics={"right": right}, checkpoint=folder, checkpoint_every=9),
            batches(),
            UsageError,
        ),
    ],
)
def test_a_validation_that_fails_does_not_cost_the_epoch(
    make: Callable[[pathlib.Path], Trainer], data: list[Any], kind: type[Exception], tmp_path: pathlib.Path
) -> None:
    made = make(tmp_path)
    with pytest.raises(kind, match="metric"):
        made.fit(data, data, epochs=2)
    assert Checkpoints(tmp_path).update() == 3
    again = make(tmp_path).resume()
    assert (again.position.epoch, again.position.batch) == (1, 0)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), made.model.parameters(), strict=True))
    again.context.metrics.clear()
    assert again.fit(data, data, epochs=2).updates == 3


class Counting(Line):
    """Counts the batches that it was validated on."""

    validated = 0
    interrupted = False
    """Whether the second of them brings a SIGTERM."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.validated += not self.training
        if self.interrupted and not self.training and self.validated == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)


def validations(made: Trainer) -> list[tuple[int, float]]:
    """The validations of the run to come: after which update, and their loss."""
    found: list[tuple[int, float]] = []

    def watch(_: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            found.append((event.update, event.metrics["loss"]))

    made.context.callbacks.append(watch)
    return found


def test_the_callbacks_of_a_validation_see_the_parameters_that_were_validated() -> None:
    found: list[tuple[float, float]] = []

    def compare(made: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            with torch.no_grad():
                error = nn.functional.mse_loss(made.model(DATA.tensors[0]), DATA.tensors[1])
            found.append((event.metrics["loss"], float(error)))

    trainer(ema=0.99, callbacks=[compare]).fit(loader(), loader(), epochs=2)
    told, seen = zip(*found, strict=True)
    assert told == pytest.approx(seen, rel=1e-5)


class Merging(nn.Linear):
    """What is trained is beside its weight in training mode, and merged into it in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.weight.requires_grad = False
        self.beside, self.merged = nn.Parameter(torch.zeros(1, 1)), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += self.beside.data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x / 32)
        return found if self.merged else found + x / 32 @ self.beside


@pytest.mark.parametrize("options", [{}, {"ema": 0.5}, {"early_stopping": EarlyStopping(patience=9)}], ids=str)
def test_modules_that_do_something_as_their_mode_changes_are_taken_back_to_training(options: dict[str, Any]) -> None:
    made, batches = trainer(Merging, **options), loader()
    frozen = made.model.weight.clone()
    for epochs in (2, 4):  # the second run begins with what the first left, which is merged
        made.fit(batches, batches, epochs=epochs)
    assert made.model.beside.abs() > 1e-3
    torch.testing.assert_close(made.model.train().weight, frozen)


@pytest.mark.own_process
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": EPOCH}], ids=["epochs", "steps"])
@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize("again", ["resume", "second fit"])
def test_a_signal_cuts_off_a_validation_and_the_run_that_goes_on_begins_with_it(
    length: dict[str, int], every: int | None, again: str, tmp_path: pathlib.Path
) -> None:
    want = validations(whole := trainer(Counting))
    whole.fit(loader(), loader(), **length)
    options: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": every}
    none = validations(made := trainer(Counting, **options))
    made.model.interrupted = True
    batches = loader()
    summary = made.fit(batches, loader(), **length)
    assert summary.ended == "It was interrupted by SIGTERM."
    assert summary.notes[-1] == "The validation was cut off; the run that goes on begins with it."
    assert (summary.updates, made.model.validated, none) == (EPOCH, 2, [])
    assert Checkpoints(tmp_path).update() == EPOCH
    seen = made.model.seen
    if again == "resume":
        made, batches, seen = trainer(Counting, **options).resume(), loader(), seen[:]
    got = validations(made)
    assert made.fit(batches, loader(), **length).updates == whole.position.update - EPOCH
    assert got == want
    assert (seen if made.model.seen is seen else seen + made.model.seen) == whole.model.seen
    assert torch.equal(made.model.layer.weight, whole.model.layer.weight)


@pytest.mark.own_process
@pytest.mark.parametrize("make", LOADERS_THAT_END)
def test_a_signal_that_ends_the_workers_of_the_validation_cuts_it_off(make: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    made = trainer(checkpoint=tmp_path, ema=0.5)
    summary = made.fit(loader(), make(), epochs=2)
    assert summary.ended == "It was interrupted by SIGTERM."
    assert made.ema is not None
    assert not torch.equal(made.ema.shadow["layer.weight"], made.model.layer.weight)
    found = Checkpoints(tmp_path).load()
    assert (found["position"]["update"], found["position"]["due"]) == (EPOCH, True)
    assert torch.equal(made.model.layer.weight, found["ema"]["layer.weight"])  # what the user has is the average


@pytest.mark.parametrize("kind", [EpochEnded, Validated])
def test_a_callback_that_fails_at_the_end_of_an_epoch_does_not_cost_it(kind: type[Event], tmp_path: pathlib.Path) -> None:
    def fail(_: Trainer, event: Event) -> None:
        if isinstance(event, kind):
            raise ConnectionError("offline")

    want = validations(whole := trainer())
    whole.fit(loader(), loader(), epochs=2)
    cut = trainer(checkpoint=tmp_path, callbacks=[fail])
    got = validations(cut)
    cut.context.callbacks.reverse()  # the one that fails comes last
    with pytest.raises(ConnectionError, match="offline"):
        cut.fit(loader(), loader(), epochs=2)
    assert Checkpoints(tmp_path).update() == EPOCH
    rest = validations(resumed := trainer(checkpoint=tmp_path).resume())
    assert resumed.fit(loader(), loader(), epochs=2).updates == EPOCH
    assert got + rest == want
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)


def test_a_stop_that_a_callback_asks_for_leaves_the_validation_whole() -> None:
    def stop(made: Trainer, event: Event) -> None:
        if isinstance(event, EpochEnded):
            made.stop("enough")

    found = validations(made := trainer(callbacks=[stop]))
    assert made.fit(loader(), loader(), epochs=2).ended == "enough"
    assert [update for update, _ in found] == [EPOCH]


class Penalty(nn.Module):
    """A loss that differentiates: of what the model makes of inputs that are part of it."""

    def forward(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        found = model(x)
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return nn.functional.mse_loss(found, y) + slope.square().mean()


def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = Penalty()(model, *batch)
    return found


def test_a_loss_that_differentiates_is_validated_too() -> None:
    data = [(torch.rand(4, 1) * 32, torch.rand(4, 1)) for _ in range(3)]
    error = {"error": lambda outputs, targets: (outputs - targets).square()}
    for metrics in ({}, error):
        made = trainer(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), loss=penalised, metrics=metrics)
        found = made.fit(data, data, epochs=1).metrics
        want = sum(float(penalised(made.model, batch).detach()) for batch in data) / 3
        assert found["loss"] == pytest.approx(want, rel=1e-5)
        assert all(parameter.grad is None for parameter in made.model.parameters())


class Force(nn.Module):
    """Answers with a slope of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.detach().requires_grad_()
        energy = self.inner(x)
        return {"energy": energy, "force": -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]}


def test_a_model_that_differentiates_is_validated_with_metrics_that_need_no_gradients() -> None:
    graphs: list[bool] = []

    def seen(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        graphs.append(outputs["force"].requires_grad)
        return (outputs["force"] - targets).square()

    data = [(torch.rand(4, 1), torch.rand(4, 1)) for _ in range(3)]
    loss = lambda outputs, targets: nn.functional.mse_loss(outputs["force"], targets)  # noqa: E731
    found = trainer(Force(), loss=loss, metrics={"error": seen}).fit(data, data, epochs=1).metrics
    assert found["loss"] == pytest.approx(found["error"], rel=1e-5)
    assert graphs == [False] * 3


def test_what_else_fails_without_gradients_is_said() -> None:
    calls: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        if len(calls) == 5:
            raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
        return with_model(model, batch)

    with pytest.raises(WorkloadError, match=r"In validation the model or its loss raised: RuntimeError: element 0 of tensors"):
        trainer(loss=loss).fit(batches(), batches(), epochs=1)
    assert calls == [True] * 3 + [False] * 2  # which is not the first batch


def test_validation_batches_whose_examples_nobody_can_count_are_told_of() -> None:
    class Box:
        def __init__(self, batch: Any) -> None:
            self.batch = batch

    boxed = lambda model, box: with_model(model, box.batch)  # noqa: E731
    data = [Box(batch) for batch in batches()]
    assert trainer(loss=boxed).fit(data, data[:1], epochs=1).notes == ()
    (note,) = trainer(loss=boxed).fit(data, data, epochs=2).notes
    assert note.startswith("Nothing tells how many examples a batch has, so that all batches count alike. If they are not")
    assert trainer(loss=lambda model, box: (with_model(model, box.batch), 2)).fit(data, data, epochs=1).notes == ()
    graphs = [{"edges": torch.zeros(3, 7), "batch": batch} for batch in batches()]
    (note,) = trainer(loss=lambda model, graph: with_model(model, graph["batch"])).fit(graphs, graphs, epochs=1).notes
    assert note.startswith("The tensors of a batch differ in their first axis ((3, 7), ")


def with_model(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("loss", [nn.MSELoss(), with_model], ids=["of outputs", "of the model"])
def test_a_validation_calls_the_model_no_more_often_for_more_metrics(loss: Any) -> None:
    metrics = {
        "far": lambda outputs, targets: (outputs - targets).abs() > 1,
        "error": lambda outputs, targets: (outputs - targets).square(),
        "mean": lambda outputs, targets: outputs.mean(),
    }
    made = trainer(Counting, loss=loss, metrics=metrics)
    found = made.fit(loader(), loader(), epochs=1).metrics
    assert made.model.validated == EPOCH
    with torch.no_grad():
        outputs = made.model(DATA.tensors[0])
    wanted = {"loss": (error := (outputs - DATA.tensors[1]).square().mean()), "error": error, "mean": outputs.mean()}
    wanted["far"] = ((outputs - DATA.tensors[1]).abs() > 1).double().mean()
    assert found == pytest.approx({name: float(value) for name, value in wanted.items()}, rel=1e-5)


def plateau(optimizer: torch.optim.Optimizer, _: int) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)


def test_a_run_validates_every_so_many_updates_and_resumes(tmp_path: pathlib.Path) -> None:
    """Three epochs of eight updates, validated after 5, 10, 15, 20 and at the end; the plateau and the best follow them."""

    def made(folder: pathlib.Path | None = None, **options: Any) -> tuple[Trainer, list[int]]:
        seen: list[int] = []
        stopping = EarlyStopping(patience=9)
        run = trainer(Drawing, validate_every=5, early_stopping=stopping, schedule=plateau, checkpoint=folder, **options)
        run.context.callbacks.append(lambda _, event: seen.append(event.update) if isinstance(event, Validated) else None)
        return run, seen

    whole, seen = made()
    summary = whole.fit(loader(), loader(), epochs=3)
    assert (seen, summary.updates) == ([5, 10, 15, 20, 24], 24)
    assert whole.optimizer.param_groups[0]["lr"] < 0.01
    assert summary.best == pytest.approx(min(summary.best or 0.0, summary.metrics["loss"]))

    killed, _ = made(tmp_path)
    updates = killed.updates(loader(), loader(), epochs=3)
    for _ in range(13):
        next(updates)
    updates.close()
    assert [saved.name for saved in sorted(tmp_path.glob("update-*"))] == ["update-00000010", "update-00000013"]
    again, later = made(tmp_path)
    again.resume().fit(loader(), loader(), epochs=3)
    assert later == seen[2:]
    assert torch.equal(again.model.layer.weight, whole.model.layer.weight)  # type: ignore[union-attr, arg-type]

    with pytest.raises(UsageError, match="validate_every goes by the validation, and there is none"):
        trainer(validate_every=5).fit(loader(), epochs=1)
    notes = trainer().fit(loader(), loader(), steps=7).notes
    assert "Nothing will be validated: the run has 7 updates to come, and its epoch ends after 8." in "".join(notes)
    notes = trainer().fit(Endless(), loader(), steps=2).notes
    assert "validates after each epoch, and nothing tells how long an epoch of the loader is" in "".join(notes)


def test_the_last_validation_is_in_the_checkpoint(tmp_path: pathlib.Path) -> None:
    """The epoch ends with update 24, whose checkpoint was written before the validation that is the last and the best."""

    def made() -> Trainer:
        return trainer(validate_every=5, early_stopping=EarlyStopping(patience=9), schedule=plateau, checkpoint=tmp_path)

    run = made()
    summary = run.fit(loader(), loader(), epochs=3)
    assert summary.best == summary.metrics["loss"]
    for found in (weights(tmp_path), made().load_best().model.state_dict()):
        torch.testing.assert_close(found, run.model.state_dict(), rtol=0, atol=0)
    assert made().resume().position == run.position

    failed = trainer(validate_every=5, metrics={"mine": failing}, checkpoint=tmp_path / "failed")
    with pytest.raises(WorkloadError, match="metric"):
        failed.fit(loader(), loader(), steps=4)
    assert Checkpoints(tmp_path / "failed").update() == 4


def test_early_stopping_ends_a_run_that_validates_within_epochs() -> None:
    made = trainer(validate_every=5, early_stopping=EarlyStopping(patience=2, min_delta=1e9))
    found = validations(made)
    summary = made.fit(loader(), loader(), epochs=9)
    assert summary.ended == "The validation's loss did not improve 2 times in a row."
    assert ([update for update, _ in found], summary.updates, summary.restored) == ([5, 10, 15], 15, "loss")


class Endless:
    """A loader without a length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield DATA.tensors[0][:4], DATA.tensors[1][:4]
