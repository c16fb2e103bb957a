"""Will this user click on that item? Embeddings of both and a small network on top."""

import argparse

import torch
import torch.nn as nn
from sklearn.metrics import roc_auc_score


class Clicks(nn.Module):
    def __init__(self, users, items, dim=32):
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        return self.mlp(torch.cat([u, i, u * i], 1))[:, 0]


def interactions(n, users, items):
    taste, kind = torch.randn(users, 4), torch.randn(items, 4)
    user, item = torch.randint(users, (n,)), torch.randint(items, (n,))
    return user, item, torch.bernoulli(torch.sigmoid((taste[user] * kind[item]).sum(1)))


class AUC:
    """Area under the ROC curve of the last examples."""

    def __init__(self, last=8192):
        self.last, self.scores, self.labels = last, [], []

    def update(self, scores, labels):
        self.scores = (self.scores + scores.tolist())[-self.last :]
        self.labels = (self.labels + labels.tolist())[-self.last :]

    def compute(self):
        return roc_auc_score(self.labels, self.scores)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    user, item, click = interactions(200_000, 1000, 500)
    model = Clicks(1000, 500)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loss_fn = nn.BCEWithLogitsLoss()
    auc = AUC()
    for step in range(1, args.max_steps + 1):
        rows = torch.randint(len(user), (args.batch_size,))
        logits = model(user[rows], item[rows])
        loss = loss_fn(logits, click[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        auc.update(logits.detach(), click[rows])
        value = auc.compute()
        if step % args.log_every == 0:
            print(f"step {step}: loss {loss.item():.4f} auc {value:.4f}")


if __name__ == "__main__":
    main()
