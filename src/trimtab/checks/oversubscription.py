"""More threads than cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.core.backend import BACKENDS
from trimtab.core.check import Check
from trimtab.core.finding import Finding
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, technique_from_json
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Oversubscription(Check):
    """More threads within an operator than cores that the process may keep busy.

    Threads of one operator wait for each other at its end. Where there are more of them than cores, the last one begins when
    the others are done, or is throttled for the rest of a scheduler's period; calls then take a multiple of their time, and now
    and then much more. It happens where torch counts the cores of the host and a container's quota grants a few of them, and
    where ``torch.set_num_threads`` was called with another machine in mind.
    Source: https://docs.kernel.org/scheduler/sched-bwc.html
    """

    name = "oversubscription"

    def run(self, subject: Any, environment: Environment) -> list[Finding]:
        """Compares the threads that torch has now with the cores that may be used."""
        threads, cores = torch.get_num_threads(), environment.usable_cores
        if threads <= cores:
            return []
        message = (
            f"torch runs {threads} threads, but this process may use {cores} core{'s' if cores > 1 else ''} only, so that they "
            f"wait for each other. Call torch.set_num_threads({cores})."
        )
        fewer = technique_from_json(PASSES, {"name": "threads", "count": cores})
        return [
            Finding(
                rule=self.name,
                level="warning",
                message=message,
                evidence={"threads": threads, "usable_cores": cores},
                remedy=Recipe(passes=(fewer,), backend=BACKENDS["eager"]()),
            )
        ]
