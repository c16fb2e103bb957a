"""Change the arguments of ``DataLoader`` by the line that makes it, and read whole batches from a data set."""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trimtab.probe.inside.loaders import on_arguments

PROOFS = 3
"""Batches that are read both ways before batched reading is trusted. Then batches 8, 64, 512 and so on are checked again."""
ERRORS = (TypeError, ValueError, IndexError, KeyError, RuntimeError, AttributeError, AssertionError, NotImplementedError)
"""Exceptions of a data set that takes only one index at a time."""
_by_site: dict[str, Mapping[str, Any]] = {}
_batched: set[int] = set()
"""Ids of data sets that are read in batches. Forked workers inherit them."""
_persistent: set[int] = set()
"""Ids of data sets whose workers are made persistent by the settings."""
_kept: list[Any] = []
"""References to these data sets, so that their ids are not reused."""
_installed = False


def switch(settings: Mapping[str, Any]) -> None:
    """Apply ``loaders`` to every ``DataLoader`` that is made from now on."""
    global _installed
    _by_site.clear()
    _by_site.update(settings.get("loaders") or {})
    if _by_site and not _installed:
        _installed = True
        on_arguments(_change)
        _BaseDataLoaderIter._reset = _keep_seed_draws(_BaseDataLoaderIter._reset)  # type: ignore[method-assign]
        _MapDatasetFetcher.fetch = _batched_fetch(_MapDatasetFetcher.fetch)  # type: ignore[method-assign]


def _change(site: str, arguments: dict[str, Any]) -> None:
    found = _by_site.get(site)
    if found is None:
        return
    new = changed(arguments, found)
    dataset = new.get("dataset")
    _kept.append(dataset)
    if found.get("batch_fetch") and dataset is not None:
        _batched.add(id(dataset))
    if new.get("persistent_workers") and not arguments.get("persistent_workers"):
        _persistent.add(id(dataset))
    arguments.clear()
    arguments.update(new)


