"""How the gradients of one bucket are added up over all processes, what that costs, and how much of it nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from trimtab.train.clock import Clock

_GATHER: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


class Exchange:
    """The plain sum, and the base of those that send less.

    It is called for one bucket after the other, in the same order by all processes, while the backward pass goes on. Whatever
    it sends it must begin to send before it returns; a callback of a future may compute, but not send, because its turn is not
    the same everywhere. (That is what makes torch's own PowerSGD hook hang over gloo.)
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self.meter = Meter()
        self.clock: Clock | None = None
        self.launched = 0
        """Buckets of the running update."""
        self.complete = False
        """Whether its last bucket was among them."""
        self.torn = False
        """Whether sending a bucket failed, so that nobody knows how much of it the others still wait for."""

    def bucket(self, bucket: Any) -> Future[torch.Tensor]:
        """What DDP calls when the gradients of a bucket, a ``GradBucket``, are there."""
        self.launched += 1
        began, flat, self.torn = time.perf_counter(), bucket.buffer(), True
        future = self.cross(bucket.parameters(), flat)
        self.torn = False
        if not flat.is_cuda:  # there a future calls back when its work is queued, long before it is done
            self.meter.flying(future, began, last=bucket.is_last())
        self.complete = bucket.is_last()
        if self.complete and self.clock is not None:  # what is left of the backward pass is waiting
            self.clock.enter("communication")
        return future

    def landed(self) -> None:
        """The backward pass of an update is over."""
        self.launched, self.complete = 0, False
        self.meter.landed()

    def reset(self) -> None:
        """Forget what updates left behind: one of them failed, and the next makes it again. All processes do it at once."""
        self.launched, self.complete, self.torn = 0, False, False

    def state_dict(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What later updates depend on, by the names of ``parameters``; every process has its own."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor]) -> bool:
        """Take up what :meth:`state_dict` gave to all processes of an earlier run, however many; whether nothing was lost."""
        return not any(states)

    def cross(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> Future[torch.Tensor]:
        """The sum of ``flat`` as :meth:`add_up` gives it; where there are complex ones, whose parts would be lost, as it is."""
        return self.summed(flat) if any(p.is_complex() for p in parameters) else self.add_up(parameters, flat)

    def add_up(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> Future[torch.Tensor]:
        """The sum of ``flat``, the gradients of ``parameters`` as :func:`in_a_row`, over all; ``flat`` may be overwritten."""
        return self.summed(flat)

    def summed(self, values: torch.Tensor) -> Future[torch.Tensor]:
        """Begin to add up ``values`` in place."""
        self.meter.sent(2 * (self.size - 1) * values.nbytes / self.size)
        work = dist.all_reduce(values, async_op=True)
        return _first(work.get_future(), values)

    def collected(self, values: torch.Tensor) -> tuple[torch.Tensor, Future[torch.Tensor]]:
        """Begin to bring the ``values`` of all processes, (n,), to each: (processes, n)."""
        self.meter.sent((self.size - 1) * values.nbytes)
        found = values.new_empty(self.size * values.numel())
        work = _GATHER(found, values, async_op=True)
        return found.view(self.size, -1), work.get_future()


class Narrow(Exchange):
    """Gradients cross in two bytes per number: half of what float32 takes.

    Pays where the network is what the update waits for. Sums are divided among the processes first, so that float16 does not
    overflow where none of them does. torch's own bfloat16 hook refuses gloo, which can add up bfloat16 by now.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def add_up(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> Future[torch.Tensor]:
        """The sum of the rounded gradients."""
        narrow = flat.div(self.size).to(self.dtype)
        return self.summed(narrow).then(lambda done: flat.copy_(done.wait()).mul_(self.size))


class Errors:
    """What compression left out of each parameter's gradient so far, to be sent with a later one.

    Source: Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[int, ...], torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}

    def of(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> torch.Tensor:
        """A tensor like ``flat`` with what was left out of these parameters; DDP may group them anew once."""
        key = tuple(id(p) for p in parameters)
        if key not in self._flat:
            fresh = torch.zeros_like(flat)
            for parameter, part in zip(parameters, torch.split(fresh, [p.numel() for p in parameters]), strict=True):
                if id(parameter) in self._parts:
                    part.copy_(self._parts[id(parameter)])
                self._parts[id(parameter)] = part
            self._flat = {known: kept for known, kept in self._flat.items() if not set(known) & set(key)} | {key: fresh}
        return self._flat[key]

    def state_dict(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What was left out of each, in its shape."""
        known = {name: (parameter, self._parts.get(id(parameter))) for name, parameter in parameters.items()}
        return {name: shaped(part, parameter).cpu().clone() for name, (parameter, part) in known.items() if part is not None}

    def load_state_dict(self, states: Sequence[Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]) -> None:
        """Have what this process left out; where there were more or fewer of them, an equal part of what all left out."""
        rank, size = dist.get_rank(), dist.get_world_size()
        self._flat.clear()
        self._parts.clear()
        for name, parameter in parameters.items():
            left = [state[name] for state in states if name in state]
            if left:
                part = left[rank] if len(left) == size else torch.stack(left).sum(0) / size
                self._parts[id(parameter)] = in_a_row(part.to(parameter.device), parameter).clone()


class Meter:
    """What crossed, for how long, and how long the backward pass was over and still had to wait.

    Times are the host's, and tell of gloo; NCCL's transfers are seen by a profiler only.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.bytes = 0.0
        self.flight_s = self.waited_s = 0.0
        self._flights: list[tuple[float, float]] = []
        self._last = 0.0

    def sent(self, count: float) -> None:
        """So many bytes leave this process, as a ring sends them."""
        self.bytes += count

    def flying(self, future: Future[torch.Tensor], began: float, *, last: bool) -> None:
        """A bucket is on its way; what was computed to send it, since it ``began``, kept the backward pass waiting."""
        now = time.perf_counter()
        self.waited_s += now - began
        if last:
            self._last = now
        future.add_done_callback(lambda _: self._flights.append((began, time.perf_counter())))

    def landed(self) -> None:
        """The backward pass has all its gradients."""
        flights, self._flights = sorted(self._flights), []
        self.updates += 1
        reached = 0.0
        for began, ended in flights:
            self.flight_s += max(ended - max(began, reached), 0.0)
            reached = max(reached, ended)
        if self._last:
            self.waited_s += time.perf_counter() - self._last
        self._last = 0.0

    @property
    def hidden(self) -> float | None:
        """The share of the time in flight that was hidden behind the backward pass; ``None`` where nothing was timed."""
        return max(1 - self.waited_s / self.flight_s, 0.0) if self.flight_s else None


def in_a_row(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The numbers of ``value``, (n,), in the order in which ``like``, of the same shape, lies in memory, as DDP's buckets."""
    return value.permute(_order(like)).reshape(-1)


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`in_a_row`; a view."""
    order = _order(like)
    return flat.view([like.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(like.dim())])


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of ``tensor``, the one with the longest stride first; as they are where it has gaps in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else list(range(tensor.dim()))


def _first(future: Future[list[torch.Tensor]], like: torch.Tensor) -> Future[torch.Tensor]:
    """What the sum came to, of the type that ``like`` has: complex numbers cross as pairs of real ones."""
    if like.is_complex():
        return future.then(lambda done: torch.view_as_complex(done.value()[0]))
    return future.then(lambda done: done.value()[0])
