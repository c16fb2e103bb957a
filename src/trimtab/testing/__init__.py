"""Contract suites for techniques and runtimes, for plug-ins as much as for trimtab's own.

A plug-in's author subclasses a suite and gives one fixture::

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

Needs pytest, which the extra ``dev`` brings.
"""

from trimtab.testing.backends import BackendSuite
from trimtab.testing.check_suite import CheckSuite
from trimtab.testing.passes import PassSuite

__all__ = ["BackendSuite", "CheckSuite", "PassSuite"]
