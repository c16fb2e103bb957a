"""trimtab.tune on trainings that are out of the ordinary: no room beside the rival, no numbers, no end, no shapes."""

from __future__ import annotations

import json
import math
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from _ranks import free_port, variables
from trimtab._internal.serialization import from_json, to_json
from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.settings import OptimizerSettings, PrecisionSettings, Settings
from trimtab.core.technique import PASSES, Pass
from trimtab.core.trial import State, Trial
from trimtab.core.workload import Training, Workload
from trimtab.errors import MeasurementError, NonFiniteError, UsageError, WorkloadError
from trimtab.evaluation.evaluate import Plan
from trimtab.evaluation.training.timer import Updates
from trimtab.evaluation.training.trial import try_recipe
from trimtab.evaluation.training.workload import TrainingSubject, first_batches, loader, prepared
from trimtab.execution.jobs import training as train_jobs
from trimtab.measure.remote import RemoteRunner, serve
from trimtab.study.training import why_settings_stay
from trimtab.train.loss.loss_parity import BaselineLosses, final, increase, parity
from trimtab.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

FOREACH = PASSES["optimizer"](kernels="foreach")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def data() -> DataLoader[Any]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def workload(model: Any = network, settings: Settings = Settings(), **more: Any) -> Workload:
    training = Training(**{"data": data, "optimizer": adam, "loss": nn.CrossEntropyLoss(), "settings": settings} | more)
    return Workload(name="tiny", mode="train", model=model, training=training)


def tried(subject: TrainingSubject, written: BaselineLosses, rival: Updates, step: Pass = FOREACH) -> Trial:
    recipe = Recipe(passes=(step,), backend=BACKENDS["eager"]())
    return try_recipe(recipe, subject, written, rival, plan=Plan(seconds=0.2, quick_s=0.1))


