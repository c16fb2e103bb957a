"""Queue, batches, deadlines and the death of instances, with instances that start at once."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import re
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from _fake_instance import DIE, FAIL, SLOW

from trimtab.serve import connection
from trimtab.serve.batcher import Answer, Batcher, Item
from trimtab.serve.connection import StartError
from trimtab.serve.deployment import Deployment, Layout, cores_of
from trimtab.serve.metrics import ModelMetrics
from trimtab.serve.options import Options
from trimtab.serve.protocol import Call, Refusal
from trimtab.serve.tuning import Point, Tuning, choose, tune_layout

HERE = pathlib.Path(__file__).parent


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances are :mod:`_fake_instance`."""
    monkeypatch.setattr(connection, "INSTANCE", "_fake_instance")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")]))


def call(value: float, rows: int = 1, key: Any = "one") -> Call:
    """A request whose values all are ``value``."""
    return Call([np.full((rows, 2), value, "f4").tobytes()], [(rows, 2)], rows, None if key is None else (key,))


def served(use: Callable[[Deployment], Awaitable[None]], instances: int = 1, path: str = "net", **options: Any) -> None:
    """Run ``use`` with a deployment of fake instances."""

    async def main() -> None:
        layout = Layout(instances=instances, threads=1, rows=4)
        deployment = Deployment(pathlib.Path(path), layout, ModelMetrics("net", "1"), lambda *_, **__: None, **options)
        await deployment.start()
        try:
            async with asyncio.timeout(20):
                await use(deployment)
        finally:
            await deployment.stop()
        assert not deployment.busy

    asyncio.run(main())


def value(answer: Answer) -> float:
    """The first value of the answer."""
    return float(np.frombuffer(answer.tensors[0], "f4")[0])


async def outcome(deployment: Deployment, request: Call, timeout_s: float = 10) -> float | int:
    """The first value of the answer, or the status of the refusal."""
    try:
        return value(await deployment.submit(request, timeout_s))
    except Refusal as refusal:
        return refusal.status


def test_requests_join_while_the_instance_is_busy_and_each_gets_its_rows() -> None:
    async def use(deployment: Deployment) -> None:
        first = asyncio.ensure_future(deployment.submit(call(SLOW), 10))
        await asyncio.sleep(0)
        rest = [asyncio.ensure_future(deployment.submit(call(n, rows=1 + n % 2), 10)) for n in range(1, 6)]
        answers = await asyncio.gather(first, *rest)
        assert [value(answer) for answer in answers] == [2 * SLOW, 2, 4, 6, 8, 10]
        assert [answer.shapes for answer in answers[1:]] == [[[1 + n % 2, 2]] for n in range(1, 6)]
        assert [answer.batch_rows for answer in answers] == [1, 3, 3, 3, 3, 2]
        found = deployment.metrics.statistics()
        sizes = {one["batch_size"]: one["compute_infer"]["count"] for one in found["batch_stats"]}
        assert (found["execution_count"], sizes) == (4, {1: 1, 2: 1, 3: 2})

    served(use)


def test_a_lone_request_does_not_wait_and_max_wait_waits() -> None:
    async def use(deployment: Deployment) -> None:
        start = asyncio.get_running_loop().time()
        a, b = await asyncio.gather(deployment.submit(call(1), 10), deployment.submit(call(2), 10))
        assert (a.batch_rows, b.batch_rows) == (2, 2)
        assert asyncio.get_running_loop().time() - start >= 0.05
        assert a.queue_s == b.queue_s == 0 < b.wait_s <= a.wait_s  # the instance was free, and waited for a fuller batch
        four = await asyncio.gather(*[deployment.submit(call(1), 10) for _ in range(4)])  # full: no wait
        assert [one.batch_rows for one in four] == [4] * 4
        assert all(one.queue_s < 0.05 for one in four)

    served(use, max_wait_s=0.05)


def test_a_full_queue_refuses_and_a_deadline_ends_what_was_not_begun() -> None:
    async def use(deployment: Deployment) -> None:
        busy = asyncio.ensure_future(outcome(deployment, call(SLOW)))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(outcome(deployment, call(1), 0.1))
        waits = asyncio.ensure_future(outcome(deployment, call(2)))
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as refused:
            await deployment.submit(call(3), 10)
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        assert await asyncio.gather(busy, late, waits) == [2 * SLOW, 504, 4]

    served(use, queue=2)


