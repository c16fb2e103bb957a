"""Names in saved models: odd ones that are read, and those with which a stranger would reach what no model needs."""

from __future__ import annotations

import pathlib

import pytest
import torch
from test_archives import rewrite
from torch import nn

from trimtab.backends.eager import Eager
from trimtab.core.candidate import Candidate
from trimtab.errors import CompileError, IntegrityError
from trimtab.safe_load.archives import load_program, load_torchscript, save_program

# weights of programs


class Columns(nn.Module):
    """As a table with a column of each name has them."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.by = nn.ModuleDict({name: nn.Embedding(9, 4) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.by[name](x[:, i]) for i, name in enumerate(self.names)], 1)


def test_weights_may_have_names_that_are_no_identifiers(tmp_path: pathlib.Path) -> None:
    marks = [f"a{chr(code)}b" for code in range(32, 127) if chr(code) not in "\"'\\{}."]
    names = ["hours-per-week", "marital status", "größe", "9", *marks]
    model, x = Columns(names).eval(), torch.randint(0, 9, (2, len(names)))
    save_program(torch.export.export(model, (x,)), tmp_path / "p.pt2")
    for program in (load_program(tmp_path / "p.pt2"), torch.export.load(tmp_path / "p.pt2")):
        assert torch.equal(program.module()(x), model(x))


@pytest.mark.parametrize("mark", ['"', "'", "\\", "{", "}", "\n", "\r", "\0", "\u2028", "ﬁ"])
def test_a_name_that_could_end_a_text_in_source_is_not_written(mark: str, tmp_path: pathlib.Path) -> None:
    program = torch.export.export(Columns([f"a{mark}b"]).eval(), (torch.zeros(1, 1, dtype=torch.long),))
    with pytest.raises(CompileError, match="should be the name of a weight"):
        save_program(program, tmp_path / "p.pt2")


def test_a_model_of_named_columns_ships_in_its_own_form(tmp_path: pathlib.Path) -> None:
    subject = Candidate.of(Columns(["hours-per-week", "marital status"]).eval(), (torch.randint(0, 9, (2, 2)),))
    executable = Eager().compile(subject)
    assert executable.save(tmp_path) == ["program.pt2"]
    x = torch.randint(0, 9, (2, 2))
    assert torch.equal(Eager().load(tmp_path, executable.signature, executable.settings)(x), subject.model(x))


# what TorchScript looks up


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0


def with_line(line: str, folder: pathlib.Path) -> pathlib.Path:
    """A scripted module with ``line`` in its forward."""
    torch.jit.save(torch.jit.script(Plain()), folder / "plain.pt")

    def change(records: dict[str, bytes]) -> None:
        name = next(name for name in records if name.endswith(".py"))
        records[name] = records[name].replace(b"    return ", f"    {line}\n    return ".encode())

    return rewrite(folder / "plain.pt", folder / "m.pt", change)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "line",
    [
        'getattr(torch, "sa" "ve")(x, "{}")',
        'getattr(torch, "s\\141ve")(x, "{}")',
        "getattr(torch, 'sa' 've')(x, '{}')",
        'getattr(torch, """sa""" "ve")(x, "{}")',
        'getattr (torch, "sa" "ve")(x, "{}")',
        'g = getattr\n    g(torch, "sa" "ve")(x, "{}")',
        't = torch\n    getattr(t, "sa" "ve")(x, "{}")',
        """z = "getattr(a, " + str(getattr(torch, 'sa' 've')(x, '{}')) + ")\"""",
    ],
)
def test_an_operator_named_by_a_text_runs_on_torch_and_is_refused_here(line: str, tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "touched"
    crafted = with_line(line.format(marker), tmp_path)
    with pytest.raises(IntegrityError, match="looks up an attribute in a way that no saved model does"):
        load_torchscript(crafted)
    torch.jit.load(crafted)(torch.ones(2))
    assert marker.exists(), "the exploit does not work on torch any more; make it real again"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "line",
    [
        "t = __torch__.torch.classes.profiler._RecordFunction",
        "t = __torch__.torch\n    c = t.classes.profiler._RecordFunction",
        "t = __torch__\n    c = t.torch.classes.profiler._RecordFunction",
        "t = (__torch__.torch).classes.profiler._RecordFunction",
        "t = __torch__.torch.\\\nclasses.profiler._RecordFunction",
        't = getattr(__torch__.torch, "classes").profiler._RecordFunction',
    ],
)
def test_a_native_class_is_refused_however_it_is_reached(line: str, tmp_path: pathlib.Path) -> None:
    crafted = with_line(line, tmp_path)
    assert torch.equal(torch.jit.load(crafted)(torch.ones(2)), torch.full((2,), 2.0)), "torch knows the name"
    with pytest.raises(IntegrityError, match="uses the native class '__torch__"):
        load_torchscript(crafted)


@pytest.mark.filterwarnings("ignore")
def test_attributes_that_torch_spells_by_getattr_are_read(tmp_path: pathlib.Path) -> None:
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))))
    columns, x = Columns(["hours-per-week", "driver's age", "income (usd)"]), torch.randint(0, 9, (2, 3))
    for module, inputs in ((nested.eval(), torch.randn(2, 4)), (columns.eval(), x)):
        torch.jit.save(torch.jit.trace(module, (inputs,)), tmp_path / "m.pt")
        assert torch.equal(load_torchscript(tmp_path / "m.pt")(inputs), module(inputs))
