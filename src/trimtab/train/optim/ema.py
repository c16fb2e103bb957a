"""Exponential moving average of weights, and the weights that a model has after a run."""

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
from trimtab.train.runtime.train_modes import equal_nan


class Ema:
    """Exponential moving average of the parameters, which often generalises better than the last parameters.

    After ``n`` updates the decay is ``min(decay, (1 + n) / (10 + n))``, so that a short run soon forgets the initial weights.
    Values with fewer than 32 bits are averaged in float32, because one update's share may round to zero in 16 bits.

    Source: Polyak & Juditsky 1992; Tarvainen & Valpola 2017, https://arxiv.org/abs/1703.01780; for the decay of the first
    updates, TensorFlow's ExponentialMovingAverage.

    Args:
        model: whose values are averaged.
        decay: of all values; or by the name of a part of the model, whose values alone are averaged.

    Raises:
        UsageError: a decay is not between 0 and 1, or the model has no such part.
    """

    def __init__(self, model: nn.Module, decay: float | Mapping[str, float]) -> None:
        named = decay if isinstance(decay, Mapping) else {"": decay}
        parts = [name for name, _ in model.named_modules()]
        for name, value in named.items():
            if name not in parts:
                raise UsageError(f"ema has {name!r}, and {type(model).__name__} has no part of that name.")
            if not isinstance(value, Real) or not 0 < value < 1:
                raise UsageError(f"ema is {decay!r}; the decay of the average lies between 0 and 1, such as 0.999.")
        self.decay = decay
        self._parts = {f"{name}." if name else "": float(value) for name, value in named.items()}
        self.begin(model)

    def begin(self, model: nn.Module) -> None:
        """Begin a new average with the present parameters."""
        self.updates = 0
        """The number of updates in the average."""
        self.shadow = {name: _averaging_copy(value) for name, value in self._values(model).items()}
        self._exact: dict[str, torch.Tensor] = {}
        """The unrounded average of values that the model holds in fewer bits, while the model has the average."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the present parameters and normalisation statistics to the average; copy other buffers."""
        values = self.follow(model)
        kinds: dict[Any, list[str]] = {}  # tensors of different meshes cannot be in one foreach operation
        for name, value in values.items():
            if value.layout != torch.strided:
                self.shadow[name] = _averaging_copy(value)
            elif _is_averaged(model, name, value):
                kind = getattr(value, "device_mesh", None), value.is_complex(), self._decay_of(name)
                kinds.setdefault(kind, []).append(name)
            else:
                self.shadow[name].copy_(value)
        early = (1 + self.updates) / (10 + self.updates)
        self.updates += 1
        for (*_, decay), names in kinds.items():
            share = 1 - min(decay, early)
            kept = [self.shadow[name] for name in names]
            torch._foreach_lerp_(kept, [values[name].to(shadow.dtype) for name, shadow in zip(names, kept, strict=True)], share)

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Swap the values of the model and the average; a second call restores both."""
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
        """Restore the average ``kept`` of ``updates``, with ``model`` as it was after the last update.

        Values that a forward pass creates may be missing in ``kept`` or have another shape there: their average begins anew.

        Args:
            part: returns this process's shard of its first argument, sharded like its second.
        """
        self.updates, self._exact = updates, {}
        self.follow(model)  # lazy parameters may have their shapes only now
        for name, value in self.shadow.items():
            if name in kept and kept[name].shape == value.shape:
                value.copy_(part(kept[name], value))

    @contextlib.contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """A block in which ``model`` has the average instead of its own values."""
        self.exchange(model)
        try:
            yield
        finally:
            self.exchange(model)

    def buffers(self, model: nn.Module) -> list[torch.Tensor]:
        """The average's tensors for the buffers of ``model``."""
        followed = self.follow(model)
        return [self.shadow[name] for name, _ in model.named_buffers() if name in followed]

    def follow(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The values of ``model``; the average begins anew for values that are new or have another shape or dtype."""
        values = self._values(model)
        self.shadow = {name: self._kept(name, value) for name, value in values.items()}
        return values

    def _kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        kept = self.shadow.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (value.shape, _averaging_dtype(value)):
            return kept
        self._exact.pop(name, None)
        return _averaging_copy(value)

    def _values(self, model: nn.Module) -> dict[str, torch.Tensor]:
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        lazy = {name for name, value in values.items() if is_lazy(value)}  # those have no values yet
        return {name: value for name, value in values.items() if name not in lazy and self._decay_of(name)}

    def _decay_of(self, name: str) -> float:
        """The decay of the value ``name``; 0 if it is not averaged."""
        return next((decay for part, decay in self._parts.items() if name.startswith(part)), 0.0)


class EvalWeights:
    """Give a model its evaluation weights after a run: an average, or the weights of the best validation.

    The average is ``ema``, or an average of the optimizer with ``modes``. The next run on the same data begins with the weights
    of the last update, which the optimizer state belongs to.

    Raises:
        UsageError: there are two averages.
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
        """The weights of the last update, while the model has others."""
        self._averaged: dict[str, torch.Tensor] = {}
        """A copy of the average in the model, to detect changes by the user."""

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the model has the average, if there is one."""
        return self.modes.evaluating() if self.ema is None else self.ema.shown(self.model)

    def apply(self, best: Mapping[str, Any] | None) -> None:
        """Write the evaluation weights into the model: ``best`` if given, else the average."""
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

    def restore_last(self, *, update: int, same: bool) -> None:
        """Restore the weights of the last of ``update`` updates, before the next run.

        Weights that the user has changed since :meth:`apply` stay. So do the best weights if the next run has other data, that
        is, if not ``same``.
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
        if stays or not update:  # the user may have loaded parameters after the Trainer was made
            self.ema.begin(self.model)
        elif average:
            self.ema.exchange(self.model)

    def forget(self) -> None:
        """Forget the evaluation weights: a checkpoint was loaded into the model."""
        self._average, self._best, self._last, self._averaged = False, None, {}, {}


def _is_averaged(model: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Whether ``value`` is a floating-point or complex parameter or normalisation statistic.

    Other buffers are not averaged: a mask of -inf has no mean.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return False
    return isinstance(value, nn.Parameter) or isinstance(_owner(model, name), nn.modules.batchnorm._NormBase)


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The module of ``model`` that holds the tensor ``name``."""
    return model.get_submodule(name.rpartition(".")[0])


def _averaging_dtype(value: torch.Tensor) -> torch.dtype:
    """The dtype in which ``value`` is averaged."""
    return torch.float32 if value.is_floating_point() and value.itemsize < 4 else value.dtype


def _averaging_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().to(_averaging_dtype(value))


def _equal(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two state dicts have equal tensors; extra state of other types is not compared."""
    pairs = [(now.get(name), value) for name, value in before.items() if isinstance(value, torch.Tensor)]
    return all(isinstance(one, torch.Tensor) and _tensors_equal(one, other) for one, other in pairs)


def _tensors_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (getattr(each, "to_local", lambda each=each: each)() for each in (one, other))  # of each process
    other = other.to(one.device)  # best weights from a checkpoint lie on the CPU
    return (one.shape, one.dtype) == (other.shape, other.dtype) and equal_nan(one, other)
