"""Taking turns: two real processes, disturbed quads, and what ends the sampling. Never asserts on absolute times."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from _places import TESTS
from _served import KEY, Work
from trimtab._internal.serialization import from_json, to_json
from trimtab.api.compare import Timing
from trimtab.core.measurement import Comparison, Interval, Measurement
from trimtab.errors import MeasurementError
from trimtab.measure import pairs
from trimtab.measure.host import Share
from trimtab.measure.pairs import Block, Progress, Quad, compare, quick
from trimtab.measure.pooled import (
    DISTURBED_DRIFT,
    DRIFT,
    MOST_STARTS,
    PRIOR_STARTS,
    STARTS,
    narrow,
    number_of_starts,
    pooled,
    usual_starts,
)
from trimtab.measure.quantiles import t_quantile
from trimtab.measure.remote import RemoteRunner
from trimtab.measure.timer import LocalRunner

pytestmark = pytest.mark.alone


class Clockwork:
    """Gives times that follow a rule of how many blocks both sides have run, without taking much time itself."""

    pid = os.getpid()
    clock = 0

    def __init__(self, ns: float, *, drift: float = 0.0, wobble: Sequence[float] = (1.0,), nap: float = 0.001) -> None:
        self.ns, self.drift, self.wobble, self.nap = ns, drift, wobble, nap

    def block(self, calls: int) -> list[int]:
        Clockwork.clock += 1
        time.sleep(self.nap)
        factor = math.exp(self.drift * Clockwork.clock) * self.wobble[Clockwork.clock % len(self.wobble)]
        return [round(self.ns * factor)] * calls

    def pace(self) -> int:
        return 1000


@pytest.fixture
def served() -> Iterator[RemoteRunner]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="trimtab-test-"))
    script = TESTS / "_served.py"
    process = subprocess.Popen([sys.executable, str(script), str(folder / "s"), "200"])
    with RemoteRunner(folder / "s", KEY) as runner:
        yield runner
    process.kill()
    process.wait()
    shutil.rmtree(folder)


def share(foreign: float, seconds: float = 0.075, resolution: float = 0.066) -> Share:
    return Share(seconds=seconds, foreign=foreign, stolen=0.0, resolution=resolution)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody else used the machine, so that no quad is thrown away."""
    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.0))


def quad(*foreign: float, seconds: float = 0.075) -> Quad:
    a, b, c, d = (Block([100], share(f, seconds)) for f in foreign)
    return Quad((a, b, c, d))


