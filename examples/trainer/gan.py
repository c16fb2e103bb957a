"""A GAN of handwritten digits (Goodfellow et al. 2014): two optimizers, each with steps of its own."""

from __future__ import annotations

from typing import Any

import torch
from material import digits
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import Loader, ManualRun


class Gan(nn.Module):
    """A generator from 16 random numbers, and a critic of images ``(B, 64)``."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def loader() -> Loader:
    """Images, a batch at a time."""
    return Loader(digits()[0], batch=64)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """What trains both."""
    return torch.optim.Adam(parameters, lr=2e-4, betas=(0.5, 0.999))


def step(run: ManualRun, real: torch.Tensor) -> torch.Tensor:
    """The critic learns to tell images from drawn ones, then the generator to be taken for them."""
    generator, critic = run.model.generator, run.model.critic
    drawn = generator(torch.randn(len(real), 16))
    run.backward(functional.softplus(-critic(real)).mean() + functional.softplus(critic(drawn.detach())).mean(), "critic")
    run.step("critic")
    loss = functional.softplus(-critic(drawn)).mean()
    run.backward(loss, "generator")
    run.step("generator")
    return loss


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(Gan(), loss=step, optimizer={"generator": adam, "critic": adam}, **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = Gan()
    for_generator, for_critic = adam(model.generator.parameters()), adam(model.critic.parameters())
    batches = loader()
    made = 0
    while made < updates:
        for real in batches:
            drawn = model.generator(torch.randn(len(real), 16))
            for_critic.zero_grad()
            told = functional.softplus(-model.critic(real)).mean()
            (told + functional.softplus(model.critic(drawn.detach())).mean()).backward()
            for_critic.step()
            for_generator.zero_grad()
            functional.softplus(-model.critic(drawn)).mean().backward()
            for_generator.step()
            made += 1
            if made == updates:
                break
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), epochs=10))
