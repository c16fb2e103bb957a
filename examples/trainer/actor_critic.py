"""Actor and critic play with handwritten digits: name the digit, and get 1 if it is right (Sutton & Barto 2018, 13.5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from material import digits
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import ManualRun

Played = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Agent(nn.Module):
    """A policy over ten names, and what reward it expects."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


class Games:
    """What the present policy plays, 64 images at a time; a resumed run goes on with the generator of the process."""

    def __init__(self, agent: nn.Module) -> None:
        self.agent = agent
        self.images, self.labels = digits()

    def __iter__(self) -> Iterator[Played]:
        while True:
            chosen = torch.randint(len(self.images), (64,))
            with torch.no_grad():
                named = torch.distributions.Categorical(logits=self.agent.actor(self.images[chosen])).sample()
            yield self.images[chosen], named, (named == self.labels[chosen]).float()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the next game depends on the policy and on torch's generator only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    """What trains both."""
    return torch.optim.Adam(parameters, lr=3e-3)


def losses(model: nn.Module, played: Played) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the critic, and that of the actor, whose rewards count above what was expected."""
    images, named, reward = played
    expected = model.critic(images).squeeze(1)
    told = torch.distributions.Categorical(logits=model.actor(images)).log_prob(named)
    return functional.mse_loss(expected, reward), -(told * (reward - expected.detach())).mean()


def step(run: ManualRun, played: Played) -> torch.Tensor:
    """Both learn from the games."""
    of_critic, of_actor = losses(run.model, played)
    run.backward(of_critic, "critic")
    run.backward(of_actor, "actor")
    run.step()
    return -played[2].mean()


def loader(agent: nn.Module) -> Games:
    """The games of an agent."""
    return Games(agent)


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(Agent(), loss=step, optimizer={"actor": adam, "critic": adam}, **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = Agent()
    for_actor, for_critic = adam(model.actor.parameters()), adam(model.critic.parameters())
    for played, _ in zip(Games(model), range(updates), strict=False):
        for_actor.zero_grad()
        for_critic.zero_grad()
        of_critic, of_actor = losses(model, played)
        of_critic.backward()
        of_actor.backward()
        for_actor.step()
        for_critic.step()
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    made = trainer()
    print(made.fit(loader(made.model), steps=2000))
