"""A graph network tells the two sides of a karate club from two members of each (Kipf & Welling 2017; Zachary 1977)."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.nn import functional

import trimtab

LABELLED = [0, 1, 32, 33]
Batch = dict[str, torch.Tensor]


class GraphNet(nn.Module):
    """``links: (N, N)`` normalised -> logits ``(N, 2)``; the members have no features but themselves."""

    def __init__(self, members: int = 34) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(members, 16, bias=False), nn.Linear(16, 2, bias=False)

    def forward(self, links: torch.Tensor) -> torch.Tensor:
        """Two rounds of means over neighbours."""
        hidden = functional.dropout(torch.relu(links @ self.first.weight.t()), 0.5, self.training)
        return links @ self.second(hidden)


def loader() -> list[Batch]:
    """The whole graph as the one batch of an epoch."""
    club = nx.karate_club_graph()
    links = torch.from_numpy(nx.to_numpy_array(club, weight=None)).float() + torch.eye(len(club))
    scale = links.sum(1).rsqrt()
    side = torch.tensor([int(club.nodes[member]["club"] == "Officer") for member in club])
    known = torch.zeros(len(club), dtype=torch.bool).index_fill(0, torch.tensor(LABELLED), value=True)
    return [{"links": scale[:, None] * links * scale, "side": side, "known": known}]


def loss(model: nn.Module, graph: Batch) -> tuple[torch.Tensor, int]:
    """The mean over the labelled members, and their number."""
    found = model(graph["links"])[graph["known"]]
    return functional.cross_entropy(found, graph["side"][graph["known"]]), len(found)


def right(outputs: torch.Tensor, graph: Batch) -> torch.Tensor:
    """Whether each member's side is found."""
    return outputs.argmax(1) == graph["side"]


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(
        GraphNet(),
        loss=loss,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=5e-4),
        metrics={"right": right},
        **options,
    )


def by_hand(updates: int) -> nn.Module:
    """The same as a loop, without the metric."""
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    (graph,) = loader()
    for _ in range(updates):
        optimizer.zero_grad()
        loss(model, graph)[0].backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), loader(), epochs=100))
