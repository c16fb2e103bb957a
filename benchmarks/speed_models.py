"""The models that speed is measured on, as workloads ``NAME_BATCH``: ``speed_models.py:resnet50_1``, ``...:bert_16``.

ResNet-50, MobileNetV2, BERT-base and the LSTM have random weights: they are for speed and fidelity, never for accuracy. MiniLM
and the digits are the pretrained and trained models of the examples. None has labels here, so that all are judged alike: by how
far outputs are from the original's, relative to what these vary by.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import digits
import minilm
import torch
import transformers
from torch import nn

import trimtab

EXAMPLES = 64
"""Examples of calibration data, and as many that fidelity is judged on."""
TOKENS = 128

Inputs = tuple[torch.Tensor, ...]


class Only(nn.Module):
    """One tensor out of a model of transformers, whose arguments come in a row."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.model(**dict(zip(self.names, inputs, strict=True))).logits


class Recurrent(nn.Module):
    """``x: float32 (B, 80, 256)`` -> ``(B, 10)``: an LSTM of two layers of 256, and a classifier on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.head(self.lstm(x)[0][:, -1])


def random_images(count: int, seed: int) -> Inputs:
    """Smooth random images: noise at several scales, as white noise alone averages out in a deep network."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, 224, 224)
    for size in (4, 16, 56, 224):
        noise = torch.randn(count, 3, size, size, generator=generator)
        images += nn.functional.interpolate(noise, size=(224, 224), mode="bilinear")
    return (images,)


def random_tokens(count: int, seed: int) -> Inputs:
    """Random ids of BERT's vocabulary, nothing masked."""
    ids = torch.randint(1000, 30000, (count, TOKENS), generator=torch.Generator().manual_seed(seed))
    return ids, torch.ones_like(ids)


def random_sequences(count: int, seed: int) -> Inputs:
    """Random features."""
    return (torch.randn(count, 80, 256, generator=torch.Generator().manual_seed(seed)),)


def texts(count: int, seed: int) -> Inputs:
    """News texts of Lee's corpus, each started at another word per round, padded or cut to the length."""
    lines = minilm.corpus("lee.cor")
    words = [lines[i % len(lines)].split()[(seed + i // len(lines)) * 7 :] for i in range(count)]
    ids, mask = minilm.tokenize([" ".join(part) for part in words], TOKENS)
    fill = TOKENS - ids.shape[1]
    return nn.functional.pad(ids, (0, fill)), nn.functional.pad(mask, (0, fill))


def scans(count: int, seed: int) -> Inputs:
    """Digits that the network was not trained on."""
    images, _ = digits.data()
    return (images[digits.TRAIN + seed * count :][:count],)


def resnet50() -> nn.Module:
    """ResNet-50 as transformers configures it, with statistics of the batch normalisations that fit its random weights."""
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    return _settled(Only(model, ("pixel_values",)))


def mobilenet() -> nn.Module:
    """MobileNetV2 of width 1.0."""
    model = transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(num_labels=1000))
    return _settled(Only(model, ("pixel_values",)))


def bert() -> nn.Module:
    """BERT-base with a classifier."""
    model = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=10))
    return Only(model, ("input_ids", "attention_mask"))


def _settled(model: nn.Module) -> nn.Module:
    """``model`` with the running statistics of real activations, without which a deep random network hardly varies."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(*random_images(8, 99))
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Inputs], tuple[str, ...]]] = {
    "resnet50": (resnet50, random_images, ("pixel_values",)),
    "mobilenet": (mobilenet, random_images, ("pixel_values",)),
    "bert": (bert, random_tokens, ("input_ids", "attention_mask")),
    "minilm": (minilm.build, texts, ("input_ids", "attention_mask")),
    "lstm": (Recurrent, random_sequences, ("x",)),
    "digits": (digits.build, scans, ("images",)),
}
"""Name -> how to build the model, how to make that many inputs from a seed, and what the inputs are called."""


def build(name: str) -> nn.Module:
    """The model, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name][0]().eval()


def batches(name: str, batch: int, seed: int) -> list[Inputs]:
    """:data:`EXAMPLES` inputs in batches of ``batch``."""
    inputs = MODELS[name][1](EXAMPLES, seed)
    return [tuple(tensor[i : i + batch].contiguous() for tensor in inputs) for i in range(0, EXAMPLES, batch)]


def workload(name: str, batch: int) -> trimtab.Workload:
    """The model at one batch size; its shapes are fixed, as they are for the calls by hand."""
    data = batches(name, batch, 0)
    return trimtab.Workload(
        name=f"{name}_{batch}", model=functools.partial(build, name), inputs=data[0], calibration=data, dynamic={}
    )


for _name in MODELS:
    for _batch in (1, 16):
        globals()[f"{_name}_{_batch}"] = functools.partial(workload, _name, _batch)
