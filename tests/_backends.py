"""Backends as tests use them: what one needs of a machine, and what it loads of what it saved."""

from __future__ import annotations

import pathlib

import pytest

from trimtab.core.backend import Backend, Executable
from trimtab.hardware.system import no_compiler

needs_compiler = pytest.mark.skipif(no_compiler() is not None, reason="needs a C++ compiler")


def reloaded(backend: Backend, executable: Executable, folder: pathlib.Path) -> Executable:
    executable.save(folder)
    return backend.load(folder, executable.signature, executable.settings)
