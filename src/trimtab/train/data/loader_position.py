"""Protocols of loaders that a run can resume within an epoch: seekable and stateful ones."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from trimtab._internal.user_code import user_code


class Seekable(Protocol):
    """A loader whose order depends on the epoch only, so that it can start at any batch without reading those before.

    It draws from its own random generators only, so that batches may be read early.
    """

    def seek(self, epoch: int, batch: int) -> None:
        """Start the next iteration at this batch of this epoch."""


class Stateful(Protocol):
    """A loader that saves its own position, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches given so far."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next iteration at a position of :meth:`state_dict`."""


def is_seekable(batches: Any) -> TypeGuard[Seekable]:
    """True if a run starts anywhere in an epoch with :meth:`Seekable.seek`."""
    return callable(getattr(batches, "seek", None))


def is_stateful(batches: Any) -> TypeGuard[Stateful]:
    """True if a run resumes from the loader's own position, not with :meth:`Seekable.seek`."""
    methods = ("state_dict", "load_state_dict")  # isinstance() of a protocol takes 30 microseconds
    return all(callable(getattr(batches, name, None)) for name in methods) and not is_seekable(batches)


def state_of(batches: Any) -> dict[str, Any] | None:
    """The position of a :class:`Stateful` loader; ``None`` for others."""
    if is_stateful(batches):
        with user_code("The loader's state_dict() raised"):
            return batches.state_dict()
    return None


def load_state(batches: Any, state: dict[str, Any]) -> None:
    """Restore ``state`` at once: torchdata's loader would do so, and draw random numbers, in the next iteration."""
    with user_code("The loader's load_state_dict() raised"):
        batches.load_state_dict(state)
        batches.state_dict()
