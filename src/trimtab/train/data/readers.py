"""Read the examples of a batch from a dataset: at once if it allows that, else one by one."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from trimtab._internal.text import listed, of_type
from trimtab._internal.user_code import user_code
from trimtab.errors import UsageError
from trimtab.train.data.batch_sampler import Index
from trimtab.train.data.collate import TARGETS, Collate
from trimtab.train.data.example_cache import ExampleCache
from trimtab.train.data.memory_mapped import MappedTensors
from trimtab.train.loss.adapter import Batch

Column = torch.Tensor | Sequence[Any]
_PLAIN_SEQUENCES = (list, tuple, range)
"""Sequences that run no user code when an item is read; subclasses may."""
_COLUMNS = user_code("The columns of the dataset could not be read")


class Source(Protocol):
    """A dataset, read in batches."""

    draws: bool
    """Whether reading runs user code, which may draw random numbers."""

    def __len__(self) -> int:
        """The number of examples."""

    def read(self, index: Index) -> Batch:
        """The batch of these examples.

        Raises:
            WorkloadError: an example cannot be read, or examples cannot be collated.
        """

    def example(self, place: int) -> Any:
        """One example, for a function that measures its length."""


class Columns:
    """Arrays with a row per example. A batch is a copy of some rows of each, never a view."""

    def __init__(self, columns: Mapping[Any, Column], build: Callable[[dict[Any, Any]], Batch], collate: Collate) -> None:
        self.columns, self.build, self.collate = columns, build, collate
        arrays = (torch.Tensor, np.ndarray)
        self.draws = not all(isinstance(column, arrays) or type(column) in _PLAIN_SEQUENCES for column in columns.values())
        counts = {name: len(column) for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise UsageError(
                f"The columns of the dataset differ in length ({shown}). Give one row per example in each; a tuple is taken "
                "for columns, so give examples in a list."
            )

    def __len__(self) -> int:
        return min(map(len, self.columns.values()))

    def read(self, index: Index) -> Batch:
        """The batch of these examples."""
        places = index if isinstance(index, slice) else torch.from_numpy(index)
        with _COLUMNS:
            return self.build({name: self._take(name, column, places) for name, column in self.columns.items()})

    def example(self, place: int) -> Any:
        """One row of each column."""
        with _COLUMNS:
            return self.build({name: column[place] for name, column in self.columns.items()})

    def _take(self, name: Any, column: Column, places: slice | torch.Tensor) -> Any:
        if isinstance(column, torch.Tensor):
            if isinstance(places, slice):
                return column[places].clone()
            if column.is_cuda:
                places = places.pin_memory().to(column.device, non_blocking=True)  # an asynchronous copy
            elif not column.is_cpu:
                places = places.to(column.device)
            return column.index_select(0, places)
        chosen = range(len(column))[places] if isinstance(places, slice) else places.tolist()
        return self.collate.join([column[place] for place in chosen], (name,), targets=name in TARGETS)


class Examples:
    """A dataset read with ``__getitems__(places)`` if it has that, else with ``dataset[place]``."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Batch]) -> None:
        self.dataset, self.collate = dataset, collate
        self.draws = not (type(dataset) in _PLAIN_SEQUENCES and type(collate) is Collate)
        self._getitems: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
        self.cache: ExampleCache | None = None
        self.transform: Callable[[Any], Any] | None = None
        """Applied to each example after it was read, or found in the cache."""

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: Index) -> Batch:
        """The batch of these examples. A list from ``__getitems__`` is collated; anything else is the batch."""
        places = list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()
        found = self._read(places) if self.cache is None else self.cache.get(places, self._examples)
        if self.transform is not None:
            with user_code(f"transform raised on examples {listed(places, 4)}"):
                found = [self.transform(example) for example in self._as_list(found)]
        with user_code(f"collate raised on examples {listed(places, 4)}"):
            return self.collate(found) if isinstance(found, list) else found

    def _examples(self, places: list[int]) -> list[Any]:
        return self._as_list(self._read(places))

    def _as_list(self, found: Any) -> list[Any]:
        if isinstance(found, list):
            return found
        raise UsageError(
            f"__getitems__ of the dataset returns {of_type(found)}, a whole batch, and cache and transform need examples. "
            "Let it return a list of them, or leave both out."
        )

    def _read(self, places: list[int]) -> Any:
        """The examples, or what ``__getitems__`` makes of them."""
        found: Any = []
        if self._getitems is not None:
            with user_code(f"The dataset raised on examples {listed(places, 4)}"):
                found = self._getitems(places)
        else:
            with _reading(places, found):
                for place in places:
                    found.append(self.dataset[place])
        return found

    def example(self, place: int) -> Any:
        """``dataset[place]``."""
        with user_code(f"The dataset raised on example {place}"):
            return self.dataset[place]


