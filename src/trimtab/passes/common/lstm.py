"""Remove hidden units of ``nn.LSTM``: torch-pruning's own pruner of recurrent layers makes models that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

GATES = 4


def removed_units(lstm: nn.LSTM, outputs: Sequence[int]) -> dict[tuple[int, str], list[int]]:
    """The hidden units that each layer and direction loses, where the last layer loses ``outputs``.

    Inner layers lose as many, those with the smallest weights into the layer above.
    """
    hidden, last = lstm.hidden_size, lstm.num_layers - 1
    suffixes = _suffixes(lstm)
    lost = {(last, s): [i - d * hidden for i in outputs if i // hidden == d] for d, s in enumerate(suffixes)}
    count = len(lost[last, ""])
    if any(len(units) != count for units in lost.values()):
        raise ValueError("both directions of an LSTM must lose as many hidden units")
    for layer in range(last):
        above = torch.stack([getattr(lstm, f"weight_ih_l{layer + 1}{s}").detach().norm(dim=0) for s in suffixes]).sum(0)
        for d, s in enumerate(suffixes):
            lost[layer, s] = sorted(above[d * hidden : (d + 1) * hidden].argsort()[:count].tolist())
    return lost


def scores(lstm: nn.LSTM) -> torch.Tensor:
    """The importance of each output of the last layer: the norm of the weights of its four gates."""
    hidden, found = lstm.hidden_size, []
    for s in _suffixes(lstm):
        rows = torch.cat([getattr(lstm, f"weight_{kind}_l{lstm.num_layers - 1}{s}").detach() for kind in ("ih", "hh")], 1)
        found.append(rows.reshape(GATES, hidden, -1).square().sum((0, 2)))
    return torch.cat(found)


def remove_units(lstm: nn.LSTM, outputs: Sequence[int]) -> None:
    """Remove ``outputs`` of the last layer, and as many units of every other one, in place."""
    hidden, lost = lstm.hidden_size, removed_units(lstm, outputs)
    suffixes = _suffixes(lstm)
    keep = {place: torch.tensor([i for i in range(hidden) if i not in set(units)]) for place, units in lost.items()}
    for (layer, s), units in keep.items():
        rows = torch.cat([units + gate * hidden for gate in range(GATES)])
        _select(lstm, f"weight_hh_l{layer}{s}", rows, units)
        columns = None
        if layer:
            columns = torch.cat([keep[layer - 1, below] + d * hidden for d, below in enumerate(suffixes)])
        _select(lstm, f"weight_ih_l{layer}{s}", rows, columns)
        if lstm.bias:
            for kind in ("ih", "hh"):
                _select(lstm, f"bias_{kind}_l{layer}{s}", rows, None)
    lstm.hidden_size = len(keep[0, ""])
    lstm.flatten_parameters()


def clear_units(lstm: nn.LSTM, outputs: Sequence[int]) -> None:
    """Set to zero, in place, what the units that :func:`remove_units` removes contribute inside the LSTM."""
    hidden, suffixes = lstm.hidden_size, _suffixes(lstm)
    with torch.no_grad():
        for (layer, s), units in removed_units(lstm, outputs).items():
            getattr(lstm, f"weight_hh_l{layer}{s}")[:, units] = 0.0
            if layer + 1 < lstm.num_layers:
                columns = [i + suffixes.index(s) * hidden for i in units]
                for above in suffixes:
                    getattr(lstm, f"weight_ih_l{layer + 1}{above}")[:, columns] = 0.0


def remove_inputs(lstm: nn.LSTM, inputs: Sequence[int]) -> None:
    """Remove ``inputs`` of the first layer, in place."""
    keep = torch.tensor([i for i in range(lstm.input_size) if i not in set(inputs)])
    for s in _suffixes(lstm):
        _select(lstm, f"weight_ih_l0{s}", None, keep)
    lstm.input_size = len(keep)
    lstm.flatten_parameters()


def pruner(base: type[Any]) -> Any:
    """A pruner of ``nn.LSTM`` for torch-pruning, whose base class is ``base``."""

    class LstmPruner(base):  # type: ignore[misc]
        TARGET_MODULES = nn.LSTM

        def prune_out_channels(self, layer: nn.LSTM, idxs: Sequence[int]) -> nn.LSTM:
            remove_units(layer, idxs)
            return layer

        def prune_in_channels(self, layer: nn.LSTM, idxs: Sequence[int]) -> nn.LSTM:
            remove_inputs(layer, idxs)
            return layer

        def get_out_channels(self, layer: nn.LSTM) -> int:
            return layer.hidden_size * (1 + layer.bidirectional)

        def get_in_channels(self, layer: nn.LSTM) -> int:
            return layer.input_size

    return LstmPruner()


def _suffixes(lstm: nn.LSTM) -> tuple[str, ...]:
    return ("", "_reverse") if lstm.bidirectional else ("",)


def _select(lstm: nn.LSTM, name: str, rows: torch.Tensor | None, columns: torch.Tensor | None) -> None:
    weight = getattr(lstm, name)
    found = weight.detach()
    found = found if rows is None else found.index_select(0, rows)
    found = found if columns is None else found.index_select(1, columns)
    setattr(lstm, name, nn.Parameter(found.clone(), requires_grad=weight.requires_grad))
