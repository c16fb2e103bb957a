"""What checks rest on, as a probe sees it in a real process."""

import pathlib

import pytest

from trimtab.core.evidence import ProbeRecord
from trimtab.hardware.environment import Environment
from trimtab.probe.command import Command
from trimtab.probe.findings import run_checks
from trimtab.probe.observe import observe

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "careless.py"
LINES = SCRIPT.read_text(encoding="utf-8").splitlines()


def site(text: str) -> str:
    return f"careless.py:{next(number for number, line in enumerate(LINES, 1) if text in line)}"


@pytest.fixture(scope="module")
def record() -> ProbeRecord:
    return observe(Command.of(SCRIPT), steps=30, seconds=120)


def test_files_are_counted_per_example(record: ProbeRecord) -> None:
    (loader,) = record.loaders
    assert loader.opens == pytest.approx(1.0)


def test_lines_have_their_function_and_how_often_they_run(record: ProbeRecord) -> None:
    runs = {line.site: (line.function, line.runs) for line in record.lines}
    assert runs.get(site("total = total"), ("loss_of", 8.0)) == ("loss_of", 8.0)
    assert record.texts[site("DataLoader(Files")] == "    loader = DataLoader(Files(pathlib.Path(name)), batch_size=8)"


def test_the_line_that_keeps_a_graph_for_nothing_is_told(record: ProbeRecord) -> None:
    (module,) = record.modules
    assert module.unused_site == site("held_out = model")
    assert [call.site for call in record.calls if call.name == "torch.set_num_threads"] == [site("torch.set_num_threads(1)")]


def test_checks_name_them(record: ProbeRecord) -> None:
    findings, failures = run_checks(record, Environment.capture())
    assert failures == []
    assert "small_files" in [finding.rule for finding in findings]
