"""The house stands: rooms, exports, what an import costs and changes, the command line, the README, the budget of sizes."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import typing
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest
import typer.main

import trimtab
from trimtab.cli.main import app

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = ROOT / "src" / "trimtab"
LAZY = re.compile(r'lazy_import\("([\w.]+)"\)\.(\w+)')
"""A name of a module that a command imports when it runs."""
README, FROZEN = ROOT / "README.md", pathlib.Path(__file__).parent / "data" / "cli.txt"

ROOMS = [
    "errors",
    "_internal",
    "tensors",
    "safe_load",
    "hardware",
    "core",
    "measure",
    "data",
    "importers",
    "train",
    "passes",
    "backends",
    "checks",
    "artifact",
    "evaluation",
    "execution",
    "study",
    "report",
    "serve",
    "probe",
    "testing",
    "api",
    "cli",
    "__main__",
]
"""The import order: a module imports only from its own room and from those before it. ``__init__`` is above all."""
ONE_FILE_EACH = {"passes", "backends", "checks"}
"""Rooms with a file for each technique, runtime or finding, however many there are."""
MOST_LOOSE, MOST_FILES, MOST_LINES = 6, 25, 500

FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def dotted(path: pathlib.Path) -> str:
    """``backends.eager`` for the file of ``trimtab.backends.eager``; empty for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path) for path in FILES}


def imports(node: ast.AST) -> Iterator[str]:
    """What is imported from trimtab, for types too, as dotted names below it: to read a file one must know those as well."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = []
    for name in names:
        if name.startswith("trimtab."):
            below = name.removeprefix("trimtab.")
            yield below if below in MODULES else below.rpartition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


@pytest.mark.parametrize("path", FILES, ids=lambda path: dotted(path) or "trimtab")
def test_imports_follow_the_order_of_the_rooms(path: pathlib.Path) -> None:
    here = dotted(path)
    room = here.partition(".")[0]
    if not here:
        return
    assert room in ROOMS, f"trimtab.{room} is no room: give it a place in ROOMS, as docs/architecture.md does"
    for name in imports(TREES[path]):
        other = name.partition(".")[0]
        assert other, f"{here} imports from the package itself; import from the module that defines it"
        assert ROOMS.index(other) <= ROOMS.index(room), f"{here} imports {name}, whose room comes after its own"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_rooms_are_told_as_they_are(page: str) -> None:
    rows = re.findall(r"^\| `([a-z_]+)/?` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    there = {dotted(path).partition(".")[0] for path in FILES} - {"", "__main__"}
    assert rows == [room for room in ROOMS if room in there]


def test_rooms_are_small_and_few_files_are_loose() -> None:
    loose = [path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")]
    assert len(loose) <= MOST_LOOSE
    folders = {path.parent for path in FILES} - {SOURCE, *(SOURCE / room for room in ONE_FILE_EACH)}
    sizes = {
        dotted(folder / "__init__.py"): sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders
    }
    assert {name: size for name, size in sizes.items() if size > MOST_FILES} == {}


def test_nothing_of_the_training_loop_knows_the_trainer() -> None:
    assert [
        dotted(path) for path in FILES if "train.trainer" in imports(TREES[path]) and dotted(path).startswith("train.")
    ] == []


def test_no_module_needs_itself() -> None:
    graph = {
        dotted(path): {name for name in imports(tree) if name != dotted(path)} for path, tree in TREES.items() if dotted(path)
    }
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    assert set(graph) <= set(order)


def test_exports_are_few_sorted_and_there() -> None:
    def key(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert trimtab.__all__ == sorted(set(trimtab.__all__), key=key)
    assert 20 <= len(trimtab.__all__) <= 45
    assert [name for name in trimtab.__all__ if not hasattr(trimtab, name)] == []
    assert dir(trimtab) == sorted(trimtab.__all__), "completion shows public names only"
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = trimtab.nothing_of_the_kind


def in_fresh_python(code: str) -> dict[str, list[str]]:
    """What ``code`` prints as JSON in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_importing_trimtab_costs_next_to_nothing() -> None:
    found = in_fresh_python("import sys, json, trimtab; print(json.dumps({'loaded': sorted(sys.modules)}))")
    heavy = {"torch", "numpy", "optuna", "rich", "typer", "plotly", "safetensors"}
    assert heavy.isdisjoint(found["loaded"])


HEAVY = """
import sys, json
import torch
bare = set(sys.modules)
from trimtab import *
print(json.dumps({"ours": sorted(set(sys.modules) - bare)}))
"""


def test_no_public_name_brings_a_compiler_or_an_optional_runtime() -> None:
    ours = set(in_fresh_python(HEAVY)["ours"])
    optional = {
        "onnx",
        "onnxruntime",
        "onnxscript",
        "openvino",
        "nncf",
        "torchao",
        "transformers",
        "plotly",
        "sklearn",
        "pynvml",
    }
    compilers = {"torch._inductor", "torch._dynamo", "torch.onnx._internal.exporter"}
    assert (optional | compilers) & ours == set()


