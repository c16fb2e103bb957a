"""Samples of programs with one thread: those during which the thread waited for a core do not count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from trimtab.core.measurement import Comparison
from trimtab.measure.pairs import compare
from trimtab.measure.timer import LocalRunner, Sample
from trimtab.measure.undisturbed import compare_undisturbed


def busy(rounds: int) -> None:
    total = 0
    for i in range(rounds):
        total += i


class Waiting:
    """A runner whose samples take ``ns`` while it runs, and wait for ``waited`` more during every other turn."""

    pid = os.getpid()
    threads = 1

    def __init__(self, ns: float, waited: float = 0.0, every: int = 2) -> None:
        self.ns, self.waited, self.every, self.turns = ns, waited, every, 0

    def block(self, calls: int) -> list[int]:
        return [round(self.ns)] * calls

    def pace(self) -> int:
        return 1000

    def samples(self, count: int, calls: int) -> list[Sample]:
        self.turns += 1
        found = []
        for number in range(count):
            waits = self.waited if (number + self.turns) % self.every else 0.0
            found.append(Sample(self.ns * (1 + waits) * (1 + 0.001 * (number % 3)), waits / (1 + waits)))
        return found


def compared(candidate: Waiting, rival: Waiting) -> Comparison:
    return compare_undisturbed(
        candidate, rival, width=0.02, seconds=0.5, min_quads=6, pids={os.getpid()}, conditions={}, process_noise=0.0
    )


@pytest.mark.parametrize("waited", [0.0, 0.5, 40.0])
def test_what_waited_does_not_count(waited: float) -> None:
    found = compared(Waiting(1e6, waited), Waiting(2e6, 3 * waited))
    assert found.ratio.value == pytest.approx(2.0, rel=1e-3)
    assert found.undisturbed == pytest.approx(1.0 if not waited else 0.5, abs=0.05)
    assert found.candidate.median == pytest.approx(1.0, rel=0.01)


def test_where_nearly_all_wait_the_time_counts_for_which_the_thread_ran_and_the_interval_is_wider() -> None:
    found = compared(Waiting(1e6, 0.5, every=10**9), Waiting(3e6, 2.0, every=10**9))
    assert found.undisturbed == 0.0
    assert found.ratio.value == pytest.approx(3.0, rel=0.01)
    assert found.ratio.width > 0.1


def test_one_thread_beside_neighbours_is_measured_as_on_a_quiet_machine() -> None:
    """Twice the work takes twice the time, whatever the neighbours do."""
    one, two = LocalRunner(lambda: busy(4000), threads=1), LocalRunner(lambda: busy(8000), threads=1)
    with _neighbours(2 * len(os.sched_getaffinity(0))):
        found = compare(one, two, seconds=3.0, process_noise=0.0)
    assert found.undisturbed is not None
    assert found.undisturbed < 1.0
    assert found.ratio.value == pytest.approx(2.0, rel=0.1)


def test_several_threads_are_timed_in_blocks() -> None:
    one, two = LocalRunner(lambda: busy(2000), threads=2), LocalRunner(lambda: busy(2000), threads=1)
    assert compare(one, two, seconds=0.3).undisturbed is None


class _neighbours:
    """Processes that use as many cores as there are, twice."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> None:
        self._running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(self._count)]
        time.sleep(0.5)

    def __exit__(self, *error: object) -> None:
        for each in self._running:
            each.send_signal(signal.SIGKILL)
            each.wait()


def test_where_waiting_is_not_counted_the_number_of_threads_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every sample would count as undisturbed."""
    monkeypatch.setattr("trimtab.measure.timer.waits", lambda pid: {})
    one = LocalRunner(lambda: busy(2000), threads=1)
    assert one.threads is None
    assert compare(one, LocalRunner(lambda: busy(2000), threads=1), seconds=0.3).undisturbed is None
