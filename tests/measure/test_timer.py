"""Blocks of calls, and the warm-up before them."""

from __future__ import annotations

import gc
import itertools
import os
import time

import pytest
import torch

from trimtab.measure.timer import LocalRunner, Runner, calls_for, fork_join, synchronizer, unrecorded_calls, warm_up

pytestmark = pytest.mark.alone


def test_a_block_gives_the_time_of_every_call() -> None:
    lengths = itertools.cycle([0.001, 0.004])
    runner = LocalRunner(lambda: time.sleep(next(lengths)))
    assert isinstance(runner, Runner)
    assert runner.pid == os.getpid()
    times = runner.block(3)  # three calls have no unrecorded ones before them
    assert times[0] >= 1_000_000
    assert times[1] >= 4_000_000
    assert all(isinstance(ns, int) for ns in times)


@pytest.mark.parametrize(("calls", "extra"), [(1, 0), (3, 0), (4, 1), (16, 2), (800, 100)])
def test_unrecorded_calls_are_a_bounded_share(calls: int, extra: int) -> None:
    made: list[int] = []
    assert len(LocalRunner(lambda: made.append(1)).block(calls)) == calls
    assert len(made) == calls + extra
    assert unrecorded_calls(calls) == extra


def test_work_is_waited_for() -> None:
    pending: list[float] = []

    def wait() -> None:
        while pending:
            time.sleep(pending.pop())

    times = LocalRunner(lambda: pending.append(0.003), wait).block(3)
    assert min(times) >= 3_000_000
    assert not pending


def test_the_collector_is_off_within_a_block_and_as_before_after_it() -> None:
    seen: list[bool] = []
    LocalRunner(lambda: seen.append(gc.isenabled())).block(2)
    assert seen == [False, False]
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        LocalRunner(fail).block(1)
    assert gc.isenabled()
    gc.disable()
    try:
        LocalRunner(lambda: None).block(1)
        assert not gc.isenabled()
    finally:
        gc.enable()


class Scripted:
    """Gives times from a list while it takes the wall-clock time that they say, scaled."""

    pid = 1

    def __init__(self, seconds: list[float], scale: float = 1.0) -> None:
        self._seconds = seconds
        self._scale = scale
        self.blocks = 0

    def block(self, calls: int) -> list[int]:
        length = self._seconds[min(self.blocks, len(self._seconds) - 1)]
        self.blocks += 1
        time.sleep(length * calls)
        return [int(length * 1e9 * self._scale)] * calls

    def pace(self) -> int:
        return 1000


def test_warm_up_ends_when_blocks_are_steady_and_not_before() -> None:
    runner = Scripted([0.05, 0.04, 0.02, 0.015, 0.012, 0.01])
    found = warm_up(runner, seconds=20, block_s=0.03)
    assert found.steady
    assert runner.blocks >= 8, "the last three blocks must be of the final speed"
    assert found.seconds < 20


def test_warm_up_gives_up_when_time_is_up_and_says_so() -> None:
    found = warm_up(Scripted([0.02, 0.03] * 500), seconds=0.4, block_s=0.03)
    assert not found.steady
    assert found.calls_per_block >= 1


def test_block_length_comes_from_the_wall_clock_and_not_from_scaled_times() -> None:
    found = warm_up(Scripted([0.002], scale=1e-3), seconds=5, block_s=0.04)
    assert 5 <= found.calls_per_block <= 30
    assert 0.001 < found.call_s < 0.008


def test_slow_calls_are_made_three_times_and_fast_ones_are_capped() -> None:
    slow = Scripted([0.05])
    assert warm_up(slow, seconds=0.05, block_s=0.03).calls_per_block == 1
    assert slow.blocks == 3
    very_slow = Scripted([0.5])
    warm_up(very_slow, seconds=0.05, block_s=0.03)
    assert very_slow.blocks == 1
    assert calls_for(0.075, 1e-12) == 5_000
    assert calls_for(0.075, 3.0) == 1


def test_threads_that_begin_and_end_an_operation_are_timed_where_they_make_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    try:
        torch.set_num_threads(2)
        assert 0 < fork_join() < 1e9
        with torch.inference_mode():
            assert fork_join() > 0
        found = LocalRunner(lambda: None, parallel=True).fork_join()
        assert found is not None
        assert found > 0
        assert LocalRunner(lambda: None).fork_join() is None, "a runtime has its own threads"
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        assert LocalRunner(lambda: None, parallel=True).fork_join() is None, "threads that sleep are woken by the kernel"
        monkeypatch.delenv("OMP_WAIT_POLICY")
        torch.set_num_threads(1)
        assert LocalRunner(lambda: None, parallel=True).fork_join() is None
    finally:
        torch.set_num_threads(before)


def test_the_cpu_needs_no_waiting() -> None:
    assert synchronizer("cpu") is synchronizer(torch.device("cpu")) is not synchronizer("meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_work_is_timed_to_its_end() -> None:
    x = torch.randn(4096, 4096, device="cuda")

    def call() -> object:
        return x @ x

    launched, waited = LocalRunner(call), LocalRunner(call, synchronizer("cuda"))
    for runner in (launched, waited):
        runner.block(20)
    torch.cuda.synchronize()
    work = sorted(waited.block(20))[10]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    busy = sorted(a.elapsed_time(b) * 1e6 for a, b in itertools.pairwise(marks))[10]  # by the device
    assert work >= 0.8 * busy
    assert busy > 2 * 4096**3 / 1e15 * 1e9, "faster than a petaflop: it was not waited for"
    assert sorted(launched.block(3))[1] < work
    torch.cuda.synchronize()
