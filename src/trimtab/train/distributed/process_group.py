"""What any several processes have in common: sums over all, decisions that all take, failures that all hear of."""

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
from trimtab.train.data.device_prefetch import stored
from trimtab.train.distributed.data_sharding import share
from trimtab.train.distributed.devices import local_device
from trimtab.train.loss.adapter import Weight
from trimtab.train.runtime.memory_errors import no_second_try, out_of_memory, stopped
from trimtab.train.runtime.world import World, weighted

T = TypeVar("T")

FINE, OUT_OF_MEMORY, FAILED = range(3)
"""How an update went in a process; what goes on with the worst of them is what all do."""
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Socket closed")


class PeerMemoryError(torch.OutOfMemoryError):
    """Another process ran out of memory in this update, so that all of them try it again in smaller parts."""


class Group(World):
    """A process among several.

    What the hosts must agree on crosses over gloo, so that nobody waits for a GPU to know it. The processes call everything
    here in the same order; :meth:`together` keeps that true where one of them fails.

    Args:
        settings: of the run.
        data: the processes that have different data, where that is not all of them.
    """

    def __init__(self, settings: Settings, data: dist.ProcessGroup | None = None) -> None:
        self.settings, self.data = settings, data
        self.rank, self.size = dist.get_rank(data), dist.get_world_size(data)
        self.index, self.processes = dist.get_rank(), dist.get_world_size()
        self.repeats = not (self.shared or settings.data.exact_batchnorm)  # there they wait for each other within layers
        self.everyone = dist.new_group(backend="gloo", timeout=_patience())
        self.counts = True
        self.lacking = False
        """Whether a parameter got no gradient in this update: here, and after it in any process that counts."""
        self._wish = self._stopping = False
        self._told: BaseException | None = None
        """What failed here last, and is not to be told again."""
        self._unheard: BaseException | None = None
        """What failed here last that the others could not be told of."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that logs, saves and prints."""
        return self.index == 0

    def device(self, name: str) -> torch.device:
        """The GPU of this process where the settings say just ``cuda``."""
        return local_device(name)

    def place(self, model: nn.Module, settings: Settings) -> None:
        """See that all processes have the same model, and give BatchNorm the statistics of all where they must be exact."""
        self.compare(model)
        super().place(model, settings)
        if settings.data.exact_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]

    def compare(self, model: nn.Module) -> None:
        """See that all processes have the same model.

        Raises:
            UsageError: it has parameters without a shape.
            WorkloadError: they have different ones.
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
        """This process's part of the batches; see :func:`~trimtab.train.distributed.data_sharding.share`."""
        if self.seed is None:
            self.seed = self.gathered(int(torch.empty((), dtype=torch.int64).random_().item()))[0]
        return share(batches, what, self.rank, self.size, self.seed, rows=self.size != self.processes)

    def rounds(self, groups: Iterator[T], length: int | None, again: Callable[[], T | None] | None = None) -> Iterator[T]:
        """``groups``, and while others have more, the last one again: it then counts for nothing (:attr:`counts`).

        So no process waits for one whose data has ended, and all data of an uneven split is used, each example for what it is
        worth. Where all know that they have the same number of groups, they speak only as the epoch begins and ends.

        Args:
            again: a group for a process that has none left to begin with, as one whose share was used up before a resumption.
        """
        lengths = self.gathered(length)
        spare: T | None = None
        try:
            if length is not None and all(other == length for other in lengths):
                yield from self._counted(groups, length, again)
                return
            while True:
                try:
                    group = next(groups, None)
                    if group is None and spare is None and again is not None:
                        spare = again()
                except BaseException as error:
                    self._failed(error, update=False)
                    raise
                spare, self.counts = (spare, False) if group is None else (group, True)
                some, empty_handed = self._most(int(self.counts), int(spare is None))
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
            PeerMemoryError: another process ran out of memory in it.
            PeerError: another process failed in it.
            WorkloadError: this one ran out of memory in an update, where the others cannot be told of it.
        """
        if update:  # what an earlier try has told keeps its frames, and what memory they hold
            self._told = self._unheard = None
        try:
            yield
        except BaseException as error:
            self._failed(error, update=update)
            raise
        try:
            stopping, used = self._most(int(self._wish), self.counts + self.lacking)
            self._stopping, self.used, self.lacking = bool(stopping), used > 0 or not update, used > 1
        except (PeerError, PeerMemoryError):
            if update:
                self.renew()
            raise

    def heard(self, error: BaseException) -> bool:
        """Whether all processes have failed with ``error``, or have been told of it."""
        if lost(error) or stopped(error) or _is(error, self._unheard):
            return False
        return _is(error, self._told) or isinstance(error, (UsageError, WorkloadError, PeerMemoryError))

    def release(self) -> None:
        """Take part in whatever exchange of gradients the others wait for in an update that failed here."""

    def renew(self) -> None:
        """Make ready for the next update after one that failed in another process."""

    def mean(
        self, losses: Sequence[torch.Tensor], weights: Sequence[Weight], *, summed: bool
    ) -> tuple[torch.Tensor, Weight | None]:
        """The mean of all losses of all processes (the sum, if they are ``summed``), and the weight of all of them."""
        if not losses:
            both = torch.zeros(2, dtype=torch.float64, device=self.device(self.settings.device))
        elif summed:
            value = torch.stack(list(losses)).double().sum()
            both = torch.stack([torch.ones_like(value), value])
        else:
            both = torch.stack(weighted(losses, weights))
        both = both.to(self.device(self.settings.device))  # a metric may be on the CPU, in some processes only
        dist.all_reduce(both, group=self.data)
        if summed:
            return both[1], None
        count = torch.where(both[0] > 0, both[0], 1.0)  # what stands for nothing has no gradient, and is no 0/0
        return both[1] / count, count

    def agreed(self, value: float) -> float:
        """The mean of what the processes give."""
        values = self.gathered(value)
        return sum(values) / len(values)

    def any(self, truth: bool) -> bool:
        """Whether it is true in any process."""
        return bool(self._most(int(truth))[0])

    def most(self, count: int) -> int:
        """The largest that any process gives."""
        return self._most(count)[0]

    def stopping(self, wish: bool) -> bool:
        """Whether any process wished to end before this update; a wish of now is heard with the next."""
        self._wish = wish
        return self._stopping

    def gathered(self, value: T) -> list[T]:
        """What every process gives, in the order of their ranks."""
        found: list[Any] = [None] * dist.get_world_size(self.everyone)
        dist.all_gather_object(found, value, group=self.everyone)
        return found

    def led(self, action: Callable[[], T]) -> T | None:
        """What ``action`` gives to the process that leads.

        Raises:
            PeerError: it failed there.
        """
        with self.together():
            return action() if self.leads else None

    @torch.no_grad()
    def settle(self, buffers: Sequence[torch.Tensor]) -> None:
        """Of those that differ, give every process the mean, or the first one's where they are no floating point."""
        buffers = [part for buffer in buffers for part in stored(buffer)]
        found = self.gathered([_digest(buffer) for buffer in buffers])
        alike = [found[rank] for rank in dist.get_process_group_ranks(self.data)]
        for buffer, *digests in zip(buffers, *alike, strict=True):
            if len(set(digests)) == 1:  # a constant, which a mean might round
                continue
            if buffer.is_floating_point():
                mean = buffer.double().contiguous() / self.size  # a sum may be too much for the type that the mean fits into
                dist.all_reduce(mean, group=self.data)
                buffer.copy_(mean)
            else:
                hand_out(buffer, self.data)

    def barrier(self) -> None:
        """Wait until every process is here."""
        dist.barrier(group=self.everyone)

    def _counted(self, groups: Iterator[T], length: int, again: Callable[[], T | None] | None) -> Iterator[T]:
        """``groups``, of which every process says that it has ``length``; what comes beyond that is left out.

        Raises:
            WorkloadError: there are fewer, and this process has not wished to end.
        """
        last: T | None = None
        for given in range(length + 1):
            among = 0 < given < length  # then the others, who have theirs, are in an update
            try:
                group = next(groups, None)
                if group is None and given < length and self._wish:  # which all hear with this update
                    group, self.counts = again() if last is None and again is not None else last, False
                if group is None and given < length:
                    raise WorkloadError(
                        f"The loader gave the batches of {counted(given, 'update')} in this epoch, but its len() said "
                        f"{length}. Mend its "
                        "len(), or leave it out: the processes then ask each other before each update."
                    )
            except BaseException as error:
                self._failed(error, update=among)
                raise
            if not among:
                self._most(0)
            if group is None or given == length:
                return
            last = group
            yield group

    def _most(self, first: int, second: int = 0) -> tuple[int, int]:
        """The largest that any process gives, of each value.

        Raises:
            PeerMemoryError: a process ran out of memory instead.
            PeerError: a process failed instead.
        """
        state, who, first, second = self._exchanged(FINE, 0, first, second)
        if state == OUT_OF_MEMORY:
            raise PeerMemoryError(f"The process of rank {who - 1} ran out of memory.")
        if state == FAILED:
            raise PeerError(f"The process of rank {who - 1} failed; its own message says why.")
        return first, second

    def _failed(self, error: BaseException, *, update: bool) -> None:
        """Tell the others, who wait in the exchange of an ``update`` or for a decision, that this process failed.

        Where that cannot be done, they are ended with this one: by torchrun, or because their connection to it breaks.

        Raises:
            WorkloadError: memory ran out, and the update cannot be made again, because the others cannot be told.
        """
        if lost(error) or isinstance(error, (PeerError, PeerMemoryError)) or _is(error, self._told):
            return
        self._told = error  # it may pass here again on its way out, and nobody would hear it then
        if update and not self._released():
            self._unheard = error
            if out_of_memory(error):
                raise no_second_try(error) from error
            return
        own = OUT_OF_MEMORY if out_of_memory(error) else FAILED
        with contextlib.suppress(RuntimeError):  # the others may be gone too; what failed here is what counts
            self._exchanged(own, dist.get_rank() + 1, 0, 0)

    def _released(self) -> bool:
        """Whether the others, who may be in the midst of an update, now come to where they can be told that it failed here."""
        if not self.repeats:
            return False
        try:
            self.release()
        except (RuntimeError, MemoryError):
            return False
        return True

    def _exchanged(self, *values: int) -> list[int]:
        """The largest of each of four values; all that the processes say to each other on the way has this form."""
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.everyone)
        return [int(value) for value in found]


