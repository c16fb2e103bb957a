"""What a loss may do with its batch and may return, and what a module may keep beside its tensors."""

from __future__ import annotations

import collections
import copy
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from _peaks import write_peaks
from trimtab import DataSettings, MemorySettings, OptimizerSettings, Settings, Trainer
from trimtab.core.workload import Training, Workload
from trimtab.errors import UsageError, WorkloadError
from trimtab.evaluation.training.workload import prepared
from trimtab.execution.jobs.training import _fingerprint
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.engine.setup import loss_on, optimizer_for
from trimtab.train.loss.adapter import LossAdapter, copy_containers
from trimtab.train.runtime.snapshots import rolled_back
from trimtab.train.telemetry.mfu import flops_share

CLASSES = 4
SGD = functools.partial(torch.optim.SGD, lr=0.01)
WEIGHTED = [nn.CrossEntropyLoss(torch.ones(CLASSES)), functools.partial(functional.cross_entropy, weight=torch.ones(CLASSES))]
Batches = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def peaks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and a peak of it that the share of a run is told of; torch's threads as they were afterwards."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    write_peaks(tmp_path / "cache", 10.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches(count: int = 4) -> Batches:
    random = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 6, generator=random), "labels": torch.randint(0, CLASSES, (8,), generator=random)}
        for _ in range(count)
    ]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def popping(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch.pop("labels")
    return functional.cross_entropy(model(batch["x"]), labels)


def trainer(loss: Any = popping, model: nn.Module | None = None, **options: Any) -> Trainer:
    return Trainer(model or network(), **{"loss": loss, "optimizer": SGD, **options})


# A loss that takes its batch apart.


class Pair(NamedTuple):
    first: list[int]
    second: Any


def test_a_batch_is_handed_out_in_containers_of_its_own() -> None:
    tensor = torch.zeros(2)
    batch = {
        "pair": Pair([1], (tensor, {"a": [tensor]})),
        "user": collections.UserDict({"b": [tensor]}),
        "count": collections.Counter("aab"),
        "default": collections.defaultdict(list, c=[tensor]),
        "size": tensor.shape,
    }
    before, given = repr(batch), copy_containers(batch)
    assert repr(given) == before
    assert [type(value) for value in given.values()] == [type(value) for value in batch.values()]
    assert given["pair"].second[0] is tensor
    given["pair"].first.clear()
    given["pair"].second[1]["a"].append(3)
    given["user"]["b"].clear()
    del given["user"]["b"], given["default"]["c"], given["count"]["a"], given["size"]
    assert repr(batch) == before


def test_a_loss_may_take_its_batch_apart_wherever_batches_are_used_again() -> None:
    summary = trainer(settings=Settings(threads=1, optimizer=OptimizerSettings(implementation="auto"))).fit(
        batches(), batches(2), epochs=2
    )
    assert summary.updates == 8
    assert summary.flops_share is not None
    assert not any("cannot be measured" in note or "it fails" in note for note in summary.notes)
    workload = Workload(name="dicts", mode="train", model=network, training=Training(data=batches, optimizer=SGD, loss=popping))
    assert len(prepared(workload, 3).reference(seed=0).losses) == 3


def test_a_loss_is_called_in_updates_and_validations_alone() -> None:
    calls: list[None] = []

    def counted(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(None)
        return popping(model, batch)

    assert trainer(counted).fit(batches(), batches(2), epochs=2).flops_share is None
    assert len(calls) == 2 * (4 + 2)


def test_a_loss_that_misses_a_key_is_named_though_settings_decide_themselves() -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["label"])

    made = trainer(loss, settings=Settings(optimizer=OptimizerSettings(implementation="auto")))
    with pytest.raises(WorkloadError, match="The model or its loss raised: KeyError: 'label'"):
        made.fit(batches(), epochs=1)
    assert flops_share(made.context, batches(1), 1.0)[0] is None


def test_compilation_that_a_loss_goes_around_is_told_of() -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return functional.cross_entropy(self.network(batch["x"]), batch["labels"])

    made = trainer(lambda model, batch: model.training_step(batch), Stepping(), settings=Settings(compile=True))
    said = "compile is off: the model cannot be compiled. The loss calls methods of the model, of which only model(...) itself"
    assert any(note.startswith(said) for note in made.fit(batches(), epochs=1).notes)


# What a loss returns beside the mean.


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (({"accuracy": 0.5},), "The loss returned a dict beside the mean."),
        ((torch.zeros(8, CLASSES),), "The loss returned a tensor of shape (8, 4) beside the mean."),
        ((None,), "The loss returned None beside the mean."),
        ((3, {}), "The loss returned 3 values."),
        ((-1,), "The loss returned -1.0 beside the mean, which no mean is over."),
        ((float("nan"),), "The loss returned nan beside the mean, which no mean is over."),
        ((torch.tensor(-2.0),), "The loss returned -2.0 beside the mean, which no mean is over."),
        ((torch.tensor(0.5, requires_grad=True),), "The loss returned a tensor that carries gradients beside the mean."),
    ],
)
def test_only_a_weight_may_stand_beside_the_mean(beside: tuple[Any, ...], said: str) -> None:
    made = trainer(lambda model, batch: (popping(model, batch), *beside))
    with pytest.raises(WorkloadError) as error:
        made.fit(batches(), epochs=1)
    assert str(error.value).startswith(f"{said} Give the mean alone, or (mean, weight)")
    assert made.position.update == 0


