"""Accumulation is exact: what several batches do together is what one large batch does, written by hand."""

from __future__ import annotations

import copy
import functools
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trimtab.core.settings import DataSettings, MemorySettings, OptimizerSettings, Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.data.batch_structure import join
from trimtab.train.trainer import Trainer

Batch = tuple[torch.Tensor, torch.Tensor]
TOLERANCE = 1e-5
CLASSES, WIDTH = 7, 12


class Tagger(nn.Module):
    """A label for every position: (B, T) token numbers -> (B, CLASSES, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.mix(self.embedding(tokens))[0]).transpose(1, 2)
        return found


def tagged(lengths: Sequence[int], size: int = 3, ignored: Sequence[int] = ()) -> list[Batch]:
    """Batches of unequal lengths in which a third of the labels is ignored; all of them in the batches ``ignored``."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(0, 20, (size + index % 2, length), generator=draw)
        labels = torch.randint(0, CLASSES, tokens.shape, generator=draw)
        labels[torch.rand(labels.shape, generator=draw) < (2.0 if index in ignored else 0.3)] = -100
        batches.append((tokens, labels))
    return batches


def padded(batches: Sequence[Batch]) -> Batch:
    """All of ``batches`` as one; a recurrent net that runs forward does not notice what is appended."""
    longest = max(tokens.shape[1] for tokens, _ in batches)
    tokens = [functional.pad(tokens, (0, longest - tokens.shape[1])) for tokens, _ in batches]
    labels = [functional.pad(labels, (0, longest - labels.shape[1]), value=-100) for _, labels in batches]
    return torch.cat(tokens), torch.cat(labels)


def assert_close(a: nn.Module, b: nn.Module) -> None:
    """Parameters and buffers are the same within the rounding of float32, relative to the largest of each."""
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        error = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-3)
        assert error <= TOLERANCE, (name, float(error))


def by_hand(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    batches: Sequence[Any],
    clip: float | None,
    rate: float = 0.5,
) -> float:
    """One plain update per batch, and the loss of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    found = torch.zeros(())
    for batch in batches:
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return float(found.detach())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of :func:`by_hand`; linear in the gradient, so that it hides no wrong scale."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def masked(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss of one's own, with the number of its tokens; not a number where there are none."""
    tokens, labels = batch
    losses = functional.cross_entropy(model(tokens), labels.clamp_min(0), reduction="none")
    kept = labels != -100
    return (losses * kept).sum() / kept.sum(), kept.sum()


WEIGHTS = torch.linspace(0.2, 2.0, CLASSES)
LOSSES: dict[str, Any] = {
    "ignored": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "smoothed and weighted": nn.CrossEntropyLoss(label_smoothing=0.1, weight=WEIGHTS),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": functional.cross_entropy,
    "partial": functools.partial(functional.cross_entropy, label_smoothing=0.1, weight=WEIGHTS),
}


@pytest.mark.parametrize("ignored", [(), (0,), (3,)], ids=["", "nothing in the first", "nothing in the last"])
@pytest.mark.parametrize("name", [*LOSSES, "mean and weight"])
def test_unequal_batches_add_up_to_the_full_batch(name: str, ignored: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Tagger()
    batches = tagged([5, 2, 9, 4], ignored=ignored)
    plain, rate = copy.deepcopy(model), 0.005 if name == "sum" else 0.5
    loss = masked if name == "mean and weight" else LOSSES[name]

    def whole(model: nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = masked(model, batch)[0] if loss is masked else loss(model(batch[0]), batch[1])
        return found

    expected = by_hand(plain, whole, [padded(batches)] * 3, clip=0.3, rate=rate)
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9),
        settings=Settings(data=DataSettings(accumulate=4), optimizer=OptimizerSettings(clip_norm=0.3)),
        log_every=1,
    )
    summary = trainer.fit(batches, epochs=3)
    assert_close(model, plain)
    assert summary.updates == 3
    assert summary.loss == pytest.approx(expected, rel=TOLERANCE)


def test_a_large_batch_taken_apart_is_the_same_update() -> None:
    torch.manual_seed(0)
    model = Tagger()
    plain, batch = copy.deepcopy(model), padded(tagged([5, 2, 9, 4]))
    by_hand(plain, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), [batch] * 2, clip=None)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=sgd, settings=Settings(data=DataSettings(micro_batch=4)))
    assert trainer.fit([batch], epochs=2).updates == 2
    assert_close(model, plain)


