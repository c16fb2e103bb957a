"""The parts of the Trainer in a loop of one's own: equal to the Trainer, also killed and resumed."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _ranks import on_ranks
from _runs import Drawing, Line, loader, settings_of, trainer
from trimtab import DataSettings, OptimizerSettings, PrecisionSettings, Settings
from trimtab.errors import UsageError
from trimtab.train import Parts

SETTINGS = Settings(data=DataSettings(accumulate=3), optimizer=OptimizerSettings(clip_norm=0.5))


def parts(folder: pathlib.Path | None = None, settings: Settings = SETTINGS) -> Parts:
    torch.manual_seed(0)
    return Parts(Drawing(), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), settings=settings, checkpoint=folder)


def train(run: Parts, data: Any, until: int = 99) -> None:
    for epoch in range(run.epoch, 2):
        for inputs, targets in run.batches(data, epoch):
            with run.precision():
                loss = F.mse_loss(run.model(inputs), targets)
            run.backward(loss)
            update = run.step()
            assert (update is None) == (not run.last)
            if update is not None and run.update == until:
                run.save(note="so far")
                return


def test_a_loop_of_ones_own_equals_the_trainer_and_goes_on(tmp_path: pathlib.Path) -> None:
    whole = parts()
    whole.model.train()
    train(whole, loader())
    made = trainer(Drawing, settings=SETTINGS, optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    made.fit(loader(), epochs=2)
    assert whole.update == made.position.update == 6
    for name, value in made.model.state_dict().items():
        torch.testing.assert_close(whole.model.state_dict()[name], value, rtol=0, atol=0)
    train(parts(tmp_path), loader(), until=2)
    torch.manual_seed(5)
    again = parts(tmp_path)
    assert again.load() == {"note": "so far"}
    train(again, loader())
    for name, value in made.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=0, atol=0)


def parts_on_each_rank(folder: pathlib.Path) -> dict[str, Any]:
    run, wholes = _line(folder / "own", accumulate=1), list(loader(shuffle=False))
    train(run, wholes, until=2)
    again = _line(folder / "own", accumulate=1)
    assert again.load() == {"note": "so far"}
    train(again, wholes)
    return {"weight": again.model.state_dict()["layer.weight"].tolist(), "updates": again.update}


def _line(folder: pathlib.Path | None, accumulate: int) -> Parts:
    torch.manual_seed(0)
    return Parts(Line(), lambda p: torch.optim.SGD(p, lr=0.1), settings=settings_of(accumulate=accumulate), checkpoint=folder)


def test_several_processes_go_through_a_loop_of_ones_own_as_one(tmp_path: pathlib.Path) -> None:
    alone = _line(None, accumulate=2)
    train(alone, list(loader(shuffle=False)))
    for each in on_ranks(parts_on_each_rank, tmp_path):
        assert each["updates"] == alone.update == 8
        torch.testing.assert_close(torch.tensor(each["weight"]), alone.model.state_dict()["layer.weight"], rtol=1e-5, atol=1e-6)


def test_the_precision_of_a_loop_of_ones_own_is_that_of_the_trainer() -> None:
    settings = settings_of(autocast="bfloat16", accumulate=2)
    run = parts(settings=settings)
    run.model.train()
    train(run, loader())
    made = trainer(Drawing, settings=settings, optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    made.fit(loader(), epochs=2)
    for name, value in made.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=0)


def test_what_the_parts_do_not_do_is_said() -> None:
    with pytest.raises(UsageError, match=r"Settings have precision\.autocast, which only Trainer does"):
        parts(settings=Settings(precision=PrecisionSettings(autocast="auto")))
    with pytest.raises(UsageError, match=r"Settings have compile, data\.micro_batch, which only Trainer does"):
        parts(settings=Settings(compile="auto", data=DataSettings(micro_batch="auto")))
    asked = settings_of(threads=1, cudnn_benchmark=True, adjust=True, tf32=True, scale_lr="sqrt", nonfinite="stop")
    told = "threads, cudnn_benchmark, adjust, precision.tf32, optimizer.scale_lr, optimizer.nonfinite"
    with pytest.raises(UsageError, match=f"Settings have {told}, which only Trainer does"):
        parts(settings=asked)
    with pytest.raises(UsageError, match="Rprop has no fused implementation"):
        Parts(Line(), torch.optim.Rprop, settings=settings_of(implementation="fused"))
    assert parts(settings=settings_of(implementation="foreach")).optimizer.param_groups[0]["foreach"] is True
    with pytest.raises(UsageError, match="Parts has no folder for checkpoints"):
        parts().save()
    run = parts(settings=Settings())
    next(run.batches(loader()))
    with pytest.raises(UsageError, match=r"step\(\) follows 1 calls of backward\(\), one for each batch, and saw 0"):
        run.step()