def hand_out(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give all processes of ``group`` what the first of them has in ``value``, also where that has gaps in memory, as a slice.

    Gloo takes numbers as they lie in memory (https://github.com/pytorch/pytorch/issues/192920), and NCCL only those in a row;
    neither knows all types, so bytes cross. A sparse tensor crosses as those that it is made of.
    """
    if (parts := stored(value))[0] is not value:
        for part in parts:
            hand_out(part, group)
        return
    for dim, stride in enumerate(value.stride()):
        if not stride and value.shape[dim] > 1:  # expanded: one number seen in many places
            value = value.narrow(dim, 0, 1)
    whole = value.contiguous()
    dist.broadcast(in_bytes(whole), group=group, group_src=0)
    if not value.is_contiguous():
        value.copy_(whole)


def _patience() -> dt.timedelta | None:
    """How long the processes wait for each other, as the script may have said where it made the default group."""
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)  # which not all versions of torch show
    found: dt.timedelta | None = getattr(options, "_timeout", None)
    return found


def _is(error: BaseException, other: BaseException | None) -> bool:
    """Whether ``error`` is ``other``, or tells of it in other words."""
    return other is not None and (error is other or error.__cause__ is other)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    """The shape of a tensor, and those of what it is made of where it is sparse; none of what is no tensor."""
    return [tuple(one.shape) for one in (value, *stored(value))] if isinstance(value, torch.Tensor) else []


def _digest(tensor: torch.Tensor) -> bytes:
    """Sixteen bytes that stand for those of ``tensor``."""
    flat = in_bytes(tensor.detach().cpu().contiguous())
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


def lost(error: BaseException) -> bool:
    """Whether ``error`` says that the connection to another process broke."""
    said = isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
    )
    return said or (error.__cause__ is not None and lost(error.__cause__))