def test_two_processes_and_a_known_ratio(served: RemoteRunner) -> None:
    seen: list[Progress] = []
    found = compare(LocalRunner(Work(50, "works")), served, seconds=4, on_progress=seen.append, conditions={"batch": 1})
    assert found.ratio.low < found.ratio.value < found.ratio.high
    assert 2 < found.ratio.value < 8, "four times the work"
    assert found.pairs >= 4
    assert found.pairs % 2 == 0
    assert found.candidate.n == 2 * (found.pairs // 2) * int(str(found.candidate.conditions["calls_per_block"]))
    assert found.rival.median > found.candidate.median
    assert found.candidate.conditions["batch"] == 1
    assert "threads" in found.candidate.conditions
    assert "threads" not in found.rival.conditions, "nobody here knows those of the other process"
    assert found.noise is not None
    assert [p.quads + p.discarded for p in seen] == list(range(1, len(seen) + 1))
    assert from_json(Comparison, to_json(found)).ratio == found.ratio


@pytest.mark.usefixtures("quiet")
def test_linear_drift_cancels() -> None:
    found = compare(Clockwork(1e6, drift=0.05), Clockwork(2e6, drift=0.05), seconds=3, max_quads=8, width=-1)
    assert found.ratio.value == pytest.approx(2, rel=1e-5)
    assert found.stopped_by == "pairs"
    assert found.pairs == 16


@pytest.mark.usefixtures("quiet")
def test_a_side_in_another_process_runs_unrecorded_where_its_turn_begins() -> None:
    """The other side's threads still spin for a while, and its own were asleep: such calls took up to twice as long."""
    calls: list[tuple[str, int]] = []

    class Named:
        def __init__(self, name: str, pid: int) -> None:
            self.name, self.pid = name, pid

        def block(self, count: int) -> list[int]:
            calls.append((self.name, count))
            time.sleep(0.001 * count)
            return [1_000_000] * count

        def pace(self) -> int:
            return 1000

    compare(Named("a", os.getpid()), Named("b", os.getppid()), seconds=5, min_quads=3, max_quads=3)
    names, counts = zip(*calls[-6:], strict=True)
    assert "".join(names) == "abbbaa", "the quad's first block goes on where the quad before ended"
    assert 1 <= counts[1] <= 2000 * pairs.LEAD_S
    assert 1 <= counts[4] <= 2000 * pairs.LEAD_S


@pytest.mark.usefixtures("quiet")
def test_order_is_a_b_b_a() -> None:
    order: list[str] = []

    class Named:
        pid = os.getpid()

        def __init__(self, name: str) -> None:
            self.name = name

        def block(self, calls: int) -> list[int]:
            order.append(self.name)
            time.sleep(0.001)
            return [1000] * calls

        def pace(self) -> int:
            return 1000

    compare(Named("a"), Named("b"), seconds=5, min_quads=3, max_quads=3)
    assert "".join(order[-12:]) == "abbaabbaabba"


@pytest.mark.usefixtures("quiet")
def test_width_ends_the_sampling_once_the_fewest_quads_are_there() -> None:
    found = compare(Clockwork(1e6), Clockwork(2e6), seconds=60, min_quads=5, max_quads=60)
    assert found.stopped_by == "width"
    assert (found.pairs, found.discarded) == (10, 0)
    assert found.process_noise == pairs.PROCESS_NOISE
    assert found.ratio.width == pytest.approx(2 * 1.96 * pairs.PROCESS_NOISE, rel=0.01)
    assert found.noise == pytest.approx(0, abs=1e-9)


@pytest.mark.usefixtures("quiet")
def test_what_differs_between_processes_does_not_count_against_oneself() -> None:
    one = Clockwork(1e6)
    assert compare(one, one, seconds=3, min_quads=3, max_quads=3).process_noise == 0
    other = compare(one, Clockwork(1e6), seconds=3, min_quads=3, max_quads=3, process_noise=0.1)
    assert other.ratio.high == pytest.approx(math.exp(0.196), rel=0.01)


@pytest.mark.usefixtures("quiet")
def test_time_ends_the_sampling_of_what_stays_wide() -> None:
    wobbly = Clockwork(1e6, wobble=(1.0, 1.4, 0.8, 2.0, 1.1, 0.7, 1.0))
    found = compare(wobbly, Clockwork(1e6), seconds=0.5, min_quads=3, width=1e-6, max_quads=100_000)
    assert found.stopped_by == "time"
    assert found.ratio.low < 1.1 < found.ratio.high * 1.2


@pytest.mark.usefixtures("quiet")
def test_slow_calls_get_four_quads_and_a_wide_interval() -> None:
    begun = time.perf_counter()
    found = compare(Clockwork(1e8, nap=0.1), Clockwork(2e8, nap=0.1, wobble=(1, 1.1)), seconds=0.1, min_quads=6)
    assert found.pairs == 8
    assert found.stopped_by == "time"
    assert time.perf_counter() - begun < 20


def test_a_quad_is_quiet_unless_others_had_the_cpu_beyond_doubt() -> None:
    assert quad(0, 0, 0, 0).quiet
    assert quad(0.13, 0.0, 0.06, 0.0).quiet, "two ticks of the clock in one block are within its resolution"
    assert not quad(0.5, 0, 0, 0).quiet, "a neighbour was busy for one block"
    assert not quad(0.12, 0.12, 0.12, 0.12).quiet, "a little in each adds up"
    a = Block([100], None)
    assert Quad((a, a, a, a)).quiet, "where nothing is known nothing can be thrown away"
    assert Quad((a, a, a, a)).mean("foreign") == 0


def test_disturbed_quads_are_thrown_away_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10**9))
    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.6 if next(count) // 4 % 3 == 0 else 0.02))
    found = compare(Clockwork(1e6), Clockwork(2e6), seconds=20, min_quads=6, max_quads=60)
    assert (found.pairs, found.discarded) == (12, 12), "every third quad of nine was disturbed"
    assert found.foreign == pytest.approx(0.02)
    assert found.stopped_by == "width"


