"""
A character-level GPT in one file. Learns to write arithmetic such as "17+25=42;".
"""

import random
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class Config:
    layers: int = 12
    heads: int = 2
    width: int = 32
    block: int = 32
    batch: int = 8
    lr: float = 1e-3
    iters: int = 800


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.ln1, self.ln2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.up = nn.Linear(c.width, 4 * c.width)
        self.down = nn.Linear(4 * c.width, c.width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, c, vocab):
        super().__init__()
        self.tok = nn.Embedding(vocab, c.width)
        self.pos = nn.Parameter(torch.zeros(c.block, c.width))
        self.blocks = nn.Sequential(*[Block(c) for _ in range(c.layers)])
        self.ln = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos[: idx.shape[1]]
        logits = self.head(self.ln(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_text(n):
    random.seed(3)
    sums = []
    for _ in range(n):
        a, b = random.randrange(100), random.randrange(100)
        sums.append(f"{a}+{b}={a + b};")
    return "".join(sums)


if __name__ == "__main__":
    config = Config()
    for arg in sys.argv[1:]:  # --iters=500 overrides
        key, value = arg.lstrip("-").split("=")
        setattr(config, key, type(getattr(config, key))(value))

    torch.manual_seed(1337)
    text = make_text(20_000)
    chars = sorted(set(text))
    data = torch.tensor([chars.index(ch) for ch in text])

    model = GPT(config, len(chars))
    opt = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for it in range(config.iters):
        starts = torch.randint(len(data) - config.block - 1, (config.batch,))
        places = starts[:, None] + torch.arange(config.block)
        loss = model(data[places], data[places + 1])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if it % 50 == 0:
            print(f"iter {it}: loss {loss.item():.4f}")
