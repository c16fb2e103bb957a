"""Every registered pass and backend against the suites that plug-ins are meant to use."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.candidate import Candidate
from trimtab.core.check import CHECKS, Check
from trimtab.core.technique import PASSES, Pass, Technique, require
from trimtab.core.trial import State
from trimtab.evaluation.evaluate import as_trial
from trimtab.evaluation.prepared_workload import Subject
from trimtab.hardware.environment import Environment
from trimtab.passes.threads import Threads
from trimtab.study.samplers.ladder import as_written
from trimtab.testing import BackendSuite, CheckSuite, PassSuite


def variants(registry: Any) -> list[Technique]:
    """Every registered technique as it comes, and once with each other value of its ``Literal`` fields, unless it compresses:
    tests/passes has those."""
    found = []
    for name in registry:
        default = registry[name]()
        found.append(default)
        if getattr(default, "cost", "seconds") == "seconds" and not getattr(default, "compresses", False):
            spoken = {f for f, values in registry[name].choices().items() if all(isinstance(value, str) for value in values)}
            found += search_space.variants(default, without=set(registry[name].choices()) - spoken)
    return found


class TestPasses(PassSuite):
    @pytest.fixture(params=variants(PASSES), ids=str)
    def technique(self, request: pytest.FixtureRequest) -> Pass:
        return request.param


class TestBackends(BackendSuite):
    @pytest.fixture(params=variants(BACKENDS), ids=str)
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return request.param


class TestOversubscription(CheckSuite):
    @pytest.fixture
    def technique(self) -> Check:
        return CHECKS["oversubscription"]()

    @contextlib.contextmanager
    def faulty(self, subject: Subject) -> Iterator[tuple[Subject, Environment]]:
        before, environment = torch.get_num_threads(), Environment.capture()
        torch.set_num_threads(environment.usable_cores + 2)
        try:
            yield subject, environment
        finally:
            torch.set_num_threads(before)


def test_a_package_that_is_installed_and_cannot_be_imported_is_a_reason() -> None:
    class Broken(Threads):
        def why_not_here(self) -> str | None:
            raise ImportError("libthing.so.1: cannot open shared object file")

    candidate = Candidate.of(torch.nn.Identity(), (torch.ones(1),))
    said = "threads cannot look at this machine: ImportError: libthing.so.1: cannot open shared object file"
    for found in (Broken().blocked(candidate), Broken().blocked_here()):
        assert str(found).startswith(said)


@pytest.mark.parametrize("raised", ["OSError('libgone.so.1: no such file')", "AttributeError('gone')", "ImportError('half')"])
def test_a_package_that_is_broken_skips_what_needs_it_and_says_why(raised: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "trimtab_broken.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    trial = as_trial(as_written(), lambda figures: require("trimtab_broken.part"))
    kind, _, words = raised.partition("('")
    assert (trial.state, trial.reason) == (
        State.SKIPPED,
        f"trimtab_broken.part is installed but cannot be imported ({kind}: {words[:-2]}). Install it again: pip install "
        "--force-reinstall trimtab_broken.",
    )


def test_every_check_of_models_has_its_suite() -> None:
    classes = [value for value in globals().values() if isinstance(value, type) and issubclass(value, CheckSuite)]
    assert {cls.__name__ for cls in classes} - {"CheckSuite"} == {
        f"Test{cls.__name__}" for cls in CHECKS.values() if cls.about == "model"
    }