def test_without_quiet_quads_the_quietest_are_used_and_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10**9))
    monkeypatch.setattr(pairs, "usage", lambda before, after: share((0.3, 0.7)[next(count) // 4 % 2]))
    found = compare(Clockwork(1e6), Clockwork(2e6), seconds=0.5, min_quads=4, max_quads=100)
    assert found.pairs == 8
    assert found.foreign == pytest.approx(0.3), "chosen by how quiet they were"
    assert found.discarded > 0
    assert found.stopped_by in ("time", "pairs")


def test_where_neighbours_starve_some_calls_the_ratio_is_said_to_be_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.5))
    starved = Clockwork(1e6, wobble=(1, 1000, 1000, 1000, 1, 1, 1, 1))
    found = compare(Clockwork(1e6), starved, seconds=0.2, min_quads=4, max_quads=4)
    assert found.ratio.value == pytest.approx(1.0), "most calls were as fast as the other's"
    assert found.ratio.high > 3
    assert found.ratio.vague


def test_where_neighbours_starve_most_calls_of_one_side_the_luckiest_give_the_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that wait for each other at a barrier may lose nearly every call to two busy neighbours, and by chance on one
    side only."""

    class Starved(Clockwork):
        def block(self, calls: int) -> list[int]:
            return [ns if i % 5 == 0 else 200 * ns for i, ns in enumerate(super().block(calls))]

    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.5))
    found = compare(Clockwork(1e6), Starved(1e6), seconds=0.2, min_quads=4, max_quads=4)
    assert found.ratio.value == pytest.approx(1.0), "the ratio of calls that nothing disturbed"
    assert found.ratio.high > 100, "that of the medians"
    assert found.ratio.vague


def test_where_neighbours_starve_what_begins_a_turn_a_call_amid_others_gives_the_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slow at first, such calls are one to a block, and each of them begins a turn: 62x was confirmed of what is slower."""

    class Starved(Clockwork):
        def block(self, calls: int) -> list[int]:
            return [100 * ns if i % 8 == 0 else ns for i, ns in enumerate(super().block(calls))]

    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.5))
    found = compare(Clockwork(2e6), Starved(1e6, nap=0.06), seconds=4, min_quads=4, max_quads=4)
    assert found.rival.conditions["calls_per_block"] == 1
    assert found.ratio.value == pytest.approx(0.5), "which a quiet machine would show"
    assert found.ratio.high > 40
    assert found.ratio.vague


def test_where_neighbours_starve_every_call_of_one_side_what_its_threads_waited_for_speaks_against_the_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two busy neighbours of two cores: 439x was measured, and 30x proven, of one thread against two that need no longer."""
    waited = {os.getppid(): 0, os.getpid(): 0}

    class Starved(Clockwork):
        pid = os.getppid()

        def block(self, calls: int) -> list[int]:
            times = super().block(calls)
            waited[self.pid] += round(0.995 * sum(times))
            return times

    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.5))
    monkeypatch.setattr(pairs, "waits", lambda pid: {pid: waited[pid]})
    found = compare(Clockwork(1e6), Starved(200e6), seconds=0.2, min_quads=4, max_quads=4)
    assert found.ratio.value > 100
    assert found.ratio.low <= 1.001, "which a quiet machine would show"
    assert found.ratio.vague
    evenly = compare(Starved(200e6), Starved(200e6), seconds=0.2, min_quads=4, max_quads=4)
    assert evenly.ratio.width < 0.1, "both lose alike"


def test_where_only_the_cores_change_their_pace_the_time_in_which_threads_wake_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of four threads wait for each other without neighbours: 12x was said to be at least 7x."""
    waited = {os.getppid(): 0, os.getpid(): 0}

    class Slow(Clockwork):
        def pace(self) -> int:
            return next(paces)

    class Waking(Slow):
        pid = os.getppid()

        def block(self, calls: int) -> list[int]:
            times = super().block(calls)
            waited[self.pid] += round(0.4 * sum(times))
            return times

    paces = itertools.cycle([100, 210, 100])
    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.05))
    monkeypatch.setattr(pairs, "waits", lambda pid: {pid: waited[pid]})
    found = compare(Slow(1e6), Waking(12e6), seconds=0.2, min_quads=4, max_quads=4)
    assert found.estimates is not None, "no quad was quiet"
    assert found.ratio.low == pytest.approx(12, rel=0.1)


