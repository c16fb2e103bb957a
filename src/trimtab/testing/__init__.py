"""Test suites for the contracts of passes, backends and checks: for trimtab's own and for plug-ins.

Subclass a suite and define its fixture::

    class TestMyPass(PassSuite):
        @pytest.fixture
        def technique(self):
            return MyPass()

    class TestMyBackend(BackendSuite):
        @pytest.fixture
        def backend(self):
            return MyBackend()

    class TestMyCheck(CheckSuite):
        @pytest.fixture
        def technique(self):
            return MyCheck()

        @contextlib.contextmanager
        def faulty(self, subject):
            yield subject_with_the_fault, environment

Needs pytest, which the extra ``dev`` installs.
"""

from trimtab.testing.backends import BackendSuite
from trimtab.testing.check_suite import CheckSuite
from trimtab.testing.passes import PassSuite

__all__ = ["BackendSuite", "CheckSuite", "PassSuite"]
