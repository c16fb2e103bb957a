"""Artifacts that the server's tests serve."""

from __future__ import annotations

import pathlib

import pytest
from _serving import write


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of an artifact: ``x: float32[batch, 16]`` -> logits and class."""
    return write(tmp_path_factory.mktemp("net") / "artifact").path