@pytest.mark.parametrize("weight", [3, 2.5, 0, np.float32(2.5), np.int64(3), torch.tensor(3)])
def test_a_weight_is_any_number_that_a_mean_can_be_over(weight: Any) -> None:
    objective = LossAdapter(lambda model, batch: (popping(model, batch), weight))
    assert float(objective(network(), batches(1)[0])[1]) == float(weight)
    assert objective(network(), batches(1)[0], weighed=False)[1] == 1.0


# State that is no tensor.


class Remembering(nn.Module):
    """A network with extra state, as layers of low precision have."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.network, self.extra = network(), extra if extra is not None else {"scale": 2.0, "seen": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and isinstance(self.extra, dict):
            self.extra["seen"][0] += 1
        found: torch.Tensor = self.network(x)
        return found

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_is_kept_restored_and_put_back(tmp_path: pathlib.Path) -> None:
    stopping = EarlyStopping(min_delta=1e9)  # the first validation is the best
    options = {"checkpoint": tmp_path / "run", "early_stopping": stopping}
    first = trainer(model=Remembering(), **options)
    first.fit(batches(), batches(2), epochs=1)
    assert first.model.extra == {"scale": 2.0, "seen": [4]}
    model = Remembering({"scale": 0.0, "seen": [0]})
    resumed = trainer(model=model, **options).resume()
    assert model.extra == {"scale": 2.0, "seen": [4]}
    resumed.fit(batches(), batches(2), epochs=2)
    assert resumed.position.best is not None
    assert model.extra == {"scale": 2.0, "seen": [4]}


def test_extra_state_that_no_checkpoint_can_hold_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="A builtins.bytes cannot be kept in a checkpoint. Use tensors, numbers"):
        trainer(model=Remembering(b"pickled"), checkpoint=tmp_path / "run").fit(batches(), epochs=1)


def test_a_study_of_a_model_with_extra_state_knows_its_tensors() -> None:
    def of(scale: float) -> str:
        def model() -> nn.Module:
            made = Remembering()
            made.network[0].weight.data.mul_(scale)
            return made

        training = Training(data=batches, optimizer=SGD, loss=popping)
        subject = prepared(Workload(name="extra", mode="train", model=model, training=training), 1)
        return _fingerprint(subject, subject.reference(seed=0))

    assert of(1.0) == of(1.0) != of(2.0)


@pytest.mark.parametrize(("kind", "weight"), [("GPT2ForSequenceClassification", 2), ("GPT2LMHeadModel", 12)])
def test_the_class_of_a_model_says_what_its_loss_is_a_mean_over(kind: str, weight: int) -> None:
    """A classifier that was read from a language model's checkpoint still has that one's name in its config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0)
    model = getattr(transformers, kind)(config)
    model.config.architectures = ["GPT2LMHeadModel"]
    tokens = torch.randint(1, 20, (2, 7))
    labels = torch.tensor([0, 2]) if weight == 2 else tokens
    assert int(LossAdapter(None)(model, {"input_ids": tokens, "labels": labels})[1]) == weight


