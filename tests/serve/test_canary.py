"""A new version gets a share of the requests before it takes over, with real processes."""

from __future__ import annotations

import concurrent.futures
import math
import os
import pathlib
import random
import shutil
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from _serving import Net, Server, write

from trimtab.errors import UsageError
from trimtab.serve.canary import CanaryStats, TrafficSplit, decide, error_difference, latency_ratio
from trimtab.serve.options import read_options

FLAGS = ["--instances", "1", "--threads", "1", "--batch", "8"]
ANY_SPEED = ["--canary-slowdown", "1000"]
ROWS = np.full((1, 16), 200.0).tolist()


class Fragile(Net):
    """Fails where the first column is above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits and class."""
        found = super().forward(x)
        return found | {"logits": found["logits"] + 0 * self.table((x[:, 0] > 100).long() * 9)}


def until(server: Server, words: str) -> list[tuple[int, Any]]:
    """Requests one after another until the server has logged ``words``: status and answer of each."""
    found = []
    while words not in server.text:
        assert '"version not loaded"' not in server.text or "withdrawn" in words, server.text
        status, answer, _ = server.infer(ROWS)
        found.append((status, answer))
    return found


def test_a_good_version_takes_over_after_its_trial(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(net, folder)
    with Server(tmp_path / "log", str(folder), *FLAGS, "--canary", "30%", "--canary-time", "5s", *ANY_SPEED) as server:
        assert server.infer(ROWS)[0] == 200
        shutil.rmtree(folder)
        write(folder, seed=1)
        os.kill(server.process.pid, signal.SIGHUP)
        found = until(server, '"version serves", "model": "net", "version": "2"')
        assert {status for status, _ in found} == {200}
        assert {answer["model_version"] for _, answer in found} == {"1", "2"}
        assert "Version 2" not in server.ask("POST", "/v2/repository/index")[1][0]["reason"]
        assert "takes over, as nothing speaks against it" in server.text
        assert server.infer(ROWS)[1]["model_version"] == "2"
        os.kill(server.process.pid, signal.SIGHUP)
        until(server, '"canary", "model": "net", "version": "3"')
        assert server.ask("GET", "/v2/models/net/versions/3")[1]["versions"] == ["3"]
        assert server.stop() == 0  # in the middle of a trial: no process is left


def test_a_version_that_fails_is_withdrawn_before_its_time(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(net, folder)
    with Server(tmp_path / "log", str(folder), *FLAGS, "--canary", "50%", "--canary-time", "60s") as server:
        shutil.rmtree(folder)
        write(folder, model=Fragile())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            loading = pool.submit(server.ask, "POST", "/v2/repository/models/net/load")
            found = until(server, "is withdrawn, as it fails more often")
            status, answer, _ = loading.result()
        assert status == 400
        assert "withdrawn" in answer["error"]
        assert {status for status, _ in found} == {200, 500}
        assert [server.infer(ROWS)[0] for _ in range(10)] == [200] * 10
        assert "withdrawn" in server.ask("POST", "/v2/repository/index")[1][0]["reason"]
        while len(server.instances) > 1:
            time.sleep(0.02)


def test_a_version_with_another_signature_is_not_tried(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(net, folder)
    with Server(tmp_path / "log", str(folder), *FLAGS, "--canary", "50%") as server:
        shutil.rmtree(folder)
        write(folder, model=torch.nn.Linear(8, 4), inputs=(torch.ones(2, 8),), dynamic={})
        status, answer, _ = server.ask("POST", "/v2/repository/models/net/load")
        assert (status, "other inputs or outputs" in answer["error"]) == (400, True)
        assert server.infer(ROWS)[0] == 200


@pytest.mark.parametrize(("share", "rows"), [(0.05, 1), (0.3, 8), (0.5, 64), (0.9, 4)])
def test_turns_keep_the_share_and_time_what_is_warm(share: float, rows: int) -> None:
    new, old = CanaryStats(), CanaryStats()
    turns = TrafficSplit(share, rows, new, old)
    previous, run = None, 0
    for _ in range(8000):
        taken = turns.next_is_new()
        run = run + 1 if taken == previous else 1
        previous = taken
        one = new if taken else old
        assert run > 1 or not one.warm or 1 - share < 0.1  # the first of a turn is not timed
        one.add(0.01 if one.warm else 1.0)
    assert new.answered / 8000 == pytest.approx(share, abs=0.03)
    for one in (new, old):
        assert one.means == pytest.approx([math.log(0.01)] * len(one.means)), "answers while the caches are cold do not count"
        assert len(one.means) >= 2


def trial(answered: int, failed: int = 0, factor: float = 1.0) -> CanaryStats:
    draw, found = random.Random(answered), CanaryStats()
    for _ in range(answered):
        found.add(factor * draw.uniform(0.009, 0.011))
    found.failed = failed
    return found


@pytest.mark.parametrize(
    ("new", "old", "takes_over", "words"),
    [
        (trial(100), trial(2000), True, "nothing speaks against it: 100 requests against 2000"),
        (trial(100, factor=1.05), trial(2000), True, "nothing speaks"),
        (trial(100, factor=1.5), trial(2000), False, "more than 1.1 times as slow"),
        (trial(90, failed=10), trial(2000, failed=2), False, "fails more often"),
        (trial(99, failed=1), trial(1980, failed=20), True, "errors 1% against 1%"),
        (trial(0), trial(0), True, "Too few answers"),
        (trial(1), trial(50), True, "Too few answers"),
    ],
)
def test_the_decision(new: CanaryStats, old: CanaryStats, takes_over: bool, words: str) -> None:
    found = decide(new, old, 1.1)
    assert found is not None
    assert (found.takes_over, words in found.sentence) == (takes_over, True), found


def test_intervals_hold_the_value_and_shrink() -> None:
    few, many = error_difference(trial(9, 1), trial(20)), error_difference(trial(900, 100), trial(10000))
    assert few.low < 0 < few.value == 0.1 < few.high
    assert 0 < many.low < many.value == 0.1 < many.high < few.high
    ratio = latency_ratio(trial(50, factor=2.0), trial(50))
    assert ratio is not None
    assert ratio.low < 2.0 < ratio.high < 2.2
    assert decide(trial(19, 0), trial(100), 1.1, early=True) is None
    assert decide(trial(10, 20), trial(100), 1.1, early=True) is not None


def test_answers_that_are_slow_together_do_not_withdraw_a_version_that_is_as_fast() -> None:
    """A neighbour takes the core for 40 answers now and then: 1.0 must lie in the interval about as often as it says."""
    inside = 0
    for seed in range(200):
        draw, trials = random.Random(seed), (CanaryStats(), CanaryStats())
        for one in trials:
            for start in range(0, 800, 40):
                pace = 0.02 if draw.random() < 0.3 else 0.01
                for _ in range(40 if start else 25):  # batches and slow times do not begin together
                    one.add(pace * draw.uniform(0.9, 1.1))
        ratio = latency_ratio(*trials)
        assert ratio is not None
        inside += ratio.low < 1 < ratio.high
    assert inside >= 170


@pytest.mark.parametrize("value", [0.9, float("nan"), "fast", True])
def test_a_slowdown_below_1_is_refused(net: pathlib.Path, value: Any) -> None:
    with pytest.raises(UsageError, match="canary-slowdown is .*; it is a number from 1 up, such as 1.1"):
        read_options([str(net)], {"canary_slowdown": value}, None)
