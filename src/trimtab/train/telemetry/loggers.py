"""Callbacks that write the figures of a run for other tools: CSV, Weights & Biases, MLflow.

``JsonLines`` and ``TensorBoard`` are in :mod:`trimtab.train.telemetry.events`.
"""

from __future__ import annotations

import csv
import pathlib
from typing import Any

from trimtab._internal.files import path_of
from trimtab.core.technique import require
from trimtab.errors import StorageError, UsageError
from trimtab.train.telemetry.events import Event, figures_of


class CsvLines:
    """A callback that appends figures to a CSV file, a row each: ``update,epoch,name,value``."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = path_of(path, "path", "runs/figures.csv")

    def __call__(self, trainer: Any, event: Event) -> None:
        """Append the figures of ``event``."""
        rows = [(event.update, event.epoch, name, value) for name, value in figures_of(event).items()]
        if not rows:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if not file.tell():
                    writer.writerow(("update", "epoch", "name", "value"))
                writer.writerows(rows)
        except OSError as error:
            raise StorageError(
                f"The log {self.path} cannot be written: {error.strerror}. Make room, or give another file; the last "
                "checkpoint is whole."
            ) from error


class WandB:
    """A callback that logs figures to Weights & Biases: ``WandB(wandb.init(project="digits"))``.

    Args:
        run: what ``wandb.init()`` returns, or anything with ``log(figures, step=...)``.

    Raises:
        UsageError: ``run`` has no ``log``.
    """

    def __init__(self, run: Any) -> None:
        if not callable(getattr(run, "log", None)):
            raise UsageError(f"WandB got {run!r}, which has no log(). Give what wandb.init() returns.")
        self._run = run

    def __call__(self, trainer: Any, event: Event) -> None:
        """Log the figures of ``event``."""
        if figures := figures_of(event):
            self._run.log(figures, step=event.update)


class MLflow:
    """A callback that logs figures to the active run of MLflow (``pip install mlflow``).

    Args:
        client: anything with ``log_metrics(figures, step=...)``; by default the module ``mlflow``.

    Raises:
        UsageError: ``client`` has no ``log_metrics``.
    """

    def __init__(self, client: Any = None) -> None:
        self._client = require("mlflow") if client is None else client
        if not callable(getattr(self._client, "log_metrics", None)):
            raise UsageError(f"MLflow got {client!r}, which has no log_metrics(). Leave it out, or give the module mlflow.")

    def __call__(self, trainer: Any, event: Event) -> None:
        """Log the figures of ``event``."""
        if figures := figures_of(event):
            self._client.log_metrics(figures, step=event.update)
