"""Settings that are switched on and off in a running script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def apply(settings: Mapping[str, Any]) -> None:
    """Make the process run with ``settings``, the JSON form of :class:`~trimtab.core.script_settings.ScriptSettings`, from the
    next step on. Whatever an earlier call switched on and ``settings`` does not name is switched off.
    """
    raise NotImplementedError
