"""Test suite for the contract of a check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from trimtab._internal.serialization import from_json, to_json
from trimtab.core.capture import Call
from trimtab.core.check import CHECKS, Check
from trimtab.core.finding import Finding
from trimtab.core.workload import Workload
from trimtab.evaluation.prepared_workload import Subject, prepare
from trimtab.hardware.environment import Environment
from trimtab.testing.assertions import assert_documented, assert_round_trip, assert_sentence, global_state, model_state
from trimtab.testing.models import CASES


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


def assert_finding(finding: Finding, check: Check, subject: Subject) -> None:
    """Assert that the fields of ``finding`` are valid."""
    assert finding.rule == check.name or finding.rule.startswith(f"{check.name}."), finding.rule
    assert_sentence(finding.message)
    assert finding.evidence, "a finding shows what it rests on"
    assert from_json(Finding, to_json(finding)) == finding
    if finding.remedy is not None:
        steps = (*finding.remedy.passes, finding.remedy.backend)
        assert [why for step in steps if (why := step.blocked(subject.candidate))] == []
    if finding.gain is not None:
        assert finding.gain.low <= finding.gain.value <= finding.gain.high
