"""The base of all worlds of several processes: means over all, common decisions, and handling of failures."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from trimtab._internal.text import counted
from trimtab.core.settings import Settings
from trimtab.errors import PeerError, UsageError, WorkloadError
from trimtab.tensors.weights import in_bytes
from trimtab.train.data.device_prefetch import storage_tensors
from trimtab.train.distributed.data_sharding import share
from trimtab.train.distributed.devices import local_device
from trimtab.train.loss.adapter import Weight
from trimtab.train.runtime.memory_errors import collective_memory_error, gpu_assert_failed, out_of_memory
from trimtab.train.runtime.world import World, weighted

T = TypeVar("T")

DONE, OUT_OF_MEMORY, FAILED = range(3)
"""The outcome of a block in a process. All processes act on the largest."""
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Socket closed")


class PeerMemoryError(torch.OutOfMemoryError):
    """Another process ran out of memory in this update, which all processes then make again in smaller parts."""


class Group(World):
    """A process among several.

    Decisions are exchanged over gloo, so that no process waits for a GPU. All processes call the methods in one order;
    :meth:`together` keeps that order when one of them fails.

    Args:
        settings: of the run.
        data: the group of processes with different data, if that is not all of them.
    """

    def __init__(self, settings: Settings, data: dist.ProcessGroup | None = None) -> None:
        self.settings, self.data = settings, data
        self.rank, self.size = dist.get_rank(data), dist.get_world_size(data)
        self.index, self.processes = dist.get_rank(), dist.get_world_size()
        self.repeats = not (self.shared or settings.data.exact_batchnorm)  # processes wait for each other within layers
        self.gloo = dist.new_group(backend="gloo", timeout=_timeout())
        self.counts = True
        self.missing_gradients = False
        """During an update: a parameter got no gradient in this process. After it: in any process whose data counts."""
        self._stop_wanted = self._stopping = False
        self._reported: BaseException | None = None
        """The last error of this process that other processes know of, or cannot be informed of."""
        self._unreported: BaseException | None = None
        """The last error of this process that other processes could not be informed of."""

    @property
    def leads(self) -> bool:
        return self.index == 0

    def device(self, name: str) -> torch.device:
        return local_device(name)

    def place(self, model: nn.Module, settings: Settings) -> None:
        """Compare the models of all processes, move the model to its device, and use SyncBatchNorm for ``exact_batchnorm``."""
        self.compare(model)
        super().place(model, settings)
        if settings.data.exact_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]

    def compare(self, model: nn.Module) -> None:
        """Compare the names and shapes of the models of all processes.

        Raises:
            UsageError: the model has lazy parameters.
            WorkloadError: names or shapes differ.
        """
        state = model.state_dict()
        if lazy := [name for name, value in state.items() if is_lazy(value)]:
            raise UsageError(
                f"{lazy[0]} has no shape before a forward pass, and all processes must begin with the same parameters. Call "
                "the model on a batch in each of them before Trainer(...)."
            )
        shapes = self.gathered([(name, _shapes(value)) for name, value in state.items()])
        if any(other != shapes[0] for other in shapes):
            raise WorkloadError(
                "The processes have different models: their parameters differ in name or shape. Build the same one in each."
            )

    def share(self, batches: Iterable[Any], what: str) -> Iterable[Any]:
        """This process's shard of the batches; see :func:`~trimtab.train.distributed.data_sharding.share`."""
        if self.seed is None:
            self.seed = self.gathered(int(torch.empty((), dtype=torch.int64).random_().item()))[0]
        return share(batches, what, self.rank, self.size, self.seed, rows=self.size != self.processes)

    def rounds(self, groups: Iterator[T], length: int | None, repeat: Callable[[], T | None] | None = None) -> Iterator[T]:
        """The ``groups``. While other processes have more, the last group is repeated with weight 0 (:attr:`counts` is false).

        So all processes make equally many updates, and all data of an uneven split is used with its weight. If all of them
        know one length, they communicate only at the beginning and at the end of the epoch.

        Args:
            repeat: gives a group to a process that has none to begin with, as one that had used up its shard before it resumed.
        """
        lengths = self.gathered(length)
        spare: T | None = None
        try:
            if length is not None and all(other == length for other in lengths):
                yield from self._counted_rounds(groups, length, repeat)
                return
            while True:
                try:
                    group = next(groups, None)
                    if group is None and spare is None and repeat is not None:
                        spare = repeat()
                except BaseException as error:
                    self._failed(error, update=False)
                    raise
                spare, self.counts = (spare, False) if group is None else (group, True)
                some, empty_handed = self._maximum(int(self.counts), int(spare is None))
                if not some or empty_handed:
                    return
                assert spare is not None
                yield spare
        finally:
            self.counts = True

    @contextlib.contextmanager
    def together(self, *, update: bool = False) -> Iterator[None]:
        """A block that succeeds in all processes or in none.

        Raises:
            PeerMemoryError: another process ran out of memory in the block.
            PeerError: another process failed in it.
            WorkloadError: this process ran out of memory in an update, and the other processes cannot be informed.
        """
        if update:  # an error keeps frames, and the tensors in them, alive
            self._reported = self._unreported = None
        try:
            yield
        except BaseException as error:
            self._failed(error, update=update)
            raise
        try:
            stopping, used = self._maximum(int(self._stop_wanted), self.counts + self.missing_gradients)
            self._stopping, self.used, self.missing_gradients = bool(stopping), used > 0 or not update, used > 1
        except (PeerError, PeerMemoryError):
            if update:
                self.drop_update()
            raise

    def known_to_all(self, error: BaseException) -> bool:
        """True if all processes have failed with ``error`` or have been informed of it."""
        if connection_lost(error) or gpu_assert_failed(error) or _caused_by(error, self._unreported):
            return False
        return _caused_by(error, self._reported) or isinstance(error, (UsageError, WorkloadError, PeerMemoryError))

    def finish_exchange(self) -> None:
        """Take part in the exchange of gradients that other processes wait for, after an update failed in this one."""

    def mean(
        self, losses: Sequence[torch.Tensor], weights: Sequence[Weight], *, summed: bool
    ) -> tuple[torch.Tensor, Weight | None]:
        """The weighted mean of the losses of all processes and the sum of the weights; their sum and ``None`` if ``summed``."""
        if not losses:
            both = torch.zeros(2, dtype=torch.float64, device=self.device(self.settings.device))
        elif summed:
            value = torch.stack(list(losses)).double().sum()
            both = torch.stack([torch.ones_like(value), value])
        else:
            both = torch.stack(weighted(losses, weights))
        both = both.to(self.device(self.settings.device))  # a metric may be on the CPU in some processes
        dist.all_reduce(both, group=self.data)
        if summed:
            return both[1], None
        count = torch.where(both[0] > 0, both[0], 1.0)  # without any weight the mean is 0, not nan
        return both[1] / count, count

    def average(self, value: float) -> float:
        values = self.gathered(value)
        return sum(values) / len(values)

    def any(self, truth: bool) -> bool:
        return bool(self._maximum(int(truth))[0])

    def maximum(self, count: int) -> int:
        return self._maximum(count)[0]

    def stopping(self, wanted: bool) -> bool:
        """True if any process wanted to stop before the last update; ``wanted`` is exchanged with the next one."""
        self._stop_wanted = wanted
        return self._stopping

    def gathered(self, value: T) -> list[T]:
        """The ``value`` of every process, by rank. It is pickled, between processes of this run only."""
        found: list[Any] = [None] * dist.get_world_size(self.gloo)
        dist.all_gather_object(found, value, group=self.gloo)
        return found

    def on_rank_0(self, action: Callable[[], T]) -> T | None:
        """The result of ``action`` in rank 0, ``None`` in other processes.

        Raises:
            PeerError: it failed in rank 0.
        """
        with self.together():
            return action() if self.leads else None

    @torch.no_grad()
    def average_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Set buffers that differ between processes to their mean, or to those of rank 0 if they are no floating point."""
        buffers = [part for buffer in buffers for part in storage_tensors(buffer)]
        found = self.gathered([_digest(buffer) for buffer in buffers])
        in_group = [found[rank] for rank in dist.get_process_group_ranks(self.data)]
        for buffer, *digests in zip(buffers, *in_group, strict=True):
            if len(set(digests)) == 1:  # equal already; a mean might round it
                continue
            if buffer.is_floating_point():
                mean = buffer.double().contiguous() / self.size  # the sum may overflow the dtype
                dist.all_reduce(mean, group=self.data)
                buffer.copy_(mean)
            else:
                broadcast(buffer, self.data)

    def barrier(self) -> None:
        dist.barrier(group=self.gloo)

    def _counted_rounds(self, groups: Iterator[T], length: int, repeat: Callable[[], T | None] | None) -> Iterator[T]:
        """The first ``length`` of ``groups``; every process has announced this number.

        Raises:
            WorkloadError: there are fewer, and this process has not wished to end.
        """
        last: T | None = None
        for given in range(length + 1):
            in_update = 0 < given < length  # other processes are in an update then
            try:
                group = next(groups, None)
                if group is None and given < length and self._stop_wanted:  # all processes learn of it in this update
                    group, self.counts = repeat() if last is None and repeat is not None else last, False
                if group is None and given < length:
                    raise WorkloadError(
                        f"The loader gave the batches of {counted(given, 'update')} in this epoch, but its len() said "
                        f"{length}. Mend its len(), or leave it out: the processes then ask each other before each update."
                    )
            except BaseException as error:
                self._failed(error, update=in_update)
                raise
            if not in_update:
                self._maximum(0)
            if group is None or given == length:
                return
            last = group
            yield group

    def _maximum(self, first: int, second: int = 0) -> tuple[int, int]:
        """The maximum of each value over all processes.

        Raises:
            PeerMemoryError: another process ran out of memory.
            PeerError: another process failed.
        """
        state, who, first, second = self._all_maximum(DONE, 0, first, second)
        if state == OUT_OF_MEMORY:
            raise PeerMemoryError(f"The process of rank {who - 1} ran out of memory.")
        if state == FAILED:
            raise PeerError(f"The process of rank {who - 1} failed; its own message says why.")
        return first, second

    def _failed(self, error: BaseException, *, update: bool) -> None:
        """Report to the other processes, which wait in the exchange of an ``update`` or for a decision, that this one failed.

        If that is impossible, they end with this process: torchrun ends them, or their connection to it breaks.

        Raises:
            WorkloadError: memory ran out in an update, and the other processes cannot be informed.
        """
        if connection_lost(error) or isinstance(error, (PeerError, PeerMemoryError)) or _caused_by(error, self._reported):
            return
        self._reported = error  # outer blocks may see it again, when no process waits for a report
        if update and not self._exchange_finished():
            self._unreported = error
            if out_of_memory(error):
                raise collective_memory_error(error) from error
            return
        own = OUT_OF_MEMORY if out_of_memory(error) else FAILED
        with contextlib.suppress(RuntimeError):  # the others may be gone; the first error counts
            self._all_maximum(own, dist.get_rank() + 1, 0, 0)

    def _exchange_finished(self) -> bool:
        """Let the other processes finish the update that failed here; true if they then wait for its outcome."""
        if not self.repeats:
            return False
        try:
            self.finish_exchange()
        except (RuntimeError, MemoryError):
            return False
        return True

    def _all_maximum(self, *values: int) -> list[int]:
        """The maximum of each of four values: outcome, rank + 1 of a failed process, and two of the caller."""
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.gloo)
        return [int(value) for value in found]


def broadcast(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast ``value``, in place, from the first process of ``group``, as contiguous bytes.

    Gloo ignores strides (https://github.com/pytorch/pytorch/issues/192920), NCCL takes contiguous tensors only, and neither
    takes all dtypes. Of a sparse tensor, its indices and values are sent.
    """
    if (parts := storage_tensors(value))[0] is not value:
        for part in parts:
            broadcast(part, group)
        return
    for dim, stride in enumerate(value.stride()):
        if not stride and value.shape[dim] > 1:  # expanded: one element in memory
            value = value.narrow(dim, 0, 1)
    whole = value.contiguous()
    dist.broadcast(in_bytes(whole), group=group, group_src=0)
    if not value.is_contiguous():
        value.copy_(whole)


def _timeout() -> dt.timedelta | None:
    """The timeout of the default group, which the script may have set."""
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)  # not in all versions of torch
    found: dt.timedelta | None = getattr(options, "_timeout", None)
    return found


def _caused_by(error: BaseException, other: BaseException | None) -> bool:
    """True if ``error`` is ``other`` or was raised from it."""
    return other is not None and (error is other or error.__cause__ is other)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    """The shape of a tensor, and those of its indices and values if it is sparse; empty for other values."""
    return [tuple(one.shape) for one in (value, *storage_tensors(value))] if isinstance(value, torch.Tensor) else []


def _digest(tensor: torch.Tensor) -> bytes:
    """A hash of the bytes of ``tensor``, 16 bytes long."""
    flat = in_bytes(tensor.detach().cpu().contiguous())
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


def connection_lost(error: BaseException) -> bool:
    """True if ``error`` says that the connection to another process broke."""
    named = isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
    )
    return named or (error.__cause__ is not None and connection_lost(error.__cause__))
