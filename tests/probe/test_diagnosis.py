"""The course of a diagnosis: watched, checked, measured, sorted. Its parts are replaced by stored facts."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from _diagnoses import FUSED, NO_DATA, NO_LOGGING, WORKERS, findings, record
from trimtab.core.measurement import Interval
from trimtab.core.script_settings import ScriptSettings
from trimtab.probe import diagnosis
from trimtab.probe.command import Command
from trimtab.probe.counterfactuals import Outcome

GAINS = {
    "workers": Outcome(settings=WORKERS, gain=Interval(1.6, 1.5, 1.7), losses="equal"),
    "data": Outcome(settings=NO_DATA, gain=Interval(2.0, 1.9, 2.1)),
    "fused": Outcome(settings=FUSED, gain=Interval(1.03, 1.025, 1.035), losses="within rounding"),
    "logging": Outcome(settings=NO_LOGGING, gain=Interval(1.06, 1.05, 1.07)),
    "threads": Outcome(settings=ScriptSettings(threads=1), failed="The script failed."),
}


class Parts:
    """The parts of a diagnosis with stored answers; :attr:`asked` has what was measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        monkeypatch.setattr(diagnosis, "observe", lambda command, **options: record())
        monkeypatch.setattr(diagnosis, "run_checks", lambda seen, environment: (findings(measured=False), ["A note."]))
        monkeypatch.setattr(diagnosis.counterfactuals, "measure", self.measure)
        monkeypatch.setattr(diagnosis.counterfactuals, "confirm", self.confirm)

    def measure(self, command: Command, seen: Any, settings: Sequence[ScriptSettings], **options: Any) -> list[Outcome]:
        self.asked.append(list(settings))
        return [one for wanted in settings for one in GAINS.values() if one.settings == wanted]

    def confirm(self, command: Command, seen: Any, settings: ScriptSettings, **options: Any) -> Outcome:
        self.asked.append(settings)
        return Outcome(settings=settings, gain=Interval(1.7, 1.6, 1.8), losses="equal", how="fresh processes")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


@pytest.fixture
def command(tmp_path: pathlib.Path) -> Command:
    script = tmp_path / "train.py"
    script.write_text("\n" * 42 + "writer.add_scalar(0)\n", encoding="utf-8")
    return Command.of(script)


def test_findings_are_measured_once_sorted_and_levelled(parts: Parts, command: Command) -> None:
    said: list[str] = []
    found = diagnosis.diagnose(command, on_progress=said.append)
    assert parts.asked == [[WORKERS, NO_DATA, FUSED, NO_LOGGING, ScriptSettings(threads=1)], found.settings]
    assert [(one.rule, one.level) for one in found.findings] == [
        ("memory_growth", "error"),
        ("workers_few", "warning"),
        ("logging", "note"),
        ("optimizer_loop", "note"),
        ("threads", "note"),
    ]
    assert found.findings[1].most == Interval(2.0, 1.9, 2.1)
    assert found.findings[4].unmeasured == "The script failed."
    assert found.settings == WORKERS.merged(FUSED)
    assert found.together is not None
    assert found.together.gain == Interval(1.7, 1.6, 1.8)
    assert found.score.total == round(100 / 1.7 / 1.06)
    assert found.notes == ("A note.",)
    assert "first step after 3.1 s" in said[0]


def test_a_patch_is_measured_as_files_of_the_overlay(parts: Parts, command: Command) -> None:
    patch = diagnosis.diagnose(command, patch=True).patch
    assert patch is not None
    assert patch.gain == Interval(1.7, 1.6, 1.8)
    assert "+if step % 50 == 0:" in patch.text
    assert [*parts.asked[-1].files] == [str(command.folder / "train.py")]


