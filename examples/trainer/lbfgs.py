"""Logistic regression by LBFGS on the breast cancer data of scikit-learn: an optimizer that calls the loss several times."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import trimtab


def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All rows as one batch, with a mean of 0 and a spread of 1."""
    rows, labels = load_breast_cancer(return_X_y=True)
    x = torch.from_numpy(rows).float()
    return [((x - x.mean(0)) / x.std(0), torch.from_numpy(labels).float()[:, None])]


loss = nn.BCEWithLogitsLoss()


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(nn.Linear(30, 1), loss=loss, optimizer=lambda p: torch.optim.LBFGS(p, max_iter=4), **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = nn.Linear(30, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    ((rows, labels),) = loader()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model(rows), labels)
        found.backward()
        return found

    for _ in range(updates):
        optimizer.step(closure)
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), epochs=20))
