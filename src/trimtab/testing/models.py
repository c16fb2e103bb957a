"""Small models for the suites, with features that exporters and runtimes often get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim

CALIBRATION = 8
"""Number of calibration calls of each case."""


class ConvNet(nn.Module):
    """Convolutions, batch norms with non-trivial statistics, a residual connection, dropout, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images``: (batch, 3, 12, 12) -> logits (batch, 10)."""
        x = functional.relu(self.stem_norm(self.stem(images)))
        x = x + self.body(x)
        scores: torch.Tensor = self.head(self.dropout(x.mean((2, 3))))
        return scores


class Encoder(nn.Module):
    """Token embedding and one transformer block with a padding mask. Inputs are integers; batch and length are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.last_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``ids``, ``mask``: int64 (batch, length) -> float32 (batch, 16), the mean over unmasked positions."""
        x = self.tokens(ids)
        query, key, value = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=(mask > 0)[:, None, None, :])
        x = self.norm(x + attended.transpose(1, 2).flatten(2))
        x = self.last_norm(x + self.narrow(functional.gelu(self.wide(x))))
        weights = mask.unsqueeze(-1).to(x.dtype)
        mean: torch.Tensor = (x * weights).sum(1) / weights.sum(1)
        return mean


class Recurrent(nn.Module):
    """An LSTM whose state is input and output: three inputs, a tuple of three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(
        self, steps: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``steps`` (batch, 5, 6), ``hidden`` and ``cell`` (1, batch, 12) -> scores (batch, 4) and the next state."""
        x, (hidden, cell) = self.lstm(steps, (hidden, cell))
        return self.head(x[:, -1]), hidden, cell


class Branches(nn.Module):
    """Several inputs, one by keyword and one unused; a weight that is used twice; a nested dict with an integer as output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 24), nn.Linear(7, 24)
        self.shared = nn.Linear(24, 24)

    def forward(self, left: torch.Tensor, unused: torch.Tensor, *, right: torch.Tensor) -> dict[str, Any]:
        """``left`` (batch, 5), ``unused`` (batch, 3), ``right`` (batch, 7) -> ``{"pair": (a, b), "best": index}``."""
        x = torch.relu(self.left(left) + self.right(right))
        first = self.shared(x)
        second = self.shared(torch.relu(first))
        return {"pair": (first, second), "best": second.argmax(-1)}


@dataclass
class Scores:
    """The output of :class:`Structured`."""

    logits: torch.Tensor
    features: torch.Tensor


class Structured(nn.Module):
    """A dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(9, 16), nn.Linear(16, 3)

    def forward(self, rows: torch.Tensor) -> Scores:
        """``rows`` (batch, 9) -> logits (batch, 3) and features (batch, 16)."""
        features = torch.tanh(self.body(rows))
        return Scores(self.head(features), features)


class Anchored(nn.Module):
    """Returns a buffer of the model and a view of it."""

    anchors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(9, 16), nn.Linear(16, 3)
        self.register_buffer("anchors", torch.randn(5, 4))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``rows`` (batch, 9) -> scores (batch, 3), the anchors (5, 4) and some of them (3, 4)."""
        return self.head(torch.tanh(self.body(rows))), self.anchors, self.anchors[2:]


class Shared(nn.Module):
    """One convolution shared by two levels with a batch norm each. Stores a computed value, and refuses non-tensors."""

    class Refusal(Exception):
        """Derives from ``Exception`` directly, like the errors of type-checking libraries."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 3, 3, padding=1)
        self.levels = nn.ModuleList([nn.Sequential(convolution, nn.BatchNorm2d(3)) for _ in range(2)])
        self.features: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images`` (batch, 3, 8, 8) -> (batch, 3)."""
        self.features = self.levels[0](images)
        if not isinstance(images, torch.Tensor):
            raise self.Refusal("tensors only")
        means: torch.Tensor = self.features.mean((2, 3)) + self.levels[1](images[..., ::2, ::2]).mean((2, 3))
        return means


