"""Trained weights in the folder of a study: a file for each training, and the state of unfinished trainings beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import statistics
import time
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from trimtab._internal.serialization import write_json
from trimtab._internal.user_code import save_errors
from trimtab.train.telemetry.events import Event, Progressed, Validated

FOLDER = "recovered"
"""Folder in the candidate's scratch folder with trained weights."""
FACTS = "trained"
"""Key of the metadata in a file of weights."""
CURVE_POINTS = 20
"""Number of points of the training-loss curve."""
REPORT_EVERY = 10
"""Most updates between two reports, from which the study knows the pace of a training."""


@dataclasses.dataclass(frozen=True)
class TrainingFiles:
    """The files of one training, under the hash of everything that decides its result."""

    folder: pathlib.Path
    key: str

    @property
    def weights(self) -> pathlib.Path:
        """The trained weights. The file exists once the training is complete."""
        return self.folder / f"{self.key}.safetensors"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Checkpoints of an unfinished training."""
        return self.folder / f"{self.key}.checkpoints"

    @property
    def progress(self) -> pathlib.Path:
        """Updates, seconds and losses of an unfinished training."""
        return self.folder / f"{self.key}.json"

    def load(self, model: nn.Module) -> dict[str, Any] | None:
        """Load the weights into ``model``. Returns the facts of the training; ``None`` if the file is missing or damaged."""
        try:
            with safe_open(self.weights, framework="pt") as file:
                facts: dict[str, Any] = json.loads(file.metadata()[FACTS])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        model.load_state_dict(state)
        return facts

    def write(self, model: nn.Module, facts: dict[str, Any]) -> None:
        """Write the weights atomically, and remove the state of the training."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
        part = self.folder / f".{self.key}.part"  # a fixed name: the next attempt overwrites what a killed process left
        try:
            with save_errors():
                save_file(state, part, metadata={FACTS: json.dumps(facts)})
            os.replace(part, self.weights)
        finally:
            part.unlink(missing_ok=True)
        self.clear()

    def clear(self) -> None:
        """Remove checkpoints and progress."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.progress.unlink(missing_ok=True)


class LossCurve:
    """A callback of the Trainer that records losses, and writes them to a file for other processes.

    Args:
        files: where the training is kept; ``None`` keeps the losses in memory only.
        updates: updates of the whole training.
    """

    def __init__(self, files: TrainingFiles | None, updates: int) -> None:
        self.files, self.updates = files, updates
        self.every = max(1, updates // CURVE_POINTS)
        """Updates between two points of the curve."""
        self.report_every = math.gcd(self.every, REPORT_EVERY)
        """Updates between two reports. The Trainer is to log as often."""
        self._since_point: list[float] = []
        self.losses: list[tuple[int, float]] = []
        """``(update, loss)``: the mean training loss since the previous point."""
        self.held_out: list[tuple[int, float]] = []
        self._before = 0.0
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before an interruption."""
        return self._before + time.perf_counter() - self._begun

    def resume(self, update: int) -> None:
        """Continue at ``update``, with the losses that were written up to it."""
        known = read_progress(None if self.files is None else self.files.progress)
        self._before = float(known.get("seconds", 0.0))
        for name in ("losses", "held_out"):
            setattr(self, name, [(int(at), float(loss)) for at, loss in known.get(name, ()) if at <= update])

    def __call__(self, trainer: Any, event: Event) -> None:
        """Keep the losses of ``event``."""
        if isinstance(event, Progressed):
            self._since_point.append(event.loss)
            if event.update % self.every == 0 or event.update == self.updates:
                self.losses.append((event.update, statistics.fmean(self._since_point)))
                self._since_point = []
        elif isinstance(event, Validated):
            self.held_out.append((event.update, event.metrics["loss"]))
        else:
            return
        if self.files is not None:
            write_json(self.files.progress, self.facts(event.update))

    def facts(self, update: int) -> dict[str, Any]:
        """The state of the training after ``update`` updates."""
        known = {"update": update, "updates": self.updates, "seconds": self.seconds}
        return known | {"losses": self.losses, "held_out": self.held_out}


def read_progress(path: pathlib.Path | None) -> dict[str, Any]:
    """What :class:`LossCurve` wrote to ``path``; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if path is not None:
            return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}
