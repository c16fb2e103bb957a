"""Plans of what to recompute, and what each of them should take.

A plan is a set of modules that do not contain each other. For every mix of "no more than so many bytes at once within a module"
and "a byte is worth so many seconds", the cheapest choice over the module tree is one; mixed plans, one up to some point of the
forward pass and another after it, lie in between.
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

from trimtab.train.memory.activation_trace import Call, Keep, Trace

Integers = np.ndarray[Any, np.dtype[np.int64]]
Modules = frozenset[nn.Module]
_PRICES, _ROOMS = 24, 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """Modules to recompute, in the order of the model."""

    modules: tuple[nn.Module, ...]
    predicted: int
    """Bytes at the peak, in theory."""
    seconds: float
    """Of recomputing, per step."""


def front(model: nn.Module, traced: Trace) -> list[Plan]:
    """Plans worth considering, the cheapest first; each needs less memory than those before it, as far as can be predicted."""
    tree, peak = _Tree(model, traced), Peak(traced)

    def plan(modules: Modules) -> Plan:
        ordered = tuple(module for module in tree.order if module in modules)
        calls = [call for module in ordered for call in tree.calls[module]]
        return Plan(ordered, peak.predicted(calls), sum(traced.seconds.get(module, 0.0) for module in ordered))

    pure = _undominated(
        plan(modules) for modules in {tree.choose(r, p) for r in tree.rooms() for p in tree.prices()} | {Modules()}
    )
    between = {mixed for a, b in zip(pure[1:], pure, strict=False) for mixed in tree.mixtures(a.modules, b.modules)}
    between |= {mixed for a in pure[1:] for mixed in tree.mixtures(a.modules, ())}
    return _undominated([*pure, *(plan(modules) for modules in between)])


def _undominated(plans: Iterable[Plan]) -> list[Plan]:
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.predicted)):
        if not found or plan.predicted < found[-1].predicted:
            found.append(plan)
    return found


class Peak:
    """Predicts the worst moment of a backward pass.

    When it has come back to where something was kept, everything alive is: what was kept before that, outside of recomputed
    calls and as their inputs; what a call under way has computed again; and gradients about as large as the activations that
    were on their way there in the forward pass.
    """

    def __init__(self, traced: Trace) -> None:
        numbers = np.array([keep.number for keep in traced.kept], np.int64)
        unique, self._storage = np.unique(numbers, return_inverse=True)
        self._index = {int(number): i for i, number in enumerate(unique)}
        self._bytes = np.zeros(len(unique), np.int64)
        self._bytes[self._storage] = [keep.bytes for keep in traced.kept]
        self._live = np.array([keep.live for keep in traced.kept], np.int64)

    def predicted(self, recomputed: Sequence[Call]) -> int:
        """Bytes at that moment if these calls, none within another, are recomputed."""
        count = len(self._live)
        if not count:
            return 0
        outside = np.ones(count, bool)
        for call in recomputed:
            outside[call.first : call.end] = False
        since = np.full(len(self._bytes), count)  # where each storage is kept first
        np.minimum.at(since, self._storage[outside], np.flatnonzero(outside))
        waiting = np.zeros(count + 1, np.int64)
        for call in recomputed:
            for number, size in dict(call.inputs).items():
                if (index := self._index.get(number)) is not None:
                    since[index] = min(since[index], call.first)
                else:  # nothing but the call keeps it
                    waiting[call.first] += size
        np.add.at(waiting, since, self._bytes)
        alive = np.cumsum(waiting[:count]) + self._live
        for call in recomputed:
            alive[call.first : call.end] += self._again(call, since)
        return int(alive.max())

    def _again(self, call: Call, since: Integers) -> Integers:
        """Bytes that ``call`` has computed again by the time it has come to each thing that it keeps."""
        inner, first = np.unique(self._storage[call.first : call.end], return_index=True)
        found = np.zeros(call.end - call.first, np.int64)
        np.add.at(found, first, np.where(since[inner] >= call.end, self._bytes[inner], 0))
        return np.cumsum(found)


class _Tree:
    """The modules that were called, each below the one that called it, with what there is to choose by."""

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self.calls: dict[nn.Module, list[Call]] = defaultdict(list)
        for call in traced.calls:
            self.calls[call.module].append(call)
        self._seconds = traced.seconds
        self._usable = {module for module in self.calls if self._may(module, traced)}
        self.order = [module for module in model.modules() if module in self._usable]
        self._below: dict[nn.Module | None, list[nn.Module]] = defaultdict(list)
        for module in self.order:
            self._below[self._above(self.calls[module][0])].append(module)
        self._own: dict[nn.Module | None, int] = defaultdict(int)
        self._inputs: dict[nn.Module, int] = defaultdict(int)
        self._room: dict[nn.Module, int] = {}
        self._weigh(traced)

    def rooms(self) -> list[float]:
        """How much a module may take while it is recomputed: a spread of what they do take."""
        found = sorted(set(self._room.values()))
        picked = {found[round(i * (len(found) - 1) / (_ROOMS - 1))] for i in range(_ROOMS)} if found else set()
        return [*sorted(picked), math.inf]

    def prices(self) -> Iterator[float]:
        """Seconds that a byte may cost, from hardly any to whatever it takes."""
        total = sum(self._own.values()) or 1
        longest = max(self._seconds.values(), default=0.0) or 1e-9
        yield from (longest / total * 10 ** (6 * i / (_PRICES - 2) - 2) for i in range(_PRICES - 1))
        yield longest * 1e6

    def choose(self, room: float, price: float) -> Modules:
        """The modules to recompute if none may take more than ``room`` bytes, and a byte kept is worth ``price`` seconds."""

        def best(module: nn.Module | None) -> tuple[float, Modules]:
            inner = [best(child) for child in self._below[module]]
            worth = price * self._own[module] + sum(value for value, _ in inner)
            apart = Modules().union(*(chosen for _, chosen in inner))
            if module is None or self._room[module] > room:
                return worth, apart
            whole = self._seconds.get(module, 0.0) + price * self._inputs[module]
            return (whole, Modules({module})) if whole < worth else (worth, apart)

        return best(None)[1]

    def mixtures(self, frugal: Iterable[nn.Module], cheap: Iterable[nn.Module]) -> Iterator[Modules]:
        """``frugal`` up to some point of the forward pass, ``cheap`` after it; for every point where one of ``frugal`` is over.

        That way round, because what is early in the forward pass waits longest.
        """
        ended = {module: self.calls[module][-1].ended for module in frugal}
        begun = {module: self.calls[module][0].begun for module in cheap}
        for point in ended.values():
            early = {module for module, moment in ended.items() if moment <= point}
            yield Modules(early | {module for module, moment in begun.items() if moment >= point})

    def _may(self, module: nn.Module, traced: Trace) -> bool:
        """Not what is called from several places, calls itself, gets inputs that change later, or is no Python."""
        calls = self.calls[module]
        parents = {call.parent.module if call.parent else None for call in calls}
        later = any(traced.written.get(number, 0) > call.begun for call in calls for number, _ in call.inputs)
        return len(parents) == 1 and module not in parents and not later and not isinstance(module, torch.jit.ScriptModule)

    def _above(self, call: Call) -> nn.Module | None:
        """The nearest usable module around ``call``."""
        parent = call.parent
        while parent is not None and parent.module not in self._usable:
            parent = parent.parent
        return None if parent is None else parent.module

    def _weigh(self, traced: Trace) -> None:
        seen: set[int] = set()
        for keep in traced.kept:
            if keep.number not in seen:
                self._own[self._home(keep)] += keep.bytes
            seen.add(keep.number)
        first = {keep.number: index for index, keep in reversed(list(enumerate(traced.kept)))}
        for module in self.order:
            for call in self.calls[module]:
                given = dict(call.inputs).items()
                self._inputs[module] += sum(size for number, size in given if first.get(number, call.first) >= call.first)
                self._room[module] = max(self._room.get(module, 0), _room(traced.kept[call.first : call.end]))

    def _home(self, keep: Keep) -> nn.Module | None:
        call = keep.call
        return None if call is None else call.module if call.module in self._usable else self._above(call)


def _room(kept: Sequence[Keep]) -> int:
    """Bytes that come back when a call with these is recomputed, at its worst moment."""
    seen: set[int] = set()
    total = most = 0
    for keep in kept:
        total += 0 if keep.number in seen else keep.bytes
        seen.add(keep.number)
        most = max(most, total + keep.live)
    return most