def test_one_request_that_fails_does_not_spoil_its_batch() -> None:
    async def use(deployment: Deployment) -> None:
        first = asyncio.ensure_future(outcome(deployment, call(SLOW)))
        await asyncio.sleep(0)
        assert await asyncio.gather(*[outcome(deployment, call(v)) for v in (1, FAIL, 2)]) == [2, 500, 4]
        await first

    served(use)


def test_a_request_that_kills_its_instance_is_tried_once_more_and_the_others_are_answered() -> None:
    async def use(deployment: Deployment) -> None:
        first = asyncio.ensure_future(outcome(deployment, call(SLOW)))
        await asyncio.sleep(0)
        assert await asyncio.gather(*[outcome(deployment, call(v)) for v in (1, DIE, 2)]) == [2, 500, 4]
        await first
        assert deployment.metrics.restarts == 2
        assert await outcome(deployment, call(5)) == 10

    served(use)


def test_all_instances_killed_under_load_lose_nothing() -> None:
    async def use(deployment: Deployment) -> None:
        work = [asyncio.ensure_future(outcome(deployment, call(SLOW if n < 3 else n))) for n in range(40)]
        await asyncio.sleep(0.1)
        pids = [instance.pid for instance in deployment.instances]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*work) == [2 * SLOW] * 3 + [2 * n for n in range(3, 40)]
        assert deployment.metrics.restarts == 2
        assert {instance.pid for instance in deployment.instances}.isdisjoint(pids)

    served(use, instances=2)


