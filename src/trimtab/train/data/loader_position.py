"""Loaders that begin anywhere, and loaders that keep their own position: what a resumed run goes on from."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

from trimtab.core.workload import user_code


@runtime_checkable
class Seekable(Protocol):
    """A loader whose order depends on nothing but the epoch, so that it can begin anywhere without reading what was before.

    It draws from no random generator but its own, so that it does not matter when its batches are read.
    """

    def seek(self, epoch: int, batch: int) -> None:
        """Make the next iteration begin at that batch of that epoch."""


@runtime_checkable
class Stateful(Protocol):
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, after the batches that it has given."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration go on from there."""


def is_stateful(batches: Any) -> TypeGuard[Stateful]:
    """Whether a resumed run goes by the position that the loader keeps, not by :meth:`Seekable.seek` or by reading again."""
    return isinstance(batches, Stateful) and not isinstance(batches, Seekable)


def state_of(batches: Any) -> dict[str, Any] | None:
    """The position of a :class:`Stateful` loader; ``None`` for others."""
    if is_stateful(batches):
        with user_code("The loader's state_dict() raised"):
            return batches.state_dict()
    return None


def load_state(batches: Any, state: dict[str, Any]) -> None:
    """Put ``batches`` where ``state`` says, now: torchdata's loader would do it, and draw, when it is next gone through."""
    with user_code("The loader's load_state_dict() raised"):
        batches.load_state_dict(state)
        batches.state_dict()