@pytest.mark.parametrize(("shifts", "weight"), [(True, 12), (False, 14)])
def test_a_class_of_its_own_that_asks_transformers_for_its_loss_is_a_mean_over_what_that_compares(
    shifts: bool, weight: int
) -> None:
    transformers = pytest.importorskip("transformers")

    class Speaker(transformers.GPT2PreTrainedModel):  # type: ignore[name-defined, misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.body, self.head = transformers.GPT2Model(config), nn.Linear(8, 20)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.body(input_ids).last_hidden_state)
            return {"loss": self.loss_function(logits, labels, 20)}

    class Naming(Speaker):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(input_ids=input_ids, labels=labels)

    class Tagger(transformers.GPT2PreTrainedModel):  # type: ignore[name-defined, misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.table = nn.Embedding(20, 20)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": functional.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())}

    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    tokens = torch.randint(1, 20, (2, 7))
    for kind in (Speaker, Naming) if shifts else (Tagger,):
        assert int(LossAdapter(None)(kind(config), {"input_ids": tokens, "labels": tokens})[1]) == weight


def test_a_loss_that_is_a_module_may_take_the_model(tmp_path: pathlib.Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return functional.cross_entropy(model(batch["x"]), batch["labels"]) * self.scale

    made = Trainer(network(), loss=(loss := Scaled()), optimizer=SGD, checkpoint=tmp_path)
    assert made.fit(batches(), batches(), epochs=1).updates == 4
    assert float(loss.scale.detach()) < 1
    Trainer(network(), loss=(again := Scaled()), optimizer=SGD, checkpoint=tmp_path).resume()
    assert torch.equal(again.scale, loss.scale)


def test_a_class_of_its_own_goes_by_what_the_config_says() -> None:
    class Wrapped(nn.Linear):
        config = type("Config", (), {"architectures": ["GPT2LMHeadModel"]})

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x).mean()}

    batch = {"x": torch.randn(2, 4), "labels": torch.ones(2, 7, dtype=torch.long)}
    assert int(LossAdapter(None)(Wrapped(4, 3), batch)[1]) == 12


@pytest.mark.parametrize("ignored", [255, -1])
def test_class_weights_go_with_any_label_that_is_left_out(ignored: int) -> None:
    weight, inputs, labels = torch.tensor([1.0, 2.0, 4.0]), torch.randn(8, 4), torch.randint(0, 3, (8,))
    labels[::2] = ignored
    loss = nn.CrossEntropyLoss(weight=weight, ignore_index=ignored)
    found, total = LossAdapter(loss)(nn.Linear(4, 3), (inputs, labels))
    assert float(total) == float(weight[labels[1::2]].sum())
    assert torch.isfinite(found)
    labels[1] = 7
    with pytest.raises(WorkloadError, match="A label is 7, but the model has 3 outputs"):
        LossAdapter(loss)(nn.Linear(4, 3), (inputs, labels))


def test_labels_that_are_bytes_are_counted_whatever_their_number() -> None:
    batch = torch.randn(3, 4), torch.tensor([156, 3, 100], dtype=torch.uint8)
    assert float(LossAdapter(nn.CrossEntropyLoss())(nn.Linear(4, 200), batch)[1]) == 3
    weighted = nn.CrossEntropyLoss(weight=torch.full((200,), 2.0), ignore_index=100)
    assert float(LossAdapter(weighted)(nn.Linear(4, 200), batch)[1]) == 4


# A loss with parameters or a state of its own.


