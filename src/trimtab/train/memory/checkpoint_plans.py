"""Plans of the modules to recompute, each with its predicted peak.

A plan is a set of modules that do not contain each other. Two prices select one: the most bytes that a recomputed module may
take, and the seconds that a byte is worth. The cheapest choice over the module tree is the plan. Mixed plans follow one plan up
to some point of the forward pass and another after it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab.train.memory.activation_trace import Call, SavedTensor, Trace

Integers = np.ndarray[Any, np.dtype[np.int64]]
Modules = frozenset[nn.Module]
_PRICES, _LIMITS = 24, 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """Modules to recompute, in the order of the model."""

    modules: tuple[nn.Module, ...]
    predicted: int
    """Bytes at the peak."""
    seconds: float
    """Of recomputing, per step."""


def pareto_front(model: nn.Module, traced: Trace) -> list[Plan]:
    """The plans that no other beats in both time and predicted memory, the fastest first."""
    tree, peak = _ModuleTree(model, traced), _PredictedPeak(traced)

    def plan(modules: Modules) -> Plan:
        ordered = tuple(module for module in tree.order if module in modules)
        calls = [call for module in ordered for call in tree.calls[module]]
        return Plan(ordered, peak.of(calls), sum(traced.seconds.get(module, 0.0) for module in ordered))

    choices = {tree.choose(limit, price) for limit in tree.limits() for price in tree.prices()}
    pure = _undominated(plan(modules) for modules in choices | {Modules()})
    mixed = {modules for a, b in zip(pure[1:], pure, strict=False) for modules in tree.mixtures(a.modules, b.modules)}
    mixed |= {modules for a in pure[1:] for modules in tree.mixtures(a.modules, ())}
    return _undominated([*pure, *(plan(modules) for modules in mixed)])


def _undominated(plans: Iterable[Plan]) -> list[Plan]:
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.predicted)):
        if not found or plan.predicted < found[-1].predicted:
            found.append(plan)
    return found


class _PredictedPeak:
    """Predicts the peak of a backward pass, which uses the saved tensors in reverse order.

    At each saved tensor three kinds of storages are alive: those saved earlier in the forward pass, outside of recomputed calls
    or as their inputs; those that the recomputed call around it has recomputed; and gradients, assumed to be as large as the
    activations that were alive at this point of the forward pass.
    """

    def __init__(self, traced: Trace) -> None:
        numbers = np.array([each.number for each in traced.saved], np.int64)
        unique, self._storage = np.unique(numbers, return_inverse=True)
        self._index = {int(number): i for i, number in enumerate(unique)}
        self._bytes = np.zeros(len(unique), np.int64)
        self._bytes[self._storage] = [each.bytes for each in traced.saved]
        self._live = np.array([each.live for each in traced.saved], np.int64)

    def of(self, recomputed: Sequence[Call]) -> int:
        """Bytes at the peak if these calls, none within another, are recomputed."""
        count = len(self._live)
        if not count:
            return 0
        outside = np.ones(count, bool)
        for call in recomputed:
            outside[call.first : call.end] = False
        since = np.full(len(self._bytes), count)  # the place where each storage is kept first
        np.minimum.at(since, self._storage[outside], np.flatnonzero(outside))
        waiting = np.zeros(count + 1, np.int64)
        for call in recomputed:
            for number, size in dict(call.inputs).items():
                if (index := self._index.get(number)) is not None:
                    since[index] = min(since[index], call.first)
                else:  # only the call keeps it
                    waiting[call.first] += size
        np.add.at(waiting, since, self._bytes)
        alive = np.cumsum(waiting[:count]) + self._live
        for call in recomputed:
            alive[call.first : call.end] += self._computed_again(call, since)
        return int(alive.max())

    def _computed_again(self, call: Call, since: Integers) -> Integers:
        """Bytes that ``call`` has recomputed, at each tensor that it saves."""
        inner, first = np.unique(self._storage[call.first : call.end], return_index=True)
        found = np.zeros(call.end - call.first, np.int64)
        np.add.at(found, first, np.where(since[inner] >= call.end, self._bytes[inner], 0))
        return np.cumsum(found)


class _ModuleTree:
    """The modules that may be recomputed, each below the one that calls it."""

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self.calls: dict[nn.Module, list[Call]] = defaultdict(list)
        for call in traced.calls:
            self.calls[call.module].append(call)
        self._seconds = traced.seconds
        self._recomputable = {module for module in self.calls if self._is_recomputable(module, traced)}
        self.order = [module for module in model.modules() if module in self._recomputable]
        self._children: dict[nn.Module | None, list[nn.Module]] = defaultdict(list)
        for module in self.order:
            self._children[self._parent_of(self.calls[module][0])].append(module)
        self._own_bytes: dict[nn.Module | None, int] = defaultdict(int)
        """Bytes that each module keeps, without those below it."""
        self._input_bytes: dict[nn.Module, int] = defaultdict(int)
        """Bytes of its inputs that nothing before it keeps."""
        self._peak_bytes: dict[nn.Module, int] = {}
        """Bytes that it takes while it is recomputed."""
        self._measure(traced)

    def limits(self) -> list[float]:
        """Most bytes that a module may take while it is recomputed: a spread of what they take."""
        found = sorted(set(self._peak_bytes.values()))
        picked = {found[round(i * (len(found) - 1) / (_LIMITS - 1))] for i in range(_LIMITS)} if found else set()
        return [*sorted(picked), math.inf]

    def prices(self) -> Iterator[float]:
        """Seconds that a byte may cost, from hardly any to any number."""
        total = sum(self._own_bytes.values()) or 1
        longest = max(self._seconds.values(), default=0.0) or 1e-9
        yield from (longest / total * 10 ** (6 * i / (_PRICES - 2) - 2) for i in range(_PRICES - 1))
        yield longest * 1e6

    def choose(self, limit: float, price: float) -> Modules:
        """The cheapest modules to recompute if none may take more than ``limit`` bytes, and a byte costs ``price`` seconds."""

        def best(module: nn.Module | None) -> tuple[float, Modules]:
            inner = [best(child) for child in self._children[module]]
            cost = price * self._own_bytes[module] + sum(value for value, _ in inner)
            chosen = Modules().union(*(modules for _, modules in inner))
            if module is None or self._peak_bytes[module] > limit:
                return cost, chosen
            whole = self._seconds.get(module, 0.0) + price * self._input_bytes[module]
            return (whole, Modules({module})) if whole < cost else (cost, chosen)

        return best(None)[1]

    def mixtures(self, frugal: Iterable[nn.Module], cheap: Iterable[nn.Module]) -> Iterator[Modules]:
        """``frugal`` up to the end of each of its modules, ``cheap`` after it.

        The frugal modules come first, because what is kept early in the forward pass is kept for longest.
        """
        ended = {module: self.calls[module][-1].ended for module in frugal}
        begun = {module: self.calls[module][0].begun for module in cheap}
        for point in ended.values():
            early = {module for module, moment in ended.items() if moment <= point}
            yield Modules(early | {module for module, moment in begun.items() if moment >= point})

    def _is_recomputable(self, module: nn.Module, traced: Trace) -> bool:
        """False for TorchScript modules, recursive calls, calls from several modules, and arguments that may change later."""
        calls = self.calls[module]
        parents = {call.parent.module if call.parent else None for call in calls}
        later = any(traced.written.get(number, 0) > call.begun for call in calls for number, _ in call.inputs)
        steady = not later and module not in traced.mutable_inputs
        return steady and len(parents) == 1 and module not in parents and not isinstance(module, torch.jit.ScriptModule)

    def _parent_of(self, call: Call) -> nn.Module | None:
        """The nearest usable module around ``call``."""
        parent = call.parent
        while parent is not None and parent.module not in self._recomputable:
            parent = parent.parent
        return None if parent is None else parent.module

    def _measure(self, traced: Trace) -> None:
        first: dict[int, int] = {}
        for index, saved in enumerate(traced.saved):
            if saved.number not in first:
                first[saved.number] = index
                call = saved.call
                home = None if call is None else call.module if call.module in self._recomputable else self._parent_of(call)
                self._own_bytes[home] += saved.bytes
        for module in self.order:
            for call in self.calls[module]:
                given = dict(call.inputs).items()
                self._input_bytes[module] += sum(size for number, size in given if first.get(number, call.first) >= call.first)
                self._peak_bytes[module] = max(self._peak_bytes.get(module, 0), _peak_of(traced.saved[call.first : call.end]))


def _peak_of(kept: Sequence[SavedTensor]) -> int:
    """The peak bytes while a call that saves these tensors is recomputed."""
    seen: set[int] = set()
    total = most = 0
    for saved in kept:
        total += 0 if saved.number in seen else saved.bytes
        seen.add(saved.number)
        most = max(most, total + saved.live)
    return most
