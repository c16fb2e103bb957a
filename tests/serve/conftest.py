"""Artifacts that the server's tests serve, and a browser."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from _serving import write


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of an artifact: ``x: float32[batch, 16]`` -> logits and class."""
    return write(tmp_path_factory.mktemp("net") / "artifact").path


CHROMIUMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'trimtab[dev]'")
    chromium = next((path for name in CHROMIUMS if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("there is no Chromium here: apt-get install chromium-headless-shell")
    with sync_api.sync_playwright() as playwright:
        as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=chromium, args=as_root)
        yield found
        found.close()
