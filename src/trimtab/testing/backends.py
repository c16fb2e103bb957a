"""Test suite for the contract of a backend."""

from __future__ import annotations

import copy
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from trimtab._internal.serialization import dumps
from trimtab.core.backend import BACKENDS, Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.dynamic_dims import resized
from trimtab.core.recipe import Recipe
from trimtab.errors import InputError
from trimtab.tensors.structure import flatten, unflatten
from trimtab.testing.assertions import (
    assert_close,
    assert_documented,
    assert_round_trip,
    assert_sentence,
    global_state,
    identical,
    model_state,
    outputs_of,
    refusal,
)
from trimtab.testing.exchange import OUTPUTS, prepare
from trimtab.testing.models import CASES, clipping, deciding

QUICK, SLOW = tuple(CASES), ("convnet", "branches", "anchored")
"""Cases for backends that compile in seconds, and for slower ones."""

SCRIPT_LINES = 24

Built = dict[str, tuple[Candidate, Executable]]

_compiled_cache: dict[tuple[str, type[Any]], Built] = {}


class BackendSuite:
    """Subclass it and define the fixture ``backend``. :attr:`cases` may be replaced or extended."""

    cases: ClassVar[dict[str, Callable[[], Candidate]]] = CASES
    refuses: ClassVar[frozenset[str]] = frozenset()
    """Names of the cases that this backend may fail to compile. It must compile all others."""

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend under test."""
        raise NotImplementedError("Override the fixture `backend` to return the backend under test.")

    @pytest.fixture
    def built(self, backend: Backend) -> Built:
        """Every case that the backend accepts, compiled once per backend. Also checks that compiling changes nothing else."""
        found = _compiled(dumps(backend, indent=None), type(self), backend)
        if not found:
            pytest.skip(f"{backend} cannot run here: {backend.blocked(next(iter(self.cases.values()))())}")
        return found

    def test_round_trip(self, backend: Backend) -> None:
        """JSON, hash, text and search space are consistent."""
        assert_round_trip(BACKENDS, backend)
        assert_documented(backend)
        assert Recipe(backend=backend).hash == Recipe(backend=type(backend)(**vars(backend))).hash

    def test_reasons(self, backend: Backend) -> None:
        """A reason is a sentence, and asking twice gives the same one."""
        for make in self.cases.values():
            candidate = make()
            reason = backend.blocked(candidate)
            assert_sentence(reason)
            assert backend.blocked(candidate) == reason

    def test_matches_the_model(self, backend: Backend, built: Built) -> None:
        """Outputs have the model's structure, shapes, dtypes and values, on the example and on calibration data."""
        for name, (candidate, executable) in built.items():
            for args, kwargs in ((candidate.args, candidate.kwargs), *candidate.calibration[:2]):
                want = candidate.model(*args, **dict(kwargs))
                assert_close(want, executable(*args, **dict(kwargs)), exact=backend.exact, where=f"{backend} on {name}")

    def test_dynamic_sizes(self, backend: Backend, built: Built) -> None:
        """Outputs are right at every size that the signature allows; other sizes are refused."""
        for name, (candidate, executable) in built.items():
            for dim in candidate.signature.dims:
                kept = next((kept for kept in executable.signature.dims if kept.name == dim.name), None)
                for size in (1, 2, 5):
                    args, kwargs = _inputs_at_size(candidate, dim.name, size)
                    if kept is not None and size in kept:
                        want = candidate.model(*args, **kwargs)
                        where = f"{backend} on {name} with {dim.name}={size}"
                        assert_close(want, executable(*args, **kwargs), exact=backend.exact, where=where)
                    elif size != candidate.signature.sizes(candidate.leaves)[dim.name]:
                        _refuses_or_agrees(candidate, executable, args, kwargs)

    def test_calls_like_the_model(self, backend: Backend, built: Built) -> None:
        """Positional arguments may be passed by keyword, in any order."""
        for name, (candidate, executable) in built.items():
            named = dict(zip(candidate.signature.parameters, candidate.args, strict=False)) | dict(candidate.kwargs)
            backwards = dict(reversed(named.items()))
            want = candidate.model(*candidate.args, **dict(candidate.kwargs))
            assert_close(want, executable(**backwards), exact=backend.exact, where=f"{backend} on {name}, by name")

    def test_refuses_wrong_inputs(self, backend: Backend, built: Built) -> None:
        """Wrong dtypes, ranks and sizes, missing inputs and numbers raise ``InputError``, or act as in the model."""
        for candidate, executable in built.values():
            leaves = candidate.leaves
            other = leaves[0].double() if leaves[0].dtype is not torch.float64 else leaves[0].float()
            wrongs: list[Any] = [other, leaves[0].unsqueeze(0), torch.cat([leaves[0], leaves[0]], dim=-1), 3.0, None]
            for wrong in wrongs:
                args, kwargs = unflatten(candidate.signature.input_structure, [wrong, *leaves[1:]])
                _refuses_or_agrees(candidate, executable, args, kwargs)
            _refuses_or_agrees(candidate, executable, candidate.args[:-1], dict(candidate.kwargs))
            _refuses_or_agrees(candidate, executable, candidate.args, dict(candidate.kwargs) | {"nonsense": leaves[0]})

    def test_strides_do_not_matter(self, backend: Backend, built: Built) -> None:
        """Inputs may have any strides, including unusual strides of dimensions of size one."""
        for name, (candidate, executable) in built.items():
            for spread in (_interleaved, _channels_last, _unusual_unit_strides):
                args, kwargs = unflatten(candidate.signature.input_structure, [spread(leaf) for leaf in candidate.leaves])
                want = candidate.model(*args, **kwargs)
                assert_close(want, executable(*args, **kwargs), exact=backend.exact, where=f"{backend} on {name}")

    def test_outputs_belong_to_the_caller(self, backend: Backend, built: Built) -> None:
        """Later calls do not change earlier outputs."""
        for name, (candidate, executable) in built.items():
            first = flatten(executable(*candidate.args, **dict(candidate.kwargs)))[0]
            copies = [tensor.clone() for tensor in first]
            args, kwargs = candidate.calibration[0]
            executable(*args, **dict(kwargs))
            executable.run_many([list(executable.signature.bind(a, k)) for a, k in candidate.calibration[:2]])
            assert identical(first, copies), f"{backend} overwrote an output of {name}."

    def test_outputs_can_be_changed_in_place(self, backend: Backend, built: Built) -> None:
        """Outputs can be modified in place, and later calls are not affected."""
        for name, (candidate, executable) in built.items():
            with torch.no_grad():  # first, because an output may share memory with the model
                want = copy.deepcopy(candidate.model(*candidate.args, **dict(candidate.kwargs)))
            leaves = [leaf.clone() for leaf in candidate.leaves]  # an output may be one of the inputs
            args, kwargs = unflatten(candidate.signature.input_structure, leaves)
            for outputs in (
                flatten(executable(*args, **kwargs))[0],
                executable.run(leaves),
                *executable.run_many([leaves, leaves]),
            ):
                for tensor in outputs:
                    tensor.zero_()
            got = executable(*candidate.args, **dict(candidate.kwargs))
            assert_close(want, got, exact=backend.exact, where=f"{backend} on {name}, after its outputs were changed")

    def test_many_requests(self, backend: Backend, built: Built) -> None:
        """``run_many`` gives the same outputs as single calls, in order."""
        for candidate, executable in built.values():
            requests = [list(executable.signature.bind(args, kwargs)) for args, kwargs in candidate.calibration]
            for leaves, outputs in zip(requests, executable.run_many(requests), strict=True):
                for a, b in zip(executable.run(leaves), outputs, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_saved_and_loaded_elsewhere(self, backend: Backend, built: Built, tmp_path: pathlib.Path) -> None:
        """A new process without the model's class computes the same outputs from the saved files."""
        for name, (candidate, executable) in built.items():
            prepare(tmp_path / name, backend, executable, candidate.leaves)
        command = [sys.executable, "-m", "trimtab.testing.reload", *(str(tmp_path / name) for name in built)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        for name, (candidate, executable) in built.items():
            found = load_file(str(tmp_path / name / OUTPUTS))
            for i, want in enumerate(executable.run(candidate.leaves)):
                assert_close(want, found[str(i)], exact=backend.exact, where=f"{backend} on {name}, loaded")

    def test_control_flow_on_data(self, backend: Backend) -> None:
        """Both branches of a model with data-dependent control flow are right, or the model is refused with a sentence."""
        for make in (deciding, clipping):
            candidate = make()
            made: list[Executable] = []
            error = refusal(lambda c=candidate, m=made: m.append(backend.compile(c)))  # type: ignore[misc]
            assert error is None or len(str(error).split()) > 4
            for factor, executable in itertools.product((1.0, -1.0, 50.0), made):
                rows = factor * candidate.args[0].abs()
                assert_close(candidate.model(rows), executable(rows), exact=backend.exact, where=f"{backend} on a branch")
            for executable in made:
                executable.close()

    def test_script(self, backend: Backend) -> None:
        """The source for ``run.py`` is short, valid, defines ``load`` and does not import trimtab."""
        source = backend.script()
        lines = [line for line in source.splitlines() if line.strip()]
        assert len(lines) <= SCRIPT_LINES, f"{len(lines)} lines"
        assert "import trimtab" not in source
        scope: dict[str, Any] = {}
        exec(compile(source, "run.py", "exec"), scope)  # noqa: S102 - the backend's own source is what is tested
        assert callable(scope["load"])


def _compiled(key: str, suite: type[BackendSuite], backend: Backend) -> Built:
    """The result of :attr:`BackendSuite.built`, cached: compiling again for each test would take minutes."""
    if (key, suite) in _compiled_cache:
        return _compiled_cache[key, suite]
    found = _compiled_cache[key, suite] = {}
    for name, make in suite.cases.items():
        if name in CASES and name not in (QUICK if backend.cost == "seconds" else SLOW):
            continue
        candidate = make()
        if reason := backend.blocked(candidate):
            assert_sentence(reason)
            continue
        before, shared, outputs = model_state(candidate.model), global_state(), outputs_of(candidate)
        made: list[Executable] = []
        error = refusal(lambda c=candidate, m=made: m.append(backend.compile(c)))  # type: ignore[misc]
        assert error is None or name in suite.refuses, f"{backend} saw no reason against {name}, but: {error}"
        assert model_state(candidate.model) == before, f"{backend} changed the model of {name}."
        assert global_state() == shared, f"{backend} left torch changed after {name}."
        assert identical(outputs_of(candidate), outputs), f"{backend} changed what the model of {name} does."
        if made:
            found[name] = candidate, made[0]
    return found


def _inputs_at_size(candidate: Candidate, name: str, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pairs = zip(candidate.leaves, candidate.signature.inputs, strict=True)
    args, kwargs = unflatten(candidate.signature.input_structure, [resized(t, s.shape, name, size) for t, s in pairs])
    return tuple(args), dict(kwargs)


def _refuses_or_agrees(candidate: Candidate, executable: Executable, args: Any, kwargs: Any) -> None:
    """Assert that the call raises ``InputError``, or acts like the model."""
    made: list[Any] = []
    try:
        error = refusal(lambda: made.append(executable(*args, **kwargs)))
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        with pytest.raises(type(error)):
            candidate.model(*args, **kwargs)
        return
    if error is not None:
        assert isinstance(error, InputError)
        assert str(error).rstrip().endswith("."), f"Not a sentence: {error}"
    for got in made:
        assert_close(candidate.model(*args, **kwargs), got, exact=True, where="an input that was not in the contract")


def _interleaved(leaf: torch.Tensor) -> torch.Tensor:
    return torch.stack([leaf, leaf], dim=-1)[..., 0]


def _channels_last(leaf: torch.Tensor) -> torch.Tensor:
    return (
        leaf.contiguous(memory_format=torch.channels_last)
        if leaf.dim() == 4
        else leaf.transpose(0, -1).contiguous().transpose(0, -1)
    )


def _unusual_unit_strides(leaf: torch.Tensor) -> torch.Tensor:
    strides = [7 if size == 1 else stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)]
    return leaf.contiguous().as_strided(leaf.shape, strides)
