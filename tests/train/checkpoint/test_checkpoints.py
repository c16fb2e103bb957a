"""Checkpoints: what goes in comes out, nothing is ever half-written, and what does not fit is said."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.testing._internal.two_tensor import TwoTensor

from _runs import EPOCH, loader
from _runs import trainer as line
from trimtab import DataSettings, Settings, Trainer
from trimtab._internal.user_code import IN_WORKER
from trimtab.errors import StorageError, UsageError
from trimtab.train.checkpoint.checkpoints import HASHES, LOCK, STATE, TENSORS, Checkpoints
from trimtab.train.checkpoint.weights import weights
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim.schedules import one_cycle
from trimtab.train.telemetry.events import Event, Progressed, Saved, Validated

SCRIPT = """
import sys, torch
from trimtab.train.checkpoint.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
for update in range(1, 100_000):
    checkpoints.save(update, {"update": update, "tensor": torch.full((200_000,), float(update))})
    print(update, flush=True)
"""

RUN = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trimtab import Trainer

def stay(trainer, event):
    print("on", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    trainer = Trainer(
        nn.Linear(4, 2), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, checkpoint=sys.argv[1], checkpoint_every=1,
        callbacks=[stay], log_every=1,
    )
    data = TensorDataset(torch.randn(40, 4), torch.zeros(40, dtype=torch.int64))
    trainer.fit(DataLoader(data, batch_size=4, num_workers=1), epochs=1)
"""


def test_what_goes_in_comes_out(tmp_path: pathlib.Path) -> None:
    tied = torch.randn(3, 4)
    state = {
        "tensors": {
            "tied": [tied, tied], "view": tied[1], "turned": tied.t(), "empty": torch.zeros(0, 3), "none": None,
            "half": torch.randn(5).bfloat16(), "number": torch.tensor(3), "truth": torch.tensor([True, False]),
            "image": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
            "waves": torch.randn(3, 2, dtype=torch.complex128), "turning": torch.randn(3, dtype=torch.complex128).conj(),
            "wave": torch.randn((), dtype=torch.complex128), "scales": torch.ones(3).to(torch.float8_e8m0fnu),
        },
        "keys": {0: {"exp_avg": torch.ones(2)}, "0": (1, 2.5, "x"), (1, 2): False},
    }  # fmt: skip
    checkpoints = Checkpoints(tmp_path)
    place = checkpoints.save(7, state)
    assert sorted(path.name for path in place.iterdir()) == sorted([TENSORS, STATE, HASHES])
    found = checkpoints.load()
    assert list(found["keys"]) == [0, "0", (1, 2)]
    assert found["keys"]["0"] == (1, 2.5, "x")
    for name, want in state["tensors"].items():
        got = found["tensors"][name]
        if isinstance(want, torch.Tensor):
            assert torch.equal(got, want), name
            assert got.dtype == want.dtype
    first, second = found["tensors"]["tied"]
    assert first is second


