"""Compare two servers under equal open-loop load, measured alternately."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from trimtab.core.measurement import Interval
from trimtab.errors import MeasurementError
from trimtab.measure.quantiles import t_quantile
from trimtab.serve.load_test import NO_CREDENTIALS, Access, Load, make_target, offer_load

ROUNDS = 10
"""Periods of each server. Each round measures both in alternating order, so that a disturbance affects both equally."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadComparison:
    """Quantiles of latency of the second server over those of the first, and the errors of each."""

    rate: float
    rounds: int
    p50: Interval
    p99: Interval
    errors: tuple[dict[str, int], dict[str, int]]
    goodput: tuple[float, float]
    late: bool
    """Whether the client itself could not keep the rate."""

    def __str__(self) -> str:
        ratios = "; ".join(
            f"{name} {one.value:.3g} times (95% interval {one.low:.3g} to {one.high:.3g})"
            for name, one in (("p50", self.p50), ("p99", self.p99))
        )
        errors = ["none" if not one else ", ".join(f"{count} x {kind}" for kind, count in one.items()) for one in self.errors]
        text = (
            f"second against first at {self.rate:,.4g}/s, {self.rounds} periods each: {ratios}; goodput "
            f"{self.goodput[0]:,.4g}/s and {self.goodput[1]:,.4g}/s; errors: {errors[0]}; {errors[1]}"
        )
        return f"{text}; the client could not keep this rate" if self.late else text


def compare_servers(
    first: str,
    second: str,
    *,
    rate: float,
    model: str | None = None,
    seconds: float = 10.0,
    rows: int = 1,
    body: bytes | None = None,
    access: Access = NO_CREDENTIALS,
    on_load: Callable[[str, Load], None] = lambda url, load: None,
) -> LoadComparison:
    """Offer ``rate`` requests per second to one server at a time, in turns, for ``seconds`` in all to each.

    Raises:
        UsageError: nothing answers at an address, or the model must be named.
        MeasurementError: too few periods had answers from both.
    """

    async def main() -> list[list[Load]]:
        urls = (first, second)
        targets = [await make_target(url, model, rows, body, access) for url in urls]
        loads: list[list[Load]] = [[], []]
        for number in range(ROUNDS):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                loads[side].append(await offer_load(targets[side], rate, seconds / ROUNDS, seed=number))
                on_load(urls[side], loads[side][-1])
        return loads

    loads = asyncio.run(main())
    return LoadComparison(
        rate=rate,
        rounds=ROUNDS,
        p50=_ratio(loads, 0),
        p99=_ratio(loads, 1),
        errors=(_errors(loads[0]), _errors(loads[1])),
        goodput=(_goodput(loads[0]), _goodput(loads[1])),
        late=any(load.late for side in loads for load in side),
    )


def _ratio(loads: Sequence[Sequence[Load]], index: int) -> Interval:
    """The ratio of one quantile: geometric mean over the rounds, with a t interval."""
    logs = [
        math.log(new.quantiles[index].ms / old.quantiles[index].ms)
        for old, new in zip(*loads, strict=True)
        if old.quantiles and new.quantiles
    ]
    if len(logs) < 2:
        raise MeasurementError("Fewer than two periods had answers from both servers. Give a higher --rate or a longer --time.")
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1) / len(logs))
    half = t_quantile(0.975, len(logs) - 1) * spread
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _errors(loads: Sequence[Load]) -> dict[str, int]:
    total = collections.Counter[str]()
    for load in loads:
        total.update(load.errors)
    return dict(total)


def _goodput(loads: Sequence[Load]) -> float:
    return sum(load.goodput for load in loads) / len(loads)
