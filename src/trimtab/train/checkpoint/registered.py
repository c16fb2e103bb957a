"""State of the user's own that checkpoints hold: objects with ``state_dict()`` and ``load_state_dict()``, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab._internal.text import of_type
from trimtab._internal.user_code import user_code
from trimtab.errors import UsageError
from trimtab.train.checkpoint.checkpoints import refuse_unsavable
from trimtab.train.run_context import RunContext


def register(context: RunContext, things: Mapping[str, Any]) -> None:
    """Have checkpoints hold the state of ``things``; after a resumption, each gets its state at once.

    Raises:
        UsageError: one lacks a method, its state cannot be saved, or the name is taken.
    """
    for name, thing in things.items():
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise UsageError(
                f"register() was given {name}={of_type(thing)}, without state_dict() or load_state_dict(). Give an object with "
                "both: checkpoints hold what the first returns, and a resumed run gives it to the second."
            )
        if context.registered.get(name, thing) is not thing:
            raise UsageError(f"register() was given {name} before, as another object. Give this one another name.")
        refuse_unsavable({f"registered {name}": _state_of(name, thing)})
        context.registered[name] = thing
        if context.resuming is not None:
            _load(context, name, context.resuming.get("registered", {}))


def state_of(context: RunContext) -> dict[str, list[Any]]:
    """The state of each registered object, of every process; all processes must call it together."""
    return {name: context.world.gathered(_state_of(name, thing)) for name, thing in context.registered.items()}


def restore(context: RunContext, kept: Mapping[str, list[Any]]) -> None:
    """Give the registered objects their states from a checkpoint."""
    for name in context.registered:
        _load(context, name, kept)


def unregistered_note(context: RunContext, kept: Mapping[str, Any]) -> str | None:
    """A sentence if the checkpoint has the state of objects that this script has not registered."""
    missing = sorted(kept.keys() - context.registered.keys())
    if not missing:
        return None
    return (
        f"The checkpoint has the state of {', '.join(missing)}, which this run has not registered, so that its own checkpoints "
        f"lack it. Call trainer.register({missing[0]}=...) before fit()."
    )


def _state_of(name: str, thing: Any) -> Any:
    with user_code(f"state_dict() of the registered {name} raised"):
        return thing.state_dict()


def _load(context: RunContext, name: str, kept: Mapping[str, list[Any]]) -> None:
    if name not in kept:
        context.note_once(f"The checkpoint has no state of {name}, which is registered now: it stays as it is.")
        return
    states = kept[name]
    with user_code(f"load_state_dict() of the registered {name} raised"):
        context.registered[name].load_state_dict(states[context.world.index % len(states)])