def test_scheduler_and_optimizer_step_once_per_update() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    counted: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda o, a, k: counted.append(o.param_groups[0]["lr"]))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    batches = [(torch.randn(3, 4), torch.randn(3, 1)) for _ in range(7)]
    trainer = Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=optimizer,
        schedule=schedule,
        settings=Settings(data=DataSettings(accumulate=3, micro_batch=2), optimizer=OptimizerSettings(clip_norm=1.0)),
    )
    trainer.fit(batches, epochs=1)
    assert counted == [1.0, 0.5, 0.25]  # 3 + 3 + 1 batches


def normalised() -> nn.Module:
    """A net with BatchNorm in two and four dimensions, one with a cumulative average."""
    torch.manual_seed(0)
    body = [block(1 if i == 0 else 6, momentum) for i, momentum in enumerate((0.3, None, 0.1, 0.1))]
    head = [nn.Flatten(), nn.Linear(6 * 64, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)]
    return nn.Sequential(*body, *head)


def block(width: int, momentum: float | None) -> nn.Module:
    """Convolution, normalisation, activation."""
    return nn.Sequential(
        nn.Conv2d(width, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=momentum), nn.ReLU(inplace=True)
    )


def images(sizes: Sequence[int]) -> list[Batch]:
    """Batches of images whose brightness differs from batch to batch, which is what BatchNorm sees."""
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 8, 8, generator=draw) * (1 + i) + i, torch.randint(0, CLASSES, (size,), generator=draw))
        for i, size in enumerate(sizes)
    ]


def least_activations(batches: Sequence[Batch]) -> float:
    """The smallest budget that can be kept, as the refusal of a smaller one names it: what convolutions need differs by CPU."""
    settings = Settings(
        data=DataSettings(accumulate=len(batches), exact_batchnorm=True), memory=MemorySettings(activation_mb=0.01)
    )
    trainer = Trainer(normalised(), loss=nn.CrossEntropyLoss(), optimizer=sgd, settings=settings)
    with pytest.raises(UsageError, match=r"still takes \d+\.\d+ MB\. Give at least that") as refused:
        trainer.fit(batches, epochs=1)
    return float(str(refused.value).partition("still takes ")[2].partition(" MB")[0])


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
def test_exact_batchnorm_is_that_of_the_full_batch(recomputed: bool) -> None:
    model, batches = normalised(), images([8, 3, 5, 1])
    activation_mb = least_activations(batches) if recomputed else None
    plain = copy.deepcopy(model)
    by_hand(plain, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), [join(batches)] * 3, clip=None, rate=0.1)
    settings = Settings(
        data=DataSettings(accumulate=4, exact_batchnorm=True), memory=MemorySettings(activation_mb=activation_mb)
    )
    trainer = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        settings=settings,
    )
    trainer.fit(batches, epochs=3)
    assert_close(model, plain)  # running means and variances and the number of batches are among the buffers
    assert [int(b) for n, b in model.state_dict().items() if n.endswith("num_batches_tracked")] == [3] * 5
    if recomputed:
        assert any("recomputed" in note and "nothing" not in note for note in trainer.notes), trainer.notes


def test_without_exact_batchnorm_the_statistics_are_those_of_each_batch() -> None:
    model, batches = normalised(), images([8, 3, 5, 2])
    plain = copy.deepcopy(model)
    by_hand(plain, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), [join(batches)], clip=None, rate=0.1)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=sgd, settings=Settings(data=DataSettings(accumulate=4)))
    trainer.fit(batches, epochs=1)
    assert int(model.get_buffer("0.1.num_batches_tracked")) == 4
    with pytest.raises(AssertionError):
        assert_close(model, plain)


def test_exact_batchnorm_refuses_what_would_break_it() -> None:
    with pytest.raises(
        UsageError, match=r"exact_batchnorm runs the batches of an update as one, which data.micro_batch=2 would take apart"
    ):
        Settings(data=DataSettings(exact_batchnorm=True, micro_batch=2))
    ragged = [(torch.randn(2, 1, 8, 8), torch.zeros(2).long()), (torch.randn(2, 1, 9, 8), torch.zeros(2).long())]
    trainer = Trainer(
        normalised(),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        settings=Settings(data=DataSettings(accumulate=2, exact_batchnorm=True)),
    )
    with pytest.raises(WorkloadError, match=r"exact_batchnorm runs .* as one\. .*one type and differ in .* Pad them"):
        trainer.fit(ragged, epochs=1)


