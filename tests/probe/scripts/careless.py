"""A training that reads a file per example, loops over the batch, and evaluates with gradients."""

import pathlib
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Files(Dataset):
    def __init__(self, folder):
        self.paths = [folder / f"{place}.txt" for place in range(64)]
        for place, path in enumerate(self.paths):
            path.write_text(str(place))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, place):
        with open(self.paths[place], encoding="utf-8") as file:
            return torch.full((4,), float(file.read()))


def loss_of(outputs):
    total = 0.0
    for output in outputs:
        total = total + (output**2).sum()
    return total


with tempfile.TemporaryDirectory() as name:
    loader = DataLoader(Files(pathlib.Path(name)), batch_size=8)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()
        model.eval()
        held_out = model(torch.ones(4, 4))
        model.train()
