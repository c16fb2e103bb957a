"""The edges of the commands: what cannot run here is listed so, Ctrl-C promises what is true, and a reader may leave."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from _faulty import write
from trimtab._internal.serialization import write_text
from trimtab.cli import environment
from trimtab.cli.main import main
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.technique import PASSES
from trimtab.hardware import system


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command in this process; gives its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trimtab", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
        with pytest.raises(SystemExit) as left:
            main()
        assert isinstance(left.value.code, int)
        return left.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def bare(monkeypatch) -> None:
    """A machine without a compiler, a GPU and the GNU C library."""
    monkeypatch.setenv("CXX", "/nowhere")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(system, "has_glibc", lambda: False)


def listed(command, kind: str) -> dict[str, dict[str, Any]]:
    code, out, _ = command("list", kind, "--json")
    assert code == 0
    return {row["name"]: row for row in json.loads(out)}


COMPILER = "The C++ compiler '/nowhere', which CXX names, was not found. Set CXX to one that is installed."
GPU = "needs an NVIDIA GPU, and PyTorch finds none here."


def test_backends_that_cannot_run_here_are_listed_so(bare, command) -> None:
    rows = listed(command, "backends")
    assert rows["inductor"]["why_not"] == rows["aoti"]["why_not"] == COMPILER
    assert rows["eager"]["why_not"] is None
    candidate = Candidate.of(nn.Linear(2, 2), (torch.ones(1, 2),))
    assert BACKENDS["inductor"]().blocked(candidate) == COMPILER


def test_passes_that_cannot_run_here_are_listed_so(bare, command, monkeypatch) -> None:
    rows = listed(command, "passes")
    assert rows["compile"]["why_not"] == COMPILER
    assert rows["tf32"]["why_not"] == f"tf32 {GPU}"
    assert rows["cudnn_benchmark"]["why_not"] == f"cudnn_benchmark {GPU}"
    assert "GNU C library" in rows["keep_memory"]["why_not"]
    assert rows["attention"]["why_not"] is None
    kernels = {f"kernel={kernel}": f"{kernel} attention {GPU}" for kernel in ("efficient", "cudnn")}
    assert rows["attention"]["not_here"] == kernels
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = command("list", "passes")
    blocks = [[line.strip() for line in block.splitlines()] for block in re.split(r"\n(?! )", out.rstrip())]
    shown = {lines[0].split(":")[0]: lines for lines in blocks}
    assert shown["attention"][-1] == f"can run, but: {' '.join(kernels.values())}"
    assert shown["attention"][-2] == "kernel=flash|efficient|cudnn|math"
    assert shown["channels_last"][0] == "channels_last: inference, training"
    assert shown["autocast"][0] == "autocast: inference, training; may lose accuracy"
    assert shown["channels_last"][-1] == "can run"
    assert shown["tf32"][-1] == f"tf32 {GPU}"


def test_a_backend_whose_package_is_broken_is_listed_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "onnxruntime").mkdir()
    code = "import logging\nlogging.warning('no such library')\nraise RuntimeError('undefined symbol')\n"
    (tmp_path / "onnxruntime" / "__init__.py").write_text(code, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "trimtab", "list", "backends", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        check=True,
        text=True,
        timeout=100,
    )
    rows = {row["name"]: row["why_not"] for row in json.loads(found.stdout)}
    assert rows["onnxruntime"].startswith("onnxruntime is installed but cannot be imported (RuntimeError: undefined symbol)")
    assert rows["eager"] is None
    assert not found.stderr, "which is what packages say to their developers"


def test_a_list_stays_readable_in_a_narrow_terminal(command, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = command("list", "backends")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "\n  Intel's OpenVINO: compiles the whole graph with oneDNN kernels; often the\n  fastest runtime" in out
    for columns in ("1", "2"):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, _ = command("list", "backends")
        assert code == 0
        assert "Intel'sOpenVINO" in "".join(out.split())


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "no GPU here has it"), ((9, 0), None)])
def test_a_gpu_that_is_too_old_is_told(monkeypatch, capability: tuple[int, int], reason: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = PASSES["tf32"]().why_not_here()
    assert found is None if reason is None else reason in str(found)


def test_what_a_model_file_says_commands_no_terminal(command, tmp_path) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Magic\x1b]0;owned\x07\x1b[2J", ["x"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in "xy"]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", values[:1], values[1:]))
    path = tmp_path / "magic.onnx"
    path.write_bytes(model.SerializeToString())
    code, out, err = command("optimize", str(path), "--out", str(tmp_path / "run"))
    assert code == 2
    assert "Magic" in err
    assert not {"\x1b", "\x07"} & set(out + err)


def test_the_names_of_a_machine_are_no_markup(command, monkeypatch) -> None:
    found = dataclasses.replace(trimtab.Environment.capture(), compiler="g++ [revision 1] [/x]", cpu="[bold]CPU :100:")
    monkeypatch.setattr(trimtab.Environment, "capture", lambda: found)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command("env")
    assert code == 0
    assert "g++ [revision 1] [/x]" in out
    assert "[bold]CPU :100: (" in out


def test_plug_ins_that_cannot_be_loaded_are_told_beside_json(command, monkeypatch) -> None:
    monkeypatch.setitem(vars(PASSES), "broken", {"old": "The pass 'old' cannot be loaded."})
    for form in ([], ["--json"]):
        code, _, err = command("list", "passes", *form)
        assert (code, err) == (0, "note: The pass 'old' cannot be loaded.\n")


@pytest.mark.parametrize(
    "line",
    [
        *("report {}", "report {} --json", "compare runs/x {}", "optimize {}.py", "measure {}", "measure {}.py"),
        *("optimize {}.onnx", "optimize hf:{}", "optimize hf:~no-such-user/{}", "init {}", "init ~no-such-user/x"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_no_bug(line: str, command) -> None:
    """pathlib raises where a name is too long, or a folder may not be entered."""
    code, _, err = command(*shlex.split(line.format("x" * 300)))
    assert code == 2
    assert err.startswith("error[")
    assert "is not a folder" in err or "There is no" in err or "is neither a kind of workload" in err


def test_names_that_no_file_can_have_are_answered(command, tmp_path) -> None:
    long, loop = tmp_path / ("x" * 300 + ".py"), tmp_path / "loop"
    loop.symlink_to(loop)
    code, _, err = command("init", "-o", str(long))
    assert (code, err) == (2, f"error[usage]: {long} cannot be written: File name too long. Choose another place with -o.\n")
    code, _, err = command("compare", str(loop), str(tmp_path / "other"))
    assert (code, err.count("is not a folder")) == (2, 1)
    write_text(loop, "what stood nowhere")
    assert loop.read_text() == "what stood nowhere"


def pressed(*_: object, **__: object) -> None:
    """What Ctrl-C does to whatever runs."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("line", ["list passes", "env --refresh", "measure model.py --time 3s", "verify runs/x/artifact"])
