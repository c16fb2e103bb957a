"""The scripts of ``examples/trainer/``: each equals a loop by hand, also after a kill, and the page counts their lines."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from _places import ROOT
from trimtab import Trainer

EXAMPLES = ROOT / "examples" / "trainer"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "material")
UPDATES = 7
KILLED = """
import importlib, os, pathlib, signal, sys, torch
sys.path.insert(0, sys.argv[1])
example = importlib.import_module(sys.argv[2])

def kill(trainer, event):
    if type(event).__name__ == "Saved" and event.update == 3:
        os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
torch.manual_seed(0)
made = example.trainer(checkpoint=sys.argv[3], checkpoint_every=3, callbacks=[kill])
data = [example.loader(*([made.model] if sys.argv[4] == "plays" else [])) for _ in range(1 + bool(made.context.metrics))]
made.fit(*data, steps=int(sys.argv[5]))
"""


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, imported from its folder; other examples have modules of the same names."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = {name: sys.modules.pop(name) for name in (*NAMES, "material") if name in sys.modules}
    yield importlib.import_module(request.param)
    for name in (*NAMES, "material"):
        sys.modules.pop(name, None)
    sys.modules.update(before)


def plays(example: ModuleType) -> bool:
    """Whether the loader needs the model, which plays."""
    return bool(inspect.signature(example.loader).parameters)


def data_of(example: ModuleType, made: Trainer) -> list[Any]:
    """What to train on, and where there are metrics the same to validate on."""
    return [example.loader(*([made.model] if plays(example) else [])) for _ in range(1 + bool(made.context.metrics))]


def by_hand(example: ModuleType) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = example.by_hand(UPDATES).state_dict()
    return found


@pytest.mark.usefixtures("one_thread")
def test_it_is_the_loop_by_hand(example: ModuleType) -> None:
    torch.manual_seed(0)
    made = example.trainer()
    made.fit(*data_of(example, made), steps=UPDATES)
    torch.testing.assert_close(made.model.state_dict(), by_hand(example), rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_it_goes_on_after_a_kill(example: ModuleType, tmp_path: pathlib.Path) -> None:
    arguments = [str(EXAMPLES), example.__name__, str(tmp_path), "plays" if plays(example) else "reads", str(UPDATES)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    made = example.trainer(checkpoint=tmp_path).resume()
    summary = made.fit(*data_of(example, made), steps=UPDATES)
    assert summary.updates == UPDATES - 3
    torch.testing.assert_close(made.model.state_dict(), by_hand(example), rtol=1e-6, atol=1e-6)


def lines(path: pathlib.Path, name: str) -> int:
    """The lines of a function of a script, without its docstring and blank lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    text = path.read_text(encoding="utf-8").splitlines()
    body = text[found.body[1].lineno - 1 : found.end_lineno]
    return sum(bool(line.strip()) for line in body)


def test_the_table_of_lines_is_counted() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.py` \| [^|]+ \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    counted = [
        (name, str(sum(lines(EXAMPLES / f"{name}.py", part) for part in ["trainer", *_steps(name)])),
         str(lines(EXAMPLES / f"{name}.py", "by_hand")))
        for name in NAMES
    ]  # fmt: skip
    assert rows == counted


def _steps(name: str) -> list[str]:
    """The function that makes the steps, where a script has one: by hand they are in the loop."""
    return ["step"] if "def step(" in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8") else []


if __name__ == "__main__":
    for each in NAMES:
        ours = sum(lines(EXAMPLES / f"{each}.py", part) for part in ["trainer", *_steps(each)])
        print(each, ours, lines(EXAMPLES / f"{each}.py", "by_hand"))
