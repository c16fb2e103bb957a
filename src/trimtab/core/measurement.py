"""Measured values, each with its number of samples and its confidence interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from trimtab._internal.text import counted

Scalar = None | bool | int | float | str
VAGUE = 2.0
"""A ratio whose upper bound is more than this factor above its lower bound is *vague*: no single number is quoted."""
SLOW_PAIRS, QUIET = 8, 0.05
"""At most this many pairs, with at most this share of the CPU used by others: calls are slow and the machine is not busy."""
START_SPREAD = 0.05
"""Standard deviation of the ratio between starts, as a share, above which a report mentions it."""
LEAST_GAIN = 0.02
"""Smallest gain of speed, memory or size that counts: two processes of the same program differ by as much."""
UNRELIABLE = 0.3
"""A ratio whose interval is wider than this share of its value is reported as unreliable."""
MAX_SHOWN = 1e3
"""An upper bound of a ratio above this carries no information; it is shown as ``over 1000``."""
StoppedBy = Literal["width", "time", "pairs"]
Relative = Literal["examples", "output", "size", "one"]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A value with its 95% confidence interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Width relative to the value: 0.02 means about plus or minus one percent."""
        return (self.high - self.low) / abs(self.value) if self.value else float("inf")

    def scaled(self, factor: float) -> Interval:
        """Value and bounds, each multiplied by a positive ``factor``."""
        return Interval(factor * self.value, factor * self.low, factor * self.high)

    @property
    def vague(self) -> bool:
        """Whether the bounds are more than a factor of :data:`VAGUE` apart. Measurements on a busy machine are; their bounds
        are not reliable either."""
        return not self.high <= VAGUE * self.low

    @property
    def unclear(self) -> bool:
        """For a ratio of speeds: whether it is vague and its bounds include 1, so that even its direction is unknown."""
        return self.vague and not (self.low > 1 or self.high < 1)

    @property
    def doubtful(self) -> bool:
        """For a ratio of speeds: whether it is vague, and would not be a sure gain if its bounds were twice as far apart."""
        return self.vague and not self.low * self.low > self.value

    @property
    def faster(self) -> bool:
        """For a ratio of speeds: whether it is surely a gain, of at least :data:`LEAST_GAIN`."""
        return self.low > 1 and self.value >= 1 + LEAST_GAIN

    @property
    def slower(self) -> bool:
        """For a ratio of speeds: whether it is surely a loss, of at least :data:`LEAST_GAIN`."""
        return self.high < 1 and self.value * (1 + LEAST_GAIN) <= 1

    def times(self) -> str:
        """The ratio with its bounds: ``2.53x (2.41 to 2.66)``, ``at least 5.64x (5.64 to 32.20)`` or
        ``unclear (0.11 to 5.64)``; see :meth:`quoted`."""
        return f"{self.quoted()} ({self.bounds()})"

    def bounds(self, joint: str = " to ") -> str:
        """The bounds of a ratio: ``2.41 to 2.66``, or ``0.11 to over 1000`` (see :data:`MAX_SHOWN`)."""
        return f"{self.low:.2f}{joint}" + (f"over {MAX_SHOWN:.0f}" if self.low <= MAX_SHOWN < self.high else f"{self.high:.2f}")

    def quoted(self, digits: int = 2) -> str:
        """The ratio without bounds: ``2.53x``. A :attr:`vague` ratio gives the bound nearer to 1, ``at least 5.64x`` or ``at
        most 0.72x``; or ``unclear`` if the bounds include 1."""
        if not self.vague:
            return f"{self.value:.{digits}f}x"
        if self.unclear:
            return "unclear"
        return f"at least {self.low:.{digits}f}x" if self.low > 1 else f"at most {self.high:.{digits}f}x"

    def multiple(self) -> str:
        """The ratio for use inside of a sentence: ``2.53x (2.41 to 2.66)``, or ``0.11x to 5.64x`` if it is unclear."""
        return self.single() if self.unclear else self.times()

    def single(self) -> str:
        """Like :meth:`multiple`, without the bounds of a clear ratio."""
        return self.bounds("x to ") + "x" if self.unclear else self.quoted()

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Summary of the samples of one quantity. ``p90`` and ``p99`` are ``None`` if there are too few samples."""

    unit: str
    n: int
    median: float
    interval: Interval
    """Interval of the median."""
    p90: float | None = None
    p99: float | None = None
    conditions: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two programs timed in alternation. ``ratio`` above 1: the candidate is faster than the baseline (``rival``)."""

    ratio: Interval
    pairs: int
    candidate: Measurement
    rival: Measurement
    discarded: int = 0
    """Blocks discarded because other processes used the CPU."""
    sampling: Interval | None = None
    """Interval of the ratio from the spread of the samples alone, if ``ratio`` was widened because of other load."""
    estimates: tuple[float, ...] | None = None
    """Estimates of the ratio that other load biases differently, always in the same order, if ``ratio`` was widened to contain
    them."""
    noise: float | None = None
    """Spread of the baseline against itself: half the width of the central 95% of its block ratios."""
    foreign: float = 0.0
    """Share of CPU time that other processes used during the kept blocks."""
    stolen: float = 0.0
    """Share of CPU time that the hypervisor took during the kept blocks."""
    slowed: float = 0.0
    """Share of the kept blocks in which the core was slower than usual, for example because another machine shares it."""
    process_noise: float = 0.0
    """Relative standard deviation of the ratio between starts of both programs. The interval includes it."""
    starts: int = 1
    """Number of starts. Each start runs both programs in new processes."""
    starts_left_out: int = 0
    """Further starts, in which the threads of the baseline met more slowly than usual. Their ratios do not count."""
    starts_corrected: int = 0
    """Starts in which the threads of the baseline met more slowly than usual, and whose ratio was computed with the baseline's
    time in the trials of the study."""
    rival_ms: tuple[float, float] | None = None
    """Shortest and longest median time of the baseline in milliseconds, over all starts and over the trials of a study."""
    undisturbed: float | None = None
    """Share of samples during which the only thread of each program never waited for a core, on the side with fewer; only these
    count. 0 if they were too few, so that the time counts for which the threads ran. ``None`` with several threads."""
    stopped_by: StoppedBy = "width"
    """Why sampling ended: the interval was narrow enough, the time was up, or the requested pairs were done."""

    @property
    def conditions(self) -> str:
        """The conditions of the timing, as text: ``2 threads each, others used 43% of the CPUs``. The number of threads is left
        out if that of one side is not known."""
        own, rival = (side.conditions.get("threads") for side in (self.candidate, self.rival))
        if self.undisturbed is not None or own == rival == 1:
            return f"one thread each, {self.others}"
        if not (isinstance(own, int) and isinstance(rival, int)):
            return self.others
        threads = f"{own} threads each" if own == rival else f"{counted(own, 'thread')} against {rival}"
        return f"{threads}, {self.others}"

    @property
    def others(self) -> str:
        """The share of the CPUs that other processes used, as text: ``others used 43% of the CPUs``."""
        if self.candidate.conditions.get("cpu_watched") is False:
            return "what others used of the CPUs is not known"
        return f"others used {self.foreign + self.stolen:.0%} of the CPUs"

    @property
    def disturbed(self) -> bool:
        """Whether the samples behind the ratio were disturbed by other processes or slow cores, because too few were quiet."""
        return self.sampling is not None and self.foreign + self.stolen + self.slowed > QUIET

    @property
    def few(self) -> bool:
        """Whether only few pairs were measured, as the calls are slow or the time was short, on a machine that was not busy."""
        return self.pairs <= SLOW_PAIRS and self.foreign + self.stolen + self.slowed <= QUIET

    @property
    def differs(self) -> str | None:
        """How much the ratio differs between starts, as text; ``None`` if little, or if the machine was busy."""
        if self.starts == 1 or self.process_noise <= START_SPREAD or self.foreign + self.stolen + self.slowed > QUIET:
            return None
        text = f"each time they start the two run at another ratio, by {self.process_noise:.0%} over {self.starts} starts"
        low, high = self.rival_ms or (0.0, 0.0)
        return text + (f"; the baseline took {low:.3g} to {high:.3g} ms" if high > (1 + START_SPREAD) * low else "")

    @property
    def doubt(self) -> str | None:
        """Why the ratio is unreliable (busy machine, slow calls, or starts that differ), as a sentence; else ``None``."""
        if self.ratio.width <= UNRELIABLE:
            return None
        if self.few:
            return (
                f"Only {self.pairs} pairs were measured in the time for it: the ratio lies between "
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
    """Loss of score, in the score's own unit; negative if the candidate scored better.

    ``decided``: ``True`` if the upper bound keeps the limit, ``False`` if the lower bound exceeds it, ``None`` if the data does
    not decide. ``n_needed`` then estimates how many examples would.
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
    """Whether the score is a share, such as an accuracy. Its drop is then shown in percent."""
    of: Literal["score", "loss"] = "score"
    """``score``: of a model over examples. ``loss``: of a training over updates; a higher loss is worse."""

    @property
    def unclear(self) -> str:
        """Why the data does not decide whether the limit is kept, as text that follows "undecidable"."""
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
        """``amount`` of the score as text: percent with ``digits`` decimals for a share, else a number."""
        return f"{amount:.{digits}%}" if self.share else f"{amount:.4g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """Errors of outputs against the reference, over all compared outputs and examples. The worst output counts.

    ``centred_error`` is the root mean square error divided by the reference's standard deviation over the examples; a constant
    predictor has 1.0. ``tail_error`` is the largest single error, divided likewise.
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
    """What these two errors are relative to: the reference's variation over the examples; else (one example) its variation
    within the output; else its size; else 1."""
    unrelated: int = 0
    """Examples whose error is as large as the reference's variation: another example's outputs would be as close."""
    left_out: int = 0
    """Batches whose data-dependent sizes differ from the reference's. They are not compared; only the score judges them."""
    still: bool = False
    """Whether trainings were compared with dropout and other random numbers switched off, because these differ."""

    @property
    def of(self) -> str:
        """What the errors are relative to, as text that follows ``off by 2% of``."""
        return {"size": "their size", "one": "1, as they are zero"}.get(self.relative_to, "what they vary by")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """Average time of one operator per call of the model."""

    name: str
    """The runtime's name for it, such as ``aten::addmm`` or ``Convolution (brgconv_avx512_1x1_I8)``."""
    calls: float
    """Runs of the operator per call; fractional if calls differ."""
    self_ms: float
    """Milliseconds per call, without the operators that it calls. On a GPU: GPU time."""
    share: float
    """Share of the time of all operators. Shares sum to 1."""


def operator_shares(rows: Iterable[tuple[str, int, float]], repeats: int) -> list[OperatorTime]:
    """Summarize ``(name, calls, milliseconds)`` rows that were measured over ``repeats`` calls of the model. Rows of equal name
    are added up, rows without time are dropped; the slowest operator is first."""
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
