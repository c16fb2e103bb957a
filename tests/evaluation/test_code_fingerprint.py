"""What counts as other code than a study was begun with, and what does not."""

from __future__ import annotations

import importlib
import pathlib
import runpy

import cloudpickle
import pytest
import torch
from torch import nn

from trimtab.evaluation.code_fingerprint import MODEL, code_of

TEXT = """
import time
def helper(x):
    return x in y
class Net:
    def forward(self, x):
        return helper(x)
"""


def of_file(folder: pathlib.Path, text: str) -> str:
    path = folder / "net.py"
    path.write_text(text)
    return code_of(nn.Identity(), {"net": str(path)})["net"]


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("class Net", "if __name__ == '__main__':\n    print(1)\n\n    print(2)\nclass Net", True),
        ("class Net", "if __name__ == 'net':\n    print(1)\nclass Net", False),
        ("return helper(x)", "return helper(x)  # as ever", False),
        ("return helper(x)", "time.sleep(0.02)\n        return helper(x)", False),
        ("return x in", "time.sleep(0.02)\n    return x in", False),
        ("import time", "import time, torch\ntorch.set_flush_denormal(True)", False),
    ],
)
def test_files_are_compared_but_for_what_they_do_as_programs(tmp_path, before: str, after: str, *, same: bool) -> None:
    assert (of_file(tmp_path, TEXT) == of_file(tmp_path, TEXT.replace(before, after))) is same


def notebook(folder: pathlib.Path, forward: str, helper: str) -> nn.Module:
    """A model as a worker finds one that was written in a notebook: there is no file to look into."""
    head = f"from torch import nn\ndef helper(x):\n    {helper}\n"
    (folder / "cell.py").write_text(f"{head}class Net(nn.Module):\n    def forward(self, x):\n        {forward}")
    made = runpy.run_path(str(folder / "cell.py"), run_name="__main__")["Net"]()
    found: nn.Module = cloudpickle.loads(cloudpickle.dumps(made))
    return found


def test_a_class_without_a_file_is_known_by_its_code_and_by_what_it_calls(tmp_path) -> None:
    def of(forward: str = "return helper(x)", helper: str = "return x + 1") -> str:
        return code_of(notebook(tmp_path, forward, helper), {})[MODEL]

    assert of() == of(forward="return  helper( x )")
    assert len({of(), of(forward="return helper(x) * 1"), of(helper="return x - -1")}) == 3


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("made", [torch.fx.symbolic_trace, torch.jit.script], ids=["fx", "script"])
def test_a_graph_is_known_by_its_operations(made) -> None:
    assert code_of(made(Sum()), {}) == code_of(made(Sum()), {}) != code_of(made(Twice()), {})


def test_of_a_class_that_was_imported_the_file_counts(tmp_path, monkeypatch) -> None:
    file = tmp_path / "net_of_a_file.py"
    text = "from torch import nn\nclass Net(nn.Module):\n    pass\n"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module(file.stem).Net()
    found = []
    for more in ("", "if __name__ == '__main__':\n    print(1)\n", "known = 1\n"):
        file.write_text(text + more)
        found.append(code_of(nn.Sequential(model), {})[MODEL])
    assert found[0] == found[1] != found[2]
