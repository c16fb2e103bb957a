"""Folders for files of a backend: shared between trials, or owned by one executable."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from trimtab._internal.user_code import user_code
from trimtab.core.candidate import Candidate
from trimtab.errors import UsageError, WorkloadError
from trimtab.hardware.environment import builders
from trimtab.tensors.weights import parts, raw


def fingerprint(candidate: Candidate, *more: object) -> str:
    """Sixteen hexadecimal digits that identify everything that an export of ``candidate`` depends on.

    These are the bytes of its tensors, the attributes and source code of its modules, its signature, the example's sizes, the
    settings that change a graph, and the versions of the exporting packages. ``more`` adds versions and options of a runtime.
    """
    digest = hashlib.blake2b(digest_size=8)
    leaf_sizes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in candidate.leaves]
    settings = candidate.settings.replaced({"threads": None, "data.batch": None})
    for value in (candidate.signature, leaf_sizes, settings, torch.__version__, builders(), *more):
        digest.update(repr(value).encode())
    for name, module in candidate.model.named_modules(remove_duplicate=False):
        digest.update(f"\n{name} {type(module).__qualname__} {getattr(module, 'training', False)}".encode())
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            _hash_value(digest, key, tensor)
        for key, value in vars(module).items():
            if key not in _MODULE_STATE:
                _hash_value(digest, key, value)
    for source in sorted(map(_source, {type(module) for module in candidate.model.modules()})):
        digest.update(source.encode())
    return digest.hexdigest()


def data_fingerprint(rows: Iterable[Iterable[torch.Tensor]], *more: object) -> str:
    """Sixteen hexadecimal digits that identify the tensors ``rows``, and options and versions ``more``."""
    digest = hashlib.blake2b(repr(more).encode(), digest_size=8)
    for i, row in enumerate(rows):
        _hash_value(digest, str(i), list(row))
    return digest.hexdigest()


_MODULE_STATE = frozenset(vars(nn.Module()))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _hash_value(digest: hashlib.blake2b, key: str, value: object, enclosing: frozenset[int] = frozenset()) -> None:
    """Add ``value`` to the digest. ``enclosing`` has the ids of the containers that hold it: a container may contain itself."""
    digest.update(f"\n{key} ".encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        for part in parts(value.detach()):
            if part.numel() and part.layout is torch.strided and not part.is_quantized:
                digest.update(raw(part).numpy().data)
    elif id(value) in enclosing or (contents := _contents(value)) is None:
        digest.update(type(value).__qualname__.encode())
    elif isinstance(contents, str):
        digest.update(_ADDRESS.sub("", contents).encode())
    else:
        for inner, item in contents:
            _hash_value(digest, str(inner), item, enclosing | {id(value)})


def _contents(value: object) -> list[tuple[object, object]] | str | None:
    """The items of a container with their keys, or the ``repr`` of another value; ``None`` if reading raises an error."""
    try:
        with user_code("An attribute cannot be read"):
            if isinstance(value, Mapping):
                return list(value.items())
            return list(enumerate(value)) if isinstance(value, (list, tuple)) else repr(value)
    except (UsageError, WorkloadError):
        return None


def _source(cls: type) -> str:
    """The source of ``cls``, so that an edited ``forward`` is not served from the cache; empty if there is none."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError, SyntaxError):  # no file, or one that was changed since
        return ""


@contextlib.contextmanager
def shared_folder(candidate: Candidate, name: str, build: Callable[[pathlib.Path], None]) -> Iterator[pathlib.Path]:
    """A folder that ``build`` filled, in this trial or in an earlier one with the same ``name``.

    It is built under a temporary name and renamed when complete, so that a killed build leaves no partial folder. Without a
    scratch folder it is built again and deleted afterwards.
    """
    if candidate.scratch is None:
        with tempfile.TemporaryDirectory(prefix="trimtab-") as text:
            build(pathlib.Path(text))
            yield pathlib.Path(text)
        return
    target = candidate.scratch / name
    if not target.is_dir():
        candidate.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=candidate.scratch, ignore_cleanup_errors=True) as text:
            whole = pathlib.Path(text) / "whole"
            whole.mkdir()
            build(whole)
            # renaming fails if another trial has built the same folder meanwhile; then that one is used
            with contextlib.suppress(OSError):
                os.rename(whole, target)
    yield target


def own_folder(candidate: Candidate) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for one executable, on the same disk as the scratch folder, so that files can be hard-linked."""
    if candidate.scratch is not None:
        candidate.scratch.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".own-", dir=candidate.scratch, ignore_cleanup_errors=True)


def copy_files(source: pathlib.Path, names: Iterable[str], folder: pathlib.Path, *, link: bool = False) -> list[str]:
    """Copy (or hard-link, if ``link`` and possible) the files ``names`` of ``source`` into ``folder``; returns the names."""
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    for name in names:
        (folder / name).unlink(missing_ok=True)
        if not (link and _linked(source / name, folder / name)):
            shutil.copyfile(source / name, folder / name)
        done.append(name)
    return done


def _linked(source: pathlib.Path, target: pathlib.Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
