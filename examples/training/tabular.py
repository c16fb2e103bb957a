"""A small network learns to tell benign tumours from malignant ones: scikit-learn's breast cancer data, 569 patients.

python examples/training/tabular.py
python -c "import trimtab; print(trimtab.tune('examples/training/tabular.py', budget='5m'))"
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from real import stop_at
from sklearn.datasets import load_breast_cancer
from torch import nn

import trimtab
from trimtab.train.data.loader import Loader

TRAIN, BATCH, EPOCHS, TARGET = 400, 16, 60, 0.085
SETTINGS = trimtab.Settings(threads=1, optimizer=trimtab.OptimizerSettings(implementation="fused"))


def build() -> nn.Module:
    """``features: float32 (B, 30)``, standardised -> ``logit: float32 (B, 1)`` of benign."""
    hidden = [nn.Linear(30, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*hidden, nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 1))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All patients, standardised by those to learn from, in an order that is shuffled but always the same."""
    bunch = load_breast_cancer()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    features, benign = torch.from_numpy(bunch.data).float()[order], torch.from_numpy(bunch.target).float()[order, None]
    return (features - features[:TRAIN].mean(0)) / features[:TRAIN].std(0), benign


def loader() -> Loader:
    """The patients to learn from, a batch at a time out of memory."""
    features, benign = data()
    return Loader((features[:TRAIN], benign[:TRAIN]), BATCH)


def held_out() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The patients to validate on."""
    features, benign = data()
    return [(features[TRAIN:], benign[TRAIN:])]


loss = nn.BCEWithLogitsLoss()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains it."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def trainer() -> trimtab.Trainer:
    """Everything put together."""
    return trimtab.Trainer(build(), loss=loss, optimizer=optimizer, settings=SETTINGS, callbacks=[stop_at(TARGET)])


def workload() -> trimtab.Workload:
    """For trimtab.tune: the same training with every setting at its default."""
    training = trimtab.Training(data=loader, optimizer=optimizer, loss=loss)
    return trimtab.Workload(name="train-tabular", mode="train", model=build, training=training)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), held_out(), epochs=EPOCHS))
