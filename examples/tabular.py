"""Tumours, benign or malignant: a small network on the 30 measurements of scikit-learn's breast cancer data (569 patients).

It is trained on 169 patients in a few seconds the first time; the other 400 judge. So few can decide a limit of three points at
best: with 200 patients, not one changed verdict still leaves a drop of 1.5 points possible.

    trimtab optimize examples/tabular.py --max-drop 3% --budget 2m
"""

from __future__ import annotations

import torch
from material import fit, trained
from torch import nn

import trimtab

try:
    from sklearn.datasets import load_breast_cancer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("This example takes its data from scikit-learn. Install it: pip install scikit-learn") from error

TRAIN, SELECT = 169, 200


class Tumours(nn.Module):
    """``features: float32 (B, 30)`` as measured -> ``logit: float32 (B,)`` of benign; 21,121 parameters."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)
        self.layers = nn.Sequential(
            nn.Linear(30, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 1),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The logit of "benign"; the measurements are standardised first."""
        return self.layers((features - self.mean) / self.spread).squeeze(1)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All patients, float32 ``(569, 30)``, and 1.0 where benign, in an order that is shuffled but always the same."""
    bunch = load_breast_cancer()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(bunch.data).float()[order], torch.from_numpy(bunch.target).float()[order]


def build() -> nn.Module:
    """The trained network; the first call trains it."""
    features, benign = data()
    features, benign = features[:TRAIN], benign[:TRAIN]
    return trained(
        "tabular-128",
        lambda: Tumours(features.mean(0), features.std(0)),
        lambda model: fit(model, features, benign, nn.BCEWithLogitsLoss(), epochs=60, rate=5e-3),
    )


def right(logits: torch.Tensor, benign: torch.Tensor) -> torch.Tensor:
    """For each patient whether the verdict is right."""
    return (logits > 0) == (benign > 0.5)


def workload() -> trimtab.Workload:
    """One patient at a time must be fast; any batch must work."""
    features, benign = data()
    select, test = slice(TRAIN, TRAIN + SELECT), slice(TRAIN + SELECT, None)
    return trimtab.Workload(
        name="tabular",
        model=build,
        inputs=(features[:1],),
        evaluation=trimtab.Evaluation(
            data=(features[select], benign[select]), test=(features[test], benign[test]), score=right
        ),
        calibration=features[:TRAIN],
        dynamic={"features": {0: "batch"}},
    )