def changed(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The ``arguments`` of a ``DataLoader`` with ``settings``, the JSON form of
    :class:`~trimtab.core.script_settings.LoaderSettings`.

    The number of workers of an iterable data set stays, because each worker would repeat its examples.
    """
    new = dict(arguments)
    workers = settings.get("workers")
    if workers is not None and not isinstance(arguments.get("dataset"), IterableDataset):
        new["num_workers"] = workers
    if settings.get("pin_memory") is not None:
        new["pin_memory"] = settings["pin_memory"]
    if new.get("num_workers"):
        if settings.get("persistent") is not None:
            new["persistent_workers"] = settings["persistent"]
        if settings.get("prefetch") is not None:
            new["prefetch_factor"] = settings["prefetch"]
    else:  # arguments that need workers
        for name in ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"):
            new.pop(name, None)
    return new


def _keep_seed_draws(reset: Callable[..., None]) -> Callable[..., None]:
    """Draw a worker seed in each epoch, as a loader without persistent workers does, so that the order of shuffling stays."""

    @functools.wraps(reset)
    def drawn(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        if not first_iter and id(loader.dataset) in _persistent:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    return drawn


def _batched_fetch(fetch: Callable[..., Any]) -> Callable[..., Any]:
    readers: weakref.WeakKeyDictionary[Any, BatchReader | None] = weakref.WeakKeyDictionary()

    @functools.wraps(fetch)
    def read(self: Any, places: Any) -> Any:
        if id(self.dataset) not in _batched:
            return fetch(self, places)
        if self not in readers:
            fits = self.auto_collation and self.collate_fn is default_collate
            readers[self] = BatchReader(self.dataset) if fits else None
        reader = readers[self]
        return fetch(self, places) if reader is None else reader.read(places, functools.partial(fetch, self, places))

    return read


class BatchReader:
    """Reads a batch with one ``dataset[places]``, if that equals the collated single items bit for bit.

    A data set that draws random numbers, or that fails or differs in one of the proofs, is read one item at a time.
    """

    def __init__(self, dataset: Any) -> None:
        self.trusted: bool | None = None
        """``True`` once both ways were equal, ``False`` once they differed, ``None`` before."""
        self._tensor_tables = _tensor_tables(dataset)
        self._dataset = dataset
        self._batches = 0
        self._form: Callable[[Sequence[int]], Any] | None = None

    def read(self, places: Sequence[int], one_by_one: Callable[[], Any]) -> Any:
        """The batch at ``places``; ``one_by_one`` reads it as the script does."""
        if self._tensor_tables is not None:
            self.trusted = True
            tensors, mapping = self._tensor_tables
            index = torch.as_tensor(places, dtype=torch.int64)
            index = index if mapping is None else mapping.index_select(0, index)
            return [tensor.index_select(0, index) for tensor in tensors]
        if self.trusted is False:
            return one_by_one()
        self._batches += 1
        if self.trusted is None or _is_power_of_eight(self._batches):
            return self._prove(places, one_by_one)
        try:
            assert self._form is not None
            return self._collated(self._dataset[self._form(places)])
        except ERRORS:
            self.trusted = False
            return one_by_one()

    def _prove(self, places: Sequence[int], one_by_one: Callable[[], Any]) -> Any:
        before = generators()
        batch = one_by_one()
        if not same_state(before, after := generators()):
            self.trusted = False
            return batch
        for form in (self._form,) if self._form is not None else (_tensor, _array):
            try:
                self._spec = _pytree.tree_structure(batch)
                equal = _equal(batch, self._collated(self._dataset[form(places)]))
            except ERRORS:
                equal = False
            if not same_state(after, generators()):
                _restore(after)
                equal = False
            if equal:
                self._form = form
                self.trusted = True if self._batches >= PROOFS else None
                return batch
        self.trusted = False
        return batch

    def _collated(self, read: Any) -> Any:
        """The values of ``read`` as tensors, in the containers of a collated batch."""
        leaves = [torch.as_tensor(leaf) for leaf in _pytree.tree_leaves(read)]
        if len(leaves) != self._spec.num_leaves:
            raise ValueError("another number of tensors")
        return _pytree.tree_unflatten(leaves, self._spec)


def _tensor_tables(dataset: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None] | None:
    """The tensors of a ``TensorDataset``, and the places of a ``Subset`` of it."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    mapping = None
    for indices in subsets:
        inner = torch.as_tensor(list(indices), dtype=torch.int64)
        mapping = inner if mapping is None else inner.index_select(0, mapping)
    plain = all(
        type(each) is torch.Tensor and each.layout is torch.strided and not each.requires_grad and each.device.type == "cpu"
        for each in dataset.tensors
    )
    return (tuple(dataset.tensors), mapping) if plain else None


def _tensor(places: Sequence[int]) -> Any:
    return torch.as_tensor(places, dtype=torch.int64)


def _array(places: Sequence[int]) -> Any:
    return _tensor(places).numpy()


def _equal(want: Any, got: Any) -> bool:
    """Whether all leaves are tensors of equal type, shape and bits."""
    pairs = list(zip(_pytree.tree_leaves(want), _pytree.tree_leaves(got), strict=True))
    return bool(pairs) and all(
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
        for one, other in pairs
    )


def _is_power_of_eight(number: int) -> bool:
    while number > 1 and number % 8 == 0:
        number //= 8
    return number == 1


def generators() -> tuple[Any, ...]:
    """The states of the random generators that a data set may use."""
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else (numpy.random.get_state(),)
    return random.getstate(), torch.get_rng_state(), *own


def same_state(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether two results of :func:`generators` are equal, so that nothing was drawn between them."""
    same = before[0] == after[0] and torch.equal(before[1], after[1])
    return same and all(bool((a[1] == b[1]).all()) and a[2:] == b[2:] for a, b in zip(before[2:], after[2:], strict=True))


def _restore(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if len(state) > 2:
        sys.modules["numpy"].random.set_state(state[2])