def test_the_fastest_calls_decide_where_the_cores_change_their_pace_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(Clockwork):
        made = 0

        def block(self, calls: int) -> list[int]:
            times = super().block(calls)
            self.made += calls
            return [ns if number % 16 == 0 else 2 * ns for number, ns in enumerate(times, self.made)]

        def pace(self) -> int:
            return next(paces)

    class Rarely(Changing):
        pid = os.getppid()

        def block(self, calls: int) -> list[int]:
            return [ns if number % 3 else 2 * ns for number, ns in enumerate(Clockwork.block(self, calls))]

    paces = itertools.cycle([100, 210, 100])
    monkeypatch.setattr(pairs, "usage", lambda before, after: share(0.05))
    found = compare(Changing(1e6), Rarely(12e6), seconds=0.2, min_quads=4, max_quads=4)
    assert found.ratio.value == pytest.approx(12, rel=0.02), "6 by the tenth quantiles"
    assert found.ratio.low < 6.2


@pytest.mark.usefixtures("quiet")
def test_quads_on_a_core_that_is_slower_than_usual_are_thrown_away_and_counted() -> None:
    """Which no counter of the system shows, where another machine has the other half of the core."""

    class Contended(Clockwork):
        blocks = 0

        def block(self, calls: int) -> list[int]:
            self.blocks += 1
            return [ns * 3 for ns in super().block(calls)] if self.slow else super().block(calls)

        @property
        def slow(self) -> bool:
            return self.blocks // 4 % 3 == 2

        def pace(self) -> int:
            return 1400 if self.slow else 1000

    found = compare(Contended(1e6), Clockwork(2e6), seconds=20, min_quads=6, width=0.001, max_quads=30, process_noise=0.0)
    assert found.discarded >= 12
    assert found.slowed == 0
    assert found.ratio.value == pytest.approx(2)
    assert found.ratio.width < 0.01


@pytest.mark.usefixtures("quiet")
def test_all_quads_give_the_ratio_of_steps_where_the_cores_change_their_pace() -> None:
    """Four chosen quads of 57 gave 1.19 to 1.41, within 13% to 64%; all of them gave 1.28."""
    draws = random.Random(0)

    class Changing(Clockwork):
        def block(self, calls: int) -> list[int]:
            factor = draws.choice([1, 1.9])
            return [round(factor * ns) for ns in super().block(calls)]

        def pace(self) -> int:
            return draws.choice([1000, 1900])

    limits: dict[str, Any] = {"seconds": 20, "min_quads": 4, "max_quads": 60, "width": 0.001, "process_noise": 0.0}
    found = compare(Changing(4e6), Changing(8e6), keep_slowed=True, **limits)
    assert found.pairs > 100
    assert found.discarded == 0
    assert found.slowed > 0.5, "which the record still says"
    assert found.ratio.low < 2 < found.ratio.high
    assert found.ratio.width < 0.5 * compare(Changing(4e6), Changing(8e6), **limits).ratio.width


@pytest.mark.usefixtures("quiet")
def test_a_clock_that_was_fast_at_first_only_is_soon_forgotten() -> None:
    class Hot(Clockwork):
        asked = 0

        def pace(self) -> int:
            self.asked += 1
            return 1000 if self.asked < 6 else 1400

    found = compare(Hot(1e6), Clockwork(2e6), seconds=20, min_quads=6, max_quads=30)
    assert found.pairs == 12
    assert found.discarded <= 8, "only until the slower clock has become the usual one"


class Joined(Clockwork):
    """Two threads that begin and end a parallel operation in 5 us."""

    def fork_join(self) -> int | None:
        return 5_000


@pytest.mark.usefixtures("quiet")
def test_the_time_of_a_parallel_operation_stands_with_the_times_of_the_calls() -> None:
    found = compare(Clockwork(1e6), Joined(2e6), seconds=20, max_quads=2)
    assert found.rival.conditions["fork_join_ns"] == 5_000
    assert "fork_join_ns" not in found.candidate.conditions


def test_another_process_says_how_many_threads_it_has_and_how_they_meet() -> None:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="trimtab-test-"))
    environment = {**os.environ, "OMP_WAIT_POLICY": "active"}
    for mode, known in (("parallel", torch.get_num_threads() > 1), ("works", False)):
        served = [sys.executable, str(TESTS / "_served.py"), str(folder / mode), "50", mode]
        process = subprocess.Popen(served, env=environment)
        with RemoteRunner(folder / mode, KEY) as runner:
            found = runner.fork_join()
            timed = compare(LocalRunner(Work(50, "works"), threads=1), runner, seconds=0.1)
            runner.stop()
        process.wait()
        assert timed.rival.conditions.get("threads") == (2 if mode == "parallel" else None)
        assert timed.conditions.startswith("1 thread against 2, others used " if mode == "parallel" else "others used ")
        assert (found is not None and found > 0) is known
    shutil.rmtree(folder)