class Centres(nn.Module):
    """Learns a place for each class, counts its calls, and compares by a network that learns nothing."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.places, self.fixed = nn.Parameter(torch.randn(CLASSES, CLASSES)), nn.Linear(CLASSES, CLASSES).eval()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return functional.cross_entropy(self.fixed(outputs) @ self.places.T, targets)


def pairs(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(batch["x"], batch["labels"]) for batch in batches(count)]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_the_parameters_of_a_loss_are_trained_as_by_hand_and_go_on(tmp_path: pathlib.Path) -> None:
    model, loss = network(), Centres()
    by_hand = momentum([*model.parameters(), loss.places])
    for inputs, targets in pairs() * 2:
        by_hand.zero_grad()
        loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), loss.places], 0.1)
        by_hand.step()

    def made(**options: Any) -> Trainer:
        return trainer(
            Centres(),
            optimizer=momentum,
            settings=Settings(optimizer=OptimizerSettings(clip_norm=0.1)),
            checkpoint=tmp_path,
            **options,
        )

    first = made()
    said = "The optimizer trains 1 parameter of the loss too. loss.requires_grad_(False) before Trainer(...) leaves it alone."
    assert first.fit(pairs(), epochs=1).notes == (said,)
    resumed = made().resume()
    resumed.fit(pairs(), epochs=2)
    for part, other in ((model, resumed.model), (loss, resumed.context.objective.loss)):
        assert isinstance(other, nn.Module)
        torch.testing.assert_close(other.state_dict(), part.state_dict())
    both = momentum([*(model := network()).parameters(), *(loss := Centres()).parameters()])
    assert trainer(loss, model, optimizer=both).optimizer is both
    before = loss.places.detach().clone()
    assert trainer(loss.requires_grad_(False), network()).fit(pairs(), epochs=1).notes == ()
    assert torch.equal(loss.places, before)


def test_a_loss_of_another_kind_does_not_get_what_the_first_had_learnt(tmp_path: pathlib.Path) -> None:
    counting = Centres().requires_grad_(False)
    trainer(counting, checkpoint=tmp_path).fit(pairs(), epochs=1)
    again = Centres().requires_grad_(False)
    assert trainer(again, checkpoint=tmp_path).resume().notes == []
    assert again.calls == counting.calls == 4
    other = trainer(nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), checkpoint=tmp_path).resume()
    assert other.notes == ["The checkpoint was made with another loss: what that had learnt or counted is left out."]


def test_parameters_of_a_loss_that_would_differ_between_processes_are_refused() -> None:
    said = r"The optimizer trains 1 parameter of the loss, but between the 2 processes only gradients of the model cross\. Put"
    with pytest.raises(UsageError, match=said):
        optimizer_for(network(), SGD, Centres(), processes=2)
    optimizer_for(network(), SGD, Centres().eval(), processes=2)


def test_a_trial_does_not_begin_with_a_loss_that_another_has_trained() -> None:
    loss = Centres()
    before = copy.deepcopy(loss.state_dict())
    training = Training(data=pairs, optimizer=functools.partial(torch.optim.SGD, lr=1.0), loss=loss)
    prepared(Workload(name="centres", mode="train", model=network, training=training), 3).reference(seed=0)
    torch.testing.assert_close(loss.state_dict(), before)


class Seen(nn.Module):
    """Counts the examples that it was trained on, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.random, self.modes = torch.Generator().manual_seed(0), set[bool]()

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.modes.add(self.training)
        self.get_buffer("seen").add_(len(targets) * self.training)
        return functional.cross_entropy(outputs, targets) * (1 + 0 * torch.rand((), generator=self.random))


class Narrow(nn.Linear):
    """Has no memory for more than five examples at once; or never, for the third batch of whatever size."""

    def __init__(self, most: int = 5) -> None:
        super().__init__(6, CLASSES)
        self.most, self.calls = most, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.training and (len(x) > self.most or self.calls == 3):
            raise torch.OutOfMemoryError("injected")
        return super().forward(x)


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        (Settings(), network),
        (Settings(data=DataSettings(micro_batch="auto")), network),
        (Settings(memory=MemorySettings(activation_mb=1.0)), network),
        (Settings(data=DataSettings(accumulate=4)), lambda: Narrow(99)),  # the second batch but one
        (Settings(data=DataSettings(accumulate=4)), Narrow),
    ],
    ids=["plain", "auto", "budget", "third of four", "narrow"],
)  # fmt: skip
def test_a_loss_counts_what_is_learnt_and_nothing_else(settings: Settings, model: Any) -> None:
    loss = Seen()
    trainer(loss, model(), settings=settings).fit(pairs(), pairs(), epochs=1)
    assert int(loss.get_buffer("seen")) == 32
    assert loss.modes == {True, False}
    assert loss.training


def test_a_loss_of_which_a_part_is_frozen_is_so_after_a_validation() -> None:
    loss = Centres()
    loss.fixed.eval()
    trainer(loss).fit(pairs(), pairs(), epochs=1)
    assert (loss.training, loss.fixed.training) == (True, False)


