"""What these scripts share: real images, words, a graph and tables out of installed packages."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re

import torch
from sklearn.datasets import load_digits


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's 1797 handwritten digits: float32 ``(1797, 64)`` in 0..1, and int64 ``(1797,)``."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


def package_folder(name: str, requirement: str) -> pathlib.Path:
    """The folder of the package ``name``, which is never imported; ``requirement`` is what to install where it is missing."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"This example reads data from the package {name}: pip install --no-deps {requirement}")
    return pathlib.Path(spec.submodule_search_locations[0])


@functools.cache
def gensim_file(name: str) -> str:
    """The text of one of gensim's test files."""
    return (package_folder("gensim", "gensim==4.4.0") / "test" / "test_data" / name).read_text(encoding="latin-1")


def word_pairs() -> list[tuple[str, str, float]]:
    """The 353 pairs of words of WordSim353, and how alike people find them, in 0..1."""
    rows = [line.split("\t") for line in gensim_file("wordsim353.tsv").splitlines() if not line.startswith("#")]
    return [(one.lower(), other.lower(), float(mean) / 10) for one, other, mean in (row[:3] for row in rows)]


@functools.cache
def words(most: int) -> tuple[torch.Tensor, int]:
    """The words of 300 news articles as numbers, int64, in their order; all but the ``most`` frequent are 0."""
    found = re.findall(r"[a-z']+", gensim_file("lee_background.cor").lower())
    counts: dict[str, int] = {}
    for word in found:
        counts[word] = counts.get(word, 0) + 1
    kept = {word: 1 + place for place, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word))[:most])}
    return torch.tensor([kept.get(word, 0) for word in found]), most + 1
