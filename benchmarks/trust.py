"""Can trimtab's verdicts be believed? Things with a known answer are put to it, and the answers are counted.

    python benchmarks/trust.py            # 200 comparisons of a model with itself, 20 replays: about three hours
    python benchmarks/trust.py --quick    # 20 comparisons, 5 replays: about 25 minutes
    python benchmarks/trust.py --parts C  # the replays alone
    python benchmarks/trust.py --parts A --neighbours 2 --pairs 20  # beside two processes that use all cores

Part A compares a model with itself, over and over: how often does it say "faster"? By its interval it may in 2.5% of all cases;
more than 5% is a failure. Two processes that hold the same model differ for as long as they live, by how their memory happens
to be laid out, so each comparison is made as trimtab makes those that it hands over: in several starts of new processes.

Part B takes scores away from a seeded share of the examples and asks whether the drop keeps a limit: how often does the verdict
contradict the truth, and are drops caught where the examples suffice: four times the limit by 2000 of them, twice the limit by
10000? (Where 1.5% of the examples are lost and 0.5% won, 2000 examples find a drop of twice a limit of 1% in 78% of all cases
at best, which is why it is not asked of them.)

Part C lets trimtab optimize a workload, then compares the artifact with it again in fresh processes: how many of the replayed
speed-ups are within 5% of the reported one? 95% should. Where fewer of the replays are within 5% of their own middle, the
machine's noise forbids an answer, which is then said in place of one.

The exit status is 1 if one of the parts fails, 0 if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pathlib
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per side: torch reads it when it is imported

import numpy as np
import torch
from practical import Neighbours
from torch import nn

import trimtab
from trimtab.core.measurement import Comparison
from trimtab.measure.pairs import compare
from trimtab.measure.pooled import MOST_STARTS, STARTS, narrow, pooled, start_timing
from trimtab.measure.quantiles import binomial_cdf
from trimtab.measure.remote import RemoteRunner, serve
from trimtab.measure.stats import median_interval, paired_drop
from trimtab.measure.timer import LocalRunner

KEY = "TRUST_KEY"
REPLAYED, REPLAY_SHARE = 0.05, 0.95
"""A replayed speed-up should be within this of the reported one, in this share of the replays."""
SEARCH = "2m"
"""What ``make demo`` gives the search: a shorter one ends before it has come to threads, and ships what is less steady."""
DIGITS = pathlib.Path(__file__).parent.parent / "examples" / "digits.py"
MOST_FASTER = 0.05
WORDS = {True: "holds", False: "FAILS", None: "cannot be told on this machine now"}


@dataclasses.dataclass(frozen=True)
class Part:
    """The outcome of one part; ``ok`` is ``None`` where the machine is too noisy for one."""

    ok: bool | None
    lines: list[str]


def main() -> int:
    """Run the parts and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the comparisons")
    parser.add_argument("--parts", default="ABC", metavar="LETTERS", help="the parts to run (default: ABC)")
    parser.add_argument("--pairs", type=int, help="comparisons of part A (default 200, quick 20)")
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside part A (default 0)")
    parser.add_argument("--seconds", type=float, default=4.0, help="time of one comparison (default 4)")
    parser.add_argument("--replay", metavar="WORKLOAD", default=str(DIGITS), help="workload of part C (default: the digits)")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(runner(), options.serve, bytes.fromhex(os.environ[KEY]))
        return 0
    if not options.parts or set(options.parts) - set("ABC"):
        parser.error(f"--parts is {options.parts!r}: letters of ABC are needed, such as AC")
    count = options.pairs or (20 if options.quick else 200)
    print(f"conditions: {conditions()}", flush=True)
    parts: dict[str, Callable[[], Part]] = {
        "A: the same model in two processes": lambda: beside(options.neighbours, count, options.seconds),
        "B: seeded drops": lambda: drops(60 if options.quick else 400),
        "C: a reported speed-up, replayed": lambda: replay(options.replay, 5 if options.quick else 20),
    }
    failed = 0
    for name, run in parts.items():
        if name[0] not in options.parts:
            continue
        print(f"\n{name}", flush=True)
        part = run()
        failed += part.ok is False
        print("\n".join(f"  {line}" for line in part.lines))
        print(f"  {WORDS[part.ok]}", flush=True)
    return int(failed > 0)