def test_a_spent_budget_says_what_was_not_measured(parts: Parts, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(record(), start_s=100.0)
    monkeypatch.setattr(diagnosis, "observe", lambda command, **options: slow)
    found = diagnosis.diagnose(command, seconds=100.0, patch=True)
    assert parts.asked == []
    assert found.together is None
    assert "give a larger --budget" in (found.findings[1].unmeasured or "")
    assert found.patch is not None
    assert "give a larger --budget" in (found.patch.reason or "")


def test_time_kept_for_the_confirmation_goes_to_what_was_not_measured_if_nothing_pays(
    parts: Parts, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Outcome(settings=FUSED, failed=diagnosis.counterfactuals.OUT_OF_TIME)
    dear = dataclasses.replace(GAINS["workers"], gain=Interval(0.9, 0.8, 0.95))
    given = [[*{**GAINS, "workers": dear, "fused": late}.values()], [GAINS["fused"]]]

    def measure(command: Command, seen: Any, settings: Sequence[ScriptSettings], **options: Any) -> list[Outcome]:
        parts.asked.append(list(settings))
        return given.pop(0)

    monkeypatch.setattr(diagnosis.counterfactuals, "measure", measure)
    found = {one.rule: one for one in diagnosis.diagnose(command).findings}
    assert parts.asked[1] == [FUSED]
    assert found["optimizer_loop"].gain == GAINS["fused"].gain


def test_a_remedy_without_a_clear_measurement_comes_before_one_that_does_not_pay(
    parts: Parts, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ScriptSettings(channels_last=True)
    unclear = Outcome(settings=layout, gain=Interval(1.2, 0.3, 4.5))
    monkeypatch.setitem(GAINS, "layout", unclear)
    monkeypatch.setitem(GAINS, "fused", dataclasses.replace(GAINS["fused"], gain=Interval(0.98, 0.91, 1.06)))
    monkeypatch.setattr(Parts, "confirm", lambda *given, **options: unclear)
    given = [one for one in findings(measured=False) if one.rule == "optimizer_loop"]
    given += [dataclasses.replace(given[0], rule="layout", settings=layout, share=None)]
    monkeypatch.setattr(diagnosis, "run_checks", lambda seen, environment: (given, []))
    assert [one.rule for one in diagnosis.diagnose(command).findings] == ["layout", "optimizer_loop"]


@pytest.mark.parametrize(
    ("most", "first"),
    [
        (Interval(9.4, 1.7, 51.7), "slow_example"),  # the evidence lies within the interval
        (Interval(1.4, 1.1, 2.5), "slow_example"),  # it cannot save more than the upper bound, 60%
        (Interval(1.3, 1.05, 2.0), "workers_few"),  # 50% at most, and no vague interval: its value counts
    ],
)
def test_the_evidence_ranks_a_finding_whose_measurement_is_vague(
    parts: Parts, command: Command, monkeypatch: pytest.MonkeyPatch, most: Interval, first: str
) -> None:
    unclear = Outcome(settings=WORKERS, gain=Interval(1.3, 0.4, 4.3))
    monkeypatch.setitem(GAINS, "workers", unclear)
    monkeypatch.setitem(GAINS, "data", dataclasses.replace(GAINS["data"], gain=most))
    monkeypatch.setattr(Parts, "confirm", lambda *given, **options: unclear)
    workers = next(one for one in findings(measured=False) if one.rule == "workers_few")
    slow = dataclasses.replace(workers, rule="slow_example", settings=None, share=0.9)
    monkeypatch.setattr(diagnosis, "run_checks", lambda seen, environment: ([workers, slow], []))
    assert next(one.rule for one in diagnosis.diagnose(command).findings) == first


def test_what_may_pay_is_measured_again_if_nothing_else_needs_the_time(
    parts: Parts, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"workers": Interval(1.1, 0.9, 1.3), "fused": Interval(0.95, 0.9, 1.0)}
    for name, gain in first.items():
        monkeypatch.setitem(GAINS, name, Outcome(settings=GAINS[name].settings, gain=gain, losses="equal"))
    found = {one.rule: one for one in diagnosis.diagnose(command).findings}
    assert parts.asked[1:] == [[WORKERS]]
    gain = found["workers_few"].gain
    assert gain is not None
    assert gain.value == pytest.approx(1.1)
    assert gain.width == pytest.approx(0.4 / 1.1 / 2**0.5, rel=0.03), "two measurements that agree"


def test_what_noise_hid_is_measured_once_more(parts: Parts, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = dataclasses.replace(GAINS["workers"], gain=Interval(1.6, 0.4, 9.0), losses="not compared")
    monkeypatch.setitem(GAINS, "workers", noisy)
    found = diagnosis.diagnose(command)
    assert parts.asked[1] == WORKERS
    assert found.findings[1].gain == Interval(1.7, 1.6, 1.8)
    assert found.findings[1].losses == "equal"


def test_losses_are_compared_in_the_time_that_the_measurement_of_single_remedies_leaves(
    parts: Parts, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []

    def compare_losses(command: Command, seen: Any, outcomes: Sequence[Outcome], **options: Any) -> list[Outcome]:
        budgets.append(options["seconds"])
        return [dataclasses.replace(one, losses="equal") if one.settings == WORKERS else one for one in outcomes]

    monkeypatch.setattr(diagnosis.counterfactuals, "compare_losses", compare_losses)
    monkeypatch.setitem(GAINS, "workers", dataclasses.replace(GAINS["workers"], losses="not compared"))
    found = {one.rule: one for one in diagnosis.diagnose(command, seconds=100).findings}
    assert found["workers_few"].losses == "equal"
    assert budgets.pop() == pytest.approx(50, abs=5), "fused may pay too, and all together are measured in the other half"
    for name in ("fused", "logging"):
        monkeypatch.setitem(GAINS, name, Outcome(settings=GAINS[name].settings, failed="The script failed."))
    found = {one.rule: one for one in diagnosis.diagnose(command, seconds=100).findings}
    assert budgets.pop() == pytest.approx(100, abs=5)
    assert found["workers_few"].losses == "equal"
    assert found["workers_few"].unmeasured is None
