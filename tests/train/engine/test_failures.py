"""What a loader or a callback raises is said, and costs no update that was made before it."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from _ranks import on_ranks
from _runs import COUNTED, EPOCH, Drawing, Line, loader, told, trainer
from trimtab import DataSettings, OptimizerSettings, PrecisionSettings, Settings, Trainer
from trimtab.errors import WorkloadError
from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.telemetry.events import Event, Progressed, Remarked

pytestmark = pytest.mark.usefixtures("one_thread")


class Faulty(Dataset[Any]):
    """Raises at one place, until it is mended."""

    def __init__(self, fault: int | None, count: int = 32) -> None:
        self.fault, self.count = fault, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        if place == self.fault:
            raise KeyError("corrupt")
        return COUNTED[place % 32], COUNTED[place % 32]


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_a_loader_raises_as_it_starts_is_said() -> None:
    context = multiprocessing.get_context("spawn")
    unsent = DataLoader(Faulty(None), 4, num_workers=1, multiprocessing_context=context, collate_fn=lambda rows: rows)
    with pytest.raises(WorkloadError, match=r"The loader raised: (PicklingError|AttributeError): Can't (get local|pickle)"):
        trainer().fit(unsent, epochs=1)


def test_what_a_loader_raises_as_it_is_gone_through_again_is_said(tmp_path: pathlib.Path) -> None:
    trainer(checkpoint=tmp_path).fit(DataLoader(Faulty(None), 4), steps=4)
    with pytest.raises(WorkloadError, match="The loader raised: KeyError: 'corrupt'"):
        trainer(checkpoint=tmp_path).resume().fit(DataLoader(Faulty(1), 4), epochs=1)


class Exhausted(Faulty):
    """Takes an iterator for endless that is not."""

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        next(iter(()) if place == self.fault else iter([place]))
        return super().__getitem__(place)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_ends_before_its_data_is_told_of(workers: int) -> None:
    said = "The loader gave 2 batches in an epoch, but its len() says 8."
    notes = trainer().fit(DataLoader(Exhausted(9), 4, num_workers=workers), epochs=2).notes
    assert len([note for note in notes if note.startswith(said)]) == 1
    assert not any("len()" in note for note in trainer().fit(DataLoader(Faulty(None), 4), epochs=2).notes)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(precision=PrecisionSettings(autocast="auto")),
        Settings(data=DataSettings(micro_batch="auto"), optimizer=OptimizerSettings(implementation="auto")),
    ],
)
def test_what_a_loader_raises_where_it_is_looked_at_is_said(settings: Settings) -> None:
    with pytest.raises(WorkloadError, match="The loader raised: KeyError: 'corrupt'"):
        trainer(settings=settings).fit(DataLoader(Faulty(0), 4), epochs=1)
    with pytest.raises(WorkloadError, match="The loader raised: KeyError: 'corrupt'"):
        find_batch(trainer(), DataLoader(Faulty(0), 4))
    metrics = {"right": lambda outputs, targets: outputs > targets}
    made = trainer(loss=lambda model, batch: model(batch[0]).mean(), metrics=metrics)
    with pytest.raises(WorkloadError, match="The validation loader raised: KeyError: 'corrupt'"):
        made.fit(loader(), DataLoader(Faulty(0), 4), epochs=1)


class Ending(Dataset[Any]):
    """Sends the run SIGTERM as it is gone through again, and then raises as one does whose worker was ended too."""

    def __init__(self) -> None:
        self.armed = False

    def __len__(self) -> int:
        return 32

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.armed:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("DataLoader worker is killed by signal")
        return COUNTED[place], COUNTED[place]


@pytest.mark.own_process
def test_a_signal_while_a_loader_is_gone_through_again_ends_the_run_where_it_stood(tmp_path: pathlib.Path) -> None:
    data = Ending()
    want = told(whole := trainer(), "loss")
    whole.fit(DataLoader(data, 4, shuffle=True), epochs=2)
    got = told(first := trainer(checkpoint=tmp_path), "loss")
    first.fit(DataLoader(data, 4, shuffle=True), steps=EPOCH + 3)
    data.armed = True
    summary = trainer(checkpoint=tmp_path).resume().fit(DataLoader(data, 4, shuffle=True), epochs=2)
    assert (summary.updates, summary.ended) == (0, "It was interrupted by SIGTERM.")
    data.armed = False
    rest = told(resumed := trainer(checkpoint=tmp_path).resume(), "loss")
    resumed.fit(DataLoader(data, 4, shuffle=True), epochs=2)
    assert got + rest == want


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 22), (4, 5)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_example_costs_no_update_before_it(
    workers: int, accumulate: int, updates: int, tmp_path: pathlib.Path
) -> None:
    def made(**options: Any) -> Trainer:
        return trainer(Line, settings=Settings(data=DataSettings(accumulate=accumulate)), **options)

    def data(fault: int | None) -> Any:
        return DataLoader(Faulty(fault, 100), 4, num_workers=workers)

    want = told(whole := made(), "loss")
    whole.fit(data(None), epochs=1)
    got = told(failed := made(checkpoint=tmp_path), "loss")
    with pytest.raises(WorkloadError, match="The loader raised: KeyError"):
        failed.fit(data(90), epochs=1)
    assert Checkpoints(tmp_path).update() == updates
    rest = told(resumed := made(checkpoint=tmp_path).resume(), "loss")
    assert resumed.fit(data(None), epochs=1).updates == whole.position.update - updates
    assert got + rest == want
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)


def test_a_loader_that_fails_before_anything_was_learnt_leaves_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(WorkloadError, match="The loader raised"):
        trainer(checkpoint=tmp_path).fit(DataLoader(Faulty(0), 4), epochs=1)
    assert Checkpoints(tmp_path).update() is None
    trainer(checkpoint=tmp_path).fit(loader(), steps=3)
    before = (tmp_path / "update-00000003").stat().st_mtime_ns
    with pytest.raises(WorkloadError, match="The loader raised"):
        trainer(checkpoint=tmp_path).resume().fit(DataLoader(Faulty(12), 4), epochs=1)
    assert (tmp_path / "update-00000003").stat().st_mtime_ns == before


@pytest.mark.parametrize("at", [5, EPOCH, EPOCH + 1])
@pytest.mark.parametrize("every", [None, 4])
def test_a_callback_that_fails_costs_no_update(every: int | None, at: int, tmp_path: pathlib.Path) -> None:
    def fail(_: Trainer, event: Event) -> None:
        if isinstance(event, Progressed) and event.update == at:
            raise ConnectionError("offline")

    want = told(whole := trainer(), "loss")
    whole.fit(loader(), epochs=2)
    got = told(cut := trainer(checkpoint=tmp_path, checkpoint_every=every), "loss")
    cut.context.callbacks.append(fail)
    with pytest.raises(ConnectionError, match="offline"):
        cut.fit(loader(), epochs=2)
    assert Checkpoints(tmp_path).update() == at
    rest = told(resumed := trainer(checkpoint=tmp_path).resume(), "loss")
    resumed.fit(loader(), epochs=2)
    assert got + rest == want


class Stumbling(Drawing):
    """Fails in a call that is counted from 0, before it draws or moves anything."""

    at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(self.seen) == 4 * self.at:
            raise OSError("the disk with the embeddings is gone")
        return super().forward(x)


@pytest.mark.parametrize("how", ["break", "model"])
def test_a_run_that_is_left_or_whose_model_fails_goes_on_at_that_update(how: str, tmp_path: pathlib.Path) -> None:
    want = told(whole := trainer(Stumbling), "loss")
    whole.fit(loader(), epochs=2)
    got = told(cut := trainer(Stumbling, checkpoint=tmp_path), "loss")
    if how == "break":
        for update in cut.updates(loader(), epochs=2):
            if len(got) == EPOCH + 3:
                assert update.applied
                break
    else:
        cut.model.at = EPOCH + 3
        with pytest.raises(WorkloadError, match="the disk with the embeddings is gone"):
            cut.fit(loader(), epochs=2)
    assert Checkpoints(tmp_path).update() == EPOCH + 3
    rest = told(resumed := trainer(Stumbling, checkpoint=tmp_path).resume(), "loss")
    resumed.fit(loader(), epochs=2)
    assert got + rest == want


def test_a_callback_that_fails_at_what_an_update_has_shown_costs_not_that_update(tmp_path: pathlib.Path) -> None:
    def strict(_: Trainer, event: Event) -> None:
        if isinstance(event, Remarked):
            raise ValueError(event.text)

    def made(**options: Any) -> Trainer:
        def shaped(optimizer: Any, updates: int) -> OneCycleLR:
            return OneCycleLR(optimizer, 0.1, total_steps=EPOCH - 1)  # as where a loader says that it is shorter than it is

        return trainer(schedule=shaped, **options)

    longer = Longer([(x, x) for x in COUNTED[:, None]][: EPOCH + 4])
    want = told(whole := made(), "loss")
    whole.fit(longer, epochs=1)
    got = told(cut := made(checkpoint=tmp_path, callbacks=[strict]), "loss")
    with pytest.raises(ValueError, match="The schedule ended after 7 updates, and the run makes more"):
        cut.fit(longer, epochs=1)
    assert Checkpoints(tmp_path).update() == cut.position.update == EPOCH
    rest = told(resumed := made(checkpoint=tmp_path).resume(), "loss")
    resumed.fit(longer, epochs=1)
    assert got[: EPOCH - 1] + want[EPOCH - 1 : EPOCH] + rest == want


class Longer(list[Any]):
    """Says that it is shorter than it is."""

    def __len__(self) -> int:
        return EPOCH - 1


def failing_on_two(folder: pathlib.Path) -> dict[str, Any]:
    def fail(_: Trainer, event: Event) -> None:
        if isinstance(event, Progressed) and event.update == 3:
            raise ConnectionError("offline")

    made = trainer(checkpoint=folder / "run", callbacks=[fail], log_every=1, progress=False)
    said = ""
    try:
        made.fit(loader(), epochs=2)
    except (ConnectionError, WorkloadError) as error:
        said = str(error)
    again = trainer(checkpoint=folder / "run", progress=False).resume()
    return {"said": said, "saved": again.position.update, "updates": again.fit(loader(), epochs=1).updates}


def test_a_callback_that_fails_costs_several_processes_no_update(tmp_path: pathlib.Path) -> None:
    first, second = on_ranks(failing_on_two, tmp_path)
    assert (first["said"], first["saved"], first["updates"]) == ("offline", 3, 1)
    assert "failed; its own message says why" in second["said"]
    assert (second["saved"], second["updates"]) == (3, 1)
