"""Paired timing: two runners take turns, A B B A, so that drift, clock frequency and neighbours affect both alike."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, TypeGuard

import torch

from trimtab.core.measurement import Comparison, Interval, Measurement, Scalar, StoppedBy
from trimtab.errors import MeasurementError
from trimtab.measure.host import Host, Share, usage, waited_ns, waits
from trimtab.measure.quantiles import quantile_of
from trimtab.measure.stats import ratio_interval, summarize, widened
from trimtab.measure.timer import BLOCK_S, MAX_CALLS, ParallelRunner, Runner, SampledRunner, WarmUp, calls_for, warm_up
from trimtab.measure.undisturbed import compare_undisturbed

DISTURBED = 0.10
"""A quad is discarded if other processes had more than this share of the CPUs that we may use."""
SLOWED, USUAL_QUANTILE = 0.15, 0.25
"""A quad is discarded if the core was slower by more than :data:`SLOWED` around one of its blocks. The usual pace is the
:data:`USUAL_QUANTILE` over all blocks: a neighbour may be there most of the time, and a clock that was fast at first must not
count for long."""
SLACK_TICKS = 2.0
"""Ticks of the kernel's clock by which a block's CPU share may be wrong; allowed before a block counts as disturbed."""
FEWEST_QUADS, FEW_QUADS = 2, 4
"""An interval needs two quads, which are measured however long they take; four unless one takes longer than
:data:`LONG_S`."""
LONG_S = 4.0
MIN_QUADS, MOST_QUADS = 6, 400
PROCESS_NOISE = 0.01
"""Relative standard deviation between pairs of processes of the ratio of two equal models, if only one pair is compared.
Several starts measure it themselves: :func:`trimtab.measure.pooled.pooled`.

