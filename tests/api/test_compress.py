"""A study that makes a smaller network, from the workload to the artifact."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

import trimtab
from trimtab.api.optimize import command_line
from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.trial import State
from trimtab.core.workload import Limits
from trimtab.errors import UsageError
from trimtab.passes.recover import FOLDER
from trimtab.study.options import Options, ways

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


@pytest.mark.long
def test_a_smaller_network_is_trained_once_confirmed_and_shipped(tmp_path, monkeypatch) -> None:
    (tmp_path / "halves.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    # only the runtime that the smaller networks are tried on, so that few trials come before them
    monkeypatch.setattr(search_space, "backends", lambda: [BACKENDS["onnxruntime"]()])
    monkeypatch.setattr(search_space, "variants", lambda technique, without=(): [])
    for name in ("rewrites", "knobs"):
        monkeypatch.setattr(search_space, name, list)
    asked: dict[str, Any] = {"limits": Limits(max_drop=0.2), "compress": "prune", "timing_seconds": 0.4, "out": "run"}
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


def test_it_is_refused_where_it_makes_no_sense(tmp_path) -> None:
    with pytest.raises(UsageError, match="compress is 'prune,more': 'more' cannot stand there"):
        trimtab.optimize("model.py", compress="prune,more")
    with pytest.raises(UsageError, match="'auto' can stand there alone"):
        ways("prune,auto")
    assert ways("prune, quantize,prune") == ("prune", "quantize")
    with pytest.raises(UsageError, match="needs the sampler ladder"):
        Options(compress=("prune",), sampler="tpe")


def test_the_command_repeats_it(tmp_path) -> None:
    assert "--compress prune,distill" in command_line("model.py", Options(compress=("prune", "distill")), None, None, tmp_path)
    assert "--compress" not in command_line("model.py", Options(), None, None, tmp_path)
