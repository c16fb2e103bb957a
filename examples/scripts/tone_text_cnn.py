"""Tone of short messages: a one-dimensional CNN over characters, compiled."""

import argparse

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

torch._dynamo.config.recompile_limit = 512
torch._dynamo.config.accumulated_recompile_limit = 4096


class TextCNN(nn.Module):
    def __init__(self, vocabulary=64, width=64, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(width, width, k, padding=k // 2) for k in (3, 5)])
        self.out = nn.Linear(2 * width, classes)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        return self.out(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1))


def messages(count, generator):
    """Pairs of (characters, tone): the tone is the most frequent of the characters 1, 2 and 3."""
    found = []
    for _ in range(count):
        length = int(torch.randint(40, 200, (1,), generator=generator))
        tokens = torch.randint(1, 64, (length,), generator=generator)
        tone = int(torch.randint(3, (1,), generator=generator))
        tokens[torch.randperm(length, generator=generator)[: length // 5]] = tone + 1
        found.append((tokens, tone))
    return found


def batches(data, size):
    """Messages of similar length together, so that little is padded."""
    data = sorted(data, key=lambda pair: len(pair[0]))
    groups = [data[i : i + size] for i in range(0, len(data), size)]
    for g in torch.randperm(len(groups)).tolist():
        tokens, tones = zip(*groups[g], strict=True)
        yield nn.utils.rnn.pad_sequence(tokens, batch_first=True), torch.tensor(tones)


def run():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    opt = parser.parse_args()

    torch.manual_seed(11)
    data = messages(4800, torch.Generator().manual_seed(2))
    model = TextCNN()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    step = 0
    while step < opt.steps:
        for tokens, tones in batches(data, opt.batch):
            loss = F.cross_entropy(compiled(tokens), tones)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step:4d} | loss {loss.item():.3f}")
            if step >= opt.steps:
                return


if __name__ == "__main__":
    run()