The memory layout of a process makes it faster or slower as long as it lives (Mytkowicz et al., "Producing wrong data without
doing anything obviously wrong!", 2009). No number of quads averages that out, so it is added to the interval. It was 0.4% to
0.9% for most models on four machines, 2.5% for calls of a tenth of a millisecond, and 14% for a model whose large outputs were
returned to the system after each call in some processes, and kept in others.
"""
LEAD_S, LEAD_BLOCKS = 0.06, 4
"""Maximum seconds, and maximum number of its blocks, that a side runs unrecorded at the beginning of its turn.

A runtime's threads spin for some milliseconds after its last call. The threads of the side that begins were asleep, and the
scheduler may wake two of them on one core for tens of milliseconds. For 60 ms after a block of ONNX Runtime, a call of 0.9 ms
took 1.3 to 1.7 ms, which made a ratio of 12x read 14x with blocks of 20 ms.
"""
WARM_UP_SHARE = 0.15
"""Share of the time that the warm-up of each side may take."""
PATIENCE = 2.0
"""If quiet quads are rare, the time limit is extended up to this factor until there are enough."""

FAST_QUANTILE = 0.1
"""Quantile of the calls that counts as undisturbed if hardly any block was."""
BURST, BURST_SHARE = 64, 0.1
"""Maximum calls in a row of each side, and their share of the time, among which an undisturbed call is sought if hardly any
block was: neighbours stop the threads of a call at the beginning of a turn far more often than those of a later one."""
LEAST_RUNNING = 1e-4
"""Minimum share of its time that a call counts as running: its waiting threads may together wait longer than the call takes."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive calls of one side: nanoseconds of each, and the CPU time of others meanwhile (``None`` if unknown)."""

    times: Sequence[int]
    share: Share | None
    paces: tuple[int, int] = (1, 1)
    """Nanoseconds of a fixed piece of work on the same core before and after the block."""
    fork_join: int | None = None
    """Nanoseconds of a small parallel operation after the block; ``None`` if that does not tell of the calls."""
    waited_ns: int = 0
    """Nanoseconds that the threads of its process waited for a core during the block, summed; 0 if unknown."""

    @cached_property
    def ns(self) -> float:
        """The median call in nanoseconds, at least 1."""
        return max(1.0, statistics.median(self.times))

    @cached_property
    def fast_ns(self) -> float:
        """The :data:`FAST_QUANTILE` of the calls in nanoseconds, at least 1: a call that hardly anything disturbed."""
        return max(1.0, quantile_of(self.times, FAST_QUANTILE))


@dataclasses.dataclass(frozen=True)
class Quad:
    """Four blocks: candidate, rival, rival, candidate."""

    blocks: tuple[Block, Block, Block, Block]

    @property
    def candidate(self) -> tuple[Block, Block]:
        """The candidate's blocks, in order."""
        return self.blocks[0], self.blocks[3]

    @property
    def rival(self) -> tuple[Block, Block]:
        """The rival's blocks, in order."""
        return self.blocks[1], self.blocks[2]

    def mean(self, kind: Literal["foreign", "stolen", "disturbed"]) -> float:
        """A share of CPU time over the four blocks together; 0 if unknown."""
        shares = [block.share for block in self.blocks if block.share is not None]
        total = sum(share.seconds for share in shares)
        return sum(getattr(share, kind) * share.seconds for share in shares) / total if total else 0.0

    @property
    def quiet(self) -> bool:
        """Whether other processes had at most :data:`DISTURBED` of the CPUs, over the whole quad and in each block.

        A block is only some ticks of the kernel's clock long, so a single block gets a tolerance.
        """
        shares = [block.share for block in self.blocks if block.share is not None]
        return self.mean("disturbed") <= DISTURBED and all(
            share.disturbed <= DISTURBED + SLACK_TICKS * share.resolution for share in shares
        )


@dataclasses.dataclass(frozen=True)
class Progress:
    """State of a comparison after a quad."""

    quads: int
    discarded: int
    ratio: Interval | None
    """Without the variation between processes, which is added at the end."""
    seconds: float
    limit_s: float


def compare(
    candidate: Runner,
    rival: Runner,
    *,
    width: float = 0.03,
    seconds: float = 10.0,
    min_quads: int = MIN_QUADS,
    max_quads: int = MOST_QUADS,
    pids: Iterable[int] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    conditions: Mapping[str, Scalar] | None = None,
    process_noise: float = PROCESS_NOISE,
    keep_slowed: bool = False,
) -> Comparison:
    """Measure how many times faster ``candidate`` is than ``rival``.

    Both are warmed up until steady. Then quads are measured until the interval of the ratio is narrower than ``width`` of it,
    ``seconds`` are up, or ``max_quads`` are done; the ratio itself never ends the sampling. At least ``min_quads`` are measured
    unless that takes more than twice ``seconds``; two are always measured.

    If both compute with one thread, samples are kept by whether their thread waited for a core
    (:func:`trimtab.measure.undisturbed.compare_undisturbed`). Otherwise quads during which others had the CPU, or a core was
    slower than usual, are discarded and counted. If there are too few quiet quads, the quietest are used, and ``foreign``,
    ``stolen`` and ``slowed`` say how noisy they were. The ratio is then that of the fastest calls of both sides, which hardly
    anything disturbed (Chen and Revels, "Robust benchmarking in noisy environments", 2016). In 29 studies of a small network,
    on a host whose cores changed their pace from minute to minute, its standard deviation was 4% around the ratio of quiet
    minutes; that of the ratio of the blocks' :data:`FAST_QUANTILE` was 7%, up to 28% above it. The interval is as wide as
    that of these quantiles. It also contains their ratio, that of the medians, and, where others used more than
    :data:`DISTURBED` of the CPUs, that of the calls' times without the time in which their threads waited for a core.

    ``process_noise``, the variation that more quads do not reduce, is added to the interval at the end, unless a runner is
    compared with itself; ``width`` is about the rest. So by default a difference below about 2% is never sure. For several
    pooled comparisons, with less noise each, :attr:`~trimtab.core.measurement.Interval.faster` has the same threshold.

    ``keep_slowed`` keeps quads during which only a core was slower than usual. Both sides of a quad meet such cores equally
    often, so that the mean over many quads is right, where a few chosen quads give a wide interval. For the steps of a
    training of 45 ms, on a host whose cores changed their pace within each second, four comparisons of 10 s each gave 1.28,
    1.29, 1.28 and 1.40, within 3% to 6%; the four quietest quads of each gave 1.19 to 1.41, within 13% to 64%.

    ``pids`` are the processes that count as ours, with their children: by default this one and those of the two runners.

    Raises:
        MeasurementError: the process of a runner died or does not answer.
    """
    pids = {os.getpid(), candidate.pid, rival.pid} if pids is None else pids
    noise = 0.0 if candidate is rival else process_noise
    if on_progress is None and _single_threaded(candidate) and _single_threaded(rival):
        return compare_undisturbed(
            candidate, rival, width=width, seconds=seconds, min_quads=max(FEWEST_QUADS, min_quads), pids=pids,
            conditions=conditions or {}, process_noise=noise,
        )  # fmt: skip
    begun = time.perf_counter()
    min_quads, max_quads = max(FEWEST_QUADS, min_quads), max(FEWEST_QUADS, min_quads, max_quads)
    block_s = min(BLOCK_S, max(0.01, seconds / (8 * min_quads)))
    warm = [warm_up(side, seconds=WARM_UP_SHARE * seconds, block_s=block_s) for side in (candidate, rival)]
    host = Host(pids)
    session = _Session(candidate, rival, warm, block_s, host, keep_slowed)
    while (stopped := _stop_reason(session, time.perf_counter() - begun, width, seconds, min_quads, max_quads)) is None:
        session.measure()
        if on_progress is not None:
            elapsed = time.perf_counter() - begun
            on_progress(Progress(len(session.quiet), len(session.noisy), session.ratio(), elapsed, seconds))
    if len(session.quiet) < min_quads and session.noisy:
        session.find_fastest(BURST_SHARE * seconds)
    return _result(session, stopped, min_quads, conditions or {}, noise)


def _single_threaded(runner: Runner) -> TypeGuard[SampledRunner]:
    return isinstance(runner, SampledRunner) and runner.threads == 1


def quick(candidate: Runner, rival: Runner, seconds: float = 1.5) -> Comparison:
    """A short first timing: fewer quads, and so a wider interval."""
    return compare(candidate, rival, width=0.06, seconds=seconds, min_quads=4)


class _Session:
    """The quads of one comparison, quiet and disturbed."""

    def __init__(
        self, candidate: Runner, rival: Runner, warm: Sequence[WarmUp], block_s: float, host: Host, keep_slowed: bool = False
    ) -> None:
        self.sides = {"candidate": candidate, "rival": rival}
        self.warm = dict(zip(self.sides, warm, strict=True))
        self.calls = {name: calls_for(block_s, each.call_s) for name, each in self.warm.items()}
        self.quiet: list[Quad] = []
        self.noisy: list[Quad] = []
        self.fastest_ns: dict[str, int] | None = None
        """Nanoseconds of the fastest call of each side; ``None`` before :meth:`find_fastest`."""
        self._host = host
        self._slowed_limit = math.inf if keep_slowed else SLOWED
        self._usual_pace: dict[str, list[float]] = {}
        lead_s = min(LEAD_S, LEAD_BLOCKS * block_s) if candidate.pid != rival.pid else 0.0
        self._lead = {name: min(MAX_CALLS, int(lead_s / each.call_s)) for name, each in self.warm.items()}
        self._last_side: str | None = None
        """The side whose block was the last."""

    def measure(self) -> None:
        """Measure one quad, and classify all quads by the pace of the cores as now known."""
        a, b, c, d = (self._block(side) for side in ("candidate", "rival", "rival", "candidate"))
        quads = [*self.quiet, *self.noisy, Quad((a, b, c, d))]
        self._usual_pace = {
            "candidate": _usual_pace(quad.candidate for quad in quads),
            "rival": _usual_pace(quad.rival for quad in quads),
        }
        self.quiet, self.noisy = [], []
        for quad in quads:
            (self.quiet if quad.quiet and self.slowed(quad) <= self._slowed_limit else self.noisy).append(quad)

    def slowed(self, quad: Quad) -> float:
        """By which share the core was slower than usual around the worst of the quad's blocks."""
        sides = {"candidate": quad.candidate, "rival": quad.rival}
        return max(
            pace / usual - 1
            for side, blocks in sides.items()
            for block in blocks
            for pace, usual in zip(block.paces, self._usual_pace[side], strict=True)
        )

    def ratio(self) -> Interval | None:
        """The ratio over the quiet quads, once there are enough for an interval."""
        return _ratio(self.quiet) if len(self.quiet) >= FEWEST_QUADS else None

    def find_fastest(self, seconds: float) -> None:
        """Find the fastest call of each side, among the measured calls and further ones that take at most ``seconds``."""
        self.fastest_ns = {}
        for name, runner in self.sides.items():
            more = runner.block(min(BURST, calls_for(seconds, self.warm[name].call_s)))
            blocks = [block for quad in (*self.quiet, *self.noisy) for block in getattr(quad, name)]
            self.fastest_ns[name] = min(*more, *(ns for block in blocks for ns in block.times))

    def _block(self, side: str) -> Block:
        runner, calls = self.sides[side], self.calls[side]
        if self._last_side != side and (lead := self._lead[side]):
            runner.block(lead)
        self._last_side = side
        before, first = self._host.snapshot(), runner.pace()
        began = waits(runner.pid)
        times = runner.block(calls)
        waited = waited_ns(began, waits(runner.pid))
        last, after = runner.pace(), self._host.snapshot()
        fork_join = runner.fork_join() if isinstance(runner, ParallelRunner) else None
        if len(times) != calls:
            raise MeasurementError(f"The {side} was asked for {calls} calls and gave the times of {len(times)}.")
        return Block(times, usage(before, after), (first, last), fork_join, waited)


def _usual_pace(pairs: Iterable[tuple[Block, Block]]) -> list[float]:
    """The usual pace before and after blocks of one side, because heavy work may leave the core slower."""
    blocks = [block for pair in pairs for block in pair]
    return [quantile_of([block.paces[i] for block in blocks], USUAL_QUANTILE) for i in (0, 1)]


def _stop_reason(
    session: _Session, elapsed: float, width: float, seconds: float, min_quads: int, max_quads: int
) -> StoppedBy | None:
    """The reason to end sampling now, if any. Uses the number of quads, the width and the clock; never the ratio."""
    quiet, measured = len(session.quiet), len(session.quiet) + len(session.noisy)
    if quiet >= min_quads:
        ratio = session.ratio()
        if ratio is not None and ratio.width <= width:
            return "width"
        if elapsed >= seconds:
            return "time"
    if measured >= max_quads:
        return "pairs"
    fewest = FEW_QUADS if elapsed < LONG_S * max(measured, 1) else FEWEST_QUADS
    return "time" if measured >= min(fewest, min_quads) and elapsed >= PATIENCE * seconds else None


def _result(
    session: _Session, stopped: StoppedBy, min_quads: int, conditions: Mapping[str, Scalar], process_noise: float
) -> Comparison:
    missing = max(0, min_quads - len(session.quiet))
    used = session.quiet + sorted(session.noisy, key=lambda quad: quad.mean("disturbed") + session.slowed(quad))[:missing]
    sides = {"candidate": [q.candidate for q in used], "rival": [q.rival for q in used]}
    timed = {name: _measurement(session, name, pairs, conditions) for name, pairs in sides.items()}
    ratio = widened(_ratio(used, fast=missing > 0), process_noise)
    sampling = estimates = None
    if missing:  # if neighbours starve calls, the fastest calls and the running time may give another ratio than blocks
        best = session.fastest_ns
        fastest = ratio.value if best is None else max(1, best["rival"]) / max(1, best["candidate"])
        sampling = Interval(fastest, fastest * ratio.low / ratio.value, fastest * ratio.high / ratio.value)
        quantiles = [_quantile_ratio(used, share) for share in (FAST_QUANTILE, 0.5)]
        crowded = statistics.fmean(quad.mean("disturbed") for quad in used) > DISTURBED
        running = _running_time_ratio(used) if crowded else fastest
        seen = [fastest, ratio.value, _ratio(used).value, *quantiles, running]
        estimates = tuple(seen)
        ratio = Interval(fastest, min(sampling.low, *seen), max(sampling.high, *seen))
    return Comparison(
        ratio=ratio,
        sampling=sampling,
        estimates=estimates,
        pairs=2 * len(used),
        candidate=timed["candidate"],
        rival=timed["rival"],
        discarded=4 * (len(session.quiet) + len(session.noisy) - len(used)),
        noise=_noise([quad.rival for quad in used]),
        foreign=max(0.0, statistics.fmean(quad.mean("foreign") for quad in used)),
        stolen=statistics.fmean(quad.mean("stolen") for quad in used),
        slowed=statistics.fmean(session.slowed(quad) > SLOWED for quad in used),
        process_noise=process_noise,
        stopped_by=stopped,
    )


def _measurement(
    session: _Session, side: str, pairs: Sequence[tuple[Block, Block]], conditions: Mapping[str, Scalar]
) -> Measurement:
    blocks = [block for pair in pairs for block in pair]
    own: dict[str, Scalar] = {
        "blocks": len(blocks),
        "calls_per_block": session.calls[side],
        "steady": session.warm[side].steady,
        "cpu_watched": all(block.share is not None for block in blocks),
        "pace_ns": statistics.median(pace for block in blocks for pace in block.paces),
    }
    if joins := [block.fork_join for block in blocks if block.fork_join is not None]:
        own["fork_join_ns"] = statistics.median(joins)
    runner = session.sides[side]
    threads = runner.threads if isinstance(runner, SampledRunner) else None
    if threads is None and runner.pid == os.getpid():
        threads = torch.get_num_threads()
    if threads is not None:
        own["threads"] = threads
    times = [ns for block in blocks for ns in block.times]
    return summarize(times, unit="ms", conditions=own | dict(conditions), blocks=[block.ns for block in blocks])


def _ratio(quads: Sequence[Quad], *, fast: bool = False) -> Interval:
    """The ratio of the blocks' medians, or of their :data:`FAST_QUANTILE`."""
    rival, candidate = (
        [block.fast_ns if fast else block.ns for quad in quads for block in getattr(quad, side)]
        for side in ("rival", "candidate")
    )
    return ratio_interval(rival, candidate)


def _quantile_ratio(quads: Sequence[Quad], share: float) -> float:
    """The ratio of the ``share`` quantiles of both sides' calls."""
    rival, candidate = (
        quantile_of([ns for quad in quads for block in getattr(quad, side) for ns in block.times], share)
        for side in ("rival", "candidate")
    )
    return max(1.0, rival) / max(1.0, candidate)


def _running_time_ratio(quads: Sequence[Quad]) -> float:
    """The ratio of both sides' times without the time in which their threads waited for a core.

    If neighbours keep every core busy, threads that meet at barriers are late in each call, so that not even the fastest call
    is undisturbed. It says nothing where neighbours leave the cores free: threads wait there only while they wake, which is a
    part of their call. On a host whose cores changed their pace it was 7 where all other estimates were 11 to 14.
    """

    def ran(blocks: Sequence[Block]) -> float:
        took, waited = sum(sum(block.times) for block in blocks), sum(block.waited_ns for block in blocks)
        return max(1.0, LEAST_RUNNING * took, took - waited) / sum(len(block.times) for block in blocks)

    rival, candidate = (ran([block for quad in quads for block in getattr(quad, side)]) for side in ("rival", "candidate"))
    return rival / candidate


def _noise(pairs: Sequence[tuple[Block, Block]]) -> float:
    """The ratio that 95% of pairs of consecutive blocks of one side stay within, less 1."""
    return math.expm1(quantile_of([abs(math.log(b.ns / a.ns)) for a, b in pairs], 0.95))