def test_a_rollback_leaves_no_gradient_and_no_draw_in_a_loss() -> None:
    model, loss, noisy = network(), Centres(), Seen()
    with rolled_back(model, loss=loss):
        loss(model(pairs()[0][0]), pairs()[0][1]).backward()
    assert loss.places.grad is None
    assert loss.calls == 0
    before = noisy.random.get_state()
    with rolled_back(model, loss=noisy):
        noisy(model(pairs()[0][0]), pairs()[0][1])
    assert torch.equal(noisy.random.get_state(), before)


def test_a_rollback_puts_the_parameters_of_a_loss_back() -> None:
    model, loss = network(), Centres()
    before, optimizer = loss.places.detach().clone(), momentum([*model.parameters(), loss.places])
    with rolled_back(model, optimizer):
        loss(model(pairs()[0][0]), pairs()[0][1]).backward()
        optimizer.step()
    assert torch.equal(loss.places, before)


@pytest.mark.parametrize("loss", WEIGHTED)
def test_the_tensors_of_a_loss_come_to_the_device(loss: Any) -> None:
    placed = loss_on(copy.deepcopy(loss), torch.device("meta"))
    assert (placed.weight if isinstance(placed, nn.Module) else placed.keywords["weight"]).is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("loss", WEIGHTED)
def test_a_loss_with_weights_of_classes_runs_on_a_gpu(loss: Any) -> None:
    made = trainer(loss=copy.deepcopy(loss), settings=Settings(device="cuda", data=DataSettings(accumulate=2)))
    data = [(batch["x"], batch["labels"]) for batch in batches(8)]
    assert made.fit(data, epochs=1).updates == 4


class Carrying(nn.Module):
    """A recurrent network that goes on from the state in which the last batch left it, and keeps it as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, CLASSES)
        self.state: torch.Tensor | None = None
        self.past: list[torch.Tensor] = []
        self.total, self.calls = torch.zeros(1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x, self.state)
        self.state = self.last = state.detach()
        self.past.append(self.last)
        self.total += len(x)
        self.calls += 1
        found: torch.Tensor = self.head(state)
        return found


@pytest.mark.parametrize(
    "settings",
    [
        Settings(data=DataSettings(accumulate=2)),
        Settings(memory=MemorySettings(activation_mb=1.0)),
        Settings(data=DataSettings(micro_batch="auto")),
    ],
    ids=str,
)
def test_a_state_that_a_model_carries_is_that_of_its_batches_alone(settings: Settings) -> None:
    batches, ended = pairs(), []
    for given in (Settings(data=DataSettings(accumulate=settings.data.accumulate)), settings):
        torch.manual_seed(0)
        model = Carrying()
        trainer(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), model, settings=given).fit(
            batches, epochs=1
        )
        assert [len(x) for x in model.past] == [len(x) for x, _ in batches]
        assert int(model.total) == sum(len(x) for x, _ in batches)
        ended.append(model)
    assert torch.equal(ended[0].head.weight, ended[1].head.weight)


def test_a_rollback_puts_attributes_back() -> None:
    model = Carrying()
    past, total = model.past, model.total
    with rolled_back(model):
        model(pairs()[0][0])
    assert model.state is None
    assert not hasattr(model, "last")
    assert model.past is past == []
    assert model.total is total
    assert not total
    assert model.calls == 1  # of what is no tensor nobody knows whether it is to be put back


@pytest.mark.parametrize("loss", [lambda m, batch: m(batch[0]).mean(), nn.TripletMarginLoss()], ids=["name", "three"])
def test_a_loss_that_takes_something_else_is_told_how_losses_are_called(loss: Any) -> None:
    with pytest.raises(WorkloadError, match=r"known by the name of its first parameter: def loss\(model, batch\)"):
        trainer(loss).fit(pairs(), epochs=1)


def test_a_model_that_takes_something_else_is_not_told_of_as_its_loss() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(x * mask)
            return found

    with pytest.raises(WorkloadError, match=r"missing 1 required positional argument: 'mask'\.?$"):
        trainer(nn.CrossEntropyLoss(), Masked()).fit(pairs(), epochs=1)