def conditions() -> str:
    """The machine and the versions, in one line."""
    basics = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread"
    )
    try:
        environment = importlib.import_module("trimtab.hardware.environment").Environment.capture()
    except ImportError:
        return basics
    return f"{basics}; {environment.cpu}" if hasattr(environment, "cpu") else basics


def runner() -> LocalRunner:
    """A small convolutional network on one image, some hundreds of microseconds per call."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)]
    model, image = nn.Sequential(*layers).eval(), torch.randn(1, 3, 32, 32)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return model(image)

    call()
    return LocalRunner(call)


@contextmanager
def servers() -> Iterator[tuple[RemoteRunner, RemoteRunner]]:
    """The model in two processes of their own, which start side by side."""
    key = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory(prefix="trust-") as folder:
        addresses = [str(pathlib.Path(folder) / name) for name in "ab"]
        command, environment = [sys.executable, __file__, "--serve"], {**os.environ, KEY: key.hex()}
        processes = [subprocess.Popen([*command, address], env=environment) for address in addresses]
        try:
            one, other = (RemoteRunner(address, key, connect_s=60) for address in addresses)
            with one, other:
                yield one, other
        finally:
            for process in processes:
                process.kill()
                process.wait()


def beside(neighbours: int, count: int, seconds: float) -> Part:
    """Part A, beside a number of busy processes."""
    with Neighbours(neighbours):
        return same(count, seconds)


def same(count: int, seconds: float) -> Part:
    """Part A."""
    found: list[Comparison] = []
    begun = time.perf_counter()
    while len(found) < count:
        starts: list[Comparison] = []
        while len(starts) < STARTS or (len(starts) < MOST_STARTS and not narrow(starts)):
            with servers() as (candidate, rival):
                timing = start_timing(seconds, STARTS)
                starts.append(compare(candidate, rival, **timing._asdict(), process_noise=0.0))
        found.append(pooled(starts))
        left = (time.perf_counter() - begun) / len(found) * (count - len(found))
        above = sum(each.ratio.low > 1 for each in found)
        print(f"  {len(found)} of {count}, {above} said faster, about {left:.0f} s left", file=sys.stderr, flush=True)
    faster = sum(each.ratio.low > 1 for each in found)
    slower = sum(each.ratio.high < 1 for each in found)
    off = sorted(abs(each.ratio.value - 1) for each in found)
    rate = faster / count
    luck = 1 - binomial_cdf(faster - 1, count, 0.025)
    middle = {name: median_interval([getattr(each, name) for each in found]).value for name in ("process_noise", "slowed")}
    lines = [
        f"{count} comparisons of at most {seconds:g} s in {time.perf_counter() - begun:.0f} s",
        f'said "faster" in {faster} ({rate:.1%}; at most {MOST_FASTER:.0%} may), "slower" in {slower} ({slower / count:.1%})',
        f"chance of so many or more if the intervals are right: {luck:.2g}",
        f"starts: {sum(each.starts for each in found)}, which differ by {middle['process_noise']:.2%} (median)",
        f"distance from 1: median {off[len(off) // 2]:.2%}, largest {off[-1]:.2%}",
        f"width of the interval: median {median_interval([each.ratio.width for each in found]).value:.2%}",
        f"quads kept {sum(each.pairs for each in found) // 2}, thrown away {sum(each.discarded for each in found) // 4}",
        f"foreign CPU in what was kept: {np.mean([each.foreign for each in found]):.1%}, "
        f"stolen {np.mean([each.stolen for each in found]):.1%}, on a slow core {np.mean([each.slowed for each in found]):.1%}",
        f"stopped by: {', '.join(f'{k} {n}' for k in ('width', 'time', 'pairs') if (n := stops(found, k)))}",
    ]
    return Part(rate <= MOST_FASTER, lines)


def stops(found: list[Comparison], why: str) -> int:
    """How many comparisons ended by ``why``."""
    return sum(each.stopped_by == why for each in found)


def drops(count: int) -> Part:
    """Part B: a classifier that is right in 95% loses a known share of its right answers."""
    rng, limit, lines, ok = np.random.default_rng(0), 0.01, [], True
    for n in (450, 2000, 10_000):
        for truth in (0.0, 0.005, 0.01, 0.02, 0.04):
            said = [verdict(rng, n, truth, limit) for _ in range(count)]
            passed, refused = (sum(v is answer for v in said) / count for answer in (True, False))
            wrong = passed if truth >= limit else refused  # a drop of just the limit passes at most one time in twenty
            allowed = 0.05 + 3 * (0.05 * 0.95 / count) ** 0.5
            enough = (n >= 2000 and truth >= 4 * limit) or (n >= 10_000 and truth >= 2 * limit)
            ok &= wrong <= allowed and not (enough and refused < 0.9)
            lines.append(
                f"n={n:<6} true drop {truth:.1%}, limit {limit:.1%}: passed {passed:.1%}, refused {refused:.1%}, "
                f"undecided {1 - passed - refused:.1%}"
            )
    return Part(ok, lines)


def replay(workload: str, count: int) -> Part:
    """Part C: optimize ``workload``, then compare its artifact with it again and again, each time in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="trust-") as folder:
        result = trimtab.optimize(workload, limits=trimtab.Limits(max_drop=0.02), budget=SEARCH, out=folder)
        best = result.best
        if best is None or best.artifact is None or best.confirmation.speedup is None:
            return Part(False, [f"nothing was shipped: {result.sentence}"])
        reported = best.confirmation.speedup
        found = [trimtab.compare(best.artifact.path, workload).comparison for _ in range(count)]
    ratios = sorted(each.ratio.value for each in found)
    middle = ratios[len(ratios) // 2]
    near, alike = (sum(abs(ratio / figure - 1) <= REPLAYED for ratio in ratios) for figure in (reported.value, middle))
    inside = sum(each.ratio.low <= reported.high and each.ratio.high >= reported.low for each in found)
    foreign = float(np.mean([each.foreign for each in found]))
    slowed = float(np.mean([each.slowed for each in found]))
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {middle:.2f}"
    lines = [
        f"{best.trial.recipe}: reported {reported.value:.2f}x ({reported.low:.2f} to {reported.high:.2f})",
        f"{count} replays: {spread}",
        f"within {REPLAYED:.0%} of that: {near} of {count} ({near / count:.0%}; at least {REPLAY_SHARE:.0%} should)",
        f"intervals that meet the reported one: {inside} of {count}; foreign CPU {foreign:.1%}, on a slow core {slowed:.0%}",
    ]
    if near / count >= REPLAY_SHARE:
        return Part(True, lines)
    lines.append(f"within {REPLAYED:.0%} of the replays' own median: {alike} of {count}")
    return Part(False if alike / count >= REPLAY_SHARE else None, lines)


def verdict(rng: np.random.Generator, n: int, truth: float, limit: float) -> bool | None:
    """What is said of one sample in which a share ``truth`` of the examples is lost and half a percent is won by chance."""
    kind = rng.choice(4, n, p=[truth + 0.005, 0.005, 0.9, 0.09 - truth])  # lost, won, right twice, wrong twice
    baseline = np.isin(kind, (0, 2)).astype(float)
    candidate = np.isin(kind, (1, 2)).astype(float)
    return paired_drop(baseline, candidate, limit=limit).decided


if __name__ == "__main__":
    sys.exit(main())