class Keeping(nn.Module):
    """Adds what a hook of its first layer kept, which refers to the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.head, self.side = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.first.register_forward_hook(lambda module, given, output: setattr(self, "kept", output))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.first(inputs).relu()) + self.side(self.kept.tanh())
        return found


def test_a_model_at_hand_whose_hooks_refer_to_it_learns_as_one_that_is_built() -> None:
    given, made = (prepared(workload(model), 8).losses(Settings(), seed=0) for model in (Keeping(), Keeping))
    assert given == made


class Crowded:
    """A loss that runs out of memory with more than eight examples, from when it is told to."""

    def __init__(self) -> None:
        self.full = False

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.full and len(batch[0]) > 8:
            raise torch.OutOfMemoryError("injected")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def __deepcopy__(self, memo: Any) -> Crowded:
        return self


def test_a_batch_that_does_not_fit_beside_the_rival_is_a_failure_and_no_verdict_on_parts() -> None:
    loss = Crowded()
    subject = prepared(workload(loss=loss), 8)
    rival = Updates(subject, subject.settings, seed=0)
    written = subject.reference(seed=0)
    loss.full = True
    found = tried(subject, written, rival)
    assert found.state is State.FAILED
    assert "There is not enough memory for whole batches beside what other processes hold" in str(found.reason)
    with pytest.raises(WorkloadError, match="There is not enough memory for whole batches"):
        Updates(subject, subject.settings, seed=0)
    with pytest.raises(WorkloadError, match="There is not enough memory for whole batches"):
        rival.block(2)


def test_on_a_gpu_a_block_takes_its_memory_first_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, given = prepared(workload(), 1), list[int]()
    updates = Updates(subject, subject.settings, seed=0)
    updates._on_gpu, made = True, updates._trainer.position.update
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(updates._trainer.position.update))
    for _ in range(2):
        assert len(updates.block(3)) == 3
    assert given == [made + 4, made + 8]  # one more than is recorded in each block


def test_a_loader_that_a_function_gives_to_be_gone_through_once_is_made_anew_for_each_epoch() -> None:
    def batches() -> Iterator[Any]:
        yield from data()

    subject = prepared(workload(data=batches), 14)  # of six each
    updates = Updates(subject, subject.settings, seed=0)
    assert len(updates.block(20)) == 20
    assert len(first_batches(loader(subject.training), 14)) == 14
    with pytest.raises(WorkloadError, match="The loader gave 1 batch and then no more, but 8 are needed"):
        prepared(workload(data=iter([(torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))])), 8)


class Ends:
    """Ends in the timing, as a stream may."""

    pid = 1

    def block(self, calls: int) -> list[int]:
        raise WorkloadError("The loader gave no batch.")

    def pace(self) -> int:
        return 1


def test_what_a_rival_says_of_its_own_workload_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    address = f"/tmp/trimtab-{free_port()}"
    server = threading.Thread(target=serve, args=(Ends(), address, b"tests"), daemon=True)
    server.start()
    with RemoteRunner(address, b"tests") as runner:
        with pytest.raises(MeasurementError, match=r"could not run its side: WorkloadError: The loader gave no batch\."):
            runner.block(1)
        assert runner.pace() == 1
        runner.stop()
    server.join(20)
    assert not server.is_alive()


class Spoilt:
    """A loss that is no number for one batch of the first epoch, which is known by its first input."""

    def __init__(self, mark: float) -> None:
        self.mark = mark

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * torch.nan if float(batch[0][0, 0]) == self.mark else loss


def mark(update: int, updates: int = 12) -> float:
    """By what the batch of an update is known."""
    return float(prepared(workload(), updates).batches[update][0][0, 0])


@pytest.mark.parametrize("update", [2, 11])
def test_an_update_that_is_left_out_as_written_is_no_mismatch(update: int) -> None:
    subject = prepared(
        workload(loss=Spoilt(mark(update)), settings=Settings(optimizer=OptimizerSettings(nonfinite="skip"))), 12
    )
    written = subject.reference(seed=0)
    assert math.isnan(written.losses[update])
    again = from_json(BaselineLosses, json.loads(json.dumps(to_json(written))))  # as trials get it
    found = tried(subject, again, Updates(subject, subject.settings, seed=0))
    assert found.state is State.COMPLETE, found.reason
    assert found.parity is not None
    assert found.parity.max_abs is not None
    assert math.isfinite(found.parity.max_relative or 0.0)
    assert found.score == pytest.approx(written.final)
    assert found.drop is not None
    assert found.drop.n == (3 if update == 2 else 2)
    assert all("nan" not in note for note in train_jobs._meaning(subject, written))


def test_losses_that_are_no_numbers_are_alike_only_among_themselves() -> None:
    written = BaselineLosses.of([1.0, math.nan, 0.4, 0.5], [[1.0, math.inf, 0.4, 0.5]])
    assert written.tolerance[3] < 0.01
    assert parity(written, [1.0, math.nan, 0.4, 0.5], exact=True).ok
    assert not parity(written, [1.0, 0.5, 0.4, 0.5], exact=True).ok
    assert not parity(written, [math.nan, math.nan, 0.4, 0.5], exact=False).ok
    assert final([1.0, 2.0, math.nan, 3.0]) == 3.0
    assert increase(written, [1.0, math.nan, 0.5, 0.6], 0.01).value == pytest.approx(0.1)
    chance = BaselineLosses.of([1.0, 0.5], [[1.0, math.nan]])  # rounding decides what is a number
    assert parity(from_json(BaselineLosses, json.loads(json.dumps(to_json(chance)))), [1.0, 7.0], exact=True).ok


def test_why_the_settings_as_written_stay_is_said_in_whole_sentences() -> None:
    told = "The settings as written stay"
    assert why_settings_stay(["joined + eager: It proves nothing."], 3) == f"{told}. joined + eager: It proves nothing."
    assert why_settings_stay([], 0) == f"{told}: no others were measured within the budget."
    assert why_settings_stay([], 1) == f"{told}: of 1 other that was measured, none was surely faster within the limits."
    assert why_settings_stay([], 7) == f"{told}: of 7 others that were measured, none was surely faster within the limits."


def test_a_training_that_ends_by_itself_is_told_in_a_sentence() -> None:
    stopping = workload(loss=Spoilt(mark(4)), settings=Settings(optimizer=OptimizerSettings(nonfinite="stop")))
    subject = prepared(stopping, 12)
    with pytest.raises(NonFiniteError, match=r"ended after update 5 of the 12 that are compared\. The loss was not finite\."):
        subject.reference(seed=0)
    updates = Updates(subject, subject.settings, seed=0)
    for _ in range(2):
        with pytest.raises(WorkloadError, match=r"The training ended while its updates were timed\."):
            updates.block(100)
    broken = prepared(
        workload(
            loss=lambda model, batch: model(batch[0]).sum() * torch.nan,
            settings=Settings(optimizer=OptimizerSettings(nonfinite="ignore")),
        ),
        8,
    )
    with pytest.raises(NonFiniteError, match="Of the last 2 losses as written fewer than 2 are finite"):
        broken.reference(seed=0)


def gradients(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss with a penalty on the gradient."""
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return nn.functional.cross_entropy(outputs, batch[1]) + slope.square().mean()