def test_ctrl_c_promises_no_more_than_is_true(line: str, command, monkeypatch) -> None:
    monkeypatch.setattr(environment, "lazy_import", pressed)
    monkeypatch.setattr(trimtab, "compare", pressed)
    monkeypatch.setattr(trimtab, "verify", pressed)
    code, _, err = command(*shlex.split(line))
    assert (code, err) == (130, f"\ninterrupted; nothing was kept. Again: trimtab {line}\n")


def test_ctrl_c_says_how_a_search_goes_on(command, monkeypatch, tmp_path) -> None:
    (tmp_path / "model.py").write_text("")
    monkeypatch.setattr(trimtab, "optimize", pressed)
    code, _, err = command("optimize", str(tmp_path / "model.py"), "--fresh", "--quiet")
    went_on = f"trimtab optimize {tmp_path / 'model.py'} --quiet"
    assert (code, err) == (130, f"\ninterrupted; what was finished is kept. To go on from it: {went_on}\n")


def unread(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command whose standard output nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
            check=False,
            env=os.environ | variables,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("variables", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("line", ["list checks", "list checks --json", "--version"])
def test_a_reader_that_has_gone_is_no_failure(line: str, variables: dict[str, str]) -> None:
    done = unread("-m", "trimtab", *shlex.split(line), **variables)
    assert (done.returncode, done.stderr) == (0, "")


MUCH = """
import sys
from trimtab.cli import _streams
_streams.prepare()
for line in range(1000):
    print("x" * 1000)
sys.exit(7)
"""


def test_a_reader_that_has_enough_leaves_the_exit_code_alone() -> None:
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(MUCH)} | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "x" * 10, "")


def test_a_full_disk_that_output_leads_to_leaves_the_exit_code_alone() -> None:
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(MUCH)} > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_a_full_disk_that_output_leads_to_is_no_success() -> None:
    line = f"{shlex.quote(sys.executable)} -m trimtab list checks --json > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "error[storage]: What the command printed was cut short: the disk that its output leads to is full. Free some space and"
        " run it again; what the run folder holds is whole.\n",
    )


def test_a_terminal_that_is_closed_leaves_the_exit_code_alone() -> None:
    ours, theirs = os.openpty()
    waits = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); input(){MUCH}"
    process = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(ours)
    os.close(theirs)
    process.communicate(b"go\n")
    assert process.returncode == 7


@pytest.mark.long
def test_a_search_that_nobody_reads_goes_on_to_its_end(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    workload = write(tmp_path, "def made(): return workload()")
    done = unread(
        "-m",
        "trimtab",
        "optimize",
        workload,
        "--out",
        str(run),
        "--max-drop",
        "10%",
        "--trials",
        "1",
        "--timing",
        "300ms",
        "--plain",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (run / "artifact" / "manifest.json").is_file()
    for form in ("--json", "--text"):
        done = unread("-m", "trimtab", "report", str(run), form)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("forms", [("--text", "--json"), ("--text", "--open"), ("--json", "--open")])
def test_a_report_has_one_form_at_a_time(command, forms: tuple[str, str], tmp_path) -> None:
    code, _, err = command("report", str(tmp_path), *forms)
    assert code == 2
    assert "--text, --json and --open each ask for another form of the report. Give one of them." in " ".join(err.split())


def test_a_pipe_of_our_own_that_breaks_is_a_bug(command, monkeypatch, tmp_path) -> None:
    def breaks(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(environment, "lazy_import", breaks)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, _, err = command("list", "passes")
    assert code == 70
    assert err.startswith("error[bug]: trimtab itself failed: BrokenPipeError: [Errno 32] Broken pipe")


def test_a_folder_that_is_gone_is_no_bug(command, monkeypatch, tmp_path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = "error[usage]: The folder that this was started in is gone, perhaps made anew. Change into it again.\n"
    for line in ("optimize model.py", "measure model.onnx"):
        code, _, err = command(*shlex.split(line))
        assert (code, err) == (2, said)
