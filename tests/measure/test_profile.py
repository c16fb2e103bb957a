from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from trimtab.measure.profile import operator_times


def test_operators_are_ranked() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
    x = torch.randn(64, 512)
    with torch.no_grad():
        times = operator_times(lambda: model(x), repeats=4)
    assert {time.name: time.calls for time in times}["aten::addmm"] == 2.0
    assert "aten::addmm" in [time.name for time in times[:3]]  # a neighbour may hold the CPU just when a small one runs
    assert sum(time.share for time in times) == pytest.approx(1.0)
    assert [time.self_ms for time in times] == sorted((time.self_ms for time in times), reverse=True)
    assert "aten::relu" in {time.name for time in times}


def test_calls_are_counted_per_run_and_the_warm_up_does_not_count() -> None:
    turns = iter(range(100))
    times = operator_times(lambda: torch.sin(torch.ones(8)) if next(turns) % 2 else torch.ones(8), repeats=4)
    assert next(time.calls for time in times if time.name == "aten::sin") == 0.5
    assert next(turns) == 5


def test_a_call_without_operators_is_empty() -> None:
    assert operator_times(lambda: None, repeats=2) == []


def test_errors_of_the_call_and_of_the_caller() -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        operator_times(lambda: None, repeats=0)
    with pytest.raises(ZeroDivisionError):
        operator_times(lambda: 1 // 0)
    assert operator_times(lambda: torch.ones(1).exp(), repeats=1)


def test_nothing_is_written_and_nothing_stays_changed() -> None:
    code = (
        "import os, torch; from trimtab.measure.profile import operator_times; before = dict(os.environ);"
        "[operator_times(lambda: torch.ones(9).exp()) for _ in range(2)]; assert dict(os.environ) == before"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_time_on_the_gpu_is_what_counts() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    times = operator_times(lambda: a @ a, repeats=3)
    assert times[0].name == "aten::mm"
    assert times[0].share > 0.9
