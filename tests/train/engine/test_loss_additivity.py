"""Whether the loss of a batch is that of its parts: how it is found out, and what is done where it is not."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from _ranks import on_ranks
from _runs import settings_of
from trimtab.core.settings import DataSettings, MemorySettings, OptimizerSettings, Settings
from trimtab.train.engine.loss_additivity import compare
from trimtab.train.engine.step import Step
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.trainer import Trainer

PAD = 0
CHANGES = "data.micro_batch=None: batches are not taken apart, because that would change what is learnt."
PARTS = "An update from parts is not that of the whole."

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 8, generator=drawn()), torch.randn(count, 4, generator=drawn(1))


def texts(count: int = 12, *, uneven: bool = True) -> dict[str, torch.Tensor]:
    """Tokens of which some texts have fewer."""
    tokens = torch.randint(1, 8, (count, 10), generator=drawn())
    if uneven:
        tokens[count // 2 :, 2:] = PAD
        tokens[1, 1:] = PAD
    return {"tokens": tokens}


class Head(nn.Module):
    """A perceptron with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class Words(nn.Module):
    """Says what the next token is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(tokens[:, :-1])
        return found


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    """Each example is to be recognised among those of its batch."""
    found = model(batch[0])
    return functional.cross_entropy(found @ batch[1].T, torch.arange(len(found)))


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.mse_loss(model(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])


def noisy_contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    return contrast(model, (batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]))


def per_token(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the tokens of which nobody knows how many there are."""
    return functional.cross_entropy(model(**batch).flatten(0, 1), batch["tokens"][:, 1:].flatten(), ignore_index=PAD)


def weighed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return per_token(model, batch), batch["tokens"][:, 1:].ne(PAD).sum()


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def elsewhere(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that there is in training only, as that of detectors."""
    if not model.training:
        raise KeyError("loss")
    return contrast(model, batch)


def trainer(model: Callable[[], nn.Module], loss: Any, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    made = settings_of(**{"threads": 1, **settings})
    return Trainer(model(), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), settings=made, progress=False)


def step_of(made: Trainer) -> Step:
    return Step(made.model, made.context.objective, made.optimizer, made.settings, made.world, HostClock())


@pytest.mark.parametrize(
    ("model", "loss", "batch", "alike"),
    [
        (Head, nn.MSELoss(), vectors(), True),
        (Head, nn.MSELoss(reduction="sum"), vectors(), True),
        (Head, nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 1.0, 9.0])), (vectors()[0], torch.arange(16) % 4), True),
        (Head, lambda outputs, targets: ((outputs - targets) ** 2).mean(), vectors(), True),
        (Head, contrast, vectors(), False),
        (Head, contrast, vectors(3), False),
        (Head, total, vectors(), False),
        (Head, noisy, vectors(), True),
        (Head, noisy_contrast, vectors(), False),
        (Words, per_token, texts(uneven=False), True),
        (Words, per_token, texts(), False),
        (Words, weighed, texts(), True),
        (Head, elsewhere, vectors(), None),
        (Head, contrast, vectors(1), None),
        (Head, contrast, (*vectors(), torch.zeros(3)), None),
        (Head, lambda model, batch: model(batch[0]).mean() * torch.nan, vectors(), None),
    ],
)
def test_the_loss_of_some_examples_is_compared_with_that_of_their_parts(
    model: Callable[[], nn.Module], loss: Any, batch: Any, alike: bool | None
) -> None:
    made = trainer(model, loss)
    found = compare(made.context, step_of(made), batch)
    assert (None if found is None else found.additive) is alike


class Counted(nn.Module):
    """A loss with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return functional.mse_loss(outputs, targets)


def test_nothing_is_left_of_the_look() -> None:
    loss = Counted()
    made = trainer(Head, loss)
    frozen = made.model.get_submodule("layers.1").eval()
    state = {name: value.clone() for name, value in made.model.state_dict().items()}
    random = torch.get_rng_state()
    found = compare(made.context, step_of(made), vectors())
    assert found is not None
    assert found.additive
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in made.model.state_dict().items())
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert made.model.training
    assert loss.training
    assert not frozen.training
    assert loss.count == 0


