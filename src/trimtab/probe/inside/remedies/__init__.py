"""Settings that are switched on and off in a running script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.probe.inside.remedies import ceilings, compilation, loaders, modules, optimizers, process


def apply(settings: Mapping[str, Any]) -> None:
    """Make the process run with ``settings``, the JSON form of :class:`~trimtab.core.script_settings.ScriptSettings`, from the
    next step on. Whatever an earlier call switched on and ``settings`` does not name is switched off.

    ``loaders``, ``compile_dynamic`` and ``keep_freed`` hold for objects and memory that are made later, and must be applied
    before the script begins; ``keep_freed`` cannot be undone. ``environment`` is set by whoever starts the process.
    """
    for remedy in (process, optimizers, modules, loaders, compilation, ceilings):
        remedy.switch(settings)
