"""Checkpoints: the state of a training run on disk, written atomically, without pickle.

The checkpoint folder has one folder per checkpoint, such as ``update-00000120``, with ``tensors.safetensors``, ``state.json``
(the structure around the tensors) and ``sha256.json``. A checkpoint is written to a temporary folder, which is then renamed. A
run resumes from the newest checkpoint whose hashes match.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trimtab._internal.files import path_of, sha256
from trimtab._internal.locks import locked
from trimtab._internal.serialization import dumps
from trimtab.core.signature import STORED
from trimtab.errors import StorageError, UsageError
from trimtab.tensors.weights import in_bytes

TENSORS, STATE, HASHES = "tensors.safetensors", "state.json", "sha256.json"
LOCK = ".lock"
SCHEMA = 6
SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The tensors that a sparse tensor is made of: names of methods, by layout."""
LAYOUTS = {str(layout): layout for layout in SPARSE}
PLAIN = frozenset(getattr(torch, name) for name in STORED)
"""The dtypes of safetensors; tensors of other dtypes are saved as bytes."""
_NAME = re.compile(r"update-(\d{8})|\.update-(\d{8})\.old")
"""Names of checkpoints. One named ``.old`` was being replaced when the process was killed, and is still valid."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """The watched metric of a checkpoint's parameters, from their validation."""

    metric: str
    value: float
    mode: Literal["min", "max"]

    def better(self, other: Figure | None) -> bool:
        """True if ``other`` is worse, of another metric, NaN or missing; NaN itself is never better."""
        if math.isnan(self.value):
            return False
        if other is None or math.isnan(other.value) or (other.metric, other.mode) != (self.metric, self.mode):
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the checkpoint folder, created by the first checkpoint.
        keep_last: how many of the newest checkpoints to keep.
        keep_best: how many to keep besides, of those with the best validation.

    Raises:
        UsageError: ``keep_last`` is below 1, ``keep_best`` below 0, or ``folder`` is no path.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep_last: int = 2, keep_best: int = 0) -> None:
        for name, value, least in (("keep_last", keep_last, 1), ("keep_best", keep_best, 0)):
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{name} is {value!r}; it is a number of checkpoints: a whole number of at least {least}.")
        self.folder, self.keep_last, self.keep_best = path_of(folder, "checkpoint", "checkpoints"), keep_last, keep_best
        self._figures: dict[pathlib.Path, Figure | None] = {}
        """The figures of the checkpoints that were read or written so far."""
        self._intact: set[pathlib.Path] = set()
        """Checkpoints known to be intact, so that their files are not hashed again."""
        self.damaged: dict[str, str] = {}
        """Damage of the checkpoints after the newest intact one, by name, as of the last call of :meth:`newest`."""

    def save(self, update: int, state: Mapping[str, Any], figure: Figure | None = None) -> pathlib.Path:
        """Write ``state``, nested mappings and sequences of tensors and plain values, as the checkpoint after ``update``.

        Args:
            figure: what the validation of this state found, if it was validated.

        Returns:
            The folder of the checkpoint.

        Raises:
            StorageError: the files cannot be written; earlier checkpoints are unchanged.
            UsageError: ``state`` has a value that can be saved neither as a tensor nor as JSON.
        """
        place = self.folder / f"update-{update:08d}"
        partial = self.folder / f".{place.name}.{os.getpid()}"
        try:
            self._delete_old()
            partial.mkdir(parents=True)
            _write(partial, state, figure)
            if place.exists():  # the resumed run has made the update again
                os.replace(place, self.folder / f".{place.name}.old")
            os.replace(partial, place)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            last = self.newest()
            kept = f"The checkpoint {last.name} is still whole." if last else "No checkpoint is there yet."
            raise StorageError(
                f"The checkpoint after update {update} cannot be written to {self.folder}: {error.strerror or error}. {kept} "
                "Make room, or give another checkpoint folder, and resume."
            ) from error
        self._intact.add(place)
        self._figures[place] = figure
        self._delete_old(place)
        return place

    def lock(self) -> IO[str] | None:
        """Create the folder, check that files can be written there, and lock it against other runs.

        The lock ends when the returned file is closed, or with the process. Forked processes, such as loader workers, do not
        inherit the lock: they may outlive the run. Closing another handle of the file in this process ends the lock too.

        Returns:
            The locked file; ``None`` on file systems without locks.

        Raises:
            StorageError: the folder cannot be written.
            UsageError: another run holds the lock.
        """
        probe = self.folder / f".update-probe.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_text("", encoding="utf-8")
            probe.unlink()
            file = (self.folder / LOCK).open("a+", encoding="utf-8")
            if not _locked(file):
                return None
            file.truncate(0)
            file.write(f"process {os.getpid()} of {platform.node()}")
            file.flush()
        except OSError as error:
            raise StorageError(
                f"Checkpoints cannot be written to {self.folder}: {error.strerror or error}. Give another checkpoint folder."
            ) from error
        return file

    def newest(self) -> pathlib.Path | None:
        """The folder of the newest whole checkpoint; ``None`` if there is none."""
        self.damaged = {}
        for place in self._folders():
            if (damage := _damage(place)) is None:
                return place
            self.damaged[place.name] = damage
        return None

    def skipped_note(self) -> str | None:
        """A sentence if :meth:`load` skipped damaged checkpoints; ``None`` if not. Hashes no files."""
        if not self.damaged:
            return None
        whole = next(place.name for place in self._folders() if place.name not in self.damaged)
        reasons = "; ".join(f"{name}: {damage}" for name, damage in self.damaged.items())
        return f"The run goes on from {whole} in {self.folder}, because what is newer is damaged ({reasons})."

    def update(self) -> int | None:
        """The number of updates before the newest checkpoint, whole or not; ``None`` if there is none."""
        return max(map(_number, self._folders()), default=None)

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The state in the newest whole checkpoint, with its tensors on ``device``.

        Raises:
            StorageError: there is none, or it has another schema.
        """
        place = self.newest()
        if place is None:
            damaged = "; ".join(f"{name}: {damage}" for name, damage in self.damaged.items())
            reason = f"none is whole ({damaged})" if damaged else "there is none"
            fix = "" if damaged else "; resume(missing_ok=True) does where there is none yet"
            raise StorageError(f"No checkpoint can be loaded from {self.folder}: {reason}. Start with fit(){fix}.")
        return read(place, device)

    def figures(self) -> dict[pathlib.Path, Figure]:
        """The intact checkpoints that were validated by the same metric as the newest of them, best first."""
        found = {place: figure for place in self._folders() if (figure := self._figure(place)) is not None}
        first = next(iter(found.values()), None)
        alike = {place: figure for place, figure in found.items() if first and figure.metric == first.metric}
        sign = -1 if first is not None and first.mode == "max" else 1
        return dict(sorted(alike.items(), key=lambda one: sign * one[1].value))

    def _figure(self, place: pathlib.Path) -> Figure | None:
        """The figure of a checkpoint, if it has one that is a number, and the checkpoint is whole."""
        if place not in self._figures:
            kept = None if _damage(place) else json.loads((place / STATE).read_text(encoding="utf-8")).get("figure")
            self._figures[place] = None if kept is None else Figure(**{**kept, "value": float(kept["value"])})
        found = self._figures[place]
        return None if found is None or math.isnan(found.value) else found

    def _folders(self) -> list[pathlib.Path]:
        """All checkpoint folders, newest first."""
        named = sorted(
            place for place in (self.folder.iterdir() if os.path.isdir(self.folder) else ()) if _NAME.fullmatch(place.name)
        )
        found = {_number(place): place for place in named}  # of two with one number, the plain name, which sorts last
        return [found[number] for number in sorted(found, reverse=True)]

    def _delete_old(self, written: pathlib.Path | None = None) -> None:
        """Delete temporary folders of killed processes, and checkpoints beyond ``keep_last`` and ``keep_best``."""
        for place in self._folders():
            if place.name.startswith("."):
                os.replace(place, self.folder / f"update-{_number(place):08d}")
        for left in self.folder.glob(".update-*"):
            shutil.rmtree(left, ignore_errors=True)
        places = self._folders()
        if len(places) <= self.keep_last:
            return
        best = list(self.figures())[: self.keep_best] if self.keep_best else []
        whole = 0
        for place in places:
            if whole >= self.keep_last and place != written and place not in best:
                self._figures.pop(place, None)
                shutil.rmtree(place, ignore_errors=True)
            elif place in self._intact or not _damage(place):
                self._intact.add(place)
                whole += 1


def _locked(file: IO[str]) -> bool:
    """Lock ``file``; where the file system has no locks, close it and return ``False``.

    Raises:
        UsageError: another process holds the lock.
    """
    try:
        free = locked(file.fileno(), inherited=False)
    except OSError:
        file.close()
        return False
    if not free:
        file.seek(0)
        with file:
            owner = file.read(200).strip()
        raise UsageError(
            f"Another run writes its checkpoints into {pathlib.Path(file.name).parent} now{f' ({owner})' if owner else ''}. "
            "Wait for it, end it with Ctrl-C there, or give another checkpoint folder."
        )
    return True


def _number(place: pathlib.Path) -> int:
    """The number of updates in the name of a checkpoint."""
    return int("".join(filter(str.isdigit, place.name)))


def read(place: pathlib.Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state in the whole checkpoint ``place``, with its tensors on ``device``.

    Raises:
        StorageError: it has another schema.
    """
    facts = json.loads((place / STATE).read_text(encoding="utf-8"))
    if facts.get("schema") != SCHEMA:
        raise StorageError(
            f"{place} has schema {facts.get('schema')}, but this trimtab reads {SCHEMA}. Use the one that wrote it."
        )
    # Tensors from a file lie at any address, and sums of unaligned vectors are rounded differently. So a resumed run gets
    # copies at addresses of the allocator.
    tensors = {key: tensor.clone() for key, tensor in load_file(place / TENSORS, device=str(device)).items()}
    for key, (dtype, shape) in facts["bytes"].items():
        tensors[key] = tensors[key].view(getattr(torch, dtype)).reshape(shape)
    state = decode(facts["state"], tensors)
    assert isinstance(state, dict)
    return state


