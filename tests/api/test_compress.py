"""A study that makes a smaller network, from the workload to the artifact."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trimtab
from trimtab.api.optimize import command_line
from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.limits import Limits
from trimtab.core.trial import State, Trial
from trimtab.errors import UsageError
from trimtab.passes.common.trained_weights import FOLDER, read_progress
from trimtab.study import study
from trimtab.study.options import Options, parse_ways
from trimtab.study.record import Record
from trimtab.study.samplers import compression, finished_trials

pytest.importorskip("torch_pruning")

WORKLOAD = """
import torch, trimtab
from torch import nn

def images(count, seed):
    images = torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    halves = [images[:, 0, :8].sum((1, 2)), images[:, 0, 8:].sum((1, 2))]
    return images, torch.stack(halves, 1).argmax(1)

def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
        nn.Linear(512, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pictures, labels = images(512, 1)
    with torch.enable_grad():
        for part, wanted in list(zip(pictures.split(64), labels.split(64))) * 6:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(part), wanted).backward()
            optimizer.step()
    return model.eval()

def workload():
    pictures, labels = images(600, 2)
    more, wanted = images(512, 1)
    return trimtab.Workload(
        name="halves",
        model=build,
        inputs=pictures[:1],
        evaluation=trimtab.Evaluation(data=(pictures, labels), score=lambda output, target: output.argmax(1) == target),
        training=trimtab.Training(data=list(zip(more.split(64), wanted.split(64))), loss=nn.CrossEntropyLoss()),
    )
