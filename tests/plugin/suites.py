"""What a plug-in's author writes to test a plug-in; ``tests/testing/test_plugin.py`` runs it where the plug-in is installed."""

import pytest
from trimtab_demo import DenseWeights, Traced

from trimtab.testing import BackendSuite, PassSuite


class TestDenseWeights(PassSuite):
    @pytest.fixture
    def technique(self):
        return DenseWeights()


class TestTraced(BackendSuite):
    @pytest.fixture
    def backend(self):
        return Traced()

    @pytest.mark.skip(reason="A plain trace does follow one branch: a known limit of this demonstration.")
    def test_control_flow_on_data(self):
        """Not kept."""
