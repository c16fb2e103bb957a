"""Test suites for the contract of a check: of models, and of scripts."""

from __future__ import annotations

import ast
import contextlib
import re
import textwrap
from collections.abc import Iterator, Mapping

import pytest

from trimtab._internal.serialization import from_json, to_json
from trimtab.core.capture import Call
from trimtab.core.check import CHECKS, Check
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.workload import Workload
from trimtab.evaluation.prepared_workload import Subject, prepare
from trimtab.hardware.environment import Environment
from trimtab.testing.assertions import assert_documented, assert_round_trip, assert_sentence, global_state, model_state
from trimtab.testing.models import CASES
from trimtab.testing.records import sound_records


class CheckSuite:
    """Subclass it, define the fixture ``technique``, and override :meth:`faulty`."""

    @pytest.fixture
    def technique(self) -> Check:
        """The check under test."""
        raise NotImplementedError("Override the fixture `technique` to return the check under test.")

    @contextlib.contextmanager
    def faulty(self, subject: Subject) -> Iterator[tuple[Subject, Environment]]:
        """Context manager that gives a subject and environment with a fault that the check finds, and undoes its changes."""
        raise NotImplementedError("Override faulty() to give what the check is made to find.")
        yield

    def subjects(self) -> list[tuple[str, Subject]]:
        """Subjects without a fault."""
        made = [(name, make()) for name, make in CASES.items()]
        return [(name, prepare(Workload(model=c.model, inputs=Call(c.args, c.kwargs)))) for name, c in made]

    def test_round_trip(self, technique: Check) -> None:
        """JSON, text and documentation are consistent."""
        assert_round_trip(CHECKS, technique)
        assert_documented(technique)

    def test_nothing_is_found_where_nothing_is_wrong(self, technique: Check) -> None:
        """A subject without a fault gives no finding, and the check changes nothing."""
        environment = Environment.capture()
        for name, subject in self.subjects():
            before, shared = model_state(subject.model), global_state()
            assert technique.run(subject, environment) == [], name
            assert model_state(subject.model) == before, name
            assert global_state() == shared, name

    def test_the_fault_is_found(self, technique: Check) -> None:
        """Each finding has a rule, a sentence, evidence and, optionally, a remedy that can be applied."""
        for name, subject in self.subjects():
            with self.faulty(subject) as (wrong, environment):
                before, shared = model_state(wrong.model), global_state()
                found = technique.run(wrong, environment)
                assert found, f"nothing was found in {name}"
                assert technique.run(wrong, environment) == found, f"another look at {name} found something else"
                assert model_state(wrong.model) == before, name
                assert global_state() == shared, name
                for finding in found:
                    assert_finding(finding, technique, wrong)


class ScriptCheckSuite:
    """For checks with ``about = "script"``. Subclass it, define the fixture ``technique``, and override :meth:`faulty`."""

    @pytest.fixture
    def technique(self) -> Check:
        """The check under test."""
        raise NotImplementedError("Override the fixture `technique` to return the check under test.")

    def faulty(self) -> Mapping[str, ProbeRecord]:
        """Records with a fault that the check finds, by a name for messages. :func:`dataclasses.replace` makes them from sound
        ones."""
        raise NotImplementedError("Override faulty() to give records with what the check is made to find.")

    def records(self) -> Mapping[str, ProbeRecord]:
        """Records without a fault: a training on a CPU and on a GPU, distributed training, inference, a loop without a loader.
        Extend it by near misses, in which the check must find nothing."""
        return sound_records()

    def environment(self) -> Environment:
        """The machine that the records are of; this one by default."""
        return Environment.capture()

    def test_round_trip(self, technique: Check) -> None:
        """JSON, text and documentation are consistent."""
        assert technique.about == "script", "a check of models is tested by CheckSuite"
        assert_round_trip(CHECKS, technique)
        assert_documented(technique)

    def test_nothing_is_found_where_nothing_is_wrong(self, technique: Check) -> None:
        """A record without a fault gives no finding."""
        environment = self.environment()
        for name, record in self.records().items():
            assert technique.run(record, environment) == [], name

    def test_an_empty_record_is_read(self, technique: Check) -> None:
        """A run that ended before its first step gives no finding, and no error."""
        assert technique.run(EMPTY, self.environment()) == []

    def test_the_fault_is_found(self, technique: Check) -> None:
        """Each finding has a rule, at most three short sentences, evidence, and remedies that change something."""
        environment = self.environment()
        for name, record in self.faulty().items():
            read = from_json(ProbeRecord, to_json(record))
            found = technique.run(read, environment)
            assert found, f"nothing was found in {name}"
            assert technique.run(read, environment) == found, f"another look at {name} found something else"
            for finding in found:
                assert_script_finding(finding, technique)


EMPTY = ProbeRecord(
    command=("train.py",), anchor="batch", anchor_site="", start_s=0.0, steps=0, step_ms=0.0, median_ms=0.0, probe_ms=0.0
)
"""A script that ended before its first step."""


def assert_script_finding(finding: Finding, check: Check) -> None:
    """Assert that the fields of a script's ``finding`` are valid."""
    assert_common(finding, check)
    sentences = len(re.findall(r"[.?!](?= [A-Z]|$)", finding.message))
    assert sentences <= 3, f"{sentences} sentences: {finding.message}"
    assert finding.share is None or 0 <= finding.share <= 1
    assert finding.gain is None, "the gain is measured later"
    assert finding.remedy is None, "a recipe cannot be applied to a script; use settings or an edit"
    if finding.settings is not None:
        assert finding.settings.changes(), "settings that change nothing"
        assert finding.settings.without is None, "what leaves a part out is a ceiling"
    if finding.ceiling is not None:
        assert finding.ceiling.without is not None
    if finding.edit is not None:
        assert_sentence(finding.edit.advice)
        assert finding.edit.site
        if finding.edit.replacement is not None:
            ast.parse(textwrap.dedent(_complete_statement(finding.edit.replacement)))


def _complete_statement(text: str) -> str:
    """``text`` with ``pass`` as its body, if it is the header of a compound statement."""
    last = text.splitlines()[-1]
    return f"{text}\n{last[: len(last) - len(last.lstrip())]}    pass" if last.rstrip().endswith(":") else text


def assert_common(finding: Finding, check: Check) -> None:
    """Assert what holds for findings of both kinds."""
    assert finding.rule == check.name or finding.rule.startswith(f"{check.name}."), finding.rule
    assert_sentence(finding.message)
    assert finding.evidence, "a finding shows what it rests on"
    assert from_json(Finding, to_json(finding)) == finding


def assert_finding(finding: Finding, check: Check, subject: Subject) -> None:
    """Assert that the fields of a model's ``finding`` are valid."""
    assert_common(finding, check)
    if finding.remedy is not None:
        steps = (*finding.remedy.passes, finding.remedy.backend)
        assert [why for step in steps if (why := step.blocked(subject.candidate))] == []
    if finding.gain is not None:
        assert finding.gain.low <= finding.gain.value <= finding.gain.high
