"""Every process holds the whole model: torch's DDP."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.candidate import Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.clock import Clock
from trimtab.train.distributed.exchange import Exchange, Narrow, in_a_row, shaped
from trimtab.train.distributed.group import AgainError, Group, hand_out
from trimtab.train.distributed.powersgd import PowerSgd
from trimtab.train.distributed.topk import TopK
from trimtab.train.memory_errors import final

T = TypeVar("T")

COMMUNICATION: dict[str | None, Callable[[], Exchange]] = {
    None: Exchange,
    "float16": lambda: Narrow(torch.float16),
    "bfloat16": lambda: Narrow(torch.bfloat16),
    "powersgd": PowerSgd,
    "topk": TopK,
}
"""What ``Settings.communication`` means."""

_NO_ROOM = (
    "The gradients fit into memory, but what their exchange takes beside them does not ({words}). Leave "
    "Settings(communication=...) out, share the model out with sharding='shard', or use a smaller one."
)
_NO_GRADIENT = (
    "Some parameters got no gradient in this update, though all got one in the first. With several processes let them take "
    "part in every update, for example by adding 0 * parameter.sum() to the loss."
)
_LATE: dict[str | None, str] = {"topk": "3.6 times", "powersgd": "1.19 times"}
"""What sends later what it leaves out now, and what AdamW makes of the loss then (``benchmarks/communication.py``)."""
_SUMS = (torch.optim.SGD, torch.optim.ASGD)
"""Optimizers whose steps are sums of gradients, to which it makes little difference which of them a part came with."""
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS_STAY: dict[str, Any] = {
    (
        "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
    ): False  # the first from torch 2.13 on
}


class Replicas(Group):
    """Processes with a copy of the model each, whose gradients are added up while the backward pass goes on.

    The first update runs without DDP: it shows whether some parameters get no gradient, which DDP must know, and whether a
    batch fits at all. An update that fails somewhere is tried again in that way, too. Then the gradients cross after everybody
    has said that he has his; a process that fails under DDP first sends zeros for what the others still wait for.

    What the first update shows may not hold for a later one, as where layers are left out at random. The first in which that
    shows is tried again too, and from then on DDP looks for parameters without a gradient in every update.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.exchange = COMMUNICATION[settings.communication]()
        self.engine: DistributedDataParallel | None = None
        self._called: nn.Module = nn.Identity()
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        """Which of them :attr:`engine` knows to be trained."""
        self._delays, self._optimizer = False, ""
        self._inside = self._rehearsing = False
        """Whether an update is under way, and whether it is only tried."""
        self._idle: bool | None = None
        """Whether some parameters get no gradient, at least at times; ``None`` until an update has shown it."""

    def wrap(self, model: nn.Module, settings: Settings, *, fresh: bool) -> nn.Module:
        """The model as DDP has it; all begin with the parameters of the first, and draw random numbers of their own."""
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                hand_out(value)
        if fresh:
            torch.manual_seed(torch.initial_seed() + self.rank)
        self.engine, self._idle, self._called, self._parameters = None, None, model, list(model.parameters())
        return _Replica(self, model)

    def timed(self, clock: Clock) -> None:
        """Tell ``clock`` when the last bucket is on its way: what is left of the backward pass is waiting."""
        self.exchange.clock = clock

    @contextlib.contextmanager
    def together(self, *, update: bool = False) -> Iterator[None]:
        """A block that succeeds in all processes or in none; after that of an update, all have the sum of the gradients."""
        self._rebuild(update)
        engine = self.engine
        with super().together(update=update):
            self._inside = update
            yield
            if update and engine is not None and not self.exchange.complete:
                if self._idle or self._rehearsing:  # DDP has looked for them, or nobody could make the update again
                    raise WorkloadError(_NO_GRADIENT)
                self._idle = True
                raise AgainError(_NO_GRADIENT)
            if update:
                self.exchange.landed()
            self._inside = False
        if update and engine is None:
            self._add_up()
            with super().together(update=update):
                self.engine = self._engaged()

    @contextlib.contextmanager
    def exchanging(self, *, now: bool) -> Iterator[None]:
        """A block whose backward pass exchanges gradients only if ``now``."""
        with contextlib.nullcontext() if now or self.engine is None else self.engine.no_sync():
            yield

    def asked(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives; it runs within DDP as a whole, whichever methods of the model it calls, and however often."""
        found: T = ask() if self.engine is None else self.engine(ask)
        return found

    def release(self) -> None:
        """Send zeros for the buckets that the others wait for.

        Raises:
            RuntimeError: there is no memory for them, or one was sent in part.
        """
        self._rebuild(not self._inside)  # else the others do that first
        if (engine := self.engine) is not None:
            if self.exchange.torn:
                raise RuntimeError("A bucket was sent in part.")
            with _Thin():  # type: ignore[no-untyped-call]
                buckets = engine.reducer._get_zeros_like_grad_buckets()
            missing = buckets[self.exchange.launched :]
            for bucket in missing:  # one after the other: there may not be memory for zeros in all of them
                thin = bucket.buffer()
                bucket.set_buffer(thin.contiguous())
                engine.reducer._run_comm_hook(bucket).wait()
                bucket.set_buffer(thin)
            if missing and engine.find_unused_parameters:
                engine._match_unused_params_allreduce()  # type: ignore[no-untyped-call]
        self.renew()

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember whether the updates are such as take ill what comes late."""
        self._delays = not isinstance(optimizer, _SUMS) and self.settings.communication in _LATE
        self._optimizer = type(optimizer).__name__

    def renew(self) -> None:
        """Take DDP away, whose hooks stand in the middle of an update; it is made anew after the next."""
        self._disengage()
        self._inside = False
        self.exchange.reset()

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[None]:
        """A block whose updates leave nothing behind that is sent later; the next one is a first one again, without DDP."""
        parameters = dict(self._called.named_parameters())
        state = self.exchange.state_dict(parameters)
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False
            self._disengage()
            self.exchange.load_state_dict([state] * self.size, parameters)

    def unsent(self) -> list[dict[str, Any]] | None:
        """What compression holds back in each process, for the one that leads."""
        found: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(self.exchange.state_dict(dict(self._called.named_parameters())), found, group=self.everyone)
        return found

    def take_unsent(self, states: list[dict[str, Any]] | None) -> bool:
        """Have the exchange go on with what an earlier run held back; whether nothing of it is lost."""
        return not states or self.exchange.load_state_dict(states, dict(self._called.named_parameters()))

    def notes(self) -> list[str]:
        """What crossed, and how much of it was waited for."""
        meter = self.exchange.meter
        if not meter.updates:
            return []
        parameters = [p for p in self._called.parameters() if p.requires_grad]
        full = 2 * (self.size - 1) / self.size * sum(p.numel() * 4 for p in parameters)
        each = meter.bytes / meter.updates
        told = f"Each process sent {each / 1e6:.3g} MB of gradients per update, {each / full:.2f} of what float32 takes"
        if meter.hidden is None:
            return [*self._doubts(), f"{told}."]
        ms = 1e3 * meter.flight_s / meter.updates
        hidden = f"that took {ms:.3g} ms, of which {meter.hidden:.0%} passed behind the backward pass"
        return [*self._doubts(), f"{told}; {hidden}."]

    def _doubts(self) -> list[str]:
        """A sentence where the optimizer makes much of what was left out and comes later."""
        if not self._delays:
            return []
        kind = self.settings.communication
        return [
            f"Caution: communication={kind!r} with {self._optimizer}. What is left out of a gradient comes with a later one, "
            f"and optimizers that adapt the size of their steps make too much of that: with AdamW {_LATE[str(kind)]} the loss "
            "was measured. Compare the loss with that of communication=None, or take SGD, 'bfloat16' or 'float16'."
        ]

    def _add_up(self) -> None:
        """Exchange the gradients that an update without DDP has left, in one bucket per dtype."""
        parameters = [p for p in self._called.parameters() if p.requires_grad]
        self._idle = self.any(bool(self._idle) or any(p.grad is None for p in parameters))
        if self._idle:
            used = torch.tensor([p.grad is not None for p in parameters])
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.everyone)
            parameters = [p for p, some in zip(parameters, used.tolist(), strict=True) if some]
        buckets = [[p for p in parameters if p.dtype is dtype] for dtype in sorted({p.dtype for p in parameters}, key=str)]
        with super().together():  # a copy of all gradients may be too much for memory, which all must know before one sends
            packed = [self._packed(bucket) for bucket in buckets]
        with final(_NO_ROOM):
            for bucket, (grads, flat) in zip(buckets, packed, strict=True):
                parts = torch.split(self.exchange.cross(bucket, flat).wait(), [p.numel() for p in bucket])
                for parameter, grad, part in zip(bucket, grads, parts, strict=True):
                    parameter.grad = grad.copy_(shaped(part, parameter))

    def _rebuild(self, due: bool) -> None:
        """Have DDP order its buckets as gradients come, once, where that is ``due``: the processes talk about it.

        It is done before anything of an update can fail. Where other parameters are trained than before, as where layers thaw,
        DDP, which looks for them only as it is made, is made anew.
        """
        if due and self.engine is not None:
            if self._trained == [p.requires_grad for p in self._parameters]:
                self.engine.reducer._rebuild_buckets()
            else:
                self._disengage()

    def _disengage(self) -> None:
        if self.engine is not None:
            del self.engine.reducer, self.engine.logger  # both hold torch's reducer, which removes its hooks when it goes
            self.engine = None

    def _packed(self, parameters: list[nn.Parameter]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The gradients, zeros where there are none, or none that count, and all of them in a row."""
        grads = [p.grad if p.grad is not None and self.counts else torch.zeros_like(p) for p in parameters]
        sparse = [name for name, p in self._called.named_parameters() if p.grad is not None and p.grad.is_sparse]
        if sparse:
            raise UsageError(
                f"The gradient of {sparse[0]} is sparse, and several processes exchange dense ones only. Make the embedding "
                "with sparse=False, or train in one process."
            )
        return grads, torch.cat([in_a_row(grad, parameter) for grad, parameter in zip(grads, parameters, strict=True)])

    def _engaged(self) -> DistributedDataParallel:
        """DDP, with the exchange in its hands."""
        on_gpu = next(self._called.parameters()).device.type == "cuda"
        engine = DistributedDataParallel(
            _Asked(self._called),
            device_ids=[next(self._called.parameters()).device] if on_gpu else None,
            **_BUFFERS_STAY,  # settle() gives them their mean where they are read
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(self._idle),
            bucket_cap_mb=self.settings.bucket_mb,
        )
        engine.register_comm_hook(None, lambda _, bucket: self._crossing(bucket))
        self._trained = [p.requires_grad for p in self._parameters]
        return engine

    def _crossing(self, bucket: Any) -> Future[torch.Tensor]:
        """Exchange the gradients of a bucket; what only keeps step has none, not even where they are no numbers."""
        if not self.counts:
            bucket.buffer().zero_()
        return self.exchange.bucket(bucket)


class _Thin(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which zeros like another tensor are one zero, seen in all places: DDP would make those of all buckets."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """One zero in place of many."""
        if func is torch.ops.aten.zeros_like.default:
            return args[0].new_zeros(()).expand(args[0].shape)
        return func(*args, **(kwargs or {}))


class _Asked(nn.Module):
    """What DDP wraps: it has the parameters of ``model``, and its forward pass is whatever is asked for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives."""
        return ask()


class _Replica(nn.Module):
    """The model, which answers whatever is asked of it."""

    def __init__(self, world: Replicas, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._world = [world]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        if self._world[0].engine is None:
            return self.module(*args, **kwargs)
        # torch.compile makes this branch anew, within DDP: in parts, whose gradients cross while the others are computed.
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the model has under ``name``, for losses that call its methods."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
