"""A diagnosis as text, page and trace."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from typer.testing import CliRunner

from _diagnoses import FUSED, WORKERS, diagnosis, record
from trimtab._internal.serialization import dumps, from_json, write_json
from trimtab.cli.main import app
from trimtab.core.diagnosis import Diagnosis, Patch
from trimtab.core.evidence import StackRecord
from trimtab.core.measurement import Interval
from trimtab.probe.counterfactuals import Outcome
from trimtab.probe.tuning import TunedScript
from trimtab.report.doctor_page import html
from trimtab.report.doctor_text import text
from trimtab.report.doctor_trace import trace


def test_json_can_be_read_back() -> None:
    found = diagnosis()
    assert from_json(Diagnosis, json.loads(dumps(found))) == found
    assert "score 57 of 100" in repr(found)


def test_the_text_has_the_verdict_the_split_and_each_standing() -> None:
    lines = text(diagnosis(), 100).splitlines()
    shown = "\n".join(lines)
    assert lines[0].startswith("train.py -- --epochs 1 is slow: 57 of 100: 43% of the step could be saved; 1 finding")
    assert "error: train.py:42: Memory grows by 8 MB at each step." in shown
    assert "data 52.0%" in shown
    assert "= 100.0%" in shown
    assert "1.60x (1.50 to 1.70)" in shown
    assert "all that pays together: 1.66x (1.55 to 1.75), in fresh processes" in shown
    assert "at most 1.06x" in shown
    assert "1 thread: the machine was busy" in shown
    assert "train.py:43: add_scalar is called at every step." in shown
    assert "it would have written: runs/events.out, model.pt" in shown
    assert "it connected to: api.wandb.ai:443" in shown
    assert "trimtab tune train.py -- --epochs 1" in shown
    assert max(map(len, lines)) <= 100


def test_a_good_score_is_not_called_slow() -> None:
    found = diagnosis()
    good = dataclasses.replace(found, score=dataclasses.replace(found.score, total=93, saved=0.07), findings=())
    assert " is slow" not in text(good)
    assert "No remedy was measured." in text(good)


def test_the_page_needs_no_network_and_shows_everything() -> None:
    patch = Patch(text="--- a/train.py\n+++ b/train.py\n", rules=("logging",), reason="the budget was spent")
    stacks = tuple(StackRecord(calls=("main (train.py:9)", line), share=0.4) for line in ("a (train.py:2)", "b (train.py:5)"))
    seen = dataclasses.replace(record(), stacks=stacks, energy="no counter here.")
    page = html(dataclasses.replace(diagnosis(), record=seen, patch=patch))
    assert "default-src &#39;none&#39;" in page
    assert "http://" not in page
    assert "https://" not in page
    for part in (
        "57 of 100",
        "wait for DataLoader",
        "train.py:18",
        "aten::mkldnn_convolution",
        "+++ b/train.py",
        "polyline",
        "main (train.py:9): 80.0%",
        "no counter here",
    ):
        assert part in page


def test_the_page_of_tune_has_every_setting_with_its_gain(tmp_path: pathlib.Path) -> None:
    gone = Outcome(settings=WORKERS, failed="It crashed: OSError: no <workers>")
    fused = Outcome(settings=FUSED, gain=Interval(1.03, 0.99, 1.07), losses="equal")
    path = pathlib.Path("trimtab.toml")
    found = TunedScript(
        command=("train.py", "--epochs", "1"),
        record=record(),
        outcomes=(fused, gone),
        kept=FUSED,
        confirmed=fused,
        configuration=None,
        path=path,
        folder=path,
        seconds=9.0,
        finished=True,
    )
    write_json(tmp_path / "tuned.json", found)
    assert TunedScript.read(tmp_path) == found
    assert CliRunner().invoke(app, ["report", "--text", str(tmp_path)]).output == f"{found}\n"
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "train.py --epochs 1: it stays as written" in page
    for part in ("fused optimizer", "1.03x (0.99 to 1.07)", "not sure", "no &lt;workers&gt;"):
        assert part in page
    assert "https://" not in page


def test_the_trace_is_one_step_in_microseconds() -> None:
    events = trace(record())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans[:2]] == [
        ("wait for DataLoader", 0.0, 52000.0),
        ("Net", 53000.0, 15000.0),
    ]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