@pytest.mark.usefixtures("quiet")
def test_calls_of_seconds_get_two_quads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "LONG_S", 0.1)
    found = compare(Clockwork(1e8, nap=0.1), Clockwork(2e8, nap=0.1), seconds=0.1, min_quads=6)
    assert found.pairs == 4
    assert found.stopped_by == "time"


def start_of(ratio: float, half: float = 0.005, *, ms: float = 1.0, **more: Any) -> Comparison:
    rival = Measurement(unit="ms", n=10, median=ms, interval=Interval(ms, 0.9 * ms, 1.1 * ms), conditions={"pace_ns": 200_000})
    candidate = dataclasses.replace(rival, median=ms / ratio, interval=Interval(ms / ratio, 0.9 * ms / ratio, 1.1 * ms / ratio))
    bounds = Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half))
    return Comparison(ratio=bounds, pairs=12, candidate=candidate, rival=rival, discarded=4, **more)


def seen_at(ms: float, pace_ns: int = 200_000, **more: Any) -> Comparison:
    found = start_of(3.0, ms=ms, **more)
    return dataclasses.replace(found, rival=dataclasses.replace(found.rival, conditions={"pace_ns": pace_ns}))


def test_several_starts_are_as_sure_as_they_agree() -> None:
    alike = pooled([start_of(ratio) for ratio in (2.0, 2.002, 1.998)])
    assert alike.ratio.value == pytest.approx(2, rel=1e-3)
    prior = PRIOR_STARTS * (pairs.PROCESS_NOISE**2 + (0.005 / 1.96) ** 2)
    drift = 1.96 * DRIFT  # starts that follow each other share it
    alone = t_quantile(0.975, PRIOR_STARTS + 2) * math.sqrt((prior + 2e-6) / (PRIOR_STARTS + 2) / 3)
    assert alike.ratio.width == pytest.approx(2 * math.hypot(alone, drift), rel=0.01)
    several = (2.0, 2.2, 1.8, 2.1, 1.9, 2.05)
    apart = pooled([start_of(ratio) for ratio in several])
    spread = statistics.stdev(math.log(r) for r in several)
    assert apart.process_noise == pytest.approx(spread)
    freedom = PRIOR_STARTS + 5
    half = math.hypot(t_quantile(0.975, freedom) * math.sqrt((prior + 5 * spread**2) / freedom / 6), drift)
    assert math.log(apart.ratio.high / apart.ratio.low) == pytest.approx(2 * half, rel=0.001)
    assert (apart.starts, apart.pairs, apart.discarded, apart.candidate.n) == (6, 72, 24, 60)
    assert apart.candidate.interval.low == pytest.approx(0.9 / 2.2)
    told = "each time they start the two run at another ratio, by 7% over 6 starts"
    assert apart.differs == told
    assert dataclasses.replace(apart, rival_ms=(0.41, 0.52)).differs == f"{told}; the baseline took 0.41 to 0.52 ms"
    assert alike.differs is None
    assert pooled([start_of(1.5, foreign=0.3), start_of(2.5, foreign=0.1)]).foreign == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("own", "rival", "words"),
    [(2, 2, "2 threads each, "), (1, 2, "1 thread against 2, "), (1, 1, "one thread each, "), (2, None, ""), (None, None, "")],
)
def test_the_conditions_name_the_threads_of_both_sides_and_what_others_used(
    own: int | None, rival: int | None, words: str
) -> None:
    one, two = (dataclasses.replace(start_of(2.0).rival, conditions={} if n is None else {"threads": n}) for n in (own, rival))
    found = dataclasses.replace(start_of(2.0, foreign=0.4, stolen=0.03), candidate=one, rival=two)
    assert found.conditions == f"{words}others used 43% of the CPUs"
    assert f"\nconditions: {found.conditions}\n" in f"{Timing(subject='one', rival='other', comparison=found)}\n"


def test_two_starts_that_agree_by_chance_are_not_believed() -> None:
    two = pooled([start_of(2.0), start_of(2.0)]).ratio
    assert 0.04 < two.width < 0.09
    apart = pooled([start_of(2.0), start_of(2.2)]).ratio
    assert 1.7 < apart.low < 1.95, "and where they differ the prior keeps them from saying nothing: 1.14 by t of two alone"
    one = pooled([start_of(2.0)]).ratio
    assert one.high == pytest.approx(2 * math.exp(math.hypot(1.96 * pairs.PROCESS_NOISE, 0.005)), rel=1e-4)


