"""Data parallelism: each process has the whole model, and gradients are averaged bucket by bucket in the backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from trimtab.core.settings import Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.distributed.comm_hooks import Bucket, Exchange, views
from trimtab.train.distributed.process_group import Group, broadcast
from trimtab.train.loss.adapter import Weight
from trimtab.train.runtime.step_clock import Clock

_MIB = 2**20
_SECOND_GRADIENT = (
    "{} got a second gradient in one backward pass, after the first had been sent to the other processes. torch's checkpoint() "
    "with use_reentrant=True does that: give use_reentrant=False."
)
_SPARSE = (
    "The gradient of {} is sparse, and several processes exchange dense ones only. Make the embedding with sparse=False, or "
    "train in one process."
)
_OTHER_STEP = (
    "run.step was called for one optimizer in one process, and for another one or for none in another. Decide by run.update, "
    "which is the same in all processes, and not by the data."
)
_LINEAR = (torch.optim.SGD, torch.optim.ASGD)
"""Optimizers whose steps are linear in the gradient, so that an error that is added to a later gradient does little harm."""


class DataParallelGroup(Group):
    """Processes with a copy of the model each, which average gradients during the backward pass.

    torch's DDP does this too, but a process that fails under it leaves the others waiting in their backward pass. Here the
    failing process sends zeros for all buckets that the others wait for. Then all processes learn of the failure, and can make
    the update again.

    Buckets are sent in one order in all processes. A parameter without a gradient delays the buckets after its own until the
    end of the backward pass. So parameters that ever had none are sent last. A parameter without a gradient in any process gets
    ``None``, as in one process.
    """

    averages = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.exchange = Exchange(settings.distributed.communication)
        self._clock: Clock | None = None
        self._model: nn.Module = nn.Identity()
        self._parameters: list[nn.Parameter] = []
        self._hooked: list[bool] | None = None
        """By parameter: whether it has a hook."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._buckets: list[list[int]] = []
        self._bucket_of: dict[int, int] = {}
        """By the index of a trained parameter: the number of its bucket."""
        self._sent_last: set[int] = set()
        self._nonlinear: str | None = None
        """The name of the optimizer, unless it is linear in the gradient."""
        self._is_manual = False
        """Whether updates exchange gradients by :meth:`average_gradients`."""
        self._updating = self._sending = self._partly_sent = False
        """An update is under way; gradients are sent as they come; sending a bucket has begun and not returned."""
        self._missing: list[set[int]] = []
        """By bucket: the parameters whose gradients are missing yet."""
        self._without_gradient: set[int] = set()
        """Parameters that got no gradient in this process."""
        self._futures: list[Future[torch.Tensor]] = []

    def wrap(self, model: nn.Module, settings: Settings, *, fresh: bool) -> nn.Module:
        """Give all processes the parameters and buffers of rank 0, and, if the run is ``fresh``, seeds of their own."""
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                broadcast(value)
        if fresh:
            torch.manual_seed(torch.initial_seed() + self.rank)
        self._model, self._parameters, self._hooked, self._sent_last = model, list(model.parameters()), None, set()
        return model

    def timed(self, clock: Clock) -> None:
        """Have ``clock`` count the time after the backward pass as communication."""
        self._clock = clock

    @contextlib.contextmanager
    def together(self, *, update: bool = False) -> Iterator[None]:
        """A block that succeeds in all processes or in none; with ``update``, it averages gradients over all processes."""
        if update:
            self._begin()
        with super().together(update=update):
            yield
            if update:
                if self._clock is not None:
                    self._clock.enter("communication")
                while len(self._futures) < len(self._buckets):
                    self._send()
                for future in self._futures:  # on a GPU, its stream waits and this process does not
                    future.wait()
                self.missing_gradients = bool(self._without_gradient)
        if update:
            self._updating = False
            self._futures.clear()
            if self.missing_gradients:
                self._drop_unused()

    @contextlib.contextmanager
    def manual_update(self) -> Iterator[None]:
        """A block of an update that exchanges gradients by :meth:`average_gradients`; it succeeds in all processes or in
        none.

        Raises:
            WorkloadError: another process makes a step that this one does not make.
            PeerError: another process failed.
        """
        self._is_manual = True
        self._reported = self._unreported = None
        try:
            yield
            stopping, used = self._maximum(int(self._stop_wanted), int(self.counts))
            if stopping > 1:
                raise WorkloadError(_OTHER_STEP)
        except BaseException as error:
            self._failed(error, update=False)
            raise
        self._stopping, self.used, self.missing_gradients = bool(stopping), used > 0, False

    @torch.no_grad()
    def average_gradients(self, parameters: Sequence[nn.Parameter], weight: Weight, place: int) -> Weight:
        """Average the gradients of ``parameters`` over all processes, in place; returns the sum of ``weight`` over them. A
        process that only keeps step sends zeros, whatever its gradients are.

        Raises:
            WorkloadError: another process is not at the same step, or a gradient is sparse.
            PeerError: another process failed.
        """
        code = place + 2  # manual_update() sends 0 or 1 here
        highest, lowest = self._maximum(code, -code)
        if highest != -lowest:
            raise WorkloadError(_OTHER_STEP)
        for kind in dict.fromkeys((p.dtype, p.device) for p in parameters):
            some = [p for p in parameters if (p.dtype, p.device) == kind]
            if any(p.grad is not None and p.grad.is_sparse for p in some):
                raise WorkloadError(_SPARSE.format("an embedding"))
            grads = [torch.zeros_like(p) if p.grad is None or not self.counts else p.grad for p in some]
            present = torch.tensor([float(p.grad is not None) for p in some])
            flat = some[0].new_empty(sum(p.numel() for p in some) + len(some))
            parts, count = views(flat, some), flat[-len(some) :]
            torch._foreach_copy_([*parts, count], [*grads, present.to(flat)])
            dist.all_reduce(flat, group=self.data)
            for parameter, part, there in zip(some, parts, count.tolist(), strict=True):
                parameter.grad = part.div_(self.size) if there else None
        total = torch.as_tensor(weight, dtype=torch.float64).to(self.device(self.settings.device), copy=True)
        dist.all_reduce(total, group=self.data)
        return total

    @contextlib.contextmanager
    def exchanging(self, *, now: bool) -> Iterator[None]:
        """A block whose backward pass sends gradients if ``now``."""
        self._sending = now and self._updating
        try:
            yield
        finally:
            self._sending = False

    def finish_exchange(self) -> None:
        """Send zeros for the buckets that other processes wait for; in a :meth:`manual_update` there are none.

        Raises:
            RuntimeError: there is no memory for them, or a bucket was sent in part.
        """
        if self._is_manual:
            return
        if self._partly_sent:
            raise RuntimeError("A bucket was sent in part.")
        if not self._updating:
            self._begin()
        while len(self._futures) < len(self._buckets):
            self._send(nothing=True)
            self._futures[-1].wait()  # memory may not suffice for zeros in all of them
        self.drop_update()

    def drop_update(self) -> None:
        """Drop an update that failed, and the errors of compression, which hold a part of it."""
        self._updating = self._sending = self._partly_sent = self.missing_gradients = False
        self._futures.clear()
        self.exchange.reset()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember whether the updates are linear in the gradient."""
        self._nonlinear = None if isinstance(optimizer, _LINEAR) else type(optimizer).__name__

    def notes(self) -> list[str]:
        """Sentences on what PowerSGD has sent, and on an optimizer that suits it badly."""
        _, numbers, sent = self.exchange.power.compression_stats()  # type: ignore[no-untyped-call]
        notes = [f"PowerSGD sent {sent / numbers:.2f} of the numbers in the gradients."] if numbers else []
        if self.exchange.kind == "powersgd" and self._nonlinear is not None:
            notes.append(
                f"Caution: communication='powersgd' with {self._nonlinear}. What is left out of a gradient comes with a later "
                "one, and optimizers that adapt the size of their steps make too much of that. "
                "Compare the loss with that of communication=None, or take SGD, 'bfloat16' or 'float16'."
            )
        return notes

    def _begin(self) -> None:
        """Begin an update. If other parameters are trained than before, hooks and buckets are made anew."""
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._hooked:
            self._hooked = trained
            for hook in self._hooks:
                hook.remove()
            arrived = weakref.WeakMethod(self._on_gradient)  # a hook does not keep the group alive
            kept: list[tuple[int, Any]] = [(at, p) for at, p in enumerate(self._parameters) if p.requires_grad]
            self._hooks = [
                p.register_post_accumulate_grad_hook(lambda _, at=at: (send := arrived()) and send(at)) for at, p in kept
            ]
            self._make_buckets()
        self._updating, self.missing_gradients = True, False
        self._futures.clear()
        self._without_gradient.clear()
        self._missing = [set(bucket) for bucket in self._buckets]

    def _make_buckets(self) -> None:
        """Put the parameters into buckets of one dtype, last parameter first, as gradients come. The first bucket is small."""
        self._buckets, most = [], (self.settings.distributed.bucket_mb or 25) * _MIB
        filling: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
        for index, parameter in reversed(list(enumerate(self._parameters))):
            if parameter.requires_grad:
                kind = (parameter.dtype, parameter.device, index in self._sent_last)
                bucket = filling.setdefault(kind, [])
                bucket.append(index)
                if sum(self._parameters[each].nbytes for each in bucket) >= (most if self._buckets else min(most, _MIB)):
                    self._buckets.append(filling.pop(kind))
        self._buckets = sorted([*self._buckets, *filling.values()], key=lambda bucket: bucket[0] in self._sent_last)
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self.exchange.reset()

    def _on_gradient(self, index: int) -> None:
        """Send the buckets that are complete with the gradient of parameter ``index``."""
        if not self._sending:
            return
        if self._bucket_of[index] < len(self._futures):
            raise UsageError(_SECOND_GRADIENT.format(self._named(index)))
        self._missing[self._bucket_of[index]].discard(index)
        while len(self._futures) < len(self._buckets) and not self._missing[len(self._futures)]:
            self._send()

    @torch.no_grad()
    def _send(self, *, nothing: bool = False) -> None:
        """Begin to average the next bucket, of which gradients become views; with ``nothing``, send zeros."""
        number = len(self._futures)
        indices = self._buckets[number]
        parameters = [self._parameters[index] for index in indices]
        grads = []
        for index, parameter in zip(indices, parameters, strict=True):
            grad = None if nothing else parameter.grad
            if grad is not None and grad.is_sparse:
                raise UsageError(_SPARSE.format(self._named(index)))
            if grad is None and self.counts:
                self._without_gradient.add(index)
            # a process out of data sends zeros, though its gradient may be nan
            grads.append(torch.zeros_like(parameter) if grad is None or not self.counts else grad)
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
        parts = views(flat, parameters)
        torch._foreach_copy_(parts, grads)
        if not nothing:
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part
        self._partly_sent = True
        self._futures.append(self.exchange.begin(Bucket(number, parameters, flat, number == len(self._buckets) - 1)))
        self._partly_sent = False

    def _drop_unused(self) -> None:
        """Set gradients to ``None`` where no process had one. Parameters that lacked one anywhere are sent last from now on."""
        found = self.gathered((self.counts, self._without_gradient))
        absent = [without for counts, without in found if counts]
        for index in set.intersection(*absent):
            self._parameters[index].grad = None
        if not (lacking := set.union(*absent)) <= self._sent_last:
            self._sent_last |= lacking
            self._make_buckets()

    def _named(self, index: int) -> str:
        return next(name for name, parameter in self._model.named_parameters() if parameter is self._parameters[index])
