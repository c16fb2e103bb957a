"""Every registered pass and backend against the suites that plug-ins are meant to use."""

from typing import Any

import pytest

from trimtab.contracts import BACKENDS, PASSES, Backend, Pass, Technique
from trimtab.testing import BackendSuite, PassSuite


def variants(registry: Any) -> list[Technique]:
    """Every registered technique as it comes, and once with each other value of its ``Literal`` fields."""
    found = []
    for name in registry:
        default = registry[name]()
        found.append(default)
        if getattr(default, "cost", "seconds") == "seconds":
            for field, values in registry[name].choices().items():
                found += [registry[name](**{field: v}) for v in values if v != getattr(default, field) and isinstance(v, str)]
    return found


class TestPasses(PassSuite):
    @pytest.fixture(params=variants(PASSES), ids=str)
    def technique(self, request: pytest.FixtureRequest) -> Pass:
        return request.param


class TestBackends(BackendSuite):
    @pytest.fixture(params=variants(BACKENDS), ids=str)
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return request.param
