"""Remedies that are applied from outside keep outputs and losses, and are undone."""

from __future__ import annotations

import pathlib
import subprocess
import sys


def test_every_remedy_can_be_switched_on_and_off() -> None:
    file = pathlib.Path(__file__).with_name("remedies_in_process.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:randomly", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
