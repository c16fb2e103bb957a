"""The weights in a checkpoint folder, without a run: those of the best validation, or of the last update."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from trimtab.errors import UsageError
from trimtab.train.checkpoint.checkpoints import Checkpoints, Figure, read
from trimtab.train.runtime.state_dict_versions import versioned

HOW_TO_KEEP = "Give Trainer(keep_best=1), or EarlyStopping(), and fit(train, validate)"
"""The fix in errors about missing weights of the best validation."""


def weights(folder: str | os.PathLike[str], which: Literal["best", "last"] = "best") -> dict[str, Any]:
    """The weights in the checkpoint folder of a run, for ``model.load_state_dict``.

    Args:
        folder: the ``checkpoint`` of a Trainer.
        which: ``"best"`` for those of the best validation, which ``Trainer(keep_best=...)`` or early stopping have kept;
            ``"last"`` for those of the newest checkpoint. With ``ema`` both are those of the average.

    Returns:
        The state dict of the model, on the CPU.

    Raises:
        UsageError: no validation's weights were kept, or ``which`` is something else.
        StorageError: no checkpoint in the folder is intact.
    """
    if which not in ("best", "last"):
        raise UsageError(f"which is {which!r}; it can be 'best' or 'last'.")
    checkpoints = Checkpoints(folder)
    newest = checkpoints.load()
    if which == "last":
        return _evaluation_weights(newest)
    found = best(checkpoints, newest, None)
    if found is None:
        where = pathlib.Path(folder)
        raise UsageError(f"No checkpoint in {where} has the weights of a validation. {HOW_TO_KEEP}; or take which='last'.")
    return found


def best(checkpoints: Checkpoints, newest: Mapping[str, Any], least: Figure | None) -> dict[str, Any] | None:
    """The weights of the best validation in a folder; ``None`` if none is there, or none is better than ``least``."""
    kept, found = least, None
    if newest["best"] is not None and newest["position"]["best"] is not None:
        metric, mode = newest["watched"]
        figure = Figure(metric=metric, value=newest["position"]["best"], mode=mode)
        if figure.better(kept):
            kept, found = figure, versioned(newest["best"], newest["versions"])
    for place, figure in checkpoints.figures().items():
        if figure.better(kept):
            kept, found = figure, _evaluation_weights(read(place))
    return found


def _evaluation_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that were validated: the average, if the run has one, else the parameters."""
    model, average = state["model"], state["ema"] or {}
    shown = {
        name: average[name].to(value.dtype) if name in average and average[name].shape == value.shape else value
        for name, value in model.items()
    }
    return versioned(shown, state["versions"])
