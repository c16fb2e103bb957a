"""Steps: the *anchor* is the event that ends a step.

It is the optimizer that steps most rarely, the last of those; without an optimizer a backward pass; without one a batch of a
loader; without one a call of an outermost module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trimtab.probe.inside import hooks, loaders, roots
from trimtab.probe.inside.plan import PLAN
from trimtab.probe.inside.sites import site

Key = tuple[str, str, int]
"""Kind, site (class name for ``forward``), and which of several with that site."""

ENOUGH = 6
"""Events of the most frequent optimizer after which the anchor is decided."""

anchor: Key | None = None
counts: dict[Key, int] = {}
"""Number of events of every candidate, in the order of their first events."""
_last: dict[Key, int] = {}
_events = 0
_number = 0
_callbacks: list[Callable[[int], None]] = []
_marks: list[Callable[[Key], None]] = []


def _planned_anchor() -> Key | None:
    given = PLAN.get("anchor")
    return (given["kind"], given["site"], given.get("index", 0)) if given else None


def rarest(kind: str) -> Key | None:
    """The candidate of a kind with the fewest events; among equals, the one with the latest event."""
    return min((key for key in counts if key[0] == kind), key=lambda key: (counts[key], -_last[key]), default=None)


def decide(late: bool = False) -> Key | None:
    """The anchor according to the events so far; ``None`` if it is too early. ``late``: decide now in any case."""
    optimizers = [count for key, count in counts.items() if key[0] == "optimizer"]
    if optimizers:
        return rarest("optimizer") if late or max(optimizers) >= ENOUGH else None
    wanted = 2 * int(PLAN.get("steps") or 40)
    made = any(entry.ref() is not None for entry in hooks.optimizers)
    for kind, enough in (("backward", ENOUGH), ("batch", wanted), ("forward", wanted)):
        key = rarest(kind)
        if kind == "forward" and not late and not any(found[0] == "batch" for found in counts):
            key = max((found for found in counts if found[0] == kind), key=lambda found: counts[found], default=None)
        elif kind != "backward" and key is not None:
            key = max((found for found in counts if found[0] == kind), key=lambda found: counts[found])
        if key is not None:
            return key if late or (counts[key] >= enough and not made) else None
    return None


def _event(key: Key) -> None:
    global anchor, _events, _number
    _events += 1
    if anchor is None:
        counts[key] = counts.get(key, 0) + 1
        _last[key] = _events
        anchor = decide()
        if anchor is not None:
            _remove_callbacks(anchor[0])
    elif key == anchor or (key[0] == "batch" and key[:2] == anchor[:2]):
        _number += 1
        for callback in _callbacks:
            callback(_number)
    else:
        return
    for mark in _marks:
        mark(key)


_site = functools.cache(site)


@functools.cache
def _install() -> None:
    global anchor
    anchor = _planned_anchor()
    kinds = {anchor[0]} if anchor else {"optimizer", "backward", "batch", "forward"}
    if "optimizer" in kinds:
        hooks.on_optimizer_step(after=_on_optimizer_step)
    if "backward" in kinds:
        hooks.around_backward(after=_on_backward)
    if "batch" in kinds:
        loaders.on_batch(after=_on_batch)
    if "forward" in kinds:
        roots.after_calls(_on_call)


def _on_optimizer_step(entry: hooks.Optimizer) -> None:
    _event(("optimizer", entry.site, entry.index))


def _on_backward(place: Any) -> None:
    _event(("backward", _site(place), 0))


def _on_batch(loader: loaders.Loader) -> None:
    _event(("batch", loader.site, loader.index))


def _on_call(module: Any) -> None:
    _event(("forward", type(module).__name__, 0))


def _remove_callbacks(kind: str) -> None:
    """Remove the callbacks that are not needed once the anchor is of ``kind``."""
    kinds: Any = {
        "backward": (hooks.after_backward, _on_backward),
        "batch": (loaders.after_batches, _on_batch),
        "forward": (roots.after, _on_call),
    }
    for other, (callbacks, own) in kinds.items():
        if other != kind and own in callbacks:
            callbacks.remove(own)


def on_step_end(callback: Callable[[int], None]) -> None:
    """Call ``callback`` with the number of the step, from 1, at each end of a step. It may block: the clock stands still."""
    _install()
    _callbacks.append(callback)


def on_mark(callback: Callable[[Key], None]) -> None:
    """Call ``callback`` at each event of the anchor and, while it is undecided, of every candidate."""
    _install()
    _marks.append(callback)
