"""Import commands on first use: importing torch takes seconds, which ``--help`` and completion do not need."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer.main
from typer.core import TyperCommand, TyperGroup


def lazy_import(module: str) -> Any:
    """Import and return the module ``trimtab.<module>``."""
    return importlib.import_module(f"trimtab.{module}")


class LazyCommand(TyperCommand):
    """A command with a known name and summary; ``module:function`` is imported when anything else is read."""

    def __init__(self, name: str, place: str, summary: str) -> None:
        super().__init__(name, short_help=summary)
        self._place = place
        for attribute in ("params", "callback", "help"):  # __getattr__ reads them from the real command
            delattr(self, attribute)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_real":
            module, _, function = self._place.partition(":")
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(self.name)(getattr(importlib.import_module(module), function))
            self._real = typer.main.get_command(alone)
            return self._real
        if attribute in ("params", "callback", "help"):
            return getattr(self._real, attribute)
        raise AttributeError(f"a LazyCommand has no {attribute!r}")

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """The context of the real command."""
        return self._real.make_context(*args, **kwargs)


def group(commands: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    """A group class with ``commands``: name -> (``module:function``, summary)."""

    class LazyGroup(TyperGroup):
        """The commands, in the order in which they are listed."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.commands = {name: LazyCommand(name, *what) for name, what in commands.items()} | dict(self.commands)

    return LazyGroup
