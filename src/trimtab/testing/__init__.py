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

    class TestMyScriptCheck(ScriptCheckSuite):
        @pytest.fixture
        def technique(self):
            return MyScriptCheck()

        def faulty(self):
            return {"padded": dataclasses.replace(sound_records()["training"], loaders=(...,))}

Needs pytest, which the extra ``dev`` installs.
"""

from trimtab.testing.backends import BackendSuite
from trimtab.testing.check_suite import CheckSuite, ScriptCheckSuite
from trimtab.testing.passes import PassSuite
from trimtab.testing.records import sound_records

__all__ = ["BackendSuite", "CheckSuite", "PassSuite", "ScriptCheckSuite", "sound_records"]
