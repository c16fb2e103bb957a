"""Test suite for the contract of a pass."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from trimtab.backends.eager import Eager
from trimtab.core.candidate import Candidate
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.technique import PASSES, Pass
from trimtab.errors import CompileError, MissingPackageError
from trimtab.passes.common.quantized import is_quantized, without_rounding
from trimtab.testing.assertions import (
    assert_close,
    assert_documented,
    assert_round_trip,
    assert_same_form,
    assert_sentence,
    global_state,
    identical,
    model_state,
    outputs_of,
    refusal,
)
from trimtab.testing.models import CASES, shared


class PassSuite:
    """Subclass it and define the fixture ``technique``. :attr:`cases` may be replaced or extended."""

    cases: ClassVar[dict[str, Callable[[], Candidate]]] = CASES

    @pytest.fixture
    def technique(self) -> Pass:
        """The pass under test."""
        raise NotImplementedError("Override the fixture `technique` to return the pass under test.")

    def candidates(self) -> list[tuple[str, Candidate]]:
        """A new candidate for each case."""
        return [(name, make()) for name, make in self.cases.items()]

    def willing(self, technique: Pass) -> list[tuple[str, Candidate]]:
        """The cases that the pass accepts. A compressing pass may refuse a case only when it is applied."""
        found = [(name, candidate) for name, candidate in self.candidates() if technique.blocked(candidate) is None]
        if not technique.compresses:
            return found
        return [(name, candidate) for name, candidate in found if refusal(lambda c=candidate: technique.apply(c)) is None]  # type: ignore[misc]

    def test_round_trip(self, technique: Pass) -> None:
        """JSON, hash, text and search space are consistent."""
        assert_round_trip(PASSES, technique)
        assert_documented(technique)
        one, other = (Recipe(passes=(technique,), backend=Eager()) for _ in range(2))
        assert one.hash == other.hash

    def test_settings_exist(self, technique: Pass) -> None:
        """The names in ``sets`` are settings."""
        assert technique.sets <= set(Settings.names())
        assert technique.modes

    def test_reasons(self, technique: Pass) -> None:
        """A reason is a sentence, asking twice gives the same one, and asking changes nothing."""
        for name, candidate in self.candidates():
            before, shared = model_state(candidate.model), global_state()
            reason = technique.blocked(candidate)
            assert_sentence(reason)
            assert technique.blocked(candidate) == reason, name
            assert model_state(candidate.model) == before, name
            assert global_state() == shared, name

    def test_looks_at_any_model(self, technique: Pass) -> None:
        """Asking never raises and changes nothing, even if the model refuses symbolic values."""
        candidate = shared()
        before = model_state(candidate.model)
        for ask in (technique.why_not, technique.blocked):
            assert_sentence(ask(candidate))
        assert model_state(candidate.model) == before
        assert isinstance(candidate.model.features, torch.Tensor), "asking ran the model itself on symbols"
        if technique.blocked(candidate) is None:
            rewritten = technique.apply(candidate)
            want = candidate.model(*rewritten.args)
            assert_close(want, rewritten.model(*rewritten.args), exact=technique.exact, where=f"{technique} on a shared layer")

    def test_runs_somewhere(self, technique: Pass) -> None:
        """The pass accepts at least one case, or gives the same reason (about the machine) for all."""
        if not self.willing(technique):
            reasons = {technique.blocked(candidate) for _, candidate in self.candidates()}
            assert len(reasons) == 1, f"{technique} takes none of the cases: {reasons}"

    def test_pure(self, technique: Pass) -> None:
        """``apply`` changes neither the given candidate nor torch's state, bit for bit."""
        for name, candidate in self.willing(technique):
            before, shared, outputs = model_state(candidate.model), global_state(), outputs_of(candidate)
            settings, signature = candidate.settings, candidate.signature
            technique.apply(candidate)
            assert model_state(candidate.model) == before, name
            assert global_state() == shared, name
            assert identical(outputs_of(candidate), outputs), name
            assert (candidate.settings, candidate.signature) == (settings, signature), name

    def test_same_function(self, technique: Pass) -> None:
        """The rewritten candidate computes the same function on its example."""
        for name, candidate in self.willing(technique):
            rewritten = technique.apply(candidate)
            want = candidate.model(*rewritten.args, **dict(rewritten.kwargs))
            got = Eager().compile(rewritten)(*rewritten.args, **dict(rewritten.kwargs))
            if technique.compresses:
                assert_same_form(want, got, where=f"{technique} on {name}")
            else:
                assert_close(want, got, exact=technique.exact, where=f"{technique} on {name}")

    def test_smaller_and_always_the_same(self, technique: Pass) -> None:
        """A pass that compresses removes weights or zeroes them, unless it trains, rounds or swaps functions, and makes
        the same network each time. One that rounds changes nothing else: without the rounding, outputs equal the original's."""
        for name, candidate in self.willing(technique) if technique.compresses else ():
            before, one, other = candidate.model, technique.apply(candidate).model, technique.apply(candidate).model
            assert all(map(torch.equal, one.parameters(), other.parameters())), name
            sizes = [sum(int(parameter.count_nonzero()) for parameter in model.parameters()) for model in (before, one)]
            assert sizes[1] < sizes[0] or "training" in technique.needs or technique.quantizes or technique.trained_only, name
            if technique.quantizes:
                assert is_quantized(one), name
                args, kwargs = candidate.own_inputs()
                assert_close(
                    before(*args, **kwargs), without_rounding(one)(*args, **kwargs), exact=True, where=f"{technique}, {name}"
                )

    def test_changes_what_it_says(self, technique: Pass) -> None:
        """Only the settings in ``sets`` change; the signature stays."""
        for name, candidate in self.willing(technique):
            rewritten = technique.apply(candidate)
            changed = {name for name in Settings.names() if candidate.settings.value(name) != rewritten.settings.value(name)}
            assert changed <= technique.sets, name
            assert rewritten.signature == candidate.signature, name

    def test_result_works_on(self, technique: Pass, tmp_path: pathlib.Path) -> None:
        """The rewritten model is in evaluation mode, and can be copied and saved without its class."""
        name, candidate = next(iter(self.willing(technique)), (None, None))
        if candidate is None:
            pytest.skip(str(technique.blocked(self.candidates()[0][1])))
        rewritten = technique.apply(candidate)
        assert not any(module.training for module in rewritten.model.modules()), name
        executable = Eager().compile(rewritten)
        want = executable(*rewritten.args, **dict(rewritten.kwargs))
        executable.save(tmp_path)
        loaded = Eager().load(tmp_path, executable.signature, executable.settings)
        assert_close(want, loaded(*rewritten.args, **dict(rewritten.kwargs)), exact=True, where=f"{technique}, saved")

    def test_refused_ones_do_no_harm(self, technique: Pass) -> None:
        """Applied to a case that it refuses, the pass raises an error of trimtab, or computes the same function."""
        for name, candidate in self.candidates():
            if technique.blocked(candidate) is None:
                continue
            made: list[Any] = []
            error = refusal(lambda c=candidate, m=made: m.append(technique.apply(c)))  # type: ignore[misc]
            if error is not None:
                assert isinstance(error, (CompileError, MissingPackageError)), name
            else:
                want = candidate.model(*made[0].args, **dict(made[0].kwargs))
                got = made[0].model(*made[0].args, **dict(made[0].kwargs))
                assert_close(want, got, exact=technique.exact, where=f"{technique} on {name}")
