"""Modules whose forward pass is run a second time in the backward pass, instead of keeping what it made.

Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; torch.utils.checkpoint, non-reentrant.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from trimtab.errors import UsageError, WorkloadError
from trimtab.train.memory.argument_copies import apart

_WITHIN_FUNC = (
    "torch.func differentiates here, through modules whose activations are to be computed again, and cannot. Leave "
    "MemorySettings(segments=...) out, and make micro-batches smaller: DataSettings(micro_batch=...)."
)
Place = tuple[nn.Module, str]
"""A buffer, or a parameter that a forward pass changes, as the module that has it and its name there."""


class Recomputed:
    """``modules`` are recomputed from now on, until :meth:`undo`.

    A second run sees what the first saw: autocast, the state of every random generator, the buffers as they were, and so the
    objects that it is given, such as a cache of keys and values to which each layer adds its own. What it does to either is
    forgotten, so that the running statistics of BatchNorm move once per batch. Modules keep their class, their names and their
    hooks, which run outside; only their ``forward`` is another one meanwhile.

    Args:
        modules: none may contain another.
        changing: what a forward pass may change, buffers or parameters, other than the buffers of normalisation layers.
        segments: in how many parts each module is recomputed, one after the other. More than one is for chains, that is
            ``nn.Sequential``: each part then keeps what it gets, and no more than one of them is there in full at a time.
    """

    def __init__(self, modules: Iterable[nn.Module], changing: Iterable[torch.Tensor] = (), *, segments: int = 1) -> None:
        self.modules = list(modules)
        known = {id(buffer) for buffer in changing}
        self._own = [vars(module).get("forward") for module in self.modules]  # a hook's, or one that somebody put there
        for module in self.modules:
            again = Again(module.forward, buffers_of(module, known)) if segments == 1 else Segments(module, segments, known)
            vars(module)["forward"] = again  # into the instance, not through setattr, which modules may have overridden

    def undo(self) -> None:
        """The modules are as they were."""
        for module, own in zip(self.modules, self._own, strict=True):
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own
        self.modules, self._own = [], []


class Again:
    """``forward``, computed again in the backward pass; where no gradients are wanted it is called as it is.

    An object and no function, so that a copy of the module is a copy of this, with the copy's own forward pass.

    What is compiled takes it into its graph, where no buffers change but BatchNorm's, whose output does not come of them. Where
    the compiler lets go in the midst of it, as it does at a ``print``, torch calls it as it was written.
    """

    def __init__(self, forward: Callable[..., Any], buffers: Iterable[Place] = ()) -> None:
        self.forward, self.buffers = forward, list(buffers)
        self.compilable = all(_only_gathered(module) for module, _ in self.buffers)
        """Whether a second run within a graph is right: what is read there of a changed buffer is what it is by then."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        call = _Call(self, args, kwargs)
        given = [*args, *kwargs.values()]
        # all positional, because only such tensors are checked for changes in place; of what holds some, those tell the device
        seen = [value if isinstance(value, torch.Tensor) else _tensors(value) for value in given]
        if torch.compiler.is_compiling():
            return checkpoint(call, *seen, use_reentrant=False)
        try:
            return checkpoint(call, *seen, use_reentrant=False)
        except RuntimeError as error:
            if within_func(error):
                raise WorkloadError(_WITHIN_FUNC) from error
            raise