def test_stopping_answers_what_waits_and_ends_every_process() -> None:
    pids = list[int]()

    async def use(deployment: Deployment) -> None:
        pids.extend(instance.pid for instance in deployment.instances)
        work = [asyncio.ensure_future(outcome(deployment, call(SLOW, rows=4))) for _ in range(4)]
        await asyncio.sleep(0.05)
        await deployment.stop()
        assert set(await asyncio.gather(*work)) <= {2 * SLOW, 503}

    served(use, instances=2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_version_that_cannot_be_served_is_refused_and_leaves_no_process() -> None:
    async def use(deployment: Deployment) -> None:
        raise AssertionError

    with pytest.raises(StartError, match="a file was changed") as refused:
        served(use, instances=2, path="broken")
    assert refused.value.kind == "IntegrityError"


def test_unlike_sizes_are_grouped_and_the_oldest_goes_first() -> None:
    batcher = Batcher(rows=3, limit=10)
    loop = asyncio.new_event_loop()
    items = [
        Item(call(n, key=key), arrived=n, expires=5.0 + n, future=loop.create_future())
        for n, key in enumerate(["a", "b", "a", None, "b", "a", "a"])
    ]
    for item in items:
        batcher.put(item)
    taken = [[items.index(item) for item in batcher.take(0.0)[0]] for _ in range(5)]
    assert taken == [[0, 2, 5], [1, 4], [3], [6], []]
    batcher.put(items[6])
    batcher.put_back(items[1])
    assert [items.index(item) for item in batcher.remove(now=6.0)] == [1]
    assert batcher.take(0.0)[0] == [items[6]]
    assert batcher.size == 0
    loop.close()


def measured(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, path: str = "paced", **options: Any) -> Tuning:
    """What is found for fake instances, for which a batch of 8 rows takes as long as one of a single row."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setattr("trimtab.hardware.system.usable_cores", lambda: 2)
    monkeypatch.setattr("trimtab.serve.tuning.SAMPLE_S", 0.02)
    monkeypatch.setattr("trimtab.serve.tuning.PINNED_GAIN", 4.0)  # a busy machine makes one of two equal samples slower
    given = Options(models={}, **options)

    def make(layout: Layout) -> Deployment:
        metrics = ModelMetrics("net", "measured")
        return Deployment(pathlib.Path(path), dataclasses.replace(layout, rows=1), metrics, lambda *_, **__: None)

    return asyncio.run(tune_layout(pathlib.Path(path), given, make, lambda *_, **__: None))


def test_the_best_layout_and_the_smallest_good_batch_are_found_and_remembered(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(tmp_path, monkeypatch)
    assert found.layout == Layout(instances=2, threads=1, rows=8)  # computing alone does not gain from larger batches
    assert {point.kind for point in found.curve} == {(2, 1, False), (1, 2, False), (2, 1, True)}
    assert found.chosen.dispatch_s > found.chosen.batch_s / 2
    assert re.match(r"  2 x 1 threads   1: [\d,]+  2: [\d,]+  4: [\d,]+  8: [\d,]+  16: [\d,]+$", found.lines()[1])
    words = r"  dispatch takes [\d.]+ of the [\d.]+ ms of 1 row, [\d.]+ of the [\d.]+ ms of 8 rows$"
    assert re.match(words, found.lines()[-1])
    again = measured(tmp_path, monkeypatch)
    assert (again.cached, again.curve) == (True, found.curve)
    with pytest.raises(StartError, match="no layout fits into --memory 1 MB. Allow more"):
        measured(tmp_path, monkeypatch, memory_mb=1)


def test_a_batch_that_the_model_does_not_bear_is_not_chosen(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"instances": 1, "threads": 1}
    assert measured(tmp_path, monkeypatch, path="paced small", **one).layout == Layout(instances=1, threads=1, rows=4)
    with pytest.raises(StartError, match="fails on a batch of 16 rows. Give a smaller --batch"):
        measured(tmp_path, monkeypatch, path="paced small", batch=16)


@pytest.mark.parametrize(
    ("rates", "pinned"),
    [
        ({"before": 100.0, "pinned": 110.0, "after": 101.0}, True),
        ({"before": 100.0, "pinned": 104.0}, False),
        ({"before": 100.0, "pinned": 200.0, "after": 200.0}, False),  # the machine became faster
        ({"before": 100.0, "pinned": 200.0}, False),  # it does not fit into the memory once more
        ({"before": 100.0}, False),  # it does not start
    ],
)
def test_instances_are_pinned_if_they_are_faster_than_before_and_after(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, rates: dict[str, float], pinned: bool
) -> None:
    asked = list[Layout]()

    async def stored(layout: Layout, *_: Any) -> list[Point]:
        asked.append(layout)
        name = "pinned" if layout.pinned else "after" if any(one.pinned for one in asked) else "before"
        if name == "pinned" and name not in rates:
            raise StartError("RuntimeFailure", "no cores")
        rate = rates.get(name) if layout.instances == 2 else 10.0
        if rate is None:
            return []
        kind = {"instances": layout.instances, "threads": layout.threads, "pinned": layout.pinned}
        return [Point(**kind, rows=8, rows_per_s=rate, batch_s=8 / rate, dispatch_s=0.0)]

    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setattr("trimtab.hardware.system.usable_cores", lambda: 2)
    monkeypatch.setattr("trimtab.serve.tuning._measure_layout", stored)
    found = asyncio.run(
        tune_layout(tmp_path, Options(models={}), lambda layout: pytest.fail("none is made"), lambda *_, **__: None)
    )
    assert found.layout == Layout(instances=2, threads=1, rows=8, pinned=pinned)
    assert ("2 x 1 threads, pinned   8: " in "\n".join(found.lines())) is ("pinned" in rates)


def test_instances_that_cannot_have_cores_of_their_own_are_not_pinned(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(point.pinned for point in measured(tmp_path, monkeypatch, instances=4, threads=1, batch=8).curve)


@pytest.mark.parametrize(
    ("instances", "nodes", "cores"),
    [
        (2, [[0, 1, 2, 3]], [[0, 1], [2, 3]]),
        (3, [[0, 1]], [[0], [1], [0]]),
        (4, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (1, [[0, 1], [2, 3]], [[0, 1]]),
    ],
)
def test_each_instance_gets_cores_of_one_node(instances: int, nodes: list[list[int]], cores: list[list[int]]) -> None:
    assert [cores_of(number, instances, nodes) for number in range(instances)] == cores


def test_a_p99_leaves_room_for_two_batches() -> None:
    curve = [
        Point(instances=1, threads=1, rows=n, rows_per_s=rate, batch_s=n / rate, dispatch_s=0.0)
        for n, rate in ((1, 100), (8, 400), (64, 800))
    ]
    assert choose(curve, None).rows == 64
    assert choose(curve, 0.05).rows == 8
    assert choose(curve, 0.001).rows == 1
    assert choose(curve, None, "latency").rows == 8  # a batch of 8 takes twice as long as one row
