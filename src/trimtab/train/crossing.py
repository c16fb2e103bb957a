"""What a dataset holds that must not be met by the workers that are forked from this process.

A file that is open is one file for all of them, with one place in it: whoever reads moves it for the others, who then read
something else. Connections to databases, and whatever lives on a GPU, do not work there at all. Most of what is like that
cannot be pickled, which is how it is found, although nothing needs to be pickled for a fork.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import sys
import threading
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader

from trimtab.errors import WorkloadError
from trimtab.train.loader import Loader
from trimtab.workload import user_code

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.local)
"""A dataset that makes them anew in a process of its own may well be forked with them."""
_MANY = 10_000
"""Of the items of longer lists and mappings, which are alike, about so many are looked at."""
_FIX = "Give the loader workers from the start, and have the dataset open such things when it reads its first example."


def why_not_shared(loader: Any) -> str | None:
    """Why the dataset of ``loader``, and what joins its examples, cannot be used by other processes too, in a sentence."""
    joins = loader.collate_fn if isinstance(loader, DataLoader) else getattr(loader, "_source", None)
    try:
        with user_code("Looking through it failed"):
            _Crossing(set()).dump((getattr(loader, "dataset", None), joins))
    except WorkloadError as error:
        cause = error.__cause__ or error
        return f"its dataset holds what processes cannot share ({type(cause).__name__}: {cause}). {_FIX}"
    return None


def why_not_read(loader: Loader) -> str | None:
    """Why a worker of ``loader`` cannot read its dataset, in a sentence; found out by having one read a batch."""
    trial = copy.copy(loader)
    trial.persistent = False
    trial.retune(workers=1, prefetch=1, pin=False)
    batches = iter(trial)
    try:
        next(batches)
    except WorkloadError as error:
        return f"a worker cannot read its dataset. {error}"
    finally:
        batches.close()  # type: ignore[attr-defined]
    return None


class _Nowhere:
    """A file that forgets."""

    def write(self, data: Any) -> int:
        """Take note of nothing."""
        return len(data)


class _Crossing(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles all but arrays, of which a fork has what this process has, and also what an object leaves out of its pickles.

    Args:
        seen: ids of objects whose attributes were looked at.
    """

    def __init__(self, seen: set[int]) -> None:
        super().__init__(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=lambda buffer: None)
        self._seen = seen

    def persistent_id(self, item: Any) -> str | None:
        """Something for what need not be pickled.

        Raises:
            PicklingError: it lies on a GPU, or is a file that is open.
        """
        if isinstance(item, torch.Tensor):
            if item.device.type != "cpu":
                raise pickle.PicklingError(f"a tensor on {item.device}")
            return "tensor"
        if isinstance(item, np.ndarray):
            return None if item.dtype.hasobject else "array"
        if isinstance(item, io.IOBase):
            if not (item.closed or isinstance(item, (io.BytesIO, io.StringIO)) or _is_stream(item)):
                raise pickle.PicklingError(f"an open file, {getattr(item, 'name', type(item).__name__)}")
            return "file"
        if isinstance(item, (list, tuple, dict)) and len(item) > _MANY:
            some = itertools.islice(item.items() if isinstance(item, dict) else item, 0, None, len(item) // _MANY)
            _Crossing(self._seen).dump(list(some)[:_MANY])
            return "items"
        return None

    def reducer_override(self, item: Any) -> Any:
        """How ``item`` is pickled; what it leaves behind, the process that is forked has all the same."""
        if id(item) not in self._seen:
            self._seen.add(id(item))
            for value in _left_behind(item):
                _Crossing(self._seen).dump(value)
        return super().reducer_override(item)


def _left_behind(item: Any) -> list[Any]:
    """The attributes that ``item`` does not give away when it is pickled, as one does that opens a file anew.

    Of one that gives something else than its attributes, only the files: the others may be what it has made that from.
    """
    kind, values = type(item), getattr(item, "__dict__", {})
    if isinstance(item, type) or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return []
    if _own(kind, "__reduce__") or _own(kind, "__reduce_ex__"):
        state = None
    else:
        state = item.__getstate__() if _own(kind, "__getstate__") else values
    if not isinstance(state, dict):
        return [value for value in values.values() if isinstance(value, io.IOBase)]
    return [value for name, value in values.items() if state.get(name) is not value and not isinstance(value, _LOCKS)]


def _is_stream(file: io.IOBase) -> bool:
    """Whether this is where everybody prints."""
    return any(file is stream for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr))


def _own(kind: type, method: str) -> bool:
    return getattr(kind, method) is not getattr(object, method)
