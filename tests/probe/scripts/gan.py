"""Two optimizers: a critic that steps three times for each step of the generator."""

import torch
from torch import nn

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(False)
torch.set_num_threads(1)
generator, critic = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
generator_optimizer = torch.optim.SGD(generator.parameters(), lr=1e-3)
for step in range(10_000):
    critic_optimizer.zero_grad()
    with torch.no_grad():
        made = generator(torch.randn(4, 8))
    (critic(made).mean() - critic(torch.randn(4, 16)).mean()).backward()
    critic_optimizer.step()
    if step % 3 == 2:
        generator_optimizer.zero_grad()
        (-critic(generator(torch.randn(4, 8))).mean()).backward()
        generator_optimizer.step()
