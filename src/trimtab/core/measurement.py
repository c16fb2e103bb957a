"""Measured values. Never a bare float: every one says how many samples it rests on and how sure it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from trimtab._internal.text import counted

Scalar = None | bool | int | float | str
VAGUE = 2.0
"""Bounds of a ratio that are further apart than this factor may not hold, and give no number to quote."""
SLOW_PAIRS, QUIET = 8, 0.05
"""So few pairs, while others had no more than this share of the CPU, are due to slow calls and not to a busy machine."""
UNLIKE = 0.05
"""A standard deviation of the ratio from start to start above this share is worth a sentence."""
LEAST_GAIN = 0.02
"""Less than this is never called a gain, of speed, memory or size: two processes of one program differ by as much."""
UNRELIABLE = 0.3
"""A ratio whose interval is wider than this share of it is said to be unreliable."""
MANY = 1e3
"""An upper bound of a ratio beyond this says only that next to nothing is known, as on a machine that is never quiet."""
Relative = Literal["examples", "output", "size", "one"]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A value with the bounds of its confidence interval (95%)."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Width relative to the value: 0.02 means that the value is known to about plus or minus one percent."""
        return (self.high - self.low) / abs(self.value) if self.value else float("inf")

    @property
    def vague(self) -> bool:
        """Whether the bounds are more than a factor of two apart: what was measured beside busy neighbours, whose bounds do not
        hold either, because they come and go."""
        return not self.high <= VAGUE * self.low

    @property
    def unclear(self) -> bool:
        """Of a ratio of speeds: whether it is vague and its bounds hold 1, so that not even its direction is known."""
        return self.vague and not (self.low > 1 or self.high < 1)

    @property
    def doubtful(self) -> bool:
        """Of a ratio of speeds: whether it is vague, and would not surely be a gain with bounds twice as far apart."""
        return self.vague and not self.low * self.low > self.value

    @property
    def faster(self) -> bool:
        """Of a ratio of speeds: whether it is surely a gain, and one of at least :data:`LEAST_GAIN`."""
        return self.low > 1 and self.value >= 1 + LEAST_GAIN

    @property
    def slower(self) -> bool:
        """Of a ratio of speeds: whether its inverse is :attr:`faster`."""
        return self.high < 1 and self.value * (1 + LEAST_GAIN) <= 1

    def times(self) -> str:
        """As a ratio: ``2.53x (2.41 to 2.66)``, ``at least 5.64x (5.64 to 32.20)`` or ``unclear (0.11 to 5.64)``; see
        :meth:`quoted`."""
        return f"{self.quoted()} ({self.bounds()})"

    def bounds(self, joint: str = " to ") -> str:
        """Of a ratio: ``2.41 to 2.66``, or ``0.11 to over 1000`` where the upper one says nothing."""
        return f"{self.low:.2f}{joint}" + (f"over {MANY:.0f}" if self.low <= MANY < self.high else f"{self.high:.2f}")

    def quoted(self, digits: int = 2) -> str:
        """As a ratio without its bounds: ``2.53x``. Where the bounds are too far apart for one number (:attr:`vague`), the
        bound that is nearer to 1: ``at least 5.64x`` or ``at most 0.72x``; and ``unclear`` where they hold 1."""
        if not self.vague:
            return f"{self.value:.{digits}f}x"
        if self.unclear:
            return "unclear"
        return f"at least {self.low:.{digits}f}x" if self.low > 1 else f"at most {self.high:.{digits}f}x"

    def multiple(self) -> str:
        """As a ratio that a sentence goes on from: ``2.53x (2.41 to 2.66)``, or ``0.11x to 5.64x`` where it is unclear."""
        return self.single() if self.unclear else self.times()

    def single(self) -> str:
        """As :meth:`multiple`, without bounds where one number is enough."""
        return self.bounds("x to ") + "x" if self.unclear else self.quoted()

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Samples of one quantity, summarized. ``p90`` and ``p99`` are ``None`` where there are too few samples to know them."""

    unit: str
    n: int
    median: float
    interval: Interval
    """Of the median."""
    p90: float | None = None
    p99: float | None = None
    conditions: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two things timed in turns. ``ratio`` above 1 means that the candidate is faster than the rival."""

    ratio: Interval
    pairs: int
    candidate: Measurement
    rival: Measurement
    discarded: int = 0
    """Blocks thrown away because somebody else had the CPU."""
    sampling: Interval | None = None
    """The interval of the ratio that the spread of the quads alone gives, where ``ratio`` is wider because of neighbours."""
    noise: float | None = None
    """Spread of the rival against itself: half the width of the central 95% of its block ratios."""
    foreign: float = 0.0
    """Share of CPU time that other processes took during the blocks that were kept."""
    stolen: float = 0.0
    """Share of CPU time that the hypervisor took during the blocks that were kept."""
    slowed: float = 0.0
    """Share of the blocks that were kept in which the core was slower than usual, as where another machine has half of it."""
    process_noise: float = 0.0
    """Standard deviation of the ratio, relative to it, from one start of both sides to the next; the interval includes it."""
    starts: int = 1
    """Starts of both sides, each in a pair of processes of its own."""
    rival_ms: tuple[float, float] | None = None
    """Shortest and longest median time of the rival over all starts, and over the trials of a study."""
    stopped_by: Literal["width", "time", "pairs"] = "width"
    """What ended the sampling: the interval was narrow enough, the time was up, or the pairs asked for were done."""

    @property
    def few(self) -> bool:
        """Whether calls were too slow for more than a few pairs, and nobody else was to blame."""
        return self.pairs <= SLOW_PAIRS and self.foreign + self.stolen + self.slowed <= QUIET

    @property
    def differs(self) -> str | None:
        """In words, how much the ratio differs from one start to the next, where nobody else was to blame."""
        if self.starts == 1 or self.process_noise <= UNLIKE or self.foreign + self.stolen + self.slowed > QUIET:
            return None
        told = f"each time they start the two run at another ratio, by {self.process_noise:.0%} over {self.starts} starts"
        low, high = self.rival_ms or (0.0, 0.0)
        return told + (f"; the baseline took {low:.3g} to {high:.3g} ms" if high > (1 + UNLIKE) * low else "")

    @property
    def doubt(self) -> str | None:
        """A sentence where the machine was too busy, or the calls too slow, for a figure that can be relied on."""
        if self.ratio.width <= UNRELIABLE:
            return None
        if self.few:
            return (
                f"The calls are so slow that only {self.pairs} pairs were measured in the time for it: the ratio lies between "
                f"{self.ratio.bounds(' and ')}."
            )
        if self.differs is not None:
            return f"It lies between {self.ratio.bounds(' and ')}, because {self.differs}."
        others = f"others took {self.foreign:.0%} of the CPU, the hypervisor {self.stolen:.0%}"
        others += f", and for {self.slowed:.0%} of the time the cores were slower than usual" if self.slowed else ""
        known = f"all that is known of the ratio is that it lies between {self.ratio.bounds(' and ')}"
        return f"The machine was too busy to measure well: {known}; {others}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop:
    """How much score was lost, in the score's own units; negative if the candidate scored better.

    ``decided`` is ``True`` when the upper bound is within the limit, ``False`` when even the lower bound is beyond it, ``None``
    when the data cannot tell; ``n_needed`` then estimates the examples that would.
    """

    value: float
    low: float
    upper: float
    n: int
    limit: float | None = None
    decided: bool | None = None
    n_needed: int | None = None
    method: str = "paired"
    share: bool = False
    """Whether the score is a share, such as an accuracy, so that a drop of it reads best in percent."""
    of: Literal["score", "loss"] = "score"
    """Of a model's score over examples, or of a training's loss over updates, which is worse where it rises."""

    @property
    def unclear(self) -> str:
        """Why the data cannot tell whether the limit is kept, to stand behind "undecidable"."""
        assert self.limit is not None
        more = "more of them would hardly help, for the drop itself is too close"
        return (
            f"with {counted(self.n, 'example')}: its score {self.change()}, but a drop of up to {self.show(self.upper)} "
            f"cannot be excluded and the limit is {self.show(self.limit)}; "
            f"{f'about {self.n_needed} would' if self.n_needed else more}"
        )

    def change(self, digits: int = 3) -> str:
        """The change as a verb phrase: the score ``drops by 0.5%``, ``improves by 1.1%`` or ``does not change``.

        A loss ``ends up 0.02 higher`` or ``ends up 0.02 lower``. ``digits`` are those behind the point of a percentage.
        """
        amount = self.show(abs(self.value), digits)
        if amount == self.show(0.0, digits):
            return "does not change"
        if self.value > 0:
            return self._worse(amount)
        return f"improves by {amount}" if self.of == "score" else f"ends up {amount} lower"

    def bound(self, digits: int = 3) -> str:
        """The upper bound of the drop, to stand in brackets behind ``change``: ``at most 2%``, ``drops by 2% at most`` behind
        an improvement, ``at least 1%`` behind one that is certain."""
        amount = self.show(abs(self.upper), digits)
        if self.upper < 0:
            return f"at least {amount}"
        if self.value > 0:
            return f"at most {amount}"
        return f"{self._worse(amount)} at most"

    def short(self, digits: int = 3) -> str:
        """Change and bound for a line of figures: ``drop 0.5% (up to 1%)``, ``gain 1.1% (drop up to 2%)``, and of a loss
        ``rise`` and ``fall``."""
        worse, better = ("drop", "gain") if self.of == "score" else ("rise", "fall")
        amount, upper = self.show(abs(self.value), digits), self.show(abs(self.upper), digits)
        if self.value >= 0 or amount == self.show(0.0, digits):
            return f"{worse} {amount} (up to {upper})"
        return f"{better} {amount} ({self.bound(digits) if self.upper < 0 else f'{worse} up to {upper}'})"

    def _worse(self, amount: str) -> str:
        return f"drops by {amount}" if self.of == "score" else f"ends up {amount} higher"

    def show(self, amount: float, digits: int = 3) -> str:
        """``amount`` of this score in words: percent of a share, with so many ``digits``, else a number in its own units."""
        return f"{amount:.{digits}%}" if self.share else f"{amount:.4g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """How far outputs are from the reference, over all outputs and examples that were compared; the worst output counts.

    ``centred_error`` is the root mean square error relative to what the reference *varies* by over the examples, so that a
    constant predictor scores 1.0 and not 0.02. ``tail_error`` is the largest single error on the same scale.
    """

    ok: bool
    reason: str | None
    n: int
    max_abs: float | None = None
    max_relative: float | None = None
    cosine: float | None = None
    sqnr_db: float | None = None
    centred_error: float | None = None
    tail_error: float | None = None
    relative_to: Relative = "examples"
    """What these two are relative to: what the reference varies by over the examples or, where it does not vary over them (one
    example only), within the output; else its size; else 1."""
    unrelated: int = 0
    """Examples whose error reaches what the reference varies by over them, so that any other example's outputs are as near."""
    left_out: int = 0
    """Batches with other sizes than the reference's, where these follow from data: the score alone judges them."""
    still: bool = False
    """Whether random numbers, as those of dropout, fall differently, so that trainings were compared that draw none."""

    @property
    def of(self) -> str:
        """What its errors are a share of, in words that follow ``off by 2% of``."""
        return {"size": "their size", "one": "1, as they are zero"}.get(self.relative_to, "what they vary by")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One operator in one call of the model, on average."""

    name: str
    """As the runtime calls it, such as ``aten::addmm`` or ``Convolution (brgconv_avx512_1x1_I8)``."""
    calls: float
    """How often it runs in one call; not whole where the model takes turns."""
    self_ms: float
    """Milliseconds in one call, without the operators that it calls itself; on the GPU where one computes."""
    share: float
    """Of the time of all operators. Shares sum to 1."""


def operator_shares(rows: Iterable[tuple[str, int, float]], repeats: int) -> list[OperatorTime]:
    """Operators from ``(name, calls, milliseconds)`` over ``repeats`` calls of the model; the slowest first, equal names added
    up, those without any time left out."""
    calls: dict[str, int] = {}
    times: dict[str, float] = {}
    for name, count, ms in rows:
        calls[name] = calls.get(name, 0) + count
        times[name] = times.get(name, 0.0) + ms
    total = sum(times.values())
    found = [
        OperatorTime(name=name, calls=calls[name] / repeats, self_ms=ms / repeats, share=ms / total)
        for name, ms in times.items()
        if ms > 0
    ]
    return sorted(found, key=lambda row: (-row.self_ms, row.name))