class Deciding(nn.Module):
    """Data-dependent control flow: an export of one branch only is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.warm, self.cold = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (batch, 6) -> (batch, 4), by another layer if their sum is negative."""
        scores: torch.Tensor = self.warm(rows) if rows.sum() > 0 else self.cold(rows)
        return scores


class Clipping(nn.Module):
    """Data-dependent control flow that does not depend on the sign of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (batch, 6) -> (batch, 4), cut to a norm of ten."""
        norm = rows.norm()
        if norm > 10:
            rows = rows * (10 / norm)
        scores: torch.Tensor = self.layer(rows)
        return scores


def convnet() -> Candidate:
    """Batch of 2 images, dynamic batch."""
    return _candidate(
        lambda: _trained(ConvNet()), lambda: ((torch.randn(2, 3, 12, 12),), {}), {"images": {0: Dim("batch", max=64)}}
    )


def encoder() -> Candidate:
    """Batch of 2 sequences of 6 tokens with padding; dynamic batch and length."""

    def inputs() -> Any:
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
        return (torch.randint(0, 50, (2, 6)), mask), {}

    axes = {0: Dim("batch", max=64), 1: Dim("length", max=32)}
    return _candidate(Encoder, inputs, {"ids": axes, "mask": axes})


def recurrent() -> Candidate:
    """One sequence with its state; dynamic batch, which is another axis of the state."""
    batch = Dim("batch", max=64)
    dynamic = {"steps": {0: batch}, "hidden": {1: batch}, "cell": {1: batch}}
    return _candidate(Recurrent, lambda: ((torch.randn(1, 5, 6), torch.randn(1, 1, 12), torch.randn(1, 1, 12)), {}), dynamic)


def branches() -> Candidate:
    """Batch of 3 rows, dynamic batch; one input by keyword, one unused."""
    batch = {0: Dim("batch", max=64)}
    dynamic = {"left": batch, "unused": batch, "right": batch}
    return _candidate(Branches, lambda: ((torch.randn(3, 5), torch.randn(3, 3)), {"right": torch.randn(3, 7)}), dynamic)


def structured() -> Candidate:
    """Batch of 4 rows, all sizes fixed, a dataclass as output."""
    return _candidate(Structured, lambda: ((torch.randn(4, 9),), {}), {})


def anchored() -> Candidate:
    """Batch of 2 rows, dynamic batch; two of the outputs do not depend on the input."""
    return _candidate(Anchored, lambda: ((torch.randn(2, 9),), {}), {"rows": {0: Dim("batch", max=64)}})


def shared() -> Candidate:
    """Batch of 2 images, all sizes fixed, through a layer that two parents share."""
    return _candidate(lambda: _trained(Shared()), lambda: ((torch.randn(2, 3, 8, 8),), {}), {})


def deciding() -> Candidate:
    """Batch of 2 rows of any sign, through a model with data-dependent control flow."""
    return _candidate(Deciding, lambda: ((torch.randn(2, 6),), {}), {})


def clipping() -> Candidate:
    """Batch of 2 rows with a norm below ten."""
    return _candidate(Clipping, lambda: ((torch.randn(2, 6),), {}), {})


CASES: dict[str, Callable[[], Candidate]] = {
    "convnet": convnet,
    "encoder": encoder,
    "recurrent": recurrent,
    "branches": branches,
    "structured": structured,
    "anchored": anchored,
}
"""Cases that every technique must accept, or refuse with a sentence. Not :func:`deciding`, which most runtimes refuse."""


def _candidate(make: Callable[[], nn.Module], inputs: Callable[[], Any], dynamic: Any) -> Candidate:
    """A candidate with the same weights and inputs in every process. The caller's random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = make().eval()
        args, kwargs = inputs()
        calibration = [inputs() for _ in range(CALIBRATION)]
    return Candidate.of(model, args, kwargs, dynamic=dynamic, calibration=calibration)


def _trained(model: nn.Module) -> nn.Module:
    """``model`` with batch-norm statistics as after training. Initial statistics would hide wrong folds."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for name, low in (("running_mean", -0.5), ("running_var", 0.5), ("weight", 0.5), ("bias", -0.5)):
                    getattr(module, name).uniform_(low, low + 1.0)
    return model
