"""Word language model: an LSTM trained by plain gradient descent, in the manner of the PyTorch examples."""

import argparse
import math

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser(description="LSTM word language model")
parser.add_argument("--emsize", type=int, default=96)
parser.add_argument("--nhid", type=int, default=96)
parser.add_argument("--bptt", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=2.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--log-dir", default="runs/word_lm")


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 1)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output), hidden


def corpus(words, vocabulary, seed=5):
    """A random walk over words in which some successors are likely."""
    g = torch.Generator().manual_seed(seed)
    likely = torch.randint(vocabulary, (vocabulary, 4), generator=g)
    choice = torch.randint(4, (words,), generator=g).tolist()
    ids, word = [], 0
    for c in choice:
        word = int(likely[word, c])
        ids.append(word)
    return torch.tensor(ids)


def batchify(data, bsz):
    n = data.size(0) // bsz
    return data[: n * bsz].view(bsz, -1).t().contiguous()


def repackage(hidden):
    return tuple(h.detach() for h in hidden)


def main():
    args = parser.parse_args()
    torch.manual_seed(1111)
    ntoken = 500
    data = batchify(corpus(40_000, ntoken), args.batch_size)
    model = RNNModel(ntoken, args.emsize, args.nhid)
    criterion = nn.CrossEntropyLoss()
    writer = SummaryWriter(args.log_dir)

    hidden = None
    model.train()
    for step in range(args.steps):
        i = (step * args.bptt) % (len(data) - args.bptt - 1)
        source, target = data[i : i + args.bptt], data[i + 1 : i + 1 + args.bptt].reshape(-1)
        if hidden is None:
            hidden = tuple(torch.zeros(1, args.batch_size, args.nhid) for _ in range(2))
        hidden = repackage(hidden)
        output, hidden = model(source, hidden)
        loss = criterion(output.view(-1, ntoken), target)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-args.lr)

        writer.add_scalar("train/loss", loss.item(), step)
        for name, p in model.named_parameters():
            writer.add_histogram(f"weights/{name}", p, step)
            writer.add_histogram(f"gradients/{name}", p.grad, step)
        if (step + 1) % 50 == 0:
            print(f"| step {step + 1:5d} | loss {loss.item():5.2f} | ppl {math.exp(loss.item()):8.2f}")
    writer.close()


if __name__ == "__main__":
    main()
