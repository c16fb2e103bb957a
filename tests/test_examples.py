"""The examples as a user runs them: they load, score what their models are known to score, and say what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import trimtab
from trimtab.evaluation.prepared_workload import Subject, prepare
from trimtab.evaluation.reference import score as judged
from trimtab.importers.load import load_workload

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test imports the examples anew, and leaves none of them behind."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    yield
    for name in names & set(sys.modules):
        del sys.modules[name]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One cache for the whole file, so that each example trains once; never the user's own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on two busy cores wait for each other: training these small networks then takes ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def use_cache(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def example(name: str) -> Subject:
    return prepare(load_workload(EXAMPLES / f"{name}.py"))


def score(subject: Subject) -> float:
    """The mean over all labelled data, or the metric of all of it."""
    evaluation, batches = subject.workload.evaluation, (*subject.splits.selection, *subject.splits.test)
    assert evaluation is not None
    outputs: list[Any] = []
    with torch.inference_mode():
        for batch in batches:
            args, kwargs = batch.call
            outputs.append(evaluation.run(subject.model, batch.inputs) if evaluation.run else subject.model(*args, **kwargs))
    if evaluation.metric:
        return judged(evaluation, outputs, batches).value
    assert evaluation.score is not None
    scores = [evaluation.score(output, batch.target).float() for output, batch in zip(outputs, batches, strict=True)]
    return torch.cat(scores).mean().item()


def parameters(subject: Subject) -> int:
    return sum(parameter.numel() for parameter in subject.model.parameters())


def test_pipeline_is_judged_by_what_it_reads(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cleaner is optimized, with the pipeline around it; whatever is called like it takes its place."""
    subject = example("pipeline")
    assert parameters(subject) == 75_329
    assert score(subject) > 0.9
    assert subject.candidate.signature.batch is not None
    pipeline = importlib.import_module("pipeline")
    monkeypatch.setattr(trimtab, "load", lambda artifact, as_module: subject.model)
    pipeline.main("runs/pipeline/artifact")
    read, _, whole = capsys.readouterr().out.split()[:3]
    assert int(read) > 0.9 * int(whole) == 0.9 * 497


def test_digits_is_trained_once_and_right() -> None:
    subject = example("digits")
    assert parameters(subject) == 77_754
    assert score(subject) > 0.96
    assert sum(batch.rows for batch in (*subject.splits.selection, *subject.splits.test)) >= 900
    assert subject.notes == ()  # three sets are given, no row of the model's data is reused
    assert subject.candidate.signature.describe() == "images: float32[batch, 1, 8, 8]"


def test_digits_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    example("digits")
    assert torch.equal(torch.rand(1), first)


def test_tabular_is_trained_once_and_right() -> None:
    subject = example("tabular")
    assert parameters(subject) == 21_121
    assert score(subject) > 0.94


def test_weights_in_the_cache_are_used_and_a_corrupt_cache_is_made_again(cache: pathlib.Path) -> None:
    reference = example("tabular").model.state_dict()
    (path,) = (cache / "trimtab" / "examples").glob("tabular*.safetensors")
    written = path.stat().st_mtime_ns
    example("tabular")
    assert path.stat().st_mtime_ns == written

    path.write_bytes(path.read_bytes()[:1000])
    again = example("tabular").model.state_dict()
    assert path.stat().st_mtime_ns != written
    assert all(torch.allclose(again[key], value, atol=1e-3) for key, value in reference.items())
    assert not list(path.parent.glob("*.part"))


def test_silero_is_the_network_that_the_package_ships() -> None:
    silero = importlib.import_module("silero")
    frames, speech = silero.recording()
    model, oracle = silero.build(), silero.oracle()
    assert frames.shape == (938, 576)
    assert sum(parameter.numel() for parameter in model.parameters()) == 309_633
    h = c = torch.zeros(1, 128)
    ours, theirs = [], []
    with torch.no_grad():
        for frame in frames.split(1):
            probability, h, c = model(frame, h, c)
            ours.append(probability)
            theirs.append(oracle(frame[:, 64:], 16_000))
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=1e-4, rtol=1e-3)
    assert ((torch.cat(ours)[:, 0] > 0.5) == (speech > 0.5)).float().mean() > 0.98


def test_silero_scores_frames_of_segments() -> None:
    subject = example("silero")
    assert score(subject) > 0.95
    assert len(subject.candidate.calibration) > 100  # states and frames as they occur, recorded while it listens
    assert not subject.candidate.signature.dims


def test_minilm_ranks_pairs_as_people_do() -> None:
    subject = example("minilm")
    assert score(subject) == pytest.approx(0.729, abs=0.01)
    assert [dim.name for dim in subject.candidate.signature.dims] == ["batch", "length"]
    assert len(subject.candidate.calibration) == 49


def test_ranks_of_ties_are_shared() -> None:
    minilm = importlib.import_module("minilm")
    assert minilm.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0]).numpy()).tolist() == [2.5, 0.0, 2.5, 1.0]
    assert minilm.spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])) == pytest.approx(-1.0)


def test_a_missing_package_is_named_with_its_command() -> None:
    material = importlib.import_module("material")
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps silero-vad==6\.2\.3"):
        material.package_folder("no_such_package", "silero-vad==6.2.3")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_to_run_it(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.stem != "material":
        assert f"    trimtab optimize examples/{path.name} " in text.split('"""')[1]
        assert "def workload() -> trimtab.Workload:" in text