def test_a_loss_that_is_made_of_gradients_is_tried_as_others_are() -> None:
    subject = prepared(workload(loss=gradients), 8)
    found = tried(subject, subject.reference(seed=0), Updates(subject, subject.settings, seed=0))
    assert found.state is State.COMPLETE, found.reason
    made = Trainer(
        network(),
        loss=gradients,
        optimizer=adam,
        settings=Settings(precision=PrecisionSettings(autocast="auto"), optimizer=OptimizerSettings(implementation="auto")),
    )
    notes = " ".join(made.fit(data(), epochs=20).notes)
    assert "cannot be measured" not in notes
    assert "autograd" not in notes
    assert "does not require grad" not in notes


class Forces(nn.Module):
    """A model that differentiates in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        return torch.autograd.grad(self.energy(inputs).sum(), inputs, create_graph=True)[0]


def test_whether_targets_are_too_coarse_is_asked_of_models_that_differentiate_too() -> None:
    def forces() -> Any:
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, 300 + x), batch_size=16)

    subject = prepared(workload(Forces, data=forces, loss=nn.MSELoss()), 8)
    assert subject.why_too_coarse(Settings(precision=PrecisionSettings(autocast="bfloat16")), 0.05) is not None


class Graph(nn.Module):
    """A model with a sparse matrix of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(8).to_sparse_coo())
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(torch.sparse.mm(self.neighbours, inputs.T).T)
        return found


def sparse() -> Any:
    x = torch.randn(6, 16, 8, generator=torch.Generator().manual_seed(1))
    return [(each.to_sparse_coo(), each[:, :3].argmax(1)) for each in x]


def on_sparse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0].to_dense()), batch[1])


def test_sparse_tensors_in_model_and_data_are_compared_as_others_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints = []
    for shift in (0.0, 0.0, 1.0):

        def model(shift: float = shift) -> nn.Module:
            made = Graph()
            made.neighbours._values().add_(shift)
            return made

        given = workload(model, data=sparse, loss=on_sparse)
        monkeypatch.setattr(train_jobs, "read_workload", lambda given, given_=given: given_)
        found = train_jobs.prepare_job({"workload": "", "updates": 8}, tmp_path)
        fingerprints.append(found["identity"])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_a_model_without_shapes_is_refused_by_the_name_of_its_parameter() -> None:
    with pytest.raises(UsageError, match=r"0\.weight has no shape before a forward pass, .* in the function that builds it"):
        prepared(workload(lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))), 8)


def test_a_process_among_several_is_tuned_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    subject = prepared(workload(), 8)
    assert len(subject.losses(subject.settings, seed=0)) == 8
    assert not dist.is_initialized()
