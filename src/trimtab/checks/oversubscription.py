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
    """torch uses more intra-operator threads than the process has usable cores.

    The threads of an operator wait for each other. With more threads than cores, some start only after others end, or are
    throttled for the rest of a scheduler period, and calls take a multiple of their time. Usual reasons: torch counts the
    host's cores in a container with a CPU quota, or a script calls ``torch.set_num_threads`` with the number of another
    machine. Source: https://docs.kernel.org/scheduler/sched-bwc.html
    """

    def run(self, subject: Any, environment: Environment) -> list[Finding]:
        """Compare torch's current number of threads with the number of usable cores."""
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