UNCHANGED = """
import json, logging, os, random, signal, threading, warnings
import cloudpickle, numpy, optuna, psutil, safetensors.torch, torch, typer  # what they do at import is theirs

def state():
    return {
        "environment": sorted(f"{k}={v}" for k, v in os.environ.items()),
        "logging": [str(logging.root.handlers), str(logging.root.level), str(logging.getLogger("trimtab").handlers)],
        "warnings": [str(warnings.filters)],
        "threads": [str(threading.active_count()), str(torch.get_num_threads())],
        "torch": [str(torch.get_default_dtype()), str(torch.is_grad_enabled()), str(torch.backends.mkldnn.enabled),
                  torch.get_float32_matmul_precision(), str(torch.are_deterministic_algorithms_enabled())],
        "random": [str(hash(random.getstate())), str(hash(torch.get_rng_state().numpy().tobytes())),
                   str(hash(numpy.random.get_state()[1].tobytes())), str(numpy.random.get_state()[2])],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "folder": [os.getcwd(), *os.listdir()],
    }

before = state()
from trimtab import *
import trimtab.cli.main
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


def test_importing_everything_changes_no_global_state() -> None:
    assert in_fresh_python(UNCHANGED) == {}


def command_line() -> str:
    """Every command with its arguments and options, one a line."""
    root = typer.main.get_command(app)
    lines = []
    for name, command in sorted(root.commands.items()):
        lines.append(f"{name}\n")
        hints = typing.get_type_hints(command.callback)
        for parameter in command.params:
            word = "/".join([*parameter.opts, *parameter.secondary_opts])
            hint = hints[parameter.name]
            kind = hint.__name__ if isinstance(hint, type) else re.sub(r"[a-z_.]+\.(?=[A-Z])", "", str(hint))
            default = "" if parameter.default is None else f" = {parameter.default}"
            lines.append(f"    {word}: {kind}{default}{' (required)' if parameter.required else ''}\n")
    return "".join(lines)


def test_the_command_line_is_frozen() -> None:
    hint = "If this is meant, tell users in CHANGELOG.md, then run: python tests/test_architecture.py > tests/data/cli.txt"
    assert FROZEN.exists(), hint
    assert command_line() == FROZEN.read_text(encoding="utf-8"), hint


def blocks(language: str) -> list[tuple[str, str]]:
    """``(mark, text)`` of the README's blocks; the mark is the HTML comment on the line before, such as ``run``."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    return re.findall(rf"(?:<!-- ([a-z ]+) -->\n+)?```{language}\n(.*?)```", text, re.DOTALL)


def commands(block: str) -> list[str]:
    """The lines after a prompt, those that end in a backslash joined with the next."""
    return re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize(
    "line", [line for _, block in blocks("console") for line in commands(block) if line.startswith("trimtab ")]
)
def test_readme_commands_parse(line: str) -> None:
    root = typer.main.get_command(app)
    _, *arguments = shlex.split(line, comments=True)
    with root.make_context("trimtab", arguments[:0], resilient_parsing=True) as context:
        name, command, rest = root.resolve_command(context, arguments)
        assert command is not None
        assert command.make_context(name, list(rest), parent=context).params is not None


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder that looks like a checkout to a command, where whatever it writes does not stay."""
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def assert_runs(command: list[str], folder: pathlib.Path) -> None:
    """Run ``command`` in ``folder`` with this interpreter's commands first on the path."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for mark, block in blocks("console") if mark == "run"])
def test_readme_commands_that_are_marked_run(block: str, checkout: pathlib.Path) -> None:
    assert_runs(["bash", "-euc", "\n".join(commands(block))], checkout)


@pytest.mark.slow
@pytest.mark.skipif(not blocks("python"), reason="the README shows no Python")
def test_readme_python_runs(checkout: pathlib.Path) -> None:
    shown = [block for mark, block in blocks("python") if mark != "do not run"]
    assert shown
    (checkout / "readme.py").write_text("\n".join(shown), encoding="utf-8")
    assert_runs([sys.executable, "-c", "import readme"], checkout)  # what stands under the guard takes minutes


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_what_commands_import_late_is_there() -> None:
    """The type checker sees no module that is named by a text."""
    asked = [
        found for path in sorted((SOURCE / "cli").glob("*.py")) for found in LAZY.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(asked) > 20
    missing = [f"{module}.{name}" for module, name in asked if not hasattr(importlib.import_module(f"trimtab.{module}"), name)]
    assert missing == []


def test_files_and_functions_keep_their_budget() -> None:
    long_files = {dotted(path): n for path in FILES if (n := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES}
    sizes = {f"{dotted(path)}.{f.name}": lines(f) for path, tree in TREES.items() for f in functions(tree)}
    assert long_files == {}
    assert {name: n for name, n in sizes.items() if n > 80} == {}
    assert statistics.median(sizes.values()) <= 10


def test_no_import_of_ours_hides_in_a_function() -> None:
    hidden = {f"{dotted(path)}.{f.name}" for path, tree in TREES.items() for f in functions(tree) if list(imports(f))}
    assert hidden == set()


def test_three_boundaries_catch_everything_and_nothing_is_left_to_do() -> None:
    broad = [
        dotted(path)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and ast.unparse(node.body[-1]) != "raise"  # one that only cleans up swallows nothing
    ]
    # a trial, the start of a probe, and what a probe calls: the last two run in the script's process, which they must not stop
    assert broad == ["evaluation.evaluate", "probe.boot.sitecustomize", "probe.inside.boundary"]
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [dotted(path) for path in FILES if words.search(path.read_text(encoding="utf-8"))] == []


if __name__ == "__main__":
    print(command_line(), end="")
