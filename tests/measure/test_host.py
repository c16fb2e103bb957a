"""Who had the CPU: ours, others, the hypervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import pytest

from trimtab.measure.host import (
    TICK_NS,
    Host,
    Snapshot,
    any_runnable,
    computed_ns,
    descendants,
    foreign,
    stolen,
    usage,
    waited_ns,
    waits,
)

pytestmark = pytest.mark.alone

linux = pytest.mark.skipif(not pathlib.Path("/proc/stat").exists(), reason="needs /proc")
BURN = "import time\nend=time.time()+{}\nwhile time.time()<end: pass"


def burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_shares_are_computed_from_snapshots() -> None:
    before = Snapshot(0, 0, 0, 4, {1: 100, 2: 50})
    after = Snapshot(1_000_000_000, 2_000_000_000, 400_000_000, 4, {1: 800_000_100, 2: 200_000_050, 3: 999})
    share = usage(before, after)
    assert share is not None
    assert share.foreign == pytest.approx(0.25)
    assert share.stolen == pytest.approx(0.1)
    assert share.disturbed == pytest.approx(0.35)
    assert share.resolution == pytest.approx(TICK_NS / 4e9)
    assert (foreign(before, after), stolen(before, after)) == (share.foreign, share.stolen)


def test_ticks_that_round_up_and_down_cancel_over_several_spans() -> None:
    tick, spans = 10, [(30, 20), (10, 20), (20, 20), (20, 20)]  # what the kernel counted, what our process used
    shares = [usage(Snapshot(0, 0, 10, 1, {1: 0}), Snapshot(2 * tick, busy, 10, 1, {1: own})) for busy, own in spans]
    assert [share.foreign for share in shares if share] == [0.5, -0.5, 0, 0]
    low = Snapshot(0, 100, 10, 1, {1: 0}), Snapshot(10, 100, 10, 1, {1: 50})
    assert (foreign(*low), stolen(*low)) == (0, 0), "what is shown is never negative"


def test_without_proc_nothing_is_known(tmp_path: pathlib.Path) -> None:
    assert Host([os.getpid()], proc=tmp_path / "none").snapshot() is None
    (tmp_path / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    assert Host([os.getpid()], proc=tmp_path).snapshot() is None, "a sandbox that shows zeros"
    assert usage(None, None) is None
    assert foreign(None, None) is None
    assert stolen(None, None) is None


def test_columns_of_proc_stat(tmp_path: pathlib.Path) -> None:
    (tmp_path / "stat").write_text("cpu  1 2 4 1000 500 8 16 32 1 0\n")  # which lists no CPU by itself
    found = Host([], proc=tmp_path).snapshot()
    assert found is not None
    assert found.busy_ns == 31 * TICK_NS, "user, nice, system, irq, softirq; guest time is in user time already"
    assert found.stolen_ns == 32 * TICK_NS
    assert found.cpus == os.cpu_count()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell which CPUs we may use")
def test_only_the_cpus_that_we_may_use_count(tmp_path: pathlib.Path) -> None:
    usable = sorted(os.sched_getaffinity(0))

    def snapshot(ours: int, others: int) -> Snapshot:
        lines = {f"cpu{cpu}": ours if cpu in usable else others for cpu in range(usable[-1] + 63)}
        total = sum(lines.values())
        text = "".join(f"{name} {busy} 0 0 9 0 0 0 1 0 0\n" for name, busy in {"cpu ": total, **lines}.items())
        (tmp_path / "stat").write_text(text + "intr 1 2 3\n")
        found = Host([], proc=tmp_path).snapshot()
        assert found is not None
        assert found.cpus == len(usable)
        return dataclasses.replace(found, at_ns=(ours + others) * TICK_NS)

    busy_elsewhere, taken = usage(snapshot(5, 0), snapshot(5, 100)), usage(snapshot(0, 0), snapshot(100, 0))
    assert busy_elsewhere is not None
    assert taken is not None
    assert busy_elsewhere.foreign == 0
    assert taken.foreign == 1


@linux
def test_the_cpus_of_the_real_machine_are_those_that_we_may_use() -> None:
    found, code = Host([]).snapshot(), "import os, trimtab.measure.host as h; print(h.Host([]).snapshot().cpus)"
    assert found is not None
    if not pathlib.Path("/proc/stat").read_text().count("\ncpu") >= len(os.sched_getaffinity(0)):
        pytest.skip("this system does not list its CPUs one by one")
    assert found.cpus == len(os.sched_getaffinity(0))
    bound = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {code}"
    told = subprocess.run([sys.executable, "-c", bound], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "1"


@linux
def test_our_children_and_threads_are_ours_and_others_are_not() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN.format(30)]) as child:
        try:
            ours, without = Host([os.getpid()]), Host([])
            pairs = [(host.snapshot(), host) for host in (ours, without)]
            burn(0.6)
            mine, nobody = (usage(before, host.snapshot()) for before, host in pairs)
            assert child.pid in descendants({os.getpid()})
        finally:
            child.kill()
    assert mine is not None
    assert nobody is not None
    assert nobody.foreign > mine.foreign + 0.6 / (os.cpu_count() or 1) * 0.5, "ours must be missing from the foreign share"


@linux
def test_the_share_of_a_stranger_is_seen() -> None:
    host = Host([os.getpid()])
    host.snapshot()
    with subprocess.Popen([sys.executable, "-c", BURN.format(30)]) as child:
        try:
            stranger = Host([child.pid])  # to it, we are the foreign process
            before = stranger.snapshot()
            used = time.process_time()
            burn(0.6)
            used = time.process_time() - used
            share = usage(before, stranger.snapshot())
        finally:
            child.kill()
    assert share is not None
    assert share.foreign >= used / share.seconds / (os.cpu_count() or 1) - 4 * share.resolution


@linux
def test_threads_that_share_a_core_wait_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    children = [subprocess.Popen([sys.executable, "-c", BURN.format(30)]) for _ in range(3)]
    try:
        for child in children:
            os.sched_setaffinity(child.pid, {core})
        before, begun = waits(children[0].pid), time.perf_counter_ns()
        time.sleep(1.0)
        waited, wall = waited_ns(before, waits(children[0].pid)), time.perf_counter_ns() - begun
    finally:
        for child in children:
            child.kill()
            child.wait()
    if not before:
        pytest.skip("this system does not tell how long threads wait")
    assert waited > 0.3 * wall, "it runs a third of the time, or less"


@linux
def test_a_process_that_is_kept_from_a_core_is_runnable_and_does_not_compute() -> None:
    core = min(os.sched_getaffinity(0))
    pin = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\n"
    with contextlib.ExitStack() as stack:

        def started(code: str, nice: int) -> int:
            command = ["nice", "-n", str(nice), sys.executable, "-c", pin + code]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            return process.pid

        asleep, kept = started("import time; time.sleep(60)", 0), started(BURN.format(60), 19)
        other = started(BURN.format(60), 0)
        time.sleep(0.5)
        before = computed_ns([kept]), computed_ns([other])
        time.sleep(1)
        assert computed_ns([kept]) - before[0] < (computed_ns([other]) - before[1]) / 4
        assert [any_runnable([pid]) for pid in (asleep, kept, other)] == [False, True, True]
        assert any_runnable([asleep, kept])
    assert not any_runnable([kept])


def test_how_long_threads_that_are_gone_have_waited_is_not_known(tmp_path: pathlib.Path) -> None:
    (tmp_path / "7" / "task" / "8").mkdir(parents=True)
    assert waits(7, tmp_path) == {}
    (tmp_path / "7" / "task" / "8" / "schedstat").write_text("900 40 3\n")
    assert waits(7, tmp_path) == {8: 40}
    assert waited_ns({7: 5, 8: 10}, {8: 40, 9: 2}) == 32


@linux
def test_a_snapshot_is_cheap_and_outlives_its_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        host = Host([os.getpid(), child.pid])
        before = host.snapshot()
    costs = []
    for _ in range(50):
        begun = time.perf_counter()
        after = host.snapshot()
        costs.append(time.perf_counter() - begun)
    assert after is not None
    assert os.getpid() in after.own_ns
    assert child.pid not in after.own_ns
    assert usage(before, after) is not None
    assert min(costs) < 0.001
