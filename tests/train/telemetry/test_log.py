"""Figures logged from a loss, a model, a hook and a callback; hooks; and the callbacks that write figures."""

from __future__ import annotations

import csv
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from _ranks import on_ranks
from _runs import Drawing, Line, loader, settings_of, trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train import log
from trimtab.train.telemetry.events import EpochEnded, EpochStarted, Event, Progressed, Validated, figures_of
from trimtab.train.telemetry.log import Log
from trimtab.train.telemetry.loggers import CsvLines, MLflow, WandB


class Telling(Line):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        log("mean", found.mean())
        return found


class Kept:
    """What W&B and MLflow are called with."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, figures: dict[str, float], *, step: int) -> None:
        self.rows.append((step, figures))

    log_metrics = log


def test_figures_from_anywhere_reach_the_events_and_the_loggers(tmp_path: pathlib.Path) -> None:
    """Windows of six updates cross the epochs of eight; a validation has means of its own."""
    events: list[Event] = []
    hooked: list[str] = []
    wandb, mlflow = Kept(), Kept()
    calls = iter(range(1, 99))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        log("call", next(calls))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def before(made: Any, value: torch.Tensor) -> None:
        hooked.append("before_backward")
        log("hooked", value)

    def told(made: Any, event: Event) -> None:
        events.append(event)
        if isinstance(event, EpochStarted):
            log("started", event.epoch)
        if isinstance(event, EpochEnded):
            log("ended", event.epoch)

    def bounded(made: Any) -> None:
        made.model.layer.weight.grad.zero_()
        hooked.append("after_backward")

    hooks = {
        "before_backward": before,
        "after_backward": bounded,
        "before_step": lambda made: hooked.append("before_step"),
        "after_step": lambda made: hooked.append("after_step"),
    }
    run = trainer(
        Telling,
        loss=loss,
        log_every=6,
        hooks=hooks,
        callbacks=[told, CsvLines(tmp_path / "figures.csv"), WandB(wandb), MLflow(mlflow)],
    )
    weight = run.model.layer.weight.clone()  # type: ignore[union-attr, operator]
    run.fit(loader(shuffle=False), loader(shuffle=False), epochs=2)
    assert torch.equal(run.model.layer.weight, weight)  # type: ignore[union-attr, arg-type]
    assert hooked == ["before_backward", "after_backward", "before_step", "after_step"] * 16
    windows = [event for event in events if isinstance(event, Progressed)]
    assert [event.update for event in windows] == [6, 12, 16]
    assert [event.logged["call"] for event in windows] == pytest.approx([3.5, (7 + 8 + 17 + 18 + 19 + 20) / 6, 22.5])
    assert windows[1].logged["ended"] == 0
    assert [event.logged.get("started") for event in windows] == [0, 1, None]
    assert windows[0].logged["hooked"] == pytest.approx(windows[0].loss)
    validated = [event for event in events if isinstance(event, Validated)]
    assert [event.logged["call"] for event in validated] == [12.5, 28.5]
    assert [(type(event), event.epoch) for event in events if isinstance(event, EpochStarted | EpochEnded)] == [
        (EpochStarted, 0), (EpochEnded, 0), (EpochStarted, 1), (EpochEnded, 1),
    ]  # fmt: skip
    rows = list(csv.reader((tmp_path / "figures.csv").open()))
    assert rows[0] == ["update", "epoch", "name", "value"]
    assert ["6", "0", "train/call", "3.5"] in rows
    assert wandb.rows == mlflow.rows
    assert wandb.rows[1][1]["validate/call"] == 12.5
    log("call", 1.0)  # outside of a run nothing happens
    sums = Log()
    for _ in range(300):
        sums.add("ones", torch.ones((), dtype=torch.bfloat16))  # whose sum ends at 256 in 16 bits
    assert sums.take() == {"ones": (300.0, 300)}


def test_every_window_of_updates_has_a_p95_for_loggers() -> None:
    """By default there are 50 updates in a window; the last one has six."""
    windows: list[Progressed] = []
    run = trainer(callbacks=[lambda _, event: windows.append(event) if isinstance(event, Progressed) else None])
    losses = [float(update.loss) for update in run.updates(loader(), epochs=7)]
    first, last = windows
    assert first.loss_p95 == pytest.approx(np.quantile(losses[:50], 0.95))
    figures = figures_of(first)
    assert (figures["train/loss_p95"], figures["train/loss_spread"]) == (first.loss_p95, first.loss_spread)
    assert figures["speed/p95_ms"] == first.p95_ms
    assert (last.update, last.loss_p95) == (56, None)
    assert "train/loss_p95" not in figures_of(last)


def hooked(accumulate: int, folder: pathlib.Path | None = None, epochs: int = 2) -> dict[str, Any]:
    """A run in which a hook thaws the bias as the second epoch begins."""
    rank = float(os.environ.get("RANK", 0))
    called: list[tuple[str, int]] = []
    logged: list[float] = []

    def began(made: Any) -> None:
        called.append(("epoch_start", made.position.epoch))
        torch.rand(())
        made.model.layer.bias.requires_grad_(made.position.epoch > 0)

    def after(made: Any) -> None:
        log("rank", rank)

    def told(_: Any, event: Event) -> None:
        logged.extend([event.logged["rank"]] if isinstance(event, Progressed) else [])

    torch.manual_seed(0)
    model = Drawing()
    hooks = {"epoch_start": began, "epoch_end": lambda made: called.append(("epoch_end", made.position.epoch))}
    run = trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        hooks={**hooks, "after_backward": after},
        callbacks=[told],
        log_every=4,
        settings=settings_of(accumulate=accumulate),
        checkpoint=folder,
    )
    if folder is not None and any(folder.glob("update-*")):
        run.resume()
    run.fit(list(loader(shuffle=False)), epochs=epochs)
    return {"called": called, "logged": logged, "bias": model.layer.bias.tolist(), "weight": model.layer.weight.tolist()}


def hooked_on_each_rank(folder: pathlib.Path) -> dict[str, Any]:
    return hooked(1)


def test_hooks_come_with_each_epoch_and_in_every_process_and_logs_are_averaged_over_them(tmp_path: pathlib.Path) -> None:
    alone, found = hooked(2), on_ranks(hooked_on_each_rank, tmp_path)
    assert alone["called"] == [("epoch_start", 0), ("epoch_end", 1), ("epoch_start", 1), ("epoch_end", 2)]
    assert [each["called"] for each in found] == 2 * [[list(call) for call in alone["called"]]]
    assert (alone["logged"], found[0]["logged"], found[1]["logged"]) == ([0.0, 0.0], [0.5, 0.5], [])
    torch.manual_seed(0)
    frozen = Drawing().layer.bias.tolist()
    assert hooked(2, epochs=1)["bias"] == frozen != alone["bias"]
    assert (found[0]["weight"], found[0]["bias"]) == (found[1]["weight"], found[1]["bias"])
    assert found[0]["bias"] != frozen
    hooked(2, tmp_path / "one", epochs=1)
    resumed = hooked(2, tmp_path / "one")
    assert (resumed["weight"], resumed["bias"]) == (alone["weight"], alone["bias"])
    assert resumed["called"] == alone["called"][2:]


def test_what_cannot_be_logged_or_hooked_is_said() -> None:
    for value, said in ((torch.zeros(2), r"a tensor of shape \(2,\)"), ("high", "got a str")):
        with pytest.raises((UsageError, WorkloadError), match=rf"log\('x', ...\) {'got ' if 'tensor' in said else ''}{said}"):
            trainer(callbacks=[lambda _, event, value=value: log("x", value)]).fit(loader(), epochs=1)
    with pytest.raises(UsageError, match="hooks has 'on_step', which there is none of. epoch_start"):
        trainer(hooks={"on_step": print})
    with pytest.raises(UsageError, match=r"The hook after_step cannot be called with \(trainer\): "):
        trainer(hooks={"after_step": lambda: None})

    def fails(made: Any) -> None:
        raise KeyError("x")

    with pytest.raises(WorkloadError, match="The hook before_step raised: KeyError: 'x'"):
        trainer(hooks={"before_step": fails}).fit(loader(), epochs=1)
    with pytest.raises(UsageError, match="WandB got 3, which has no log"):
        WandB(3)
    with pytest.raises(UsageError, match="MLflow got 3, which has no log_metrics"):
        MLflow(3)
