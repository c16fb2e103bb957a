"""Truth in production: outputs against the original model, inputs against the test vectors, with real processes."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from _serving import Server, write

from trimtab.errors import UsageError
from trimtab.serve.drift import MIN_COMPARISONS, InputDrift, OutputDrift
from trimtab.serve.options import read_options
from trimtab.serve.protocol import TensorFormat

ONE = ["--instances", "1", "--threads", "1", "--batch", "8"]
ROWS = np.random.default_rng(0).normal(size=(4, 16)).astype("f4")


def statistics(server: Server, name: str) -> Any:
    return server.ask("GET", "/v2/models/net/stats")[1]["model_stats"][0][name]


def metric(server: Server, name: str, **labels: str) -> float:
    """The value of the metric ``name`` whose labels hold ``labels``."""
    for line in server.ask("GET", "/metrics")[1].decode().splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.split()[-1])
    raise AssertionError(name)


def compared(server: Server, least: int) -> Any:
    """The shadow's statistics, as soon as ``least`` requests were compared."""
    while (found := statistics(server, "shadow"))["compared"] < least:
        assert server.infer(ROWS.tolist())[0] == 200
    return found


def references(server: Server) -> list[psutil.Process]:
    return [one for one in server.instances if "trimtab.serve.reference" in one.cmdline()]


def test_the_original_agrees_and_its_process_is_never_waited_for(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "artifact", original=True).path
    with Server(tmp_path / "log", str(folder), *ONE, "--shadow", "100%") as server:
        found = compared(server, MIN_COMPARISONS)
        logits, classes = found["errors"]
        assert (found["alarm"], found["up"], logits["output"], classes["output"]) == (False, True, "logits", "class")
        assert 0 <= logits["mean"] <= logits["high"] < logits["tolerance"]
        assert metric(server, "trimtab_shadow_alarm", model="net", version="1") == 0
        assert metric(server, "trimtab_shadow_requests_total", outcome="compared") >= MIN_COMPARISONS
        assert metric(server, "trimtab_shadow_error", output="logits", statistic="high") < logits["tolerance"]
        assert "against the original" in server.ask("GET", "/")[1].decode()
        bad = ROWS.copy()
        bad[0, :3], bad[1, 0] = [np.nan, np.inf, 1e6], -1e6
        while metric(server, "trimtab_input_values_total", kind="nan") == 0:
            tensor = {"name": "x", "shape": [4, 16], "datatype": "FP32", "parameters": {"binary_data_size": bad.nbytes}}
            head = f'{{"inputs": [{tensor}]}}'.replace("'", '"').encode()
            length = {"Inference-Header-Content-Length": str(len(head))}
            assert server.ask("POST", "/v2/models/net/infer", head + bad.tobytes(), length)[0] == 200
            time.sleep(0.05)
        assert metric(server, "trimtab_input_values_total", kind="outside") >= 3
        assert metric(server, "trimtab_input", of="requests", statistic="high") == 1e6
        low, high = (metric(server, "trimtab_input", of="artifact", statistic=word) for word in ("low", "high"))
        assert -5 < low < high < 5
        while statistics(server, "shadow").get("incomparable", 0) == 0:  # NaN in, NaN out: no drift
            time.sleep(0.02)
        assert not statistics(server, "shadow")["alarm"]
        (reference,) = references(server)
        assert reference.nice() == 19
        reference.suspend()
        assert [server.infer(ROWS.tolist())[0] for _ in range(20)] == [200] * 20
        assert statistics(server, "shadow")["skipped"] >= 1
        reference.kill()
        while metric(server, "trimtab_shadow_up") == 1:
            time.sleep(0.02)
        assert server.infer(ROWS.tolist())[0] == 200


def test_outputs_that_leave_the_tolerance_raise_the_alarm(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = write(tmp_path / "other", seed=1).path
    with Server(tmp_path / "log", str(net), *ONE, "--shadow", "1", "--shadow-from", str(other)) as server:
        found = compared(server, MIN_COMPARISONS)
        assert found["alarm"]
        assert found["errors"][0]["low"] > found["errors"][0]["tolerance"]
        assert metric(server, "trimtab_shadow_alarm") == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--shadow", "1%"], r"does not travel with .* --shadow-from ARTIFACT"),
        (["--shadow", "1%", "--shadow-from", "{other}"], r"Give an artifact of the same signature"),
    ],
)
def test_without_a_reference_the_server_does_not_start(
    net: pathlib.Path, tmp_path: pathlib.Path, flags: list[str], sentence: str
) -> None:
    other = write(tmp_path / "other", model=torch.nn.Linear(8, 4), inputs=(torch.ones(2, 8),), dynamic={}).path
    words = [word.format(other=other) for word in flags]
    command = [sys.executable, "-m", "trimtab", "serve", str(net), "--port", "0", "--no-grpc", *ONE, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert re.search(sentence, " ".join(done.stderr.split()))
    assert "Traceback" not in done.stderr


def test_shares_and_references_are_read(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "serving.toml"
    file.write_text(f'shadow = "1%"\nshadow_from = "b={net}"\ncanary = "5%"\ncanary_time = "10s"\n')
    found = read_options([f"a={net}", f"b={net}"], {}, file)
    assert (found.shadow, found.shadow_from, found.canary, found.canary_time_s) == (0.01, {"b": net}, 0.05, 10.0)
    for flags, sentence in (
        ({"shadow": "200%"}, "shadow is"),
        ({"shadow_from": [str(net)]}, "Give a share"),
        ({"shadow": "1%", "shadow_from": [f"c={net}"]}, "'c', which is not served"),
        ({"canary": "0"}, "canary is '0'; it is a share"),
    ):
        with pytest.raises(UsageError, match=sentence):
            read_options([str(net)], flags, None)


def test_the_alarm_needs_an_interval_above_the_tolerance_or_a_broken_output() -> None:
    drift = OutputDrift(["y"], [0.01])
    for error in [0.02] * (MIN_COMPARISONS - 1):
        drift.add([error])
    assert not drift.alarm
    drift.add([0.021])
    assert drift.alarm
    assert drift.intervals()["y"].low > 0.01
    unsure = OutputDrift(["y"], [0.01])
    for error in [0.0, 0.03] * MIN_COMPARISONS:
        unsure.add([error])
    assert unsure.intervals()["y"].value > 0.01 > unsure.intervals()["y"].low
    assert not unsure.alarm
    broken = OutputDrift(["y"], [0.01])
    broken.add([None])
    assert broken.alarm


def test_inputs_of_every_datatype_are_counted() -> None:
    forms = [TensorFormat.of("b", "bfloat16", [2]), TensorFormat.of("i", "int64", [2]), TensorFormat.of("e", "bool", [0])]
    known = {"low": 0.0, "high": 2.0, "mean": 1.0, "std": 1.0}
    drift = InputDrift(forms, [known, known | {"values": [0.0, 1.0, 2.0]}, None])
    bits = np.array([1.5, np.nan], "f4").view("u4") >> 16
    drift.add([bits.astype("u2").tobytes(), np.array([1, 3], "i8").tobytes(), b""])
    assert [dict(counts) for counts in drift.counts[:2]] == [
        {"sampled": 2, "nan": 1, "outside": 0},
        {"sampled": 2, "nan": 0, "outside": 1, "unseen": 1},
    ]
    assert drift.seen(0) == {"low": 1.5, "high": 1.5, "mean": 1.5, "std": 0.0}
    assert drift.seen(1) == {"low": 1.0, "high": 3.0, "mean": 2.0, "std": 1.0}
    assert drift.seen(2) is None