def _write(folder: pathlib.Path, state: Mapping[str, Any], figure: Figure | None) -> None:
    written = Encoder()
    tree = written.encode(state)
    try:
        save_file(written.tensors, folder / TENSORS)
    except SafetensorError as error:  # safetensors has no error code for a full disk
        raise OSError(str(error)) from error
    kept = None if figure is None else {**dataclasses.asdict(figure), "value": str(figure.value)}  # may be infinite
    facts = {"schema": SCHEMA, "figure": kept, "bytes": written.bytes, "state": tree}
    (folder / STATE).write_text(dumps(facts), encoding="utf-8")
    (folder / HASHES).write_text(dumps({name: sha256(folder / name) for name in (TENSORS, STATE)}), encoding="utf-8")
    for name in (TENSORS, STATE, HASHES):
        _sync(folder / name)
    _sync(folder)


class Encoder:
    """Encode nested values as JSON, and collect the tensors in them. Equal views of one storage are kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.bytes: dict[str, tuple[str, list[int]]] = {}
        """Dtype and shape of the tensors that are saved as bytes, by key."""
        self._keys: dict[Any, str] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any) -> Any:
        """``value`` as JSON, with keys of :attr:`tensors` in place of tensors. Keys of mappings keep their type.

        Raises:
            UsageError: ``value`` holds an object that can be saved neither as a tensor nor as JSON.
        """
        if isinstance(value, torch.Tensor):
            value = value.detach().resolve_conj() if value.is_complex() else value.detach()
            if is_traceable_wrapper_subclass(value) and not hasattr(value, "full_tensor"):  # DTensors arrive gathered
                raise UsageError(
                    f"A {type(value).__module__}.{type(value).__qualname__}, a tensor made of others, cannot be kept in a "
                    "checkpoint. Use plain tensors, as an optimizer with states of 32 bits does, or leave out checkpoint=..."
                )
            if value.is_quantized:
                raise UsageError(
                    f"A tensor of {value.dtype} cannot be kept in a checkpoint: its scale is no part of its numbers. Train "
                    "before it is quantized, or leave out checkpoint=..."
                )
            return {"tensor": self._add_tensor(value)} if value.layout == torch.strided else self._sparse(value)
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no NaN and infinity
            return {"float": str(float(value))}
        if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (bool, int, float, str)):
            return self._array(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {"items": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item) for item in value]}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.encode(item) for item in value]
        raise UsageError(
            f"A {type(value).__module__}.{type(value).__qualname__} cannot be kept in a checkpoint. Use tensors, numbers, "
            "arrays, strings, lists, tuples and dicts in what state_dict() returns."
        )

    def _array(self, value: np.ndarray[Any, Any] | np.generic) -> Any:
        """A numpy array or scalar, saved as bytes: numpy has dtypes that torch lacks."""
        if value.dtype.hasobject or value.dtype.names:
            raise UsageError(
                f"A numpy array of {value.dtype} cannot be kept in a checkpoint. Use numbers, or lists and dicts of them, "
                "in what state_dict() returns."
            )
        key = self._add_tensor(torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8))
        return {"array": key, "dtype": value.dtype.str, "shape": list(value.shape), "alone": isinstance(value, np.generic)}

    def _sparse(self, tensor: torch.Tensor) -> Any:
        """A sparse tensor, saved as the tensors that it is made of."""
        if (names := SPARSE.get(tensor.layout)) is None:
            raise UsageError(
                f"A tensor with the layout {tensor.layout} cannot be kept in a checkpoint. Make it dense, or one of "
                f"{', '.join(LAYOUTS)}; or give register_buffer(..., persistent=False) for what is made anew each time."
            )
        parts = [getattr(tensor, name)().contiguous() for name in names]
        sorted_once = tensor.layout == torch.sparse_coo and tensor.is_coalesced()
        keys = [self._add_tensor(part) for part in parts]
        return {"sparse": str(tensor.layout), "size": list(tensor.shape), "parts": keys, "coalesced": sorted_once}

    def _add_tensor(self, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage().data_ptr()
        place = (storage, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
        if storage and place in self._keys:
            return self._keys[place]
        key = self._keys[place] = str(len(self.tensors))
        self.tensors[key] = (
            tensor.clone(memory_format=torch.contiguous_format) if storage in self._storages else tensor.contiguous()
        )
        self._storages.add(storage)
        if tensor.dtype not in PLAIN:
            self.bytes[key] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            self.tensors[key] = in_bytes(self.tensors[key])
        return key


class _Checker(Encoder):
    """An encoder that only checks values, and copies no tensors."""

    def encode(self, value: Any) -> Any:
        """``value`` as JSON; lazy parameters, which have no values yet, are not checked."""
        return None if is_lazy(value) else super().encode(value)

    def _add_tensor(self, tensor: torch.Tensor) -> str:
        return ""


def refuse_unsavable(state: Mapping[str, Any]) -> None:
    """Check that a checkpoint can hold ``state``, before hours of training.

    Raises:
        UsageError: an object can be saved neither as a tensor nor as JSON; the message names the part of ``state``.
    """
    for name, part in state.items():
        try:
            _Checker().encode(part)
        except UsageError as error:
            raise UsageError(f"The state of the {name} cannot be saved. {error}") from error


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode the result of :meth:`Encoder.encode`."""
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "array" in tree:
        held, shape = tensors[tree["array"]].cpu().numpy().tobytes(), tree["shape"]
        array = np.frombuffer(held, np.dtype(tree["dtype"]), math.prod(shape)).reshape(shape).copy()
        return array[()] if tree["alone"] else array
    if "sparse" in tree:
        return _sparse_tensor([tensors[key] for key in tree["parts"]], tree)
    if "float" in tree:
        return float(tree["float"])
    if "tuple" in tree:
        return tuple(decode(item, tensors) for item in tree["tuple"])
    return {decode(key, tensors): decode(item, tensors) for key, item in tree["items"]}


def _sparse_tensor(parts: Sequence[torch.Tensor], facts: Mapping[str, Any]) -> torch.Tensor:
    """The sparse tensor that is made of ``parts``."""
    if (layout := LAYOUTS[facts["sparse"]]) == torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, facts["size"], is_coalesced=facts["coalesced"])
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, facts["size"], layout=layout)


def _damage(place: pathlib.Path) -> str | None:
    """The damage of a checkpoint's files, as a clause; ``None`` if it is intact."""
    try:
        hashes = json.loads((place / HASHES).read_text(encoding="utf-8"))
        changed = [name for name in (TENSORS, STATE) if sha256(place / name) != hashes[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{changed[0]} has changed since it was written" if changed else None


def _sync(path: pathlib.Path) -> None:
    """Flush ``path`` to disk, so that a power failure cannot leave a renamed folder with empty files."""
    folder = path.is_dir()
    if os.name == "nt" and folder:  # Windows cannot open folders, and flushes only files open for writing
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