def test_an_unlucky_start_widens_the_interval_and_does_not_move_the_figure() -> None:
    unlucky = pooled([start_of(ratio) for ratio in (2.0, 2.01, 1.2, 1.99, 2.0, 2.0)]).ratio
    assert unlucky.value == pytest.approx(2.0)
    assert unlucky.width > 0.3


def test_a_fifth_of_the_processes_at_another_speed_do_not_widen_the_interval() -> None:
    ratios = [13.3, 13.5, 19.2, 13.4, 13.2, 13.6, 130.0, 13.4, 13.3, 13.5, 13.4, 13.4]
    found = pooled([start_of(ratio, half=0.01) for ratio in ratios]).ratio
    assert found.value == pytest.approx(13.4)
    assert 12.9 < found.low < 13.4 < found.high < 14.2
    half = pooled([start_of(ratio, half=0.01) for ratio in (13.4, 19.2) * 6]).ratio
    assert half.low < 13.5 < 19.1 < half.high


def test_the_interval_of_starts_holds_as_often_as_it_says() -> None:
    """For starts that differ by less than the prior says, by about as much, and by far more."""
    generator = random.Random(0)
    for sigma in (0.005, 0.025, 0.1):
        held = 0
        for _ in range(400):
            ratio = pooled([start_of(2 * math.exp(generator.gauss(0, sigma)), half=0.002) for _ in range(STARTS)]).ratio
            held += ratio.low <= 2 <= ratio.high
        assert held >= 0.9 * 400, f"{held} of 400 at a standard deviation of {sigma:.1%}"


def test_what_the_study_saw_of_the_original_counts() -> None:
    starts = [start_of(10.0 * (1 + 0.01 * i), ms=0.52) for i in (-1, 0, 1, 0, -1, 1)]
    alone = pooled(starts)
    assert alone.rival_ms == (0.52, 0.52)
    same = pooled(starts, [seen_at(0.52), seen_at(0.523)])
    assert same.ratio.width == pytest.approx(alone.ratio.width, rel=0.05)
    other = pooled(starts, [seen_at(0.41), seen_at(0.411), seen_at(0.409)])
    assert other.rival_ms == (0.409, 0.52)
    assert other.ratio.low == pytest.approx(10.0 * 0.41 / 0.52, rel=0.001), "as it was when the search timed it"
    assert other.ratio.value == alone.ratio.value
    slower = pooled(starts, [seen_at(0.7)])
    assert slower.ratio.high == pytest.approx(10.0 * 0.7 / 0.52, rel=0.001)
    machine = pooled(starts, [seen_at(0.7, pace_ns=300_000)])
    assert machine.ratio == alone.ratio, "where the cores themselves were slower, both sides were"
    assert pooled(starts, [seen_at(288.0, foreign=0.1)]).ratio == alone.ratio, "nor do neighbours tell of the model"
    assert pooled(starts, [seen_at(0.7, slowed=0.75)]).ratio == alone.ratio, "nor does a core that is slow most of the time"
    disturbed = [dataclasses.replace(each, estimates=(each.ratio.value,) * 2) for each in starts]
    assert pooled(disturbed, [seen_at(0.41)]).ratio == pooled(disturbed).ratio, "times of disturbed starts tell of the machine"
    wide = math.hypot(math.log(alone.ratio.high / 10.0), 1.96 * math.sqrt(DISTURBED_DRIFT**2 - DRIFT**2))
    assert math.log(pooled(disturbed).ratio.high / 10.0) == pytest.approx(wide, rel=0.01), (
        "from minute to minute it differs more"
    )
    varied = pooled(starts, [seen_at(ms) for ms in (0.45, 0.6, 0.5, 0.54)])
    assert varied.ratio.width > 1.5 * alone.ratio.width, "what it varied by during the search is in the prior"


def joined(ratio: float, ns: int, pace_ns: int = 200_000, threads: int = 2) -> Comparison:
    """A start, or a trial of the search, whose rival's threads met in ``ns``."""
    found = start_of(ratio, ms=ratio / 39 * pace_ns / 200_000)
    conditions = {"pace_ns": pace_ns, "fork_join_ns": ns}
    return dataclasses.replace(
        found,
        rival=dataclasses.replace(found.rival, conditions=conditions, p90=1.0),
        candidate=dataclasses.replace(found.candidate, conditions={"threads": threads}),
    )


