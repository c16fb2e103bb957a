"""Find the process that slows down the others."""

from __future__ import annotations

import dataclasses
import socket
import statistics
from collections.abc import Mapping, Sequence

from trimtab.train.runtime.step_clock import PHASES

SLOW = 1.3
"""A process is slow if it takes this many times the median of the others."""


@dataclasses.dataclass(frozen=True)
class Pace:
    """The work of one process since the last report."""

    examples: int
    seconds: Mapping[str, float]
    """By phase."""
    host: str = dataclasses.field(default_factory=socket.gethostname)

    @property
    def busy_s(self) -> float:
        """Seconds of all phases except waiting for other processes."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "communication")


def slow_process(paces: Sequence[Pace]) -> tuple[int, str] | None:
    """The rank of the slow process and a sentence about it; ``None`` if there is none."""
    if len(paces) < 2:
        return None
    rank = max(range(len(paces)), key=lambda each: paces[each].busy_s)
    slow, others = paces[rank], [pace for pace in paces if pace is not paces[rank]]
    usual = statistics.median(pace.busy_s for pace in others)
    if not usual or slow.busy_s < SLOW * usual:
        return None
    own = {phase: statistics.median(pace.seconds.get(phase, 0.0) for pace in others) for phase in PHASES}
    worst = max((phase for phase in PHASES if phase != "communication"), key=lambda p: slow.seconds.get(p, 0.0) - own[p])
    return rank, (
        f"The process of rank {rank} on {slow.host} takes {slow.busy_s / usual:.1f} times as long per update as the others, "
        f"most of it in {worst!r}, and all wait for it."
    )
