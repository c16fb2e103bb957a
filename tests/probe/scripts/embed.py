"""Inference over a loader, with gradients, and with most of each batch padding."""

import torch
from torch import nn
from torch.utils.data import DataLoader


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, place):
        mask = torch.zeros(32, dtype=torch.long)
        mask[:8] = 1
        return {"input_ids": torch.randint(1, 50, (32,)) * mask, "attention_mask": mask}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 16)

    def forward(self, input_ids, attention_mask):
        return self.head(self.embedding(input_ids)) * attention_mask[..., None]


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = Model().eval()
    for batch in DataLoader(Texts(), batch_size=4, num_workers=1):
        for row in model(**batch):
            row.tolist()