def test_starts_in_which_threads_met_slowly_do_not_count() -> None:
    fast, slow = [joined(13.3 + 0.05 * i, 4_600 + 50 * i) for i in range(8)], [joined(19.5, 7_000)] * 8
    seen = [joined(13.4, 4_900)] * 10
    alone, found = pooled(fast, seen), pooled([*slow, *fast], [*seen, *slow])
    assert found.ratio == alone.ratio
    assert (found.starts, found.starts_left_out, alone.starts_left_out) == (8, 8, 0)
    assert found.rival_ms == (pytest.approx(13.3 / 39), pytest.approx(0.5)), "all that was seen"
    assert usual_starts([*slow, *fast], seen) == fast
    assert pooled([*slow, *fast]).starts_left_out == 0, "without a search, all starts count"
    few = pooled([*slow, *fast[:4]], [*seen, *slow])
    assert (few.starts, few.starts_left_out) == (4, 8)
    assert few.ratio.high < 14.5
    every = pooled([*slow, *fast[:3]], seen)
    assert (every.starts, every.starts_left_out, every.starts_corrected) == (11, 0, 0), "three are too few"
    assert every.ratio.low <= 13.5 < 19.4 < every.ratio.high, "what the search saw of the original widens the interval"
    alike = [dataclasses.replace(each, rival=dataclasses.replace(each.rival, median=13.3 / 39)) for each in slow]
    assert pooled([*alike, *fast], seen).starts_left_out == 0, "a model whose time does not depend on it"
    cores = [joined(13.4, 7_000, pace_ns=290_000)] * 8
    assert pooled([*cores, *fast], seen).starts_left_out == 0, "slow cores take longer for everything, on both sides"
    usually = pooled([*slow, joined(13.3, 4_900)], slow)
    assert usually.starts_left_out == 0
    assert usually.ratio.value == pytest.approx(19.5), "a machine that is so most of the time is as it is"


def test_the_search_tells_how_long_the_original_takes_if_threads_met_slowly_in_all_starts() -> None:
    seen, usual = [joined(13.4, 4_900)] * 10, joined(13.3, 4_900, threads=1)
    slow = [joined(19.5 + 0.1 * i, 7_000, threads=1) for i in range(-3, 4)]
    found = pooled([*slow, usual], seen)
    assert (found.starts, found.starts_left_out, found.starts_corrected) == (8, 0, 7)
    assert found.ratio.value == pytest.approx(13.4, rel=0.01)
    assert found.ratio.low < 13.4 * 0.93, "its times were not measured in turns"
    assert 13.4 * 1.07 < found.ratio.high < 15.5
    assert found.rival.median == pytest.approx(13.4 / 39)
    assert found.rival.p90 is None
    assert found.rival_ms is not None
    assert found.rival_ms[1] > 0.49
    two = pooled([dataclasses.replace(each, candidate=usual.rival) for each in slow], seen)
    assert two.starts_corrected == 0, "threads of the candidate may have met slowly too"
    assert two.ratio.low < 13.5 < 19.5 == pytest.approx(two.ratio.value)
    assert pooled(slow, seen[:3]).starts_corrected == 0, "three trials are too few"


def test_what_neighbours_did_to_every_start_is_not_averaged_out() -> None:
    starved = Interval(400.0, 0.5, 900.0)
    starts = [start_of(400.0, sampling=Interval(400.0, 390.0, 410.0)) for _ in range(STARTS)]
    starts = [dataclasses.replace(each, ratio=starved, estimates=(0.5, 900.0)) for each in starts]
    found = pooled(starts).ratio
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(900.0))
    assert found.unclear
    few = pooled([*starts[:2], *[start_of(2.0) for _ in range(6)]]).ratio
    assert few.value == pytest.approx(2.0), "two of eight do not decide"
    wide = [start_of(2.0, sampling=Interval(2.0, 1.0, 4.0)) for _ in range(STARTS)]
    wide = [dataclasses.replace(each, ratio=each.sampling, estimates=(1.9, 2.2)) for each in wide]
    found = pooled(wide).ratio
    assert 1.5 < found.low <= 1.9
    assert 2.2 <= found.high < 2.7, "the spread of the samples in a start is averaged out"