"""


def holds_if_trained(trial: Trial) -> bool:
    """As if no smaller network kept the limit untrained; this one would."""
    return finished_trials.holds(trial) and (trial.recipe.training is not None or not trial.recipe.compresses)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_smaller_network_is_trained_once_confirmed_and_shipped(tmp_path, monkeypatch) -> None:
    (tmp_path / "halves.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    # only the runtime that the smaller networks are tried on, so that few trials come before them
    monkeypatch.setattr(search_space, "backends", lambda: [BACKENDS["onnxruntime"]()])
    monkeypatch.setattr(search_space, "variants", lambda technique, without=(): [])
    for name in ("rewrites", "knobs"):
        monkeypatch.setattr(search_space, name, list)
    monkeypatch.setattr(compression, "is_worthwhile", lambda *_: True)  # whatever the timing says
    monkeypatch.setattr(compression, "holds", holds_if_trained)
    asked: dict[str, Any] = {"limits": Limits(max_drop=0.05), "compress": "prune", "timing_seconds": 0.4, "out": "run"}
    cut = trimtab.optimize("halves.py", trials=9, train_budget=0.2, **asked)
    (stopped,) = cut.study.trainings.all
    assert stopped.state is State.STOPPED
    assert "at its limit of 0.2 s. Give more with --train-budget" in str(stopped.reason)
    assert not list(pathlib.Path("run/scratch", FOLDER).glob("*.safetensors")), "what time cuts off is not kept"
    assert {trial.state for trial in cut.trials if trial.recipe.training is not None} <= {State.STOPPED, State.SKIPPED}
    result = trimtab.optimize("halves.py", trials=3, train_budget="20m", **asked)
    smaller = [trial for trial in result.trials if trial.stage == "compressed"]
    trained = [trial for trial in smaller if any(step.name == "recover" for step in trial.recipe.passes)]
    assert trained
    assert any(trial.state is State.COMPLETE for trial in trained), [trial.reason for trial in trained]
    assert stopped.recipe.hash in {each.recipe.hash for each in result.study.trainings.all if each.state is State.COMPLETE}
    assert {path.suffix for path in pathlib.Path("run/scratch", FOLDER).iterdir()} == {".safetensors"}
    notes = {note for trial in trained for note in trial.notes if note.startswith("Trained on")}
    files = list(pathlib.Path("run/scratch", FOLDER).glob("*.safetensors"))
    assert len(files) == len(notes), "each training happens once, and every trial says the same of it"
    best = result.best
    assert best is not None
    assert best.artifact is not None
    if best.trial.recipe.compresses:
        manifest = json.loads((best.artifact.path / "manifest.json").read_text())
        scale, tolerance = manifest["golden"]["scale"][0], manifest["golden"]["tolerance"][0]
        assert tolerance <= 0.1 * scale, "test vectors are the smaller network's"
        case = best.artifact.golden().cases[0]
        assert torch.allclose(best.artifact.load().run(case.inputs)[0], case.outputs[0], atol=tolerance)
        module = best.artifact.module()
        assert torch.allclose(module(*case.inputs), case.outputs[0], atol=tolerance)
        assert sum(parameter.numel() for parameter in module.parameters()) < 10_000, "the original has 10,594"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_training_that_cannot_end_in_time_leaves_the_time_to_other_recipes(tmp_path, monkeypatch) -> None:
    (tmp_path / "halves.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_space, "backends", lambda: [BACKENDS["onnxruntime"]()])
    monkeypatch.setattr(compression, "is_worthwhile", lambda *_: True)
    monkeypatch.setattr(compression, "holds", holds_if_trained)
    monkeypatch.setattr(study, "UPDATES", (200_000,))  # more than the budget allows
    asked: dict[str, Any] = {"limits": Limits(max_drop=0.05), "compress": "prune", "timing_seconds": 0.4, "out": "run"}
    result = trimtab.optimize("halves.py", budget="120s", **asked)
    stopped = [each for each in result.study.trainings.all if each.state is State.STOPPED]
    assert stopped
    why = r"stopped after \d+ of 200,000 updates, because at its pace it needs \d+ s more and \d+ s of the search are left"
    assert re.search(why, stopped[0].reason or ""), stopped[0].reason
    assert stopped[0].pace_s
    assert not any("cut off when the study ended" in note for note in result.study.notes)
    assert any("too short to try prune_channels(keep=0.5) + recover" in note for note in result.study.notes)
    assert any("recover" in recipe for recipe in Record.read(pathlib.Path("run")).untried), "the same command asks for it again"
    assert result.trials[-1].recipe.training is None, "the search goes on"
    later = [trial for trial in result.trials if trial.recipe.backend.name == "eager"]
    assert any(trial.state is State.COMPLETE for trial in later[1:])


ALONE = """
import sys
from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.study.samplers import compression, finished_trials
compression.is_worthwhile = lambda *_: True
holds = finished_trials.holds
compression.holds = lambda trial: holds(trial) and (trial.recipe.training is not None or not trial.recipe.compresses)
search_space.backends = lambda: [BACKENDS["onnxruntime"]()]
search_space.variants = lambda technique, without=(): []
search_space.rewrites = search_space.knobs = list
from trimtab.cli.main import main
sys.argv[1:] = ["optimize", "halves.py", "--max-drop", "2%", "--compress", "prune", "--timing", "400ms", "--out", *sys.argv[1:]]
main()
"""


def in_training(out: pathlib.Path, act: Callable[[subprocess.Popen[str]], None], *more: str) -> tuple[int, str]:
    """Run a study in a process of its own and ``act`` in the middle of a training. Returns status and output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, str(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    trained = out / "scratch" / FOLDER
    begun = {path.name: read_progress(path).get("update", 0) for path in trained.glob("*.json")}
    while process.poll() is None:
        found = [(path, read_progress(path).get("update", 0)) for path in trained.glob("*.json")]
        if any(update > begun.get(path.name, 0) + 20 for path, update in found):
            act(process)
            break
        time.sleep(0.005)
    said = process.communicate()[0]
    return process.returncode, " ".join(said.split())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small tmpfs needs root on Linux")
def test_ctrl_c_and_a_full_disk_in_a_training_lose_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "halves.py").write_text(WORKLOAD.replace("32", "96").replace("512, 2", "1536, 2"))
    monkeypatch.chdir(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this system does not let us mount a tmpfs")

    def resize(kilobytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)

    out = disk / "run"
    trained = out / "scratch" / FOLDER
    try:
        status, said = in_training(out, lambda process: process.send_signal(signal.SIGINT))
        assert status in (0, 130), said
        assert "was cut off when the study ended; the same command tries it again" in said
        assert list(trained.glob("*.checkpoints/*")), "the state of the training is kept"
        status, said = in_training(out, lambda _: resize(shutil.disk_usage(disk).used // 1024 + 100))
        assert status != 0, said
        assert "disk is full" in said or "No space left" in said, said
        assert "the same command" in said
        resize(400 * 1024)
        (stopped,) = trained.glob("*.json")
        resumed = read_progress(stopped)["update"]
        assert resumed > 0
        status, said = in_training(out, lambda _: None, "--trials", "1")
        first = Record.read(out).trainings[0]
        assert first.state is State.COMPLETE, said
        assert {path.suffix for path in trained.iterdir()} == {".safetensors"}
        updates = [at for at, _ in first.losses]
        assert updates == sorted(updates)
        assert len(updates) == len(set(updates)) == 20, "the curve goes on where it was cut"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


LOUD = """
import torch, trimtab
from sklearn.datasets import load_digits
from torch import nn

bunch = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images, labels = torch.from_numpy(bunch.images).float().flatten(1)[order] / 16, torch.from_numpy(bunch.target).long()[order]

def build():
    torch.manual_seed(0)
    wide = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), *wide, nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.enable_grad():
        for part, wanted in list(zip(images[:800].split(64), labels[:800].split(64))) * 8:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(part), wanted).backward()
            optimizer.step()
    with torch.no_grad():  # the same function, with one channel so loud that 8 bits leave nothing of the others
        loud = model[:2](images[:800]).mean(0).argmax()
        model[0].weight[loud] *= 1000
        model[0].bias[loud] *= 1000
        model[2].weight[:, loud] /= 1000
    return model.eval()

def workload():
    return trimtab.Workload(
        name="loud",
        model=build,
        inputs=images[:1],
        evaluation=trimtab.Evaluation(
            data=(images[800:1300], labels[800:1300]), test=(images[1300:], labels[1300:]),
            score=lambda output, target: output.argmax(1) == target,
        ),
        calibration=images[:256],
        training=trimtab.Training(data=list(zip(images[:800].split(64), labels[:800].split(64))), loss=nn.CrossEntropyLoss()),
    )
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_bits_that_collapse_are_rescued_by_layers_in_float_and_ship(tmp_path, monkeypatch) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "loud.py").write_text(LOUD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_space, "backends", lambda: [BACKENDS["onnxruntime"]()])
    for name in ("rewrites", "knobs"):
        monkeypatch.setattr(search_space, name, list)

    def static(technique: Any, without: Any = ()) -> list[Any]:
        plain = technique == BACKENDS["onnxruntime"]()
        return [dataclasses.replace(technique, precision="int8_static")] if plain else []

    monkeypatch.setattr(search_space, "variants", static)
    asked: dict[str, Any] = {"limits": Limits(max_drop=0.03), "timing_seconds": 1.0, "out": "run", "budget": "400s"}
    result = trimtab.optimize("loud.py", **asked)
    collapsed = next(t for t in result.trials if t.recipe.backend.quantizes and not t.recipe.backend.float_layers)
    assert collapsed.drop is not None
    assert not collapsed.drop.decided
    assert {name for name, _ in collapsed.sensitivity[:2]} == {"0", "2"}
    best = result.best
    assert best is not None
    assert best.confirmation.drop.decided, "the limit holds on data that the search never saw"
    assert best.trial.recipe.backend.float_layers in (1, 2)
    assert any("Layers in float, which rounding harms most: " in note for note in best.trial.notes)
    (report,) = (tmp_path / "run").glob("*-report.html")
    page = report.read_text(encoding="utf-8")
    assert "Sensitivity of the layers to 8 bits" in page


def test_it_is_refused_where_it_makes_no_sense(tmp_path) -> None:
    with pytest.raises(UsageError, match="compress is 'prune,more': 'more' cannot stand there"):
        trimtab.optimize("model.py", compress="prune,more")
    with pytest.raises(UsageError, match="'auto' can stand there alone"):
        parse_ways("prune,auto")
    assert parse_ways("prune, quantize,prune") == ("prune", "quantize")
    with pytest.raises(UsageError, match="needs the sampler ladder"):
        Options(compress=("prune",), sampler="tpe")


def test_the_command_repeats_it(tmp_path) -> None:
    assert "--compress prune,distill" in command_line("model.py", Options(compress=("prune", "distill")), None, None, tmp_path)
    assert "--compress" not in command_line("model.py", Options(), None, None, tmp_path)
