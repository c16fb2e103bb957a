"""Begin what the plan says, right after ``import torch`` in the script's process."""

from __future__ import annotations

import importlib
import os

from trimtab.probe.inside.plan import IS_WORKER, PLAN


def begin() -> None:
    """Install what the plan's mode needs. In workers of a loader nothing is installed but the settings for reading."""
    mode = PLAN.get("mode")
    if mode == "observe":
        importlib.import_module("trimtab.probe.inside.recorder").begin()
        return
    if PLAN.get("guard"):
        importlib.import_module("trimtab.probe.inside.audit").guard()
    if PLAN.get("settings"):
        importlib.import_module("trimtab.probe.inside.remedies").apply(PLAN["settings"])
    if PLAN.get("watch") and not IS_WORKER:
        importlib.import_module("trimtab.probe.inside.watch").start()
    if mode in ("turns", "losses", "trace") and not IS_WORKER:
        importlib.import_module(f"trimtab.probe.inside.{mode}").start()
    os.register_at_fork(after_in_child=lambda: PLAN.update(mode="forked"))
