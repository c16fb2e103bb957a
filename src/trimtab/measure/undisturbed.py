"""Paired timing of two programs with one thread each: samples of a millisecond, kept if their thread did not wait for a core.

A program with one thread is slowed by neighbours only while its thread waits in the run queue of a core, and Linux counts that
time (``/proc/<pid>/task/*/schedstat``, read before and after a sample, outside of it). Samples without waiting are those of a
quiet machine, whatever the neighbours do. Beside two busy neighbours on two cores their ratio was within 3% of the quiet one
after 5 s; the median of all samples was off by up to 80%. With several threads there are hardly any such samples, because
threads meet at barriers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence

from trimtab.core.measurement import Comparison, Interval, Scalar, StoppedBy
from trimtab.measure.host import Host, Share, usage
from trimtab.measure.quantiles import quantile_of
from trimtab.measure.stats import ratio_interval, summarize, widened
from trimtab.measure.timer import MAX_CALLS, Sample, SampledRunner, WarmUp, calls_for, warm_up

SAMPLE_S, SAMPLES = 1e-3, 8
"""Duration of a sample in seconds, unless one call takes longer, and samples in a turn."""
LEAD_S = 5e-3
"""Maximum seconds of unrecorded calls at the beginning of a turn: the other program has replaced what was in the caches."""
WAITED = 0.02
"""A sample is kept if its thread waited for a core for at most this share of it."""
LEAST_KEPT = 0.1
"""Least share of kept samples. With fewer, as for long calls beside neighbours, the time for which the thread ran counts."""
RAN_NOISE = 0.03
"""Relative standard deviation added to a ratio of times that threads ran: caches were refilled after each interruption."""
FEWEST_QUADS, MOST_QUADS = 4, 2000
WARM_UP_SHARE = 0.15


@dataclasses.dataclass(frozen=True)
class Turn:
    """Consecutive samples of one side."""

    samples: Sequence[Sample]

    @property
    def kept(self) -> list[float]:
        """Nanoseconds per call of the samples without waiting."""
        return [each.ns for each in self.samples if each.waited <= WAITED]

    @property
    def ran(self) -> list[float]:
        """Nanoseconds per call for which the thread ran."""
        return [each.ns * max(1e-4, 1 - each.waited) for each in self.samples]


def compare_undisturbed(
    candidate: SampledRunner,
    rival: SampledRunner,
    *,
    width: float,
    seconds: float,
    min_quads: int,
    pids: Iterable[int],
    conditions: Mapping[str, Scalar],
    process_noise: float,
) -> Comparison:
    """How many times faster ``candidate`` is than ``rival``: :func:`trimtab.measure.pairs.compare` for one thread each.

    Turns follow each other in the order A B B A. Sampling ends when the interval of the ratio is narrower than ``width`` of it,
    or after ``seconds``.

    Raises:
        MeasurementError: the process of a runner died or does not answer.
    """
    begun = time.perf_counter()
    sides = {"candidate": candidate, "rival": rival}
    warm = {name: warm_up(side, seconds=WARM_UP_SHARE * seconds, block_s=4 * SAMPLE_S) for name, side in sides.items()}
    host, quads = Host(pids), list[tuple[Turn, Turn, Turn, Turn]]()
    paces = {name: [side.pace()] for name, side in sides.items()}
    before = host.snapshot()
    stopped: StoppedBy | None = None
    while stopped is None:
        a, b, c, d = (_turn(sides[name], warm[name]) for name in ("candidate", "rival", "rival", "candidate"))
        quads.append((a, b, c, d))
        elapsed = time.perf_counter() - begun
        if len(quads) >= FEWEST_QUADS and elapsed >= seconds:
            stopped = "time"
        elif len(quads) >= MOST_QUADS:
            stopped = "pairs"
        elif len(quads) >= min_quads and len(quads) % 4 == 0:
            times, kept = _times(quads)
            if kept >= LEAST_KEPT and len(times["rival"]) >= 4 and _ratio(times).width <= width:
                stopped = "width"
    paces = {name: [*paces[name], side.pace()] for name, side in sides.items()}
    share = usage(before, host.snapshot())
    return _result(quads, stopped, share, warm, paces, conditions, process_noise)


def _turn(runner: SampledRunner, warm: WarmUp) -> Turn:
    """The samples of one turn, after some unrecorded calls."""
    runner.block(max(1, min(MAX_CALLS, int(LEAD_S / warm.call_s))))
    samples = 1 if warm.call_s > SAMPLES * SAMPLE_S else SAMPLES
    return Turn(runner.samples(samples, calls_for(SAMPLE_S, warm.call_s)))


def _times(quads: Sequence[tuple[Turn, Turn, Turn, Turn]]) -> tuple[dict[str, list[float]], float]:
    """The median time of each turn by side, and the share of kept samples of the side with fewer.

    Quads with a turn without kept samples are left out. If too few samples were kept, the times that threads ran count instead.
    """
    turns = {"candidate": [turn for a, _, _, d in quads for turn in (a, d)]}
    turns["rival"] = [turn for _, b, c, _ in quads for turn in (b, c)]
    kept = min(
        sum(len(turn.kept) for turn in each) / max(1, sum(len(turn.samples) for turn in each)) for each in turns.values()
    )
    whole = [quad for quad in quads if all(turn.kept for turn in quad)]
    ran = kept < LEAST_KEPT or len(whole) < FEWEST_QUADS
    used = quads if ran else whole
    found: dict[str, list[float]] = {"candidate": [], "rival": []}
    for a, b, c, d in used:
        for name, one, two in (("candidate", a, d), ("rival", b, c)):
            found[name] += [statistics.median(turn.ran if ran else turn.kept) for turn in (one, two)]
    return found, 0.0 if ran else kept


def _ratio(times: Mapping[str, Sequence[float]]) -> Interval:
    return ratio_interval(times["rival"], times["candidate"])


def _result(
    quads: Sequence[tuple[Turn, Turn, Turn, Turn]],
    stopped: StoppedBy,
    share: Share | None,
    warm: Mapping[str, WarmUp],
    paces: Mapping[str, Sequence[int]],
    conditions: Mapping[str, Scalar],
    process_noise: float,
) -> Comparison:
    times, kept = _times(quads)
    timed = {}
    for name, each in times.items():
        own: dict[str, Scalar] = {
            "blocks": len(each),
            "calls_per_block": calls_for(SAMPLE_S, warm[name].call_s),
            "steady": warm[name].steady,
            "cpu_watched": share is not None,
            "pace_ns": statistics.median(paces[name]),
            "threads": 1,
        }
        timed[name] = summarize(each, unit="ms", conditions=own | dict(conditions), blocks=each)
    rival = times["rival"]
    noise = quantile_of([abs(math.log(b / a)) for a, b in zip(rival[::2], rival[1::2], strict=True)], 0.95)
    return Comparison(
        ratio=widened(_ratio(times), process_noise if kept else math.hypot(process_noise, RAN_NOISE)),
        pairs=len(rival),
        candidate=timed["candidate"],
        rival=timed["rival"],
        discarded=4 * len(quads) - 2 * len(rival),
        noise=math.expm1(noise),
        foreign=0.0 if share is None else max(0.0, share.foreign),
        stolen=0.0 if share is None else share.stolen,
        undisturbed=kept,
        process_noise=process_noise,
        stopped_by=stopped,
    )