def labelled(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """A loss that goes by what is said of the whole batch."""
    sharper = {"first": 1.0, "second": 3.0}[batch.get("task", "first")]
    return functional.cross_entropy(model(batch["x"]) * sharper * batch["scale"], batch["y"], weight=batch["weights"])


@pytest.mark.parametrize(
    "differ",
    [
        lambda index: {"scale": 1.0 + index},
        lambda index: {"scale": torch.tensor(1.0 + index)},
        lambda index: {"task": ["first", "second"][index]},
        lambda index: {"task": "second"} if index else {},
        lambda index: {"weights": torch.arange(1.0, CLASSES + 1) if index else None},
        lambda index: {"weights": torch.arange(1.0, CLASSES + 1)},
    ],
)
def test_batches_run_as_one_only_where_they_differ_in_their_examples_alone(differ: Callable[[int], dict[str, Any]]) -> None:
    random = torch.Generator().manual_seed(0)
    batches = [
        {
            "x": torch.randn(4, WIDTH, generator=random),
            "y": torch.randint(0, CLASSES, (4,), generator=random),
            **{"scale": 1.0, "weights": None, **differ(index)},
        }
        for index in range(2)
    ]
    torch.manual_seed(0)
    apart = nn.Linear(WIDTH, CLASSES)
    together = copy.deepcopy(apart)
    for model, joined in ((apart, False), (together, True)):
        Trainer(model, loss=labelled, optimizer=sgd, settings=Settings(data=DataSettings(accumulate=2, joined=joined))).fit(
            batches, epochs=2
        )
    assert_close(together, apart)
    exact = Trainer(
        apart, loss=labelled, optimizer=sgd, settings=Settings(data=DataSettings(accumulate=2, exact_batchnorm=True))
    )
    with pytest.raises(WorkloadError, match=r"exact_batchnorm runs the batches of an update as one\. "):
        exact.fit(batches, epochs=1)


def test_batches_that_are_objects_are_not_taken_for_the_first() -> None:
    class Graph:
        def __init__(self, nodes: torch.Tensor) -> None:
            self.nodes = nodes

    def loss(model: nn.Module, graph: Graph) -> torch.Tensor:
        found: torch.Tensor = model(graph.nodes).square().mean()
        return found

    torch.manual_seed(0)
    graphs, apart = [Graph(torch.randn(3, WIDTH)) for _ in range(2)], nn.Linear(WIDTH, 1)
    together = copy.deepcopy(apart)
    for model, joined in ((apart, False), (together, True)):
        Trainer(model, loss=loss, optimizer=sgd, settings=Settings(data=DataSettings(accumulate=2, joined=joined))).fit(
            graphs, epochs=2
        )
    assert_close(together, apart)


class Encoding(UserDict[str, Any]):
    """A batch that answers to attributes, as those of tokenizers do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def test_batches_that_are_joined_stay_of_their_kind() -> None:
    def loss(model: nn.Module, batch: Encoding) -> torch.Tensor:
        assert isinstance(batch.pair, tuple)
        x, y = batch.pair
        found: torch.Tensor = nn.functional.cross_entropy(model(x), y)
        return found

    torch.manual_seed(0)
    batches = [Encoding({"pair": (torch.randn(4, WIDTH), torch.randint(0, CLASSES, (4,)))}) for _ in range(2)]
    apart = nn.Linear(WIDTH, CLASSES)
    together = copy.deepcopy(apart)
    for model, joined in ((apart, False), (together, True)):
        Trainer(model, loss=loss, optimizer=sgd, settings=Settings(data=DataSettings(accumulate=2, joined=joined))).fit(
            batches, epochs=2
        )
    assert_close(together, apart)


@pytest.mark.parametrize("other", [{"mask": torch.ones(4)}, {"scale": None}, {"sizes": (8, 8, 8)}])
def test_batches_that_hold_different_things_are_not_joined(other: dict[str, Any]) -> None:
    batch = {"x": torch.ones(4, WIDTH), "scale": torch.ones(4), "sizes": (8, 8)}
    for batches in ([batch, {**batch, **other}], [{**batch, **other}, batch]):
        with pytest.raises(WorkloadError, match="hold different things cannot be joined"):
            join(batches)
