"""Runs that end, and those that go on: with the same data or with other data, from where they stood, or not at all."""

from __future__ import annotations

import functools
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from _runs import COUNTED, DATA, EPOCH, LOADERS_THAT_END, Drawing, Line, Stream, loader, told, trainer
from trimtab import DataSettings, OptimizerSettings, PrecisionSettings, Settings, Trainer
from trimtab.errors import StorageError, UsageError
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.telemetry.events import Event, Progressed, Remarked, Saved, Validated

pytestmark = pytest.mark.usefixtures("one_thread")


def test_steps_that_end_with_an_epoch_complete_it() -> None:
    events: list[Event] = []
    made = trainer(callbacks=[lambda _, event: events.append(event)])
    summary = made.fit(loader(), loader(), steps=8)
    assert summary.epochs == 1
    assert summary.updates == 8
    assert sum(isinstance(event, Validated) for event in events) == 1


def test_a_run_that_early_stopping_had_ended_stays_ended(tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {"early_stopping": EarlyStopping(patience=2, min_delta=1e9), "checkpoint": tmp_path}
    assert trainer(**options).fit(loader(), loader(), epochs=9).epochs == 3
    summary = trainer(**options).resume().fit(loader(), loader(), epochs=9)
    assert summary.updates == 0
    assert summary.ended == "The validation's loss did not improve 2 times in a row."


def test_a_run_that_goes_on_knows_what_the_last_validation_found(tmp_path: pathlib.Path) -> None:
    metrics = {"nothing": lambda outputs, targets: float("nan"), "mean": lambda outputs, targets: float(outputs.mean())}
    before = trainer(checkpoint=tmp_path, metrics=metrics).fit(loader(), loader(), epochs=1)
    summary = trainer(checkpoint=tmp_path, metrics=metrics).resume().fit(loader(), loader(), steps=before.updates + 1)
    assert summary.metrics == pytest.approx(before.metrics, rel=0, abs=0, nan_ok=True)


def test_a_second_run_is_not_ended_by_what_had_ended_the_first() -> None:
    made = trainer(early_stopping=EarlyStopping(patience=2, min_delta=1e9))
    data = list(loader())
    assert made.fit(data, data, epochs=9).epochs == 3
    assert made.fit(data, data, epochs=9).epochs == 5
    assert made.fit(data, data, epochs=6).epochs == 6  # its patience is not at its end
    assert made.fit(data, data, epochs=9).epochs == 7


class Noisy(nn.Module):
    """Has a generator of its own; as a model, or as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.random = nn.Linear(1, 1), torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.random)
        found: torch.Tensor = self.layer(x / 32 + noise) if targets is None else ((x - targets + noise) ** 2).mean()
        return found


@pytest.mark.parametrize("every", [3, EPOCH])
@pytest.mark.parametrize("again", ["resume", "second fit"])
def test_generators_of_the_model_and_the_loss_go_on_where_they_stood(again: str, every: int, tmp_path: pathlib.Path) -> None:
    def made(**options: Any) -> Trainer:
        return trainer(Noisy, loss=Noisy().requires_grad_(False), **options)

    data = list(loader())
    want = told(whole := made(), "loss")
    whole.fit(data, data, epochs=2)
    got = told(cut := made(checkpoint=tmp_path), "loss")
    cut.fit(data, data, steps=every)
    if again == "resume":
        cut = made(checkpoint=tmp_path).resume()
        got += (rest := told(cut, "loss"))
        cut.fit(data, data, epochs=2)
        got += rest
    else:
        cut.fit(data, data, epochs=2)
    assert got == want


@pytest.mark.own_process
@pytest.mark.parametrize("make", LOADERS_THAT_END)
def test_a_signal_that_ends_the_workers_too_ends_the_run_with_a_checkpoint(
    make: Callable[[], Any], tmp_path: pathlib.Path
) -> None:
    made = trainer(checkpoint=tmp_path, log_every=1)
    summary = made.fit(make(), epochs=2)
    assert summary.ended == "It was interrupted by SIGTERM."
    assert Checkpoints(tmp_path).load()["position"]["update"] == summary.updates > 0


@pytest.mark.parametrize("kind", [Progressed, Saved])
def test_what_callbacks_draw_changes_nothing_in_the_run(kind: type[Event], tmp_path: pathlib.Path) -> None:
    def draw(made: Trainer, event: Event) -> None:
        if isinstance(event, kind):
            torch.manual_seed(event.update)
            random.seed(torch.rand(()).item())

    def end(made: Trainer, event: Event) -> None:
        if isinstance(event, Saved) and event.update == 5:
            made.stop("enough")

    def made(*callbacks: Callable[[Trainer, Event], None], folder: str) -> Trainer:
        options: dict[str, Any] = {"checkpoint": tmp_path / folder, "checkpoint_every": 5, "log_every": 3}
        return trainer(Drawing, callbacks=callbacks, **options)

    data = list(loader())
    (undisturbed := made(folder="undisturbed")).fit(data, epochs=2)
    (whole := made(draw, folder="whole")).fit(data, epochs=2)
    made(draw, end, folder="cut").fit(data, epochs=2)
    (resumed := made(draw, folder="cut").resume()).fit(data, epochs=2)
    assert torch.equal(whole.model.layer.weight, undisturbed.model.layer.weight)
    assert torch.equal(whole.model.layer.weight, resumed.model.layer.weight)


class Ending(list[Any]):
    """Batches whose run is asked to end before it has begun."""

    made: Trainer

    def __len__(self) -> int:
        self.made.stop("SIGTERM")
        return super().__len__()


def test_a_run_that_ended_before_anything_was_done_leaves_nothing(tmp_path: pathlib.Path) -> None:
    batches = Ending(loader())
    batches.made = trainer(checkpoint=tmp_path)
    assert batches.made.fit(batches, epochs=1).updates == 0
    assert Checkpoints(tmp_path).update() is None
    assert trainer(checkpoint=tmp_path).fit(loader(), epochs=1).updates == EPOCH


def test_a_run_that_ended_before_its_first_update_can_be_started_again(tmp_path: pathlib.Path) -> None:
    def stop(made: Trainer, event: Event) -> None:
        if isinstance(event, Remarked):
            made.stop("SIGTERM")

    options: dict[str, Any] = {"settings": Settings(optimizer=OptimizerSettings(implementation="auto")), "checkpoint": tmp_path}
    first = trainer(callbacks=[stop], **options)
    assert first.fit(loader(), epochs=1).updates == 0
    assert Checkpoints(tmp_path).update() == (0 if first.decided else None)
    with pytest.raises(StorageError, match=r"there is none\. Start with fit\(\); resume\(missing_ok=True\) does where"):
        trainer(checkpoint=tmp_path / "empty").resume()
    again = trainer(**options).resume(missing_ok=True)
    assert again.fit(loader(), epochs=1).updates == EPOCH


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_is_refused_before_the_run() -> None:
    made = trainer(checkpoint="/proc/nope")
    with pytest.raises(
        StorageError, match=r"Checkpoints cannot be written to /proc/nope: .*\. Give another checkpoint folder\."
    ):
        made.fit(loader(), epochs=1)
    assert made.position.update == 0


@pytest.mark.parametrize("name", ["checkpoint_every", "log_every"])
def test_a_number_of_updates_below_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 0; it is a number of updates: a whole number of at least 1"):
        trainer(**{name: 0})


def test_other_groups_of_parameters_are_refused(tmp_path: pathlib.Path) -> None:
    trainer(checkpoint=tmp_path).fit(loader(), steps=1)
    model = Line()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    made, before = trainer(model, optimizer=torch.optim.SGD(groups, lr=0.1), checkpoint=tmp_path), model.layer.weight.clone()
    with pytest.raises(
        UsageError, match=r"was made with optimizer groups of 2 parameters, not of 1 and 1\. Give the optimizer"
    ):
        made.resume()
    assert torch.equal(before, model.layer.weight)


def test_a_run_that_is_over_is_not_begun() -> None:
    made = trainer()
    made.fit(loader(), epochs=3)
    for data in (loader(), [(torch.ones(1, 1), torch.ones(1, 1))]):
        with pytest.raises(UsageError, match=r"epochs=3 counts in all, and this trainer has made 3\. Give epochs=6 for 3 more"):
            made.fit(data, epochs=3)
    with pytest.raises(UsageError, match=r"steps=10 counts in all, and this trainer has made 24\. Give steps=34"):
        made.fit(loader(), steps=10)


def numbered(start: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of one example, which is its number."""
    return [(torch.full((1, 1), float(start + index)), torch.ones(1, 1)) for index in range(count)]


@pytest.mark.parametrize("make", [list, iter], ids=["list", "iterator"])
@pytest.mark.parametrize("count", [4, 10])
def test_other_data_begins_at_its_beginning(make: Callable[[Any], Any], count: int) -> None:
    made = trainer()
    made.fit(make(numbered(0, 10)), steps=6)
    summary = made.fit(make(numbered(100, count)), epochs=1)
    assert made.model.seen == [*range(6), *range(100, 100 + count)]
    note = "The run before ended after batch 6 of an epoch of other data; this data begins at its beginning."
    assert (summary.updates, summary.notes) == (count, (note,))


def test_the_same_data_goes_on_where_it_was_left() -> None:
    made, data = trainer(), numbered(0, 10)
    made.fit(data, steps=6)
    assert made.fit(data, epochs=1).notes == ()
    assert made.model.seen == [*range(10)]
    made = trainer()
    made.fit(DataLoader(DATA, batch_size=4), steps=6)
    assert made.fit(DataLoader(DATA, batch_size=4), epochs=1).notes == ()
    assert made.model.seen == [*range(32)]
    made.fit(DataLoader(DATA, batch_size=4), steps=EPOCH + 2)
    assert made.fit(DataLoader(DATA, batch_size=8), epochs=2).updates == 4  # as many batches would be other examples


def test_a_second_run_does_not_look_for_the_scale_of_float16_again() -> None:
    def made() -> Trainer:
        loss = lambda outputs, targets: ((outputs - targets) ** 2).mean() * 300  # noqa: E731
        optimizer = functools.partial(torch.optim.SGD, lr=1e-6)
        return trainer(
            loss=loss,
            optimizer=optimizer,
            settings=Settings(precision=PrecisionSettings(autocast="float16"), data=DataSettings(accumulate=2)),
        )

    data = [*DataLoader(DATA, batch_size=4)]
    whole, parts = made(), made()
    skipped = whole.fit(data, epochs=6).skipped
    assert 0 < skipped < whole.position.update
    for epochs in (2, 4, 6):
        assert parts.fit(data, epochs=epochs).skipped <= skipped
    assert parts.position.skipped == skipped
    assert torch.equal(whole.model.layer.weight, parts.model.layer.weight)
    parts.fit(data[:2], epochs=7)  # other data, on the same model
    assert parts.position.skipped == skipped


def test_other_data_has_early_stopping_of_its_own() -> None:
    made = trainer(early_stopping=EarlyStopping(patience=1, min_delta=1e9))
    assert made.fit(loader(), loader(), epochs=9).epochs == 2
    best = made.position.best
    other = [(torch.ones(1, 1), torch.ones(1, 1))] * 3
    summary = made.fit(other, other, epochs=9)
    assert (summary.updates, summary.epochs) == (6, 4)
    assert made.position.best != best


def unsized(count: int) -> DataLoader[Any]:
    """A loader that does not say how long it is."""
    return DataLoader(Stream(lambda _: [(COUNTED[place], COUNTED[place]) for place in range(count)]), 1)


@pytest.mark.parametrize(
    ("first", "second", "count", "now"),
    [
        (lambda: loader(batch_size=2), lambda: loader(batch_size=8), 32, "4 batches and not 16"),
        (lambda: unsized(12), lambda: unsized(4), 4, "fewer batches"),
    ],
)
def test_an_epoch_of_another_length_begins_again(first: Any, second: Any, count: int, now: str, tmp_path: pathlib.Path) -> None:
    trainer(checkpoint=tmp_path).fit(first(), steps=10)
    resumed = trainer(checkpoint=tmp_path).resume()
    summary = resumed.fit(second(), epochs=1)
    assert sorted(resumed.model.seen) == list(range(count))
    said = f"The run before ended after batch 10 of an epoch of other data, and this has {now}: the epoch begins again."
    assert summary.notes[-1] == said


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_goes_on_from_its_last_parameters_and_not_from_the_best(ema: float | None) -> None:
    def wild() -> Trainer:
        wide = functools.partial(torch.optim.SGD, lr=1.0)
        return trainer(Drawing, ema=ema, early_stopping=EarlyStopping(patience=50), optimizer=wide)

    data = list(loader())
    want = told(whole := wild(), "loss")
    whole.fit(data, data, epochs=6)
    got = told(made := wild(), "loss")
    made.fit(data, data, epochs=3)
    made.fit(data, data, epochs=6)
    assert got == want
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), whole.model.parameters(), strict=True))
    weight = torch.full((1, 1), 0.25)
    made.model.layer.load_state_dict({"weight": weight, "bias": torch.zeros(1)})  # what its owner puts there stays
    made.optimizer.param_groups[0]["lr"] = 0.0
    made.context.early_stopping, made.context.best_parameters = None, None
    made.fit(data, epochs=7)
    assert torch.equal(made.model.layer.weight, weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_run_on_a_gpu_goes_on_after_its_best_parameters_were_shown(tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {
        "settings": Settings(device="cuda"), "early_stopping": EarlyStopping(patience=9), "checkpoint": tmp_path,
    }  # fmt: skip
    data, held_out = loader(), loader()
    trainer(**options).fit(data, held_out, epochs=2)
    resumed = trainer(**options).resume()
    assert resumed.fit(data, held_out, epochs=2).updates == 0  # the best ones are those of the checkpoint
    assert resumed.fit(data, held_out, epochs=3).updates == EPOCH


def test_data_that_may_have_no_end_asks_for_checkpoints_on_the_way(tmp_path: pathlib.Path) -> None:
    def notes(**options: Any) -> list[str]:
        made = trainer(**options)
        made.fit(loader(Stream(lambda _: DATA), shuffle=False), steps=3)
        return [note for note in made.notes if "checkpoint_every=1000" in note]

    (note,) = notes(checkpoint=tmp_path / "one")
    assert note.startswith("Nothing tells how long an epoch of the loader is, and a checkpoint is written when one ends, or")
    assert notes(checkpoint=tmp_path / "two", checkpoint_every=2) == notes() == []
