"""Every process holds the whole model, and gradients cross bucket by bucket while the backward pass goes on."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.train.distributed.comm_hooks import Bucket, Exchange, in_a_row, shaped
from trimtab.train.distributed.process_group import Group, hand_out
from trimtab.train.runtime.step_clock import Clock

_MIB = 2**20
_TWICE = (
    "{} got a second gradient in one backward pass, after the first had been sent to the other processes. torch's checkpoint() "
    "with use_reentrant=True does that: give use_reentrant=False."
)
_SPARSE = (
    "The gradient of {} is sparse, and several processes exchange dense ones only. Make the embedding with sparse=False, or "
    "train in one process."
)
_SUMS = (torch.optim.SGD, torch.optim.ASGD)
"""Optimizers whose steps are sums of gradients, to which it makes little difference which of them a part came with."""


class DataParallelGroup(Group):
    """Processes with a copy of the model each, whose gradients get their mean while the backward pass goes on.

    torch's DDP does the same, but a process that fails under it leaves the others waiting in their backward pass. Here that
    process sends zeros for all buckets that they still wait for. Then all are told, and can make the update again.

    Buckets cross in one order, which is the same in all processes. A parameter without a gradient holds up the rest until the
    backward pass is over. So those that were ever without one cross last. Where no process has a gradient for it, a parameter
    gets none, as in one process.
    """

    averages = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.exchange = Exchange(settings.distributed.communication)
        self._clock: Clock | None = None
        self._model: nn.Module = nn.Identity()
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] | None = None
        """Which of them had hooks last."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._buckets: list[list[int]] = []
        self._place: dict[int, int] = {}
        """The bucket of each parameter that is trained."""
        self._late: set[int] = set()
        self._doubted: str | None = None
        """The optimizer, where it makes much of what comes late."""
        self._updating = self._sending = self._torn = False
        """Whether an update is under way; its gradients cross as they come; sending one failed midway."""
        self._due: list[set[int]] = []
        """The gradients that each bucket still waits for."""
        self._without: set[int] = set()
        """Parameters that got none here."""
        self._flights: list[Future[torch.Tensor]] = []

    def wrap(self, model: nn.Module, settings: Settings, *, fresh: bool) -> nn.Module:
        """The model as it is; all begin with the parameters of the first, and draw random numbers of their own."""
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                hand_out(value)
        if fresh:
            torch.manual_seed(torch.initial_seed() + self.rank)
        self._model, self._parameters, self._trained, self._late = model, list(model.parameters()), None, set()
        return model

    def timed(self, clock: Clock) -> None:
        """Tell ``clock`` when the backward pass is over: what is left is waiting."""
        self._clock = clock

    @contextlib.contextmanager
    def together(self, *, update: bool = False) -> Iterator[None]:
        """A block that succeeds in all processes or in none; after that of an update, all have the mean of the gradients."""
        if update:
            self._begin()
        with super().together(update=update):
            yield
            if update:
                if self._clock is not None:
                    self._clock.enter("communication")
                while len(self._flights) < len(self._buckets):
                    self._send()
                self.exchange.land(self._flights)
                self.lacking = bool(self._without)
        if update:
            self._updating = False
            self._flights.clear()
            if self.lacking:
                self._leave_out()

    @contextlib.contextmanager
    def exchanging(self, *, now: bool) -> Iterator[None]:
        """A block whose backward pass sends gradients only if ``now``."""
        self._sending = now and self._updating
        try:
            yield
        finally:
            self._sending = False

    def release(self) -> None:
        """Send zeros for the buckets that the others wait for.

        Raises:
            RuntimeError: there is no memory for them, or one was sent in part.
        """
        if self._torn:
            raise RuntimeError("A bucket was sent in part.")
        if not self._updating:
            self._begin()
        while len(self._flights) < len(self._buckets):
            self._send(nothing=True)
            self._flights[-1].wait()  # one after the other: there may not be memory for zeros in all of them
        self.renew()

    def renew(self) -> None:
        """Forget an update that failed, and what earlier ones have left out, which holds a part of it."""
        self._updating = self._sending = self._torn = self.lacking = False
        self._flights.clear()
        self.exchange.reset()

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[None]:
        """A block whose updates leave nothing behind that is sent later."""
        try:
            yield
        finally:
            self.exchange.reset()

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember whether the updates are such as take ill what comes late."""
        self._doubted = None if isinstance(optimizer, _SUMS) else type(optimizer).__name__

    def notes(self) -> list[str]:
        """What crossed, and how long the backward passes stood still for it."""
        sent, notes = self.exchange, list[str]()
        if not sent.bytes:
            return notes
        if sent.kind == "powersgd" and self._doubted is not None:
            notes.append(
                f"Caution: communication='powersgd' with {self._doubted}. What is left out of a gradient comes with a later "
                "one, and optimizers that adapt the size of their steps make too much of that. "
                "Compare the loss with that of communication=None, or take SGD, 'bfloat16' or 'float16'."
            )
        full = 2 * (self.size - 1) / self.size * sum(p.numel() * 4 for p in self._parameters if p.requires_grad)
        each = sent.bytes / sent.updates
        told = f"Each process sent {each / 1e6:.3g} MB of gradients per update, {each / full:.2f} of what float32 takes"
        on_cpu = all(p.device.type == "cpu" for p in self._parameters)
        waited = f"; the backward pass stood still {1e3 * sent.waited_s / sent.updates:.3g} ms for that" if on_cpu else ""
        return [*notes, f"{told}{waited}."]

    def _begin(self) -> None:
        """Make ready for an update; where other parameters are trained than before, as where layers thaw, with new buckets."""
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._trained:
            self._trained = trained
            for hook in self._hooks:
                hook.remove()
            world = weakref.ref(self)
            kept = [(index, p) for index, p in enumerate(self._parameters) if p.requires_grad]
            self._hooks = [
                p.register_post_accumulate_grad_hook(_arrival(world, index))  # type: ignore[no-untyped-call]
                for index, p in kept
            ]
            self._arrange()
        self._updating, self.lacking = True, False
        self._flights.clear()
        self._without.clear()
        self._due = [set(bucket) for bucket in self._buckets]

    def _arrange(self) -> None:
        """Put the parameters into buckets of one type, the last first, as their gradients come; the first bucket is small."""
        self._buckets, most = [], (self.settings.distributed.bucket_mb or 25) * _MIB
        for late in (False, True):
            filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
            for index in reversed(range(len(self._parameters))):
                parameter = self._parameters[index]
                if not parameter.requires_grad or (index in self._late) is not late:
                    continue
                kind = (parameter.dtype, parameter.device)
                bucket = filling.setdefault(kind, [])
                bucket.append(index)
                if sum(self._parameters[each].nbytes for each in bucket) >= (most if self._buckets else min(most, _MIB)):
                    self._buckets.append(filling.pop(kind))
            self._buckets += filling.values()
        self._place = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self.exchange.reset()

    def _arrived(self, index: int) -> None:
        """A gradient is there: send the buckets that are full now."""
        if not self._sending:
            return
        if self._place[index] < len(self._flights):
            raise UsageError(_TWICE.format(self._named(index)))
        self._due[self._place[index]].discard(index)
        while len(self._flights) < len(self._buckets) and not self._due[len(self._flights)]:
            self._send()

    @torch.no_grad()
    def _send(self, *, nothing: bool = False) -> None:
        """Begin to bring the next bucket to all, whose gradients become views of it; or zeros, if ``nothing``."""
        number = len(self._flights)
        indices = self._buckets[number]
        parameters = [self._parameters[index] for index in indices]
        grads = []
        for index, parameter in zip(indices, parameters, strict=True):
            grad = None if nothing else parameter.grad
            if grad is not None and grad.is_sparse:
                raise UsageError(_SPARSE.format(self._named(index)))
            if grad is None and self.counts:
                self._without.add(index)
            # what only keeps step has no gradient, not even where it is no number
            grads.append(torch.zeros_like(parameter) if grad is None or not self.counts else grad)
        flat = torch.cat([in_a_row(grad, parameter) for grad, parameter in zip(grads, parameters, strict=True)])
        if not nothing:
            for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
                parameter.grad = shaped(part, parameter)
        self._torn = True
        self._flights.append(self.exchange.begin(Bucket(number, parameters, flat, number == len(self._buckets) - 1)))
        self._torn = False

    def _leave_out(self) -> None:
        """Take the gradient of parameters away that got one in no process; those that lacked one anywhere cross last."""
        found = torch.zeros(2, len(self._parameters), dtype=torch.uint8)
        if self.counts:
            for index in self._place:
                found[int(index in self._without), index] = 1
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.everyone)
        there, lacked = found.bool().tolist()
        for index in self._place:
            if not there[index]:
                self._parameters[index].grad = None
        late = {index for index, some in enumerate(lacked) if some}
        if not late <= self._late:
            self._late |= late
            self._arrange()

    def _named(self, index: int) -> str:
        return next(name for name, parameter in self._model.named_parameters() if parameter is self._parameters[index])


def _arrival(world: weakref.ref[DataParallelGroup], index: int) -> Callable[[torch.Tensor], None]:
    """What a parameter calls when its gradient is there; it does not keep the processes' world alive."""

    def arrived(_: torch.Tensor) -> None:
        if (found := world()) is not None:
            found._arrived(index)

    return arrived
