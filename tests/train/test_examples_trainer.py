"""The scripts of ``examples/trainer/``: each equals a loop by hand, also after a kill, and the page counts their lines."""

from __future__ import annotations

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
COMPILED = [pytest.mark.long, pytest.mark.timeout(1200)]
CASES = [pytest.param(name, marks=COMPILED) if name == "bert" else name for name in NAMES]
"""The scripts; compiling takes a minute, and several on a busy machine."""
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


@pytest.fixture(params=CASES)
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
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == -9, done.stderr
    made = example.trainer(checkpoint=tmp_path).resume()
    summary = made.fit(*data_of(example, made), steps=UPDATES)
    assert summary.updates == UPDATES - 3
    torch.testing.assert_close(made.model.state_dict(), by_hand(example), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("side", [False, True], ids=["trainer", "by_hand"])
def test_the_benchmark_times_its_updates(example: ModuleType, side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("trainer").Script(example.__name__, by_hand=side)
    first, second = script.block(2)
    assert first == second > 0


def test_the_table_of_lines_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scripts = importlib.import_module("lightning_scripts")
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.py` \| [^|]+ \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    names = [build.__name__ for build in scripts.SCRIPTS]
    assert {*names, "bert"} == {*NAMES}
    assert rows == [(name, *map(str, scripts.counts(name))) for name in names]
    assert sum(int(ours) <= int(lightning) for _, ours, lightning, _ in rows) >= 10