class RowSubset:
    """Some of the rows of columns, such as a part of :func:`torch.utils.data.random_split`."""

    def __init__(self, source: Columns | RowSubset, indices: Sequence[int]) -> None:
        self.source, self.indices = source, np.asarray(indices, np.int64)
        self.draws: bool = source.draws

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: Index) -> Batch:
        """The batch of these examples."""
        return self.source.read(self.indices[index])

    def example(self, place: int) -> Any:
        """One row of each column."""
        return self.source.example(int(self.indices[place]))


class Job(NamedTuple):
    """One batch to read: the seed of random numbers drawn meanwhile, and the examples."""

    seed: tuple[int, ...]
    places: Index


class Reader(Dataset[Batch]):
    """Reads batches, in this process or in a worker. The batch depends on the :class:`Job` only."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, job: Job) -> Batch:
        """The batch of ``job``; the global random generators are restored afterwards."""
        if not self.source.draws:
            return self.source.read(job.places)
        with seeded(job.seed):
            return self.source.read(job.places)


@contextlib.contextmanager
def seeded(seed: Sequence[int]) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch (CPU) in a block, and restore them afterwards."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    first, second, third = np.random.SeedSequence(seed).generate_state(3).tolist()
    torch.default_generator.manual_seed(first)  # torch.manual_seed would seed GPUs too
    np.random.seed(second)
    random.seed(third)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def source_of(dataset: Any, collate: Callable[[list[Any]], Batch] | None) -> Source:
    """The fastest way to read ``dataset``.

    Raises:
        UsageError: the dataset has no ``len()`` and ``dataset[i]``, or its columns differ in length.
    """
    joining = Collate() if collate is None else collate
    if not callable(joining):
        raise UsageError(f"collate is {of_type(joining)}; give a function of a list of examples.")
    plain = joining if type(joining) is Collate and joining.mask is None else None  # a mask needs whole examples
    columns = _arrays(dataset, plain or Collate())
    if columns is not None and plain is not None:
        return columns
    whole = dataset
    while type(whole) is Subset:
        whole = whole.dataset
    if columns is not None and isinstance(whole, (Mapping, tuple)):  # dataset[i] is a column, not an example
        dataset = _Rows(columns)
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"The dataset is {of_type(dataset)}, which cannot be read by place: a Loader needs len(dataset) and dataset[i]. "
            "Give a list or a dataset that has them, or the Trainer a torch DataLoader over this one."
        )
    return Examples(dataset, joining)


def _arrays(dataset: Any, collate: Collate) -> Columns | RowSubset | None:
    """``dataset``, or the whole of a ``Subset``, as columns; ``None`` if it is not made of arrays."""
    if type(dataset) is not Subset:
        return _columns(dataset, collate)
    whole = _arrays(dataset.dataset, collate)
    return None if whole is None else RowSubset(whole, dataset.indices)


class _Rows(Sequence[Any]):
    """Columns as a sequence of examples, for a collate function of the user."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: Any) -> Any:
        return self.source.example(place)


class _reading(user_code):
    """Names the example at which the dataset raised: the one after those in ``found``."""

    def __init__(self, places: list[int], found: list[Any]) -> None:
        super().__init__("")
        self.places, self.found = places, found

    def explain(self, error: BaseException) -> None:
        """Raise what ``error`` becomes."""
        self.what = f"The dataset raised on example {self.places[len(self.found)]}"
        super().explain(error)


def _columns(dataset: Any, collate: Collate) -> Columns | None:
    """``dataset`` as columns; ``None`` if it is not made of arrays."""
    if type(dataset) is TensorDataset:
        dataset = dataset.tensors
    if _is_array(dataset):
        return Columns({0: _column(dataset)}, _only, collate)
    if isinstance(dataset, tuple) and dataset and all(map(_is_array, dataset)):
        build = functools.partial(_tuple, type(dataset))
        return Columns(dict(enumerate(map(_column, dataset))), build, collate)
    if isinstance(dataset, Mapping) and dataset and all(map(_is_column, dataset.values())):
        mapped = isinstance(dataset, MappedTensors)  # pickles as the path of its folder
        columns = dataset if mapped else {name: _column(column) for name, column in dataset.items()}
        return Columns(columns, _identity, collate)
    return None


def _column(column: Any) -> Column:
    """An array of numbers as a tensor that shares its memory; anything else unchanged."""
    if not isinstance(column, np.ndarray) or column.dtype.kind not in "biufc":
        found: Column = column
        return found
    if not column.dtype.isnative or any(stride < 0 for stride in column.strides):
        column = np.ascontiguousarray(column, column.dtype.newbyteorder("="))
    column = np.asarray(column)  # drops the class numpy.memmap
    with warnings.catch_warnings():  # torch warns of read-only memory; batches are copies
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(column)


def _is_array(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, np.ndarray)) and item.ndim > 0


def _is_column(item: Any) -> bool:
    return _is_array(item) or (isinstance(item, Sequence) and not isinstance(item, (str, bytes)))


def _only(found: dict[Any, Any]) -> Any:
    return found[0]


def _tuple(kind: Any, found: dict[Any, Any]) -> Any:
    return kind(*found.values()) if hasattr(kind, "_fields") else tuple(found.values())


def _identity(found: dict[Any, Any]) -> Any:
    return found
