"""Python imports this module when it starts. It runs the ``sitecustomize`` that it hides, and starts the probe when torch is
imported.

It needs no import but the standard library's, because it runs in every Python process that the script starts.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
"""The folder that holds the package ``trimtab``."""


def run_hidden() -> None:
    """Execute the ``sitecustomize`` that Python would have found without this folder."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def start_probe() -> None:
    """Load the probe. A failure is told on stderr, and the script goes on unwatched."""
    added = importlib.util.find_spec("trimtab") is None
    if added:
        sys.path.append(PACKAGE)
    try:
        importlib.import_module("trimtab.probe.inside.start").begin()
    except Exception as error:  # noqa: BLE001 - whatever fails in the probe must not stop the script
        print(f"trimtab: the probe did not start: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        if added:
            sys.path.remove(PACKAGE)


class AfterTorch:
    """A finder that starts the probe when ``import torch`` is done."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            start_probe()

        loader.exec_module = exec_module
        return spec


run_hidden()
if os.environ.get("TRIMTAB_PLAN") and os.environ.get("TRIMTAB") != "off":
    sys.meta_path.insert(0, AfterTorch())
