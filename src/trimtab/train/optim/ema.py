"""When to stop before the end, and which parameters to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trimtab.errors import UsageError
from trimtab.train.optim.optimizer_state import OptimizerModes
from trimtab.train.runtime import state_dict_versions


class Ema:
    """A running average of the parameters, which often generalises better than the last of them.

    It forgets faster in the beginning, so that a short run is no average of where it began: after ``n`` updates the decay is
    ``(1 + n) / (10 + n)``, until that exceeds ``decay``. What has fewer than 32 bits is averaged in float32, where the small
    share of one update does not round to nothing.

    Source: Polyak & Juditsky 1992; Tarvainen & Valpola 2017, https://arxiv.org/abs/1703.01780; on the decay of the beginning,
    TensorFlow's ExponentialMovingAverage.

    Raises:
        UsageError: the decay is none.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not isinstance(decay, Real) or not 0 < decay < 1:
            raise UsageError(f"ema is {decay!r}; the decay of the average lies between 0 and 1, such as 0.999.")
        self.decay: float = decay
        self.begin(model)

    def begin(self, model: nn.Module) -> None:
        """Average from here on: the parameters as they are now are the first."""
        self.updates = 0
        """That are in the average."""
        self.shadow = {name: _taken(value) for name, value in self._values(model).items()}
        self._exact: dict[str, torch.Tensor] = {}
        """The average itself of what the model has rounded, while the model shows it."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take parameters and statistics of normalisation as they are now into the average; other buffers are copied."""
        values = self.follow(model)
        kinds: dict[Any, list[str]] = {}  # what is sharded over other processes, or not at all, cannot be in one operation
        for name, value in values.items():
            if value.layout != torch.strided:
                self.shadow[name] = _taken(value)
            elif _is_averaged(model, name, value):
                kinds.setdefault((getattr(value, "device_mesh", None), value.is_complex()), []).append(name)
            else:
                self.shadow[name].copy_(value)
        share = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for names in kinds.values():
            kept = [self.shadow[name] for name in names]
            torch._foreach_lerp_(kept, [values[name].to(shadow.dtype) for name, shadow in zip(names, kept, strict=True)], share)

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Put the average into the model and the model's own values into the average; twice is as it was."""
        for name, value in self.follow(model).items():
            kept, shadow = value.detach().clone(), self.shadow[name]
            value.copy_(shadow)
            if name in self._exact:
                self.shadow[name] = self._exact.pop(name)
            elif shadow.dtype != value.dtype:
                self._exact[name], self.shadow[name] = shadow, kept.to(shadow.dtype)
            else:
                shadow.copy_(kept)

    @torch.no_grad()
    def load(
        self,
        model: nn.Module,
        kept: Mapping[str, torch.Tensor],
        updates: int,
        part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Be the average of ``updates`` whose values are ``kept``, with ``model`` as the last of these left it.

        What only a forward pass makes may have another shape in ``kept``, or not be there: it begins anew. ``part`` gives
        this process's part of a whole value, as the other tensor is one.
        """
        self.updates, self._exact = updates, {}
        self.follow(model)  # a lazy one has its shapes only now
        for name, value in self.shadow.items():
            if name in kept and kept[name].shape == value.shape:
                value.copy_(part(kept[name], value))

    @contextlib.contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """A block in which ``model`` has the average."""
        self.exchange(model)
        try:
            yield
        finally:
            self.exchange(model)

    def buffers(self, model: nn.Module) -> list[torch.Tensor]:
        """What the average has for the buffers of ``model``."""
        followed = self.follow(model)
        return [self.shadow[name] for name, _ in model.named_buffers() if name in followed]

    def follow(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The values of ``model``; the average begins anew for what its forward pass has made, enlarged or taken away since."""
        values = self._values(model)
        self.shadow = {name: self._kept(name, value) for name, value in values.items()}
        return values

    def _kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        kept = self.shadow.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (value.shape, _wide(value)):
            return kept
        self._exact.pop(name, None)
        return _taken(value)

    @staticmethod
    def _values(model: nn.Module) -> dict[str, torch.Tensor]:
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: value for name, value in values.items() if not is_lazy(value)}  # until a forward pass has made it


