"""A cache of decoded examples, for ``Loader(cache=...)``: in the memory of a process, or in files that its workers share.

Batches are never cached: with a shuffled order the same batch does not come twice, but every example comes in every epoch.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trimtab._internal.files import DISK_FULL, path_of
from trimtab._internal.serialization import dumps
from trimtab._internal.text import of_type
from trimtab._internal.units import megabytes
from trimtab.errors import StorageError, UsageError
from trimtab.tensors.structure import leaves_of, map_items
from trimtab.train.checkpoint.checkpoints import Encoder, decode

_SIZE = re.compile(r"\s*[0-9.]+\s*[kKmMgG][iI]?[bB]\s*")
_FACTS = "cache.json"
_LEAF_BYTES = 64
"""Memory of a value in addition to its data, in bytes."""


class ExampleCache:
    """Decoded examples by their place in the dataset.

    Args:
        where: a size such as ``"2GB"``: most memory, of this process without workers, else of files in shared memory; or a
            folder, which later runs use too.
        dataset: what is read; a folder that was written for another one is refused.
        workers: processes that read.

    Raises:
        UsageError: ``where`` is neither, or the folder is another dataset's.
        StorageError: the folder cannot be written.
    """

    def __init__(self, where: str | os.PathLike[str], dataset: Any, workers: int) -> None:
        self.folder: pathlib.Path | None = None
        self.free_bytes: float = float("inf")
        """Bytes that this process may still add."""
        self._kept: dict[int, Any] = {}
        if isinstance(where, str) and _SIZE.fullmatch(where):
            self.free_bytes = 1e6 * megabytes(where, "cache") / max(workers, 1)
            if workers:
                shared = pathlib.Path("/dev/shm")
                self.folder = pathlib.Path(tempfile.mkdtemp(prefix="trimtab-", dir=shared if shared.is_dir() else None))
                self._end = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        else:
            self.folder = path_of(where, "cache", "2GB, or a folder").absolute()
            _check_dataset(self.folder, {"dataset": type(dataset).__qualname__, "examples": len(dataset)})

    def get(self, places: Sequence[int], read: Callable[[list[int]], list[Any]]) -> list[Any]:
        """The examples at ``places``; those that are not in the cache from ``read``.

        Raises:
            UsageError: ``read`` draws random numbers, or an example cannot be kept.
        """
        found = {place: example for place in places if (example := self._find(place)) is not None}
        if missing := [place for place in dict.fromkeys(places) if place not in found]:
            before = _random_states()
            examples = read(missing)
            if _random_states() != before:
                raise UsageError(
                    "The dataset draws random numbers as it reads an example, and a cached example would be the same in every "
                    "epoch. Let the dataset decode only, and give what is drawn as Loader(..., cache=..., transform=function)."
                )
            for place, example in zip(missing, examples, strict=True):
                found[place] = example
                self._keep(place, example)
        return [found[place] for place in places]

    def _find(self, place: int) -> Any:
        if self.folder is None:
            return _copied(self._kept[place]) if place in self._kept else None
        path = self._path(place)
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["example"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            raise StorageError(f"{path} is damaged: {error}. Remove {self.folder}; it is made anew.") from error
        for key, (dtype, shape) in facts["bytes"].items():
            tensors[key] = tensors[key].view(getattr(torch, dtype)).reshape(shape)
        return decode(facts["tree"], tensors)

    def _keep(self, place: int, example: Any) -> None:
        size = sum(map(_bytes, leaves_of(example)))
        if size > self.free_bytes:
            return
        if self.folder is None:
            self._kept[place] = _copied(example)
        else:
            written = Encoder()
            try:
                facts = dumps({"tree": written.encode(example), "bytes": written.bytes}, indent=None)
            except UsageError as error:
                raise UsageError(f"Example {place} cannot be cached in files: {of_type(example)}. {error}") from error
            if not self._write(self._path(place), written.tensors, facts):
                self.free_bytes = 0
                return
        self.free_bytes -= size

    def _write(self, path: pathlib.Path, tensors: dict[str, torch.Tensor], facts: str) -> bool:
        """Write an example; ``False`` if there is no room for it, so that it is read again each time."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors or {"none": torch.zeros(0)}, partial, metadata={"example": facts})
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, SafetensorError) or error.errno in DISK_FULL:  # it has no code for a full disk
                return False
            raise StorageError(f"The cache cannot be written to {path}: {error.strerror}. Give another folder.") from error
        return True

    def _path(self, place: int) -> pathlib.Path:
        assert self.folder is not None
        return self.folder / f"{place // 1000:06d}" / f"{place:09d}.safetensors"

    def __getstate__(self) -> dict[str, Any]:
        """The state for a worker, which reads the same files and does not remove them when it ends."""
        return {name: value for name, value in vars(self).items() if name != "_end"} | {"_kept": {}}


def _check_dataset(folder: pathlib.Path, facts: dict[str, Any]) -> None:
    """Write into ``folder`` which dataset it caches, or check it."""
    path = folder / _FACTS
    try:
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept != facts:
                raise UsageError(
                    f"The cache in {folder} is of a {kept['dataset']} with {kept['examples']} examples, and this dataset is a "
                    f"{facts['dataset']} with {facts['examples']}. Give another folder, or remove that one."
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps(facts), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"The cache cannot be written to {folder}: {error.strerror}. Give another folder.") from error


def _random_states() -> tuple[bytes, Any, Any]:
    """The states of the global random generators."""
    numpy: Any = np.random.get_state()
    return torch.default_generator.get_state().numpy().tobytes(), (numpy[1].tobytes(), numpy[2]), random.getstate()


def _copied(value: Any) -> Any:
    """``value`` with tensors and arrays of its own: a transform may change an example in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return map_items(value, _copied)


def _bytes(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() * leaf.element_size() + _LEAF_BYTES
    return int(getattr(leaf, "nbytes", 0) or (len(leaf) if isinstance(leaf, (str, bytes)) else 0)) + _LEAF_BYTES
