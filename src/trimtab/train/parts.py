"""The parts of the Trainer for a loop that the user writes: precision, accumulation, processes and checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trimtab._internal.validation import checked_call
from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.hardware.system import keep_freed_memory
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.data.micro_batches import MicroBatcher, check_loader
from trimtab.train.distributed.launch import join
from trimtab.train.engine import setup
from trimtab.train.engine.gradients import discard
from trimtab.train.engine.step import MicroBatchLosses, Step, Update
from trimtab.train.loss.adapter import Batch, LossAdapter, Weight, examples
from trimtab.train.optim import optimizer_state
from trimtab.train.optim.kernels import use_kernels
from trimtab.train.optim.optimizer_dict import needs_closure
from trimtab.train.runtime.random_generators import generators_of, set_states, states_of
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import allocate, random_state, set_random_state
from trimtab.train.runtime.world import World

_DONE = (
    "device",
    "memory_format",
    "precision.autocast",
    "data.micro_batch",
    "data.accumulate",
    "data.exact_batchnorm",
    "data.joined",
    "memory.keep_freed",
    "memory.cuda_allocator",
    "optimizer.implementation",
    "optimizer.clip_norm",
    "optimizer.clip_value",
    "optimizer.nonfinite",
    "distributed.communication",
    "distributed.bucket_mb",
    "distributed.sharding",
)
"""The settings that :class:`Parts` follows. Those of threads, TF32 and attention hold until a run ends, which it cannot see."""


class Parts(Step):
    """Precision, accumulation, clipping, processes and checkpoints for a loop that stays the user's.

    Example::

        import torch
        from trimtab import DataSettings, Settings
        from trimtab.train import Parts
        model = torch.nn.Linear(8, 1)
        parts = Parts(model, torch.optim.AdamW, settings=Settings(data=DataSettings(accumulate=2)))
        loader = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(4)]
        for epoch in range(2):
            for inputs, targets in parts.batches(loader, epoch):
                with parts.precision():
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                parts.backward(loss)
                parts.step()

    Args:
        model: trained in place; moved to the device of ``settings``.
        optimizer: an optimizer of its parameters, or a function that makes it.
        settings: device, precision, accumulation, clipping and checks; what needs a run is refused, such as ``"auto"``.
        checkpoint: folder for :meth:`save` and :meth:`load`.
        world: the processes, from :func:`~trimtab.train.distributed.launch.join`, which is called by default.

    Raises:
        UsageError: an argument makes no sense, or asks for what only the Trainer does.
    """

    @checked_call("Parts")
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        settings: Settings = Settings(),
        checkpoint: str | os.PathLike[str] | None = None,
        world: World | None = None,
    ) -> None:
        setup.check_model(model)
        world = world or join(settings)
        self.device = world.device(settings.device)
        default = Settings()
        asked = [name for name in settings.names() if name not in _DONE and settings.value(name) != default.value(name)]
        asked += [name for name in _DONE if settings.value(name) in ("auto", "stop")]
        asked += ["distributed.sharding"] if world.shared else []
        if asked:
            raise UsageError(f"Settings have {', '.join(asked)}, which only Trainer does. Leave that out, or use Trainer.")
        setup.check_place(model, self.device)
        allocate(settings)
        if settings.memory.keep_freed:
            keep_freed_memory()
        world.place(model, settings)
        made = setup.optimizer_for(model, optimizer, processes=world.processes)
        if needs_closure(made):
            raise UsageError(f"{type(made).__name__} needs a closure. Call its step(closure) yourself, or use Trainer.")
        if settings.optimizer.implementation is not None and settings.optimizer.implementation != "auto":
            use_kernels(made, settings.optimizer.implementation)
        super().__init__(
            world.wrap(model, settings, fresh=True), LossAdapter(_no_loss), made, settings, world, HostClock(), norm_every=1
        )
        self.update = 0
        """Updates made."""
        self.epoch = 0
        """The epoch of the last :meth:`batches`; after :meth:`load` the epoch to continue."""
        self._checkpoints = None if checkpoint is None else Checkpoints(checkpoint)
        self._move = setup.apply_memory_format(model, settings, self.device)
        self._skip = 0
        """Batches of :attr:`epoch` that were used before :meth:`load`."""
        self._epoch_random: dict[str, Any] = {}
        """Random states at the start of the epoch."""
        self._resume_random: dict[str, Any] | None = None
        """Random states to continue with after :meth:`load`."""
        self._feed: MicroBatcher | None = None
        self._count, self._place, self._batch = 1, 0, None
        self._group: list[Batch] | None = None
        """The batches of the last update, which a process without further batches repeats while others have some."""
        self._losses: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._update_block = contextlib.ExitStack()

    @property
    def last(self) -> bool:
        """Whether this is the last batch of its update, in which :meth:`step` steps."""
        return self._place == self._count - 1

    def batches(self, loader: Iterable[Batch], epoch: int = 0) -> Iterator[Batch]:
        """This process's batches of an epoch of ``loader``, on the device.

        After :meth:`load`, the epoch that was interrupted goes on after its last update.
        """
        check_loader(loader, "loader")
        feed = self._feed = setup.feed_for(self.world.share(loader, "loader"), self.settings, self.clock, self._move)
        skip = self._skip if epoch == self.epoch else 0
        self.epoch, self._skip, now, self._resume_random = epoch, 0, self._resume_random, None
        if now is not None:
            self._set_random(self._epoch_random if skip else now)
        self._epoch_random = self._random()
        feed.begin(epoch, skip)
        feed.taken = skip
        if now is not None and skip:
            self._set_random(now)
        for group in self.world.rounds(feed.groups(), feed.length(), lambda: self._group):
            discard(self._parameters)
            self._group, self._count = group, len(group)
            for self._place, batch in enumerate(group):
                self._batch = batch
                yield batch
        self._skip, self.epoch, self._epoch_random = 0, epoch + 1, {}
        self._feed = None

    def backward(self, loss: torch.Tensor, *, weight: float | None = None) -> None:
        """Add the gradients of ``loss``, the mean of the batch, to those of the update.

        Args:
            loss: a scalar.
            weight: what the loss is a mean over, by default the number of examples of the batch.
        """
        if self._place == 0 and not self._losses:
            if self._typical_weight is None and self.world.size > 1:
                self._typical_weight = self.world.average(examples(self._batch))
            self._update_block.enter_context(self.world.together(update=True))
        counts: Weight = examples(self._batch) if weight is None else weight
        if not self.world.counts:  # it only keeps step with processes that have more batches
            loss, counts = loss.nan_to_num() * 0, counts * 0
        self._losses.append(loss.detach())
        self._weights.append(counts)
        with self.world.exchanging(now=self.last):
            self.scaler.scale(self._weighted(loss, counts, self._count)).backward()  # type: ignore[no-untyped-call]

    def step(self) -> Update | None:
        """Step the optimizer with the gradient of the mean over all batches of the update, on all processes.

        Returns:
            What the update did; ``None`` before the last batch of an accumulated update, where nothing happens.

        Raises:
            UsageError: :meth:`backward` was not called for each batch.
            NonFiniteError: loss or gradient is not finite, and the settings make that an error.
        """
        if not self.last:
            return None
        if len(self._losses) != self._count:
            raise UsageError(
                f"step() follows {self._count} calls of backward(), one for each batch, and saw {len(self._losses)}."
            )
        self._update_block.close()
        found = MicroBatchLosses(self._losses, self._weights, None)
        self._losses, self._weights = [], []
        update = self._mean_gradients(found, self._parameters)
        if update.applied:
            self.scaler.step(self.optimizer)
        if self._scales_loss:
            self._adapt_scale(update)
        discard(self._parameters)
        self.update += 1
        return update

    def save(self, **state: Any) -> None:
        """Write a checkpoint: model, optimizer, random generators, the position, and ``state``, plain values or tensors.

        Raises:
            UsageError: there is no folder, or something cannot be kept in a checkpoint.
            StorageError: it cannot be written.
        """
        self.check()
        world, folder = self.world, self._folder()
        kept = {
            "model": world.unsharded(self.model.state_dict()),
            "optimizer": world.unsharded(self.optimizer.state_dict()),
            "step": self.state_dict(),
            "position": {"update": self.update, "epoch": self.epoch, "batch": 0 if self._feed is None else self._feed.taken},
            "begun": world.gathered(self._epoch_random),
            "random": world.gathered(self._random()),
            "state": state,
        }
        world.on_rank_0(lambda: folder.save(self.update, kept))

    def load(self) -> Mapping[str, Any] | None:
        """Restore the newest checkpoint; returns the ``state`` that :meth:`save` was given, ``None`` without a checkpoint.

        Raises:
            UsageError: there is no folder, or another number of processes wrote the checkpoint.
            StorageError: no checkpoint is whole.
        """
        folder, world = self._folder(), self.world
        if folder.update() is None:
            return None
        found = folder.load()
        if len(found["random"]) != world.processes:
            raise UsageError(
                f"{len(found['random'])} processes wrote the checkpoint, and here are {world.processes}. Start as many."
            )
        before: dict[torch.Tensor, torch.dtype] = {
            parameter: found["model"][name].dtype for name, parameter in self.model.named_parameters()
        }
        self.model.load_state_dict(found["model"])
        optimizer_state.load(self.optimizer, found["optimizer"], world, before)
        self.load_state_dict(found["step"])
        position = found["position"]
        self.update, self.epoch, self._skip = position["update"], position["epoch"], position["batch"]
        self._epoch_random, self._resume_random = found["begun"][world.index], found["random"][world.index]
        state: Mapping[str, Any] = found["state"]
        return state

    def _random(self) -> dict[str, Any]:
        loader = None if self._feed is None else self._feed.batches
        return {**random_state(), "loader": states_of(generators_of(loader))}

    def _set_random(self, state: Mapping[str, Any]) -> None:
        set_random_state(state)
        if self._feed is not None:
            set_states(generators_of(self._feed.batches), state["loader"])

    def _folder(self) -> Checkpoints:
        if self._checkpoints is None:
            raise UsageError("Parts has no folder for checkpoints. Give Parts(..., checkpoint='folder').")
        return self._checkpoints


def _no_loss(outputs: Any, targets: Any) -> Any:
    """A placeholder for the loss, which the user's loop computes."""
    raise AssertionError("the loop of the user computes the loss")