def test_only_the_newest_are_kept_and_a_damaged_one_is_passed_over(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for update in (1, 2, 3):
        checkpoints.save(update, {"update": update, "weights": torch.ones(100)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-00000002", "update-00000003"]
    file = tmp_path / "update-00000003" / TENSORS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert checkpoints.load()["update"] == 2
    (tmp_path / "update-00000002" / STATE).unlink()
    with pytest.raises(StorageError, match=r"none is whole \(update-00000003: tensors.safetensors has changed since it was"):
        checkpoints.load()


class Rising:
    """A metric that is highest in the third validation; and a state of the user's own."""

    def __init__(self) -> None:
        self.validations = 0

    def reset(self) -> None:
        self.validations += 1

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        pass

    def compute(self) -> float:
        return -abs(self.validations - 3.2)

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.validations = state["validations"]


@pytest.mark.parametrize("ema", [None, 0.5])
def test_the_best_checkpoints_stay_and_their_weights_come_back_without_a_run(ema: float | None, tmp_path: pathlib.Path) -> None:
    validated: list[dict[str, torch.Tensor]] = []

    def made() -> tuple[Trainer, Rising]:
        metric = Rising()
        watching = EarlyStopping(metric="rising", mode="max", patience=9, restore_best=False)
        return line(
            checkpoint=tmp_path, checkpoint_every=3, keep_last=1, keep_best=2, early_stopping=watching, ema=ema,
            metrics={"rising": metric}, callbacks=[_keeping(validated)],
        ).register(rising=metric), metric  # fmt: skip

    first, metric = made()
    first.fit(loader(), loader(), epochs=5)
    names = sorted(place.name for place in tmp_path.glob("update-*"))
    assert names == [f"update-{epoch * EPOCH:08d}" for epoch in (3, 4, 5)]
    again, metric = made()
    again.load_best()
    for found in (weights(tmp_path), again.model.state_dict()):
        assert torch.equal(found["layer.weight"], validated[2]["layer.weight"])
    assert torch.equal(weights(tmp_path, "last")["layer.weight"], validated[4]["layer.weight"])
    again.resume()
    assert metric.validations == 5
    again.fit(loader(), loader(), epochs=6)
    other = line(checkpoint=tmp_path).resume().register(other=Rising()) if ema is None else None
    if other is not None:  # told of before the run, and of what it has not registered as the run begins
        assert "The checkpoint has no state of other, which is registered now: it stays as it is." in other.notes
        summary = other.fit(loader(), epochs=7)
        assert any("the state of rising, which this run has not registered" in note for note in summary.notes)
        with pytest.raises(UsageError, match=r"register\(\) was given x=a dict, without state_dict\(\)"):
            other.register(x={})
    with pytest.raises(UsageError, match="the weights of no validation were kept. Give Trainer"):
        line().load_best()
    with pytest.raises(UsageError, match="keep_best is 2, and there is no folder for"):
        line(keep_best=2)
    with pytest.raises(UsageError, match="keep_best goes by the validation, and there is none"):
        line(checkpoint=tmp_path / "new", keep_best=2).fit(loader(), epochs=1)


def test_the_best_of_the_validations_within_epochs_stay(tmp_path: pathlib.Path) -> None:
    """Of those after 5, 10, 15, 20 and 24 updates the third and the fourth are the best."""
    metric, validated = Rising(), []
    watching = EarlyStopping(metric="rising", mode="max", patience=9, restore_best=False)
    made = line(
        checkpoint=tmp_path, validate_every=5, keep_last=1, keep_best=2, early_stopping=watching,
        metrics={"rising": metric}, callbacks=[_keeping(validated)],
    )  # fmt: skip
    made.fit(loader(), loader(), epochs=3)
    assert sorted(place.name for place in tmp_path.glob("update-*")) == [f"update-{update:08d}" for update in (15, 20, 24)]
    assert torch.equal(weights(tmp_path)["layer.weight"], validated[2]["layer.weight"])


def _keeping(found: list[dict[str, torch.Tensor]]) -> Any:
    """A callback that copies the weights of each validation."""

    def keep(made: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            found.append({name: value.clone() for name, value in made.model.state_dict().items()})

    return keep


def test_files_are_written_out_as_windows_asks_for_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    synced: list[bool] = []

    def fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if not folder and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        synced.append(folder)

    monkeypatch.setattr(os, "fsync", fsync)
    Checkpoints(tmp_path).save(1, {"update": 1})
    assert (synced.count(False), synced.count(True)) == (3, 2)


def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(SCRIPT)
    for attempt in range(4):
        folder = tmp_path / f"run-{attempt}"
        process = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(2 + attempt):
            assert process.stdout.readline()
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        said = [int(line) for line in process.stdout.read().split()]
        found = Checkpoints(folder).load()
        assert found["update"] >= max(said, default=2 + attempt)
        assert torch.equal(found["tensor"], torch.full((200_000,), float(found["update"])))
        Checkpoints(folder).save(10**6, {"update": 10**6})  # what was left half-written is swept away
        assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small tmpfs needs root on Linux")
def test_a_full_disk_loses_nothing(tmp_path: pathlib.Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this system does not let us mount a tmpfs")
    try:
        checkpoints = Checkpoints(disk / "run")
        checkpoints.save(1, {"weights": torch.ones(400_000)})
        with pytest.raises(
            StorageError,
            match=r"The checkpoint after update 2 cannot be written .*\. The checkpoint update-00000001 is still whole",
        ):
            checkpoints.save(2, {"weights": torch.zeros(900_000)})
        assert [path.name for path in (disk / "run").iterdir()] == ["update-00000001"]
        assert torch.equal(checkpoints.load()["weights"], torch.ones(400_000))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def trainer(folder: pathlib.Path, **options: Any) -> Trainer:
    """A small convolutional network with everything that has a state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(144, 3))
    defaults: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(), "optimizer": functools.partial(torch.optim.AdamW, lr=0.01), "ema": 0.9,
        "schedule": one_cycle(0.02), "checkpoint": folder, "checkpoint_every": 7, "log_every": 1,
        "settings": Settings(memory_format="channels_last", data=DataSettings(accumulate=2)),
    }  # fmt: skip
    return Trainer(model, **{**defaults, **options})


def batches(shuffle: bool = True) -> torch.utils.data.DataLoader[Any]:
    """Shuffled images."""
    made = torch.Generator().manual_seed(1)
    images = torch.randn(160, 1, 8, 8, generator=made)
    data = torch.utils.data.TensorDataset(images, images.mean((1, 2, 3)).mul(99).long() % 3)
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=shuffle)


def losses(made: Trainer, *, kill_at: int | None = None) -> list[float]:
    """The loss of every update; ends with an exception right after the checkpoint of an update if asked."""
    found: list[float] = []

    def note(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Progressed):
            found.append(event.loss)
        if isinstance(event, Saved) and event.update == kill_at:
            raise ConnectionAbortedError

    made.context.callbacks.append(note)
    try:
        made.fit(batches(), batches(shuffle=False), epochs=6)
    except ConnectionAbortedError:
        assert kill_at is not None
    return found


def test_the_next_fifty_losses_are_the_same_to_the_bit(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(3)
    whole = losses(trainer(tmp_path / "whole"))
    torch.manual_seed(3)
    first = losses(trainer(tmp_path / "cut"), kill_at=7)
    torch.manual_seed(99)  # a new process would have drawn others
    rest = losses(trainer(tmp_path / "cut").resume())
    assert len(whole) == 60
    assert first + rest == whole
    assert len(rest) >= 50


def test_the_best_parameters_survive_too(tmp_path: pathlib.Path) -> None:
    made = trainer(tmp_path, ema=None, early_stopping=EarlyStopping(min_delta=1e9))
    made.fit(batches(), batches(shuffle=False), epochs=2)
    found = trainer(tmp_path, ema=None, early_stopping=EarlyStopping(min_delta=1e9)).resume()
    assert made.best_parameters is not None
    assert found.best_parameters is not None
    assert torch.equal(found.best_parameters["5.bias"], made.best_parameters["5.bias"])
    assert not torch.equal(found.best_parameters["5.bias"], found.model.state_dict()["5.bias"])


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}, r"was made with AdamW, not SGD\. Give that optimizer\."),
        ({"ema": None}, r"was made with ema=\.\.\.; give the same\."),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: pathlib.Path, other: dict[str, Any], sentence: str) -> None:
    trainer(tmp_path).fit(batches(), steps=7)
    with pytest.raises(UsageError, match=sentence):
        trainer(tmp_path, **other).resume()


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: pathlib.Path) -> None:
    trainer(tmp_path).fit(batches(), steps=7)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    before = other[1].weight.detach().clone()
    made = Trainer(other, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, checkpoint=tmp_path, ema=0.9)
    with pytest.raises(UsageError, match=r"is of another model, a Sequential: 0\.bias, 0\.weight, 1\.bias and \d+ more differ"):
        made.resume()
    assert torch.equal(before, other[1].weight)
    assert made.position.update == 0


def test_a_second_run_does_not_write_over_the_first(tmp_path: pathlib.Path) -> None:
    trainer(tmp_path).fit(batches(), steps=7)
    with pytest.raises(UsageError, match=r"holds update-00000007 of an earlier run\. Go on from it with trainer\.resume\(\)"):
        trainer(tmp_path).fit(batches(), steps=7)


def test_a_worker_that_would_train_again_what_it_is_to_measure_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path).fit(batches(), steps=7)
    monkeypatch.setenv(IN_WORKER, "1")
    with pytest.raises(
        UsageError, match=r"of an earlier run\. A worker process of trimtab has read this file anew, and trains"
    ):
        trainer(tmp_path).fit(batches(), steps=7)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    place = checkpoints.save(1, {"x": 1})
    facts = json.loads((place / STATE).read_text()) | {"schema": 99}
    (place / STATE).write_text(json.dumps(facts))
    with pytest.raises(StorageError, match="has changed since it was written"):
        checkpoints.load()


def test_what_cannot_be_kept_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"A builtins\.set cannot be kept in a checkpoint\."):
        Checkpoints(tmp_path).save(1, {"x": {1, 2}})
    with pytest.raises(UsageError, match=r"A tensor of torch\.qint8 cannot be kept in a checkpoint: its scale is no part of"):
        Checkpoints(tmp_path).save(1, {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})
    assert list(tmp_path.glob("update-*")) == []


def damage(place: pathlib.Path) -> None:
    (place / TENSORS).write_bytes(b"")


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path: pathlib.Path) -> None:
    for update in (8, 9):
        damage(Checkpoints(tmp_path).save(update, {"x": torch.ones(1)}))
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for update in (5, 6, 7):
        assert checkpoints.save(update, {"x": torch.ones(1)}).exists()
    assert [int(place.name[-2:]) for place in checkpoints._folders()] == [9, 8, 7, 6]
    checkpoints.save(10, {"x": torch.ones(1)})
    Checkpoints(tmp_path, keep_last=1).save(1, {"x": torch.ones(1)})
    assert (tmp_path / "update-00000001").exists()


def test_a_damaged_checkpoint_that_is_passed_over_is_told_of(tmp_path: pathlib.Path) -> None:
    trainer(tmp_path).fit(batches(), steps=14)
    assert not any("damaged" in note for note in trainer(tmp_path).resume().notes)
    damage(tmp_path / "update-00000014")
    resumed = trainer(tmp_path).resume()
    damaged = f"what is newer is damaged (update-00000014: {TENSORS} has changed"
    said = f"The run goes on from update-00000007 in {tmp_path}, because {damaged}"
    assert resumed.position.update == 7
    assert [note for note in resumed.notes if note.startswith(said)]
    assert any(note.startswith(said) for note in resumed.fit(batches(), steps=8).notes)


def test_two_runs_at_once_do_not_write_into_one_folder(tmp_path: pathlib.Path) -> None:
    script, folder = tmp_path / "run.py", tmp_path / "run"
    script.write_text(RUN, encoding="utf-8")
    process = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        made = Trainer(nn.Linear(4, 2), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, checkpoint=folder)
        batch = (torch.randn(4, 4), torch.zeros(4, dtype=torch.int64))
        with pytest.raises(UsageError, match=rf"Another run writes its checkpoints into .*run now \(process {process.pid} of "):
            made.fit([batch], epochs=1)
    finally:
        process.kill()
        process.wait()
    made.resume(missing_ok=True).fit([batch], epochs=1)  # at once, though workers of the one that was killed may live on
    assert all(path.name.startswith("update-") or path.name == LOCK for path in folder.iterdir())


def test_a_kill_between_two_renames_leaves_a_checkpoint(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    place = checkpoints.save(7, {"x": 7})
    os.replace(place, tmp_path / f".{place.name}.old")  # as far as one gets that writes the same update again
    found = Checkpoints(tmp_path)
    assert (found.update(), found.load()) == (7, {"x": 7})
    assert not place.exists()  # who only reads moves nothing
    damaged = tmp_path / ".update-00000008.old"
    found.save(8, {"x": 8})
    assert place.exists()
    os.replace(tmp_path / "update-00000008", damaged)
    damage(damaged)
    assert Checkpoints(tmp_path).load() == {"x": 7}
    found.save(8, {"x": 9})
    assert Checkpoints(tmp_path).load() == {"x": 9}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-00000007", "update-00000008"]


def test_numbers_that_are_not_finite_come_back(tmp_path: pathlib.Path) -> None:
    Checkpoints(tmp_path).save(1, {"rates": [math.inf, -math.inf, math.nan, 1.0]})
    found = Checkpoints(tmp_path).load()["rates"]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


def test_a_checkpoint_of_no_update_is_one(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.update() is None
    checkpoints.save(0, {"x": torch.ones(1)})
    assert checkpoints.update() == 0


ARRAYS: list[Any] = [
    np.linspace(0.1, 0.0, 5),
    np.arange(6, dtype=np.uint64).reshape(2, 3)[:, ::-1],
    np.zeros((0, 3), np.complex128),
    np.array(True),
    np.array(["a", "bcd"]),
    np.array(["2026-08-01"], "datetime64[D]"),
    np.arange(3, dtype=">i2"),
    np.float32(0.1),
    np.int64(7),
    np.bool_(True),
]


@pytest.mark.parametrize("array", ARRAYS, ids=repr)
def test_arrays_of_numpy_come_out_as_they_went_in(array: Any, tmp_path: pathlib.Path) -> None:
    (Checkpoints(tmp_path)).save(1, {"x": [array, {np.int64(3): array}]})
    one, other = Checkpoints(tmp_path).load()["x"]
    for found in (one, other[3]):
        assert type(found) is type(array)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


class Table(LRScheduler):
    """Rates that were computed beforehand."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Any) -> None:
        self.rates = rates
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [float(self.rates[min(self.last_epoch, len(self.rates) - 1)])] * len(self.base_lrs)


@pytest.mark.parametrize(
    ("strange", "said"),
    [
        ({1, 2}, r"The state of the optimizer cannot be saved\. A builtins\.set cannot be kept in a checkpoint\."),
        (
            TwoTensor(torch.ones(1), torch.ones(1)),
            r"two_tensor\.TwoTensor, a tensor made of others, cannot be kept in a checkp",
        ),
    ],
    ids=["set", "subclass"],
)
def test_what_an_update_makes_that_cannot_be_saved_is_refused_after_the_first(
    strange: Any, said: str, tmp_path: pathlib.Path
) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["odd"] = strange
            return super().step(closure)

    made = trainer(tmp_path, optimizer=functools.partial(Odd, lr=0.1))
    with pytest.raises(UsageError, match=said):
        made.fit(batches(), epochs=1)
    assert made.position.update == 1
    assert Checkpoints(tmp_path).update() is None


def test_a_schedule_with_an_array_goes_on_and_one_that_cannot_be_saved_is_refused_before_the_run(
    tmp_path: pathlib.Path,
) -> None:
    def made(rates: Any, callbacks: Any = ()) -> Trainer:
        return Trainer(
            nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=functools.partial(torch.optim.SGD, lr=1.0), checkpoint=tmp_path,
            schedule=lambda optimizer, updates: Table(optimizer, rates), callbacks=callbacks, progress=False,
        )  # fmt: skip

    data, events = [(torch.ones(2, 1), torch.ones(2, 1))] * 4, list[Event]()
    strange = made(np.array([0.1, 0.2], dtype=object), [lambda _, event: events.append(event)])
    with pytest.raises(UsageError, match=r"state of the scheduler cannot be saved\. A numpy array of object cannot be kept"):
        strange.fit(data, epochs=1)
    assert events == []
    assert strange.position.update == 0
    made(np.linspace(1.0, 0.1, 10)).fit(data, steps=3)
    resumed = made(np.linspace(1.0, 0.1, 10)).resume()
    resumed.fit(data, steps=4)
    assert resumed.scheduler is not None
    assert np.array_equal(resumed.scheduler.rates, np.linspace(1.0, 0.1, 10))
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.6)
    changed = made(np.linspace(0.5, 0.05, 10)).resume()
    (note,) = changed.fit(data, steps=4).notes
    assert note.startswith("The checkpoint wins over the script: schedule.rates=array([")
    assert np.array_equal(changed.scheduler.rates, np.linspace(1.0, 0.1, 10))