class _Call:
    """One call of ``forward``, for torch's checkpoint to make twice: the second run sees what the first one saw.

    It keeps them apart by itself, because torch's ``context_fn`` may not be given while something is compiled, and this may be
    called outside of the graph then, too.
    """

    def __init__(self, again: Again, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.again, self.count, self.names = again, len(args), tuple(kwargs)
        self.given = [None if isinstance(value, torch.Tensor) else value for value in (*args, *kwargs.values())]
        self.second: _SecondRun | None = None

    def __call__(self, *seen: Any) -> Any:
        """Run it; ``seen`` are the tensors among what it was given, each in its place."""
        if torch.compiler.is_compiling():
            if not self.again.compilable:
                torch._dynamo.graph_break()
            return self._run(self.given, seen)
        if self.second is None:
            given, self.given = self.given, [apart(value) for value in self.given]
            self.second = _SecondRun(self.again.buffers)
            return self._run(given, seen)  # what this changes is no affair of the graph, which would keep it
        with self.second:  # a graph that is kept may be run backward twice
            return self._run([apart(value) for value in self.given], seen)

    def _run(self, given: Sequence[Any], seen: Sequence[Any]) -> Any:
        use = [value if isinstance(value, torch.Tensor) else own for own, value in zip(given, seen, strict=True)]
        return self.again.forward(*use[: self.count], **dict(zip(self.names, use[self.count :], strict=True)))


class Segments:
    """The forward pass of a chain, in ``count`` parts of about as many links, each computed again as one."""

    def __init__(self, chain: nn.Module, count: int, changing: set[int]) -> None:
        assert isinstance(chain, nn.Sequential)
        links = list(chain)  # not children(), which names a module once that stands in it twice
        bounds = [round(i * len(links) / count) for i in range(count + 1)]
        runs = [_Run(links[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
        self.parts = [Again(run, [place for link in run.links for place in buffers_of(link, changing)]) for run in runs]

    def __call__(self, x: Any) -> Any:
        """Run it."""
        for part in self.parts:
            x = part(x)
        return x


class _Run:
    """Links of a chain, called one after the other."""

    def __init__(self, links: Sequence[nn.Module]) -> None:
        self.links = list(links)

    def __call__(self, x: Any) -> Any:
        for link in self.links:
            x = link(x)
        return x


def within_func(error: RuntimeError) -> bool:
    """Whether it is what ``grad``, ``jacrev`` and the like of torch.func say where something else than is usual is kept."""
    return "torch.func" in str(error) and "saved tensor hooks" in str(error)


def longest_chain(model: nn.Module) -> nn.Sequential:
    """The ``nn.Sequential`` in ``model`` with most links.

    Raises:
        UsageError: there is none of at least two.
    """
    chains = [m for m in model.modules() if isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward]
    found = max(chains, key=len, default=None)
    if found is None or len(found) < 2:
        raise UsageError(
            f"segments needs an nn.Sequential of at least two modules, and {type(model).__name__} has none. Give "
            "activation_mb, which works with any model."
        )
    return found


def buffers_of(module: nn.Module, changing: set[int]) -> list[Place]:
    """What the forward pass of ``module`` may change in it: that whose ``id`` is known to, and BatchNorm's buffers."""
    return [
        (inner, name)
        for inner in module.modules()
        for held, known in ((inner._buffers, isinstance(inner, nn.modules.batchnorm._NormBase)), (inner._parameters, False))
        for name, value in held.items()
        if value is not None and (known or id(value) in changing)
    ]


def _only_gathered(module: nn.Module) -> bool:
    """Whether ``module`` changes its buffers in training, and its output does not come of them: torch's own BatchNorm."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and type(module).__module__.startswith("torch.nn.modules.")


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class _SecondRun(AbstractContextManager[None]):
    """A block that sees buffers, and Python's and numpy's random generators, as they were when this was made.

    torch's own generators are kept by torch's checkpoint. Buffers are exchanged, not overwritten: what else refers to them,
    such as the graph that is running backward, must not see them change.
    """

    def __init__(self, buffers: Iterable[Place]) -> None:
        self._buffers = [(module, name, _copied(_value(module, name))) for module, name in buffers]
        self._random = (random.getstate(), np.random.get_state())
        self._present: list[torch.Tensor] = []
        self._present_random: Any = None

    def __enter__(self) -> None:
        self._present = [_value(module, name) for module, name, _ in self._buffers]
        for module, name, then in self._buffers:
            _place(module, name)[name] = then.clone()  # a graph that is kept may be run backward twice
        self._present_random = (random.getstate(), np.random.get_state())
        self._set_random(self._random)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for (module, name, _), present in zip(self._buffers, self._present, strict=True):
            _place(module, name)[name] = present
        self._set_random(self._present_random)
        self._present, self._present_random = [], None

    @staticmethod
    def _set_random(state: Any) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    """What a buffer is; one that the first run is yet to make has nothing that it was, and stands for itself."""
    return buffer if is_lazy(buffer) else buffer.detach().clone()


def _place(module: nn.Module, name: str) -> dict[str, Any]:
    """Where ``module`` has what is called so."""
    held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
    return held


def _value(module: nn.Module, name: str) -> torch.Tensor:
    value: torch.Tensor = _place(module, name)[name]
    return value