def test_how_many_starts_there_are() -> None:
    assert not narrow([start_of(2.0), start_of(2.4)])
    assert narrow([start_of(2.0 + 0.01 * i) for i in range(STARTS)])
    assert MOST_STARTS > STARTS >= 6
    assert number_of_starts(0.001, 0.01, 10.0) == STARTS
    assert number_of_starts(0.1, 0.4, 10.0) == 2
    assert number_of_starts(1.0, 4.0, 10.0) == 1
    assert number_of_starts(0.001, 0.01, 0.2) == 1


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (1.03, "faster"),
        (1.013, "no difference that can be proven"),
        (1 / 1.013, "no difference that can"),
        (1 / 1.03, "slower"),
    ],
)
def test_less_than_two_percent_is_never_called_a_gain(ratio: float, told: str) -> None:
    found = pooled([start_of(ratio * each) for each in (0.9999, 1.0, 1.0001)])
    assert f"pairs: {told}" in str(Timing(subject="one", rival="other", comparison=found))
    assert found.ratio.faster is (told == "faster")


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (Interval(300.0, 8.872, 5830.0), "no difference that can be proven"),
        (Interval(300.0, 41.0, 5830.0), "faster"),
        (Interval(0.01, 0.005, 0.02), "slower"),
        (Interval(0.3, 0.05, 0.9), "no difference that can be proven"),
    ],
)
def test_bounds_that_may_not_hold_are_quoted_by_the_nearer_one_and_decide_little(ratio: Interval, told: str) -> None:
    found = str(Timing(subject="one", rival="other", comparison=dataclasses.replace(start_of(1.0), ratio=ratio)))
    quoted = f"at least {ratio.low:.3f}x" if ratio.low > 1 else f"at most {ratio.high:.3f}x"
    assert f"speed-up {quoted} (95% interval {ratio.low:.3f} to {ratio.high:.3f}) over 12 pairs: {told}\n" in found


def test_an_upper_bound_that_says_nothing_is_cut() -> None:
    assert Interval(300.0, 0.114, 20673940539.7).times() == "unclear (0.11 to over 1000)"
    assert Interval(300.0, 0.114, 20673940539.7).multiple() == "0.11x to over 1000x"
    assert Interval(300.0, 0.114, 640.0).multiple() == "0.11x to 640.00x"
    assert Interval(300.0, 5.636, 20673940539.7).times() == "at least 5.64x (5.64 to over 1000)"
    assert Interval(12.9, 5.636, 32.2).multiple() == "at least 5.64x (5.64 to 32.20)"
    assert (Interval(12.9, 5.636, 32.2).single(), Interval(0.3, 0.1, 0.72).single()) == ("at least 5.64x", "at most 0.72x")
    assert not Interval(12.9, 5.636, 32.2).unclear
    assert Interval(2000.0, 1900.0, 2100.0).times() == "2000.00x (1900.00 to 2100.00)"


def test_a_neighbour_is_noticed() -> None:
    burn = "import time\nend=time.time()+60\nwhile time.time()<end: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(os.cpu_count() or 1)]
    try:
        work = LocalRunner(Work(50, "works"))
        found = compare(
            work, work, seconds=1.5, min_quads=3, pids=[2**22 + 1]
        )  # a process that does not exist: all are foreign
    finally:
        for process in neighbours:
            process.kill()
            process.wait()
    if not found.rival.conditions["cpu_watched"]:
        pytest.skip("this system does not say who has the CPU")
    assert found.foreign > 0.5
    assert found.stopped_by == "time"


def test_quick(served: RemoteRunner) -> None:
    found = quick(LocalRunner(Work(50, "works")), served, seconds=1.0)
    assert found.pairs >= 4
    assert found.ratio.value > 1


def test_a_runner_that_gives_too_few_times_is_found_out() -> None:
    class Lazy(Clockwork):
        def block(self, calls: int) -> list[int]:
            return super().block(calls)[:1]

    with pytest.raises(MeasurementError, match="calls and gave the times of 1"):
        compare(Lazy(1e3, nap=0.0001), Clockwork(1e3, nap=0.0001), seconds=1)


def test_slow_calls_get_four_pairs_and_no_blame() -> None:
    one, other = Clockwork(1e8, nap=0.05, wobble=(1, 1.4)), Clockwork(2e8, nap=0.05, wobble=(1, 1.5, 1.1))
    found = compare(one, other, seconds=0.02, min_quads=6, width=1e-6)
    assert found.pairs >= 4
    slow = dataclasses.replace(found, pairs=4, foreign=0.01, stolen=0.0, ratio=Interval(1.5, 1.0, 2.0))
    assert str(slow.doubt).startswith("Only 4 pairs were measured in the time for it")
    busy = dataclasses.replace(slow, foreign=0.3)
    assert str(busy.doubt).startswith("The machine was too busy to measure well")