def test_auto_leaves_batches_whole_whose_loss_compares_their_examples() -> None:
    def run(batch: Any) -> Trainer:
        made = trainer(Head, contrast, micro_batch=batch)
        made.fit([vectors(64)] * 3, epochs=1)
        return made

    auto, plain = run("auto"), run(None)
    assert (auto.settings.data.micro_batch, auto.decided) == (None, {"data.micro_batch": None})
    assert [note[: len(CHANGES)] for note in auto.notes] == [CHANGES]
    assert "The loss of 64 examples is " in auto.notes[0]
    for a, b in zip(auto.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_auto_keeps_its_decision_after_an_interruption(tmp_path: pathlib.Path) -> None:
    def run(folder: pathlib.Path, steps: list[int]) -> Trainer:
        for count in steps:
            torch.manual_seed(0)
            made = Trainer(
                Head(),
                loss=contrast,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
                settings=Settings(threads=1, data=DataSettings(micro_batch="auto", accumulate=2)),
                checkpoint=folder,
            )
            made.resume(missing_ok=True).fit([vectors(8)] * 8, steps=count)
        return made

    whole, parts = run(tmp_path / "whole", [4]), run(tmp_path / "parts", [2, 4])
    assert parts.settings.data.micro_batch is None
    assert parts.notes[0] == "data.micro_batch=None: as decided when the run began."
    for a, b in zip(whole.model.state_dict().values(), parts.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("loss", "settings", "told"),
    [
        (contrast, {"micro_batch": 4}, True),
        (contrast, {"accumulate": 2, "micro_batch": 4}, True),
        (contrast, {"accumulate": 2}, False),  # accumulated by the user, who says with that how the loss adds up
        (contrast, {"accumulate": 2, "micro_batch": 16}, False),
        (contrast, {"micro_batch": 64}, False),  # nothing is taken apart
        (contrast, {}, False),
        (noisy, {"accumulate": 2, "micro_batch": 4}, False),
    ],
)
def test_an_update_from_parts_that_is_not_that_of_the_whole_is_told_once(
    loss: Any, settings: dict[str, Any], told: bool
) -> None:
    made = trainer(Head, loss, **settings)
    data = [vectors(16)] * 4
    made.fit(data, epochs=1)
    made.fit(data, epochs=2)
    assert [note[: len(PARTS)] for note in made.notes] == [PARTS] * told
    assert all("return (mean, weight) from loss(model, batch)" in note for note in made.notes)


def test_a_split_for_want_of_memory_says_what_it_does_to_the_loss() -> None:
    def limited(loss: Any) -> Any:
        def short(model: nn.Module, batch: Any) -> Any:
            if len(batch[0]) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss(model, batch)

        return short

    found = {}
    for loss in (contrast, noisy, elsewhere):
        made = trainer(Head, limited(loss))
        made.fit([vectors(16)] * 2, epochs=1)
        found[loss] = made.notes[0].partition("parts of at most 8, with ")[2]
    assert found[contrast].startswith("other updates than those of whole batches. The loss of 8 examples is ")
    same = "the same updates, except that BatchNorm"
    assert found[noisy] == f"{same} sees smaller batches."
    assert found[elsewhere] == f"{same}, and a loss that compares examples, see smaller batches."


def test_a_run_that_is_adjusted_knows_what_speaks_against_parts() -> None:
    for loss, reason in ((contrast, "other updates would come of it. The loss of 16 examples is "), (noisy, "None")):
        made = trainer(Head, loss)
        made.fit([vectors(16)] * 2, epochs=1)
        assert str(made.context.fit.memory_plan.sizer.why_not_split(step_of(made))).startswith(reason)


# What two processes do; only the second has texts of unequal length.


def decisions(folder: pathlib.Path) -> Mapping[str, Any]:
    found = {}
    for sharding in ("replicate", "shard"):
        for name, settings in (("auto", {"micro_batch": "auto"}), ("parts", {"micro_batch": 4}), ("adjust", {"adjust": True})):
            made = trainer(Words, per_token, sharding=sharding, **settings)
            data = [texts(8, uneven=dist.get_rank() == 1)] * 4
            made.fit(Own(data), epochs=1)
            found[f"{sharding} {name}"] = [
                made.settings.data.micro_batch,
                made.notes,
                made.context.fit.memory_plan.sizer.changes_loss,
            ]
    return found


class Own(list[Any]):
    """A loader that has this process's own batches."""

    sharded = True


def test_processes_find_the_same(tmp_path: pathlib.Path) -> None:
    first, second = on_ranks(decisions, tmp_path)
    assert first == second
    for name, (batch, notes, fails) in first.items():
        assert (batch, fails) == (4 if name.endswith("parts") else None, True), name
        told = [note.startswith((CHANGES, PARTS)) for note in notes]
        assert sum(told) == (not name.endswith("adjust")), notes


class Followed(nn.Module):
    """A student, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)


def follow(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        for own, other in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1
        wanted = model.teacher(batch[0])
    return functional.mse_loss(model.student(batch[0]), wanted)


class Follow(nn.Module):
    """The same where the teacher is the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        model.__dict__["teacher"] = self.teacher
        return follow(model, batch)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(data=DataSettings(micro_batch="auto")),
        Settings(memory=MemorySettings(activation_mb=100)),
        Settings(data=DataSettings(accumulate=2)),
        Settings(memory_format="auto", compile="auto", optimizer=OptimizerSettings(implementation="auto")),
    ],
    ids=["batch", "activation_mb", "accumulate", "auto"],
)
@pytest.mark.parametrize("own", [False, True], ids=["of_the_model", "of_the_loss"])
def test_a_teacher_that_follows_in_the_forward_pass_is_where_a_loop_by_hand_has_it(settings: Settings, own: bool) -> None:
    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Followed()
        if not own:
            return model, follow
        del model.teacher
        return model, Follow()

    batches = [vectors(8), vectors(8), vectors(8), vectors(8)]
    model, loss = made()
    plain, plain_loss = made()
    trainer = Trainer(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), settings=settings)
    trainer.fit(batches, epochs=1)
    optimizer = torch.optim.SGD(plain.student.parameters(), lr=0.1)
    for first in range(0, 4, settings.data.accumulate):
        for batch in batches[first : first + settings.data.accumulate]:
            (plain_loss(plain, batch) / settings.data.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(model.student.parameters(), plain.student.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for one, other in zip(model.teacher.parameters(), plain.teacher.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
