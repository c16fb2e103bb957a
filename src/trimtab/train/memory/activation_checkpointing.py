"""Activation checkpointing: the backward pass runs the forward pass of a module again instead of keeping its activations.

Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; torch.utils.checkpoint, non-reentrant.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab._internal.text import of_type
from trimtab.errors import WorkloadError
from trimtab.tensors.structure import tensors_of

_OBJECT = (
    "The forward pass of {} cannot be computed again: it was given {}, which may change until then. Leave activation_mb out, "
    "or hand on tensors, numbers, strings and tuples of them only."
)
_WRITTEN = (
    "The forward pass of {} cannot be computed again: a tensor that it was given in a tuple has changed in place since. Leave "
    "activation_mb out."
)
_CONSTANTS = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
Place = tuple[nn.Module, str]
"""A buffer, or a parameter that a forward pass changes: the module that has it and its name there."""


class Recomputed:
    """Recompute ``modules`` from now on, until :meth:`undo`.

    The second run has the autocast mode, the random generators and the buffers of the first. Its changes of buffers are
    dropped, so that the running statistics of BatchNorm move once per batch. Modules keep their class, their names and their
    hooks, which run outside; only ``forward`` is replaced.

    Args:
        modules: none may contain another.
        changing: buffers and parameters that a forward pass may change. Those of BatchNorm are known without.

    Raises:
        WorkloadError: in the forward pass, where a module is given a list or an object; see :func:`find_mutable`.
    """

    def __init__(self, modules: Iterable[nn.Module], changing: Iterable[torch.Tensor] = ()) -> None:
        self.modules = list(modules)
        known = {id(buffer) for buffer in changing}
        self._own = [vars(module).get("forward") for module in self.modules]  # one that a hook or the user has put there
        for module in self.modules:
            forward = _Checkpointed(module.forward, buffers_of(module, known), type(module).__name__)
            vars(module)["forward"] = forward  # not by setattr, which a module may override

    def undo(self) -> None:
        """Give the modules their own ``forward`` back."""
        for module, own in zip(self.modules, self._own, strict=True):
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own
        self.modules, self._own = [], []


class _Checkpointed:
    """``forward``, run again in the backward pass; without gradients, it is called as it is.

    It is an object so that a deep copy of the module has a deep copy of this, with the forward pass of the copied module.

    The compiler takes it into its graph if no buffers change but BatchNorm's, which the output does not depend on. At a graph
    break, torch runs it uncompiled.
    """

    def __init__(self, forward: Callable[..., Any], buffers: Sequence[Place], name: str) -> None:
        self.forward, self.buffers, self.name = forward, buffers, name
        self.compilable = all(_is_torch_batchnorm(module) for module, _ in buffers)
        """Whether a second run within a graph is right; there it reads buffers as the first run has left them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        count, names = len(args), tuple(kwargs)  # and not args, which the graph would keep through run
        first: list[tuple[_State, list[int]]] = []

        def run(*given: Any) -> Any:  # twice, or more often where a graph is kept
            named = dict(zip(names, given[count:], strict=True))
            if torch.compiler.is_compiling():
                if not self.compilable:
                    torch._dynamo.graph_break()
                return self.forward(*given[:count], **named)
            if not first:
                if (value := find_mutable(given)) is not None:
                    raise WorkloadError(_OBJECT.format(self.name, of_type(value)))
                first.append((_State(self.buffers), _versions(given)))
                return self.forward(*given[:count], **named)
            state, versions = first[0]
            if _versions(given) != versions:
                raise WorkloadError(_WRITTEN.format(self.name))
            with state.restored():  # not by torch's context_fn, which the compiler does not take
                return self.forward(*given[:count], **named)

        # By position, because torch looks for changes in place only there.
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)


class _State:
    """Buffers, and the states of Python's and NumPy's random generators, as they are now. torch's checkpoint keeps torch's."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module, name in places:
            held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
            self._buffers.append((held, name, held[name].detach().clone()))
        self._random = (random.getstate(), np.random.get_state())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A block with that state, after which the present one is back.

        Buffers are exchanged, not overwritten: the graph that is running backward may refer to them.
        """
        present = [held[name] for held, name, _ in self._buffers]
        drawn = (random.getstate(), np.random.get_state())
        for held, name, then in self._buffers:
            held[name] = then.clone()  # a graph that is kept may be run backward twice
        _set_random(*self._random)
        try:
            yield
        finally:
            for (held, name, _), value in zip(self._buffers, present, strict=True):
                held[name] = value
            _set_random(*drawn)


def find_mutable(given: Iterable[Any]) -> Any:
    """The first of ``given``, tuples opened, that may change after a call: neither tensor, number nor string.

    These are lists, dicts and other objects, such as a cache that layers add to. ``None`` if there is none.
    """
    for value in given:
        found = find_mutable(value) if isinstance(value, tuple) else None if isinstance(value, _CONSTANTS) else value
        if found is not None:
            return found
    return None


def _versions(given: Iterable[Any]) -> list[int]:
    """The in-place version of each tensor within a tuple. torch itself checks tensors that are arguments."""
    inner = [tensor for value in given if isinstance(value, tuple) for tensor in tensors_of(value)]
    return [tensor._version for tensor in inner if not tensor.is_inference()]


def buffers_of(module: nn.Module, changing: set[int]) -> list[Place]:
    """The buffers and parameters within ``module`` whose ``id`` is in ``changing``, and the buffers of BatchNorm."""
    return [
        (inner, name)
        for inner in module.modules()
        for held, known in ((inner._buffers, isinstance(inner, nn.modules.batchnorm._NormBase)), (inner._parameters, False))
        for name, value in held.items()
        if value is not None and (known or id(value) in changing)
    ]


def _is_torch_batchnorm(module: nn.Module) -> bool:
    """Whether ``module`` is torch's own BatchNorm, which changes its buffers in training and does not read them."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and type(module).__module__.startswith("torch.nn.modules.")


def _set_random(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
