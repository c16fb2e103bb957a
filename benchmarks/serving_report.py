"""What ``benchmarks/serving.py`` is asked for, and the file in which its measurements add up, so that it can run in pieces."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trimtab._internal.serialization import write_json

PEERS = ("litserve", "fastapi", "ray", "triton")
Figures = dict[str, float]
Servers = Mapping[str, Figures]
"""Figures of each server, and of the ``bare`` executable, for one model in one round."""


def median(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _best_peer(servers: Servers) -> float:
    return max([servers[name]["rps"] for name in PEERS if name in servers], default=0.0)


def _best_bare(servers: Servers) -> float:
    return max(servers["bare"].values())


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure that ``trimtab serve`` shall reach with a model."""

    model: str
    text: str
    figure: Callable[[Servers], float]
    """Raises ``KeyError`` or ``ZeroDivisionError`` if a server that it takes was not measured."""
    limit: float
    least: bool = False
    """Whether ``limit`` is the least value, not the greatest."""

    def line(self, runs: Mapping[str, Mapping[str, Sequence[Figures]]]) -> tuple[str, float | None, bool | None]:
        """A sentence, the figure for the medians, and whether the limit is kept; ``None`` if it was not measured."""
        servers, limit = runs.get(self.model, {}), f"{'at least' if self.least else 'at most'} {self.limit:g}"
        count = min([len(found) for found in servers.values()], default=0)
        try:
            value = self.figure({name: median(found) for name, found in servers.items() if found})
            rounds = [self.figure({name: found[number] for name, found in servers.items()}) for number in range(count)]
        except (KeyError, ZeroDivisionError):
            return f"not measured {self.model}: {self.text} ({limit})", None, None
        kept = value >= self.limit if self.least else value <= self.limit
        spread = f"{min(rounds):.3g} to {max(rounds):.3g} in {count} rounds; " if count else ""
        return f"{'met   ' if kept else 'MISSED'} {self.model}: {self.text}: {value:.3g} ({spread}{limit})", value, kept


TARGETS = (
    Target("identity", "requests/s over LitServe's", lambda of: of["trimtab"]["rps"] / of["litserve"]["rps"], 5.0, True),
    Target("identity", "requests/s over the next best server's", lambda of: of["trimtab"]["rps"] / _best_peer(of), 2.5, True),
    Target(
        "identity",
        "median latency of a lone client above the bare call, ms",
        lambda of: of["trimtab"]["lone_ms"] - 1e3 / of["bare"]["1"],
        0.5,
    ),
    Target("identity", "share of a CPU without a client", lambda of: of["trimtab"]["idle"], 0.01),
    Target("minilm", "rows/s over the bare loop's best", lambda of: of["trimtab"]["rps"] / _best_bare(of), 0.9, True),
    Target("mlp", "CPU time of computing a request over the bare one's", lambda of: of["trimtab"]["cpu_ratio"], 1.1),
)


def verdicts(runs: Mapping[str, Mapping[str, Sequence[Figures]]]) -> Iterator[tuple[str, float | None, bool | None]]:
    """Each target: a sentence, the figure and whether the limit is kept."""
    return (target.line(runs) for target in TARGETS)


class Store:
    """The measurements of all pieces, in ``path`` if that is given: model -> server -> figures of each round.

    ``conditions``: what pieces must share to be added up.
    """

    def __init__(self, path: pathlib.Path | None, conditions: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        self._path, self._conditions = path, dict(conditions)
        self.runs: dict[str, dict[str, list[Figures]]] = {}
        self._pieces: list[dict[str, Any]] = []
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            for name, value in self._conditions.items():
                if (there := found["conditions"].get(name)) != value:
                    sys.exit(f"{path} was measured with {name} {there!r}, and this is {value!r}. Give another file.")
            self.runs, self._pieces = found["runs"], found["pieces"]
        for model in forget:
            self.runs.pop(model, None)

    def begin(self, **facts: object) -> None:
        """A piece begins, under these circumstances."""
        self._pieces.append(facts)

    def missing(self, models: Sequence[str], servers: Sequence[str], rounds: int) -> list[tuple[str, str]]:
        """Model and server of each measurement that is left, round after round of each model."""
        return [
            (model, server)
            for model in models
            for number in range(rounds)
            for server in servers
            if len(self.runs.get(model, {}).get(server, [])) <= number
        ]

    def add(self, model: str, server: str, figures: Figures) -> None:
        """Keep a measurement, and write the file."""
        self.runs.setdefault(model, {}).setdefault(server, []).append(figures)
        if self._path is not None:
            lines = [line for line, *_ in verdicts(self.runs)]
            found = {"conditions": self._conditions, "pieces": self._pieces, "verdicts": lines, "runs": self.runs}
            write_json(self._path, found)
