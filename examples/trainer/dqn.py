"""Deep Q-learning on a walk through the handwritten digits (Mnih et al. 2015): replay, and a network that follows slowly.

The player sees a digit and goes one up or down; 1 is gained at 9, and each step costs a little. Checkpoints
hold what was played, as the position of the loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from material import digits
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import ManualRun

Moves = tuple[torch.Tensor, ...]


class Values(nn.Module):
    """What up and down are worth in each image, now and by the network that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(2))
        self.slow.load_state_dict(self.online.state_dict())
        self.slow.requires_grad_(False)


class Replay:
    """Plays 16 steps by the present values, and gives 64 of those that it remembers."""

    def __init__(self, values: nn.Module, size: int = 1024) -> None:
        self.values, self.images = values, digits()[0]
        self.of = [(digits()[1] == digit).nonzero()[:, 0] for digit in range(10)]
        self.memory, self.count, self.place = torch.zeros(size, 4, dtype=torch.int64), 0, 0
        self.digit, self.image = 4, int(self.of[4][0])

    def __iter__(self) -> Iterator[Moves]:
        while True:
            for _ in range(16):
                self._play()
            seen, action, reached, won = self.memory[torch.randint(min(self.count, len(self.memory)), (64,))].unbind(1)
            yield self.images[seen], action, self.images[reached], won.float()

    def _play(self) -> None:
        with torch.no_grad():
            best = int(self.values.online(self.images[self.image]).argmax())
        action = int(torch.randint(2, ())) if float(torch.rand(())) < 0.2 else best
        self.digit = min(max(self.digit + (1 if action else -1), 0), 9)
        reached = int(self.of[self.digit][int(torch.randint(len(self.of[self.digit]), ()))])
        self.memory[self.place] = torch.tensor([self.image, action, reached, int(self.digit == 9)])
        self.count, self.place = self.count + 1, (self.place + 1) % len(self.memory)
        if self.digit == 9:
            self.digit, reached = 4, int(self.of[4][0])
        self.image = reached

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, and where the player is."""
        facts = {"count": self.count, "place": self.place, "digit": self.digit, "image": self.image}
        return {"memory": self.memory.clone(), **facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        vars(self).update(state)


def loss_of(model: nn.Module, moves: Moves) -> torch.Tensor:
    """How far the values are from what was gained and what the slow network expects after it."""
    seen, action, reached, won = moves
    value = model.online(seen).gather(1, action[:, None])[:, 0]
    return functional.smooth_l1_loss(value, won - 0.02 + 0.95 * (1 - won) * model.slow(reached).amax(1))


@torch.no_grad()
def follow(model: nn.Module) -> None:
    """The slow network comes a little nearer."""
    for slow, online in zip(model.slow.parameters(), model.online.parameters(), strict=True):
        slow.lerp_(online, 0.05)


def step(run: ManualRun, moves: Moves) -> torch.Tensor:
    """One step of the values, then one of the network that follows."""
    loss = loss_of(run.model, moves)
    run.backward(loss)
    run.step()
    follow(run.model)
    return loss


def loader(values: nn.Module) -> Replay:
    """What is played and remembered. It has a ``state_dict()``, so that a checkpoint holds it as the place in the data."""
    return Replay(values)


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(Values(), loss=step, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = Values()
    optimizer = torch.optim.Adam(model.online.parameters(), lr=1e-3)
    for moves, _ in zip(Replay(model), range(updates), strict=False):
        optimizer.zero_grad()
        loss_of(model, moves).backward()
        optimizer.step()
        follow(model)
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    made = trainer()
    print(made.fit(loader(made.model), steps=2000))
