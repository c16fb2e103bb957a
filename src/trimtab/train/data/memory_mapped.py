"""Memory-mapped arrays: nothing is read before the first batch, and all processes share one copy."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trimtab._internal.files import path_of
from trimtab._internal.serialization import dumps, from_json
from trimtab._internal.text import of_type
from trimtab.errors import StorageError, UsageError
from trimtab.tensors.weights import in_bytes

HEADER, SCHEMA = "tensors.json", 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor in its file: contiguous, in native byte order."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class MappedTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, mapped from the files of a folder: ``Loader(MappedTensors(folder))``.

    The system reads pages on access and drops them when memory is short. All processes of a machine share the pages; a worker
    gets the path of the folder only. Writes to a tensor are private to the process.

    Raises:
        StorageError: the folder is missing or damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = path_of(folder, "folder", "data/train").absolute()
        self._tensors = {name: _mapped(self.folder, entry) for name, entry in _header(self.folder).items()}

    @classmethod
    def write(cls, folder: str | os.PathLike[str], arrays: Mapping[str, Any]) -> MappedTensors:
        """Write ``arrays`` into a new folder and open them. The folder appears when all files are complete.

        Each value is a tensor, an array, or an iterable of parts, concatenated along axis 0, for data larger than memory.

        Raises:
            UsageError: the folder exists, a name is no identifier, or parts of one array differ in dtype or shape.
            StorageError: the folder cannot be written.
        """
        place = path_of(folder, "folder", "data/train")
        if os.path.exists(place):
            raise UsageError(f"{place} exists already. Give another folder, or remove it first.")
        if wrong := [name for name in arrays if not isinstance(name, str) or not name.replace("_", "a").isalnum()]:
            raise UsageError(f"{wrong[0]!r} is no name for an array; use letters, digits and underscores.")
        if not arrays:
            raise UsageError("There is nothing to write: give a mapping of names to arrays.")
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            partial.mkdir(parents=True)
            entries = {name: _write(partial / f"{name}.bin", name, array) for name, array in arrays.items()}
            (partial / HEADER).write_text(dumps({"schema": SCHEMA, "tensors": entries}), encoding="utf-8")
            os.replace(partial, place)
        except OSError as error:
            raise StorageError(f"{place} cannot be written: {error.strerror or error}. Make room, or give another.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return cls(place)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """The number of tensors, not of rows."""
        return len(self._tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path; the other process maps the files itself."""
        return type(self), (self.folder,)


def _header(folder: pathlib.Path) -> dict[str, _Entry]:
    try:
        facts = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        if facts["schema"] != SCHEMA:
            raise StorageError(f"{folder} has schema {facts['schema']}, but this trimtab reads {SCHEMA}. Write it again.")
        return {name: from_json(_Entry, entry) for name, entry in facts["tensors"].items()}
    except FileNotFoundError as error:
        raise StorageError(f"{folder} holds no {HEADER}. Write the arrays with MappedTensors.write(folder, arrays).") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{folder / HEADER} cannot be read: {type(error).__name__}: {error}. Write it again.") from error


def _mapped(folder: pathlib.Path, entry: _Entry) -> torch.Tensor:
    path, dtype = folder / entry.file, getattr(torch, entry.dtype, None)
    if path.parent != folder or not isinstance(dtype, torch.dtype) or any(size < 0 for size in entry.shape):
        raise StorageError(f"{folder / HEADER} describes {entry}, which is no tensor beside it. Write it again.")
    count = math.prod(entry.shape)
    have, want = path.stat().st_size if os.path.isfile(path) else -1, count * dtype.itemsize
    if have != want:
        found = "is missing" if have < 0 else f"has {have} bytes instead of {want}"
        raise StorageError(f"{path} {found}. Write the arrays again.")
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype).view(entry.shape)


def _write(path: pathlib.Path, name: str, array: Any) -> _Entry:
    """Write ``array`` part by part."""
    dtype: torch.dtype | None = None
    shape: torch.Size | None = None
    rows = 0
    with path.open("wb") as file:
        for part in map(_as_tensor, (array,) if isinstance(array, (torch.Tensor, np.ndarray)) else _parts(name, array)):
            if part is None or not part.dim():
                raise UsageError(f"{name} has a part that is no array of numbers with at least one axis. Give such parts.")
            if shape is not None and (part.dtype, part.shape[1:]) != (dtype, shape):
                raise UsageError(
                    f"Parts of {name} differ: rows of shape {tuple(shape)}, {dtype}, and of {tuple(part.shape[1:])}, "
                    f"{part.dtype}. Bring them to one shape and type, or pad them."
                )
            dtype, shape, rows = part.dtype, part.shape[1:], rows + len(part)
            in_bytes(part.contiguous()).numpy().tofile(file)
        file.flush()
        os.fsync(file.fileno())
    if dtype is None or shape is None:
        raise UsageError(f"{name} has no parts, so that neither its type nor its shape is known. Give one at least.")
    return _Entry(file=path.name, dtype=str(dtype).removeprefix("torch."), shape=(rows, *shape))


def _parts(name: str, array: Any) -> Iterable[Any]:
    if not isinstance(array, Iterable) or isinstance(array, (str, bytes, Mapping)):
        raise UsageError(f"{name} is {of_type(array)}; give a tensor, a numpy array, or an iterable of them.")
    return array


def _as_tensor(part: Any) -> torch.Tensor | None:
    if isinstance(part, torch.Tensor):
        return part.detach().cpu()
    if isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
        return torch.from_numpy(np.require(part, part.dtype.newbyteorder("="), ["C", "W"]))
    return None