class EvalWeights:
    """What a run leaves in its model in place of what its last update left: an average, or the best parameters.

    The average is ``ema``, or the one that the optimizer keeps, as its ``modes`` tell. The run that goes on with the same data
    begins with what its last update left; its optimizer goes with that.
    """

    def __init__(self, model: nn.Module, ema: Ema | None, modes: OptimizerModes) -> None:
        if ema is not None and modes:
            raise UsageError(
                f"ema is {ema.decay}, and the optimizer keeps an average of its own, for which it has train() and eval(). "
                "Leave out ema=..., or take another optimizer."
            )
        self.model, self.ema, self.modes = model, ema, modes
        self._average = False
        self._best: Mapping[str, Any] | None = None
        self._last: dict[str, Any] = {}
        """What the model had before the best parameters were put into it."""
        self._averaged: dict[str, torch.Tensor] = {}
        """The parameters as the average was shown, to see whether somebody changes them."""

    def during(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the model has the average."""
        return self.modes.used() if self.ema is None else self.ema.shown(self.model)

    def show(self, best: Mapping[str, Any] | None) -> None:
        """Put into the model what its owner is to have."""
        if self.ema is not None:
            self.ema.exchange(self.model)
            self._average = True
        if best is not None or self.modes:
            self._last = state_dict_versions.copied(self.model)
            self.modes.eval()
            self._best = state_dict_versions.copied(self.model) if best is None else best
            self.model.load_state_dict(self._best)
        elif self._average:
            self._averaged = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def take_back(self, *, update: int, same: bool) -> None:
        """Put back what the last of ``update`` updates left; other data begins with the best parameters, if they were shown.

        Parameters that somebody has changed since the run are left to him.
        """
        best, last, average, averaged = self._best, self._last, self._average, self._averaged
        self.forget()
        if best is None:
            stays = not _equal(dict(self.model.named_parameters()), averaged)
        else:
            stays = not (same and _equal(self.model.state_dict(), best))
        self.modes.train()
        if best is not None and not stays:
            self.model.load_state_dict(last)
        if self.ema is None:
            return
        if stays or not update:  # parameters may be loaded after the Trainer is made
            self.ema.begin(self.model)
        elif average:
            self.ema.exchange(self.model)

    def forget(self) -> None:
        """The model has what an update left: a checkpoint was put into it."""
        self._average, self._best, self._last, self._averaged = False, None, {}, {}


def _is_averaged(model: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Whether ``value`` is a parameter or a statistic of normalisation, which change a little with each update.

    Other buffers are what the model goes by now, such as a mask that holds -inf, of which there is no mean.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return False
    return isinstance(value, nn.Parameter) or isinstance(_owner(model, name), nn.modules.batchnorm._NormBase)


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The module that holds what ``model`` has under ``name``."""
    return model.get_submodule(name.rpartition(".")[0])


def _wide(value: torch.Tensor) -> torch.dtype:
    """What ``value`` is averaged in."""
    return torch.float32 if value.is_floating_point() and value.itemsize < 4 else value.dtype


def _taken(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().to(_wide(value))


def _equal(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two states have the same tensors; what a module keeps as its extra state is not compared."""
    pairs = [(now.get(name), value) for name, value in before.items() if isinstance(value, torch.Tensor)]
    return all(isinstance(one, torch.Tensor) and _alike(one, other) for one, other in pairs)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (getattr(each, "to_local", lambda each=each: each)() for each in (one, other))  # each process its own shard
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    other = other.to(one.device)  # the best parameters of a run that was gone on with were read into the host's memory
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
