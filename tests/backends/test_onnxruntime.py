"""The ONNX Runtime backend, and what it shares with OpenVINO's: scratch folders, names, proof of a converted graph."""

import logging
import os
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.backends.common import causes, onnx_export, onnx_int8
from trimtab.backends.common import scratch as _scratch
from trimtab.backends.common.foreign import calibration_rows, convert, no_numpy_form, wrong_graph
from trimtab.backends.common.io_names import plain_names
from trimtab.backends.common.process_lock import quiet
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim
from trimtab.errors import CompileError, IntegrityError, UsageError
from trimtab.testing.models import CASES

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
OnnxRuntime = BACKENDS["onnxruntime"]


class Small(nn.Module):
    """Two products, the input given back, a number, truth values and a kept weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.slope = 0.5

    def forward(self, x, unused):
        y = self.second(torch.tanh(self.first(x) * self.slope))
        return y, x, y.sum(), y > 0


class Attention(nn.Module):
    """Attention whose mask is as large as it gets, which a quantizer must not take for a value."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4 + (1 - mask)[:, None, :] * torch.finfo(x.dtype).min
        return self.out(torch.softmax(scores, -1) @ self.value(x))


class SizeInside(nn.Module):
    """Tracing turns the batch into a constant."""

    def forward(self, x):
        return x * float(x.shape[0])


def small(scratch=None, **more):
    batch = {0: Dim("batch", max=32)}
    calibration = [((torch.randn(3, 4), torch.randn(2)), {}) for _ in range(4)]
    args = (torch.randn(1, 4), torch.randn(2))
    return Candidate.of(Small().eval(), args, dynamic={"x": batch}, calibration=calibration, scratch=scratch, **more)


def attention():
    def inputs():
        mask = torch.ones(2, 6)
        mask[1, 4:] = 0
        return (torch.randn(2, 6, 16), mask), {}

    torch.manual_seed(1)
    return Candidate.of(Attention().eval(), inputs()[0], calibration=[inputs() for _ in range(6)])


def cosine(candidate, executable):
    want, got = candidate.model(*candidate.args).flatten(), executable(*candidate.args).flatten()
    return torch.cosine_similarity(want, got, dim=0).item()


@pytest.fixture(scope="module")
def built():
    candidate = small()
    executable = OnnxRuntime().compile(candidate)
    yield candidate, executable
    executable.close()


def test_other_sizes_and_kinds_of_outputs(built):
    candidate, executable = built
    assert [dim.name for dim in executable.signature.dims] == ["batch"]
    for batch in (1, 2, 7):
        x, unused = torch.randn(batch, 4), torch.randn(2)
        for want, got in zip(candidate.model(x, unused), executable(x, unused), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_outputs_belong_to_the_caller(built):
    _, executable = built
    x, unused = torch.randn(2, 4), torch.randn(2)
    first = executable(x, unused)
    kept = [t.clone() for t in first]
    executable(torch.randn(2, 4), unused)
    x.zero_()
    for before, now in zip(kept, first, strict=True):
        assert torch.equal(before, now)
    first[0].add_(1)  # writable


def test_strided_and_tracked_inputs(built):
    candidate, executable = built
    x = torch.randn(4, 3, requires_grad=True).t()
    torch.testing.assert_close(executable(x, torch.ones(4)[::2])[0], candidate.model(x, torch.ones(2))[0], rtol=1e-4, atol=1e-5)


class Masked(nn.Module):
    """Truth values go in and come out, and so does the input itself."""

    def forward(self, x, mask):
        return x.masked_fill(mask, 0.0), mask.logical_not(), x.half()


def test_every_kind_of_tensor_crosses():
    model, dims = Masked(), {"x": {0: Dim("n", max=32)}, "mask": {0: Dim("n", max=32)}}
    executable = OnnxRuntime().compile(Candidate.of(model, (torch.randn(3, 4), torch.rand(3, 4) > 0.5), dynamic=dims))
    whole, turned = torch.randn(6, 4), torch.randn(4, 6) > 0
    negated = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    with torch.inference_mode():
        inferred = torch.randn(3, 4)
    for x in (
        whole[3:],
        whole[:3].requires_grad_(),
        negated,
        torch._neg_view(torch.randn(3, 4)),
        inferred,
        nn.Parameter(whole[:3]),
    ):
        for mask in (turned[:, :3].T, torch.ones(3, 4, dtype=torch.bool)):
            wanted, got = model(x, mask), executable(x, mask)
            assert [t.dtype for t in got] == [torch.float32, torch.bool, torch.float16]
            assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    kept = executable(inferred, mask)
    executable.close()
    assert torch.equal(kept[0], model(inferred, mask)[0])  # what was given outlives the session


def test_default_operators_ruin_attention_and_auto_does_not():
    candidate = attention()
    safe = OnnxRuntime(precision="int8_static").compile(candidate)
    ruined = OnnxRuntime(precision="int8_static", operators="all").compile(candidate)
    assert cosine(candidate, safe) > 0.99
    assert 1 - cosine(candidate, ruined) > 5 * (1 - cosine(candidate, safe))
    assert "float: 2 MatMul" in " ".join(safe.notes)


@pytest.mark.parametrize(("case", "answer"), [("encoder", True), ("convnet", False), ("recurrent", False)])
def test_transformers_are_told_by_their_graph(case, answer, tmp_path):
    OnnxRuntime().compile(CASES[case]()).save(tmp_path)
    assert onnx_int8.is_transformer(tmp_path / "model.onnx") is answer
    nodes = onnx_int8.linear_nodes(tmp_path / "model.onnx")
    assert len(nodes) == {"encoder": 5, "convnet": 1, "recurrent": 1}[case]


def test_dynamic_int8_of_lstm_and_shared_weights():
    lstm = OnnxRuntime(precision="int8_dynamic").compile(CASES["recurrent"]())
    assert any("LSTM" in note.split("float")[0] for note in lstm.notes)
    candidate = CASES["branches"]()  # ONNX Runtime's own quantizer gets the shared weight of this one wrong
    executable = OnnxRuntime(precision="int8_dynamic").compile(candidate)
    for want, got in zip(candidate.flat()(*candidate.leaves)[:2], executable.run(candidate.leaves)[:2], strict=True):
        assert torch.cosine_similarity(want.flatten(), got.flatten(), dim=0) > 0.99


def test_an_output_before_a_relu_keeps_its_negative_values():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            y = self.first(x)
            return y, self.second(torch.relu(y))

    calibration = [((torch.randn(8, 6),), {}) for _ in range(4)]
    candidate = Candidate.of(Two().eval(), (torch.randn(8, 6),), calibration=calibration)
    got = OnnxRuntime(precision="int8_static").compile(candidate).run(candidate.leaves)
    assert got[0].min() < -0.1
    assert torch.cosine_similarity(candidate.model(*candidate.args)[0].flatten(), got[0].flatten(), dim=0) > 0.99


@pytest.mark.parametrize("precision", ["f32", "int8_dynamic", "int8_static"])
def test_weights_beside_the_file(precision, monkeypatch, tmp_path):
    monkeypatch.setattr(onnx_export, "ONE_FILE_BYTES", 0)
    candidate = CASES["convnet"]()
    backend = OnnxRuntime(precision=precision)
    executable = backend.compile(candidate)
    files = executable.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(files)
    if precision == "f32":
        assert files == ["model.onnx", "model.onnx.data"]
    loaded = backend.load(tmp_path, executable.signature, Settings(threads=1))
    torch.testing.assert_close(loaded.run(candidate.leaves)[0], executable.run(candidate.leaves)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
def test_damaged_files_are_refused(built, tmp_path, damage):
    _, executable = built
    executable.save(tmp_path)
    path = tmp_path / "model.onnx"
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "garbage": os.urandom(500)}[damage])
    with pytest.raises(IntegrityError, match=r"model\.onnx .*(cannot be loaded|can be read)"):
        OnnxRuntime().load(tmp_path, executable.signature, Settings())
    path.unlink()
    with pytest.raises(IntegrityError, match=r"model\.onnx .*(cannot be loaded|can be read)"):
        OnnxRuntime().load(tmp_path, executable.signature, Settings())


@pytest.mark.parametrize("place", ["../secret.bin", "/etc/hostname", "other.bin", ""])
def test_weights_outside_of_the_folder_are_refused(built, tmp_path, place):
    _, executable = built
    folder = tmp_path / "artifact"
    folder.mkdir()
    executable.save(folder)
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    model = onnx.load(folder / "model.onnx")
    inner = onnx.helper.make_node(
        "Constant", [], ["spied"], value=onnx.numpy_helper.from_array(np.zeros(4, np.float32), "spied")
    )
    tensor = inner.attribute[0].t  # hidden in an attribute, where a check of the initializers would not find it
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    model.graph.node.append(inner)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(IntegrityError, match="Do not use it"):
        OnnxRuntime().load(folder, executable.signature, Settings())


@pytest.mark.parametrize(
    "entries",
    [
        (("location", "model.onnx.data"), ("location", "../secret.bin")),
        (("location", "model.onnx.data"), ("offset", "0"), ("offset", "4096")),
        (("location", "model.onnx.data"), ("basepath", "..")),
        (("offset", "0"),),
    ],
)
@pytest.mark.parametrize("place", ["initializer", "default of a function"])
def test_weights_whose_place_reads_in_two_ways_are_refused(built, tmp_path, place, entries):
    _, executable = built
    executable.save(tmp_path)
    (tmp_path / "model.onnx.data").write_bytes(bytes(4096))
    model = onnx.load(tmp_path / "model.onnx")
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in entries:
        tensor.external_data.add(key=key, value=value)
    if place == "initializer":
        model.graph.initializer.append(tensor)
    else:
        function = model.functions.add(name="F", domain="strange")
        function.attribute_proto.add(name="v", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(IntegrityError, match="says where the tensor 'w' lies by"):
        OnnxRuntime().load(tmp_path, executable.signature, Settings())


def test_linked_weights_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx_export, "ONE_FILE_BYTES", 0)
    executable = OnnxRuntime().compile(CASES["convnet"]())
    executable.save(tmp_path / "artifact")
    os.rename(tmp_path / "artifact" / "model.onnx.data", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "artifact" / "model.onnx.data")
    with pytest.raises(IntegrityError, match=r"model\.onnx\.data"):
        OnnxRuntime().load(tmp_path / "artifact", executable.signature, Settings())


def test_another_signature_is_refused(built, tmp_path):
    _, executable = built
    executable.save(tmp_path)
    other = Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(1, 4),)).signature
    with pytest.raises(IntegrityError, match="signature"):
        OnnxRuntime().load(tmp_path, other, Settings())


def test_script_runs_without_torch(built, tmp_path):
    candidate, executable = built
    executable.save(tmp_path)
    source = OnnxRuntime().script()
    assert len(source.strip().splitlines()) <= 16
    np.savez(tmp_path / "in.npz", *(leaf.numpy() for leaf in candidate.leaves))
    program = f"""{source}
import sys, numpy
data = numpy.load("in.npz")
outputs = load(".", 1)([data[name] for name in data.files])
assert "torch" not in sys.modules
numpy.savez("out.npz", *outputs)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    found = np.load(tmp_path / "out.npz")
    for want, name in zip(executable.run(candidate.leaves), found.files, strict=True):
        np.testing.assert_allclose(found[name], want.numpy(), rtol=1e-4, atol=1e-5)


def test_reasons_against_it():
    candidate = Candidate.of(nn.Conv1d(2, 2, 1, bias=False).eval(), (torch.randn(1, 2, 4),))
    assert "Try int8_static" in OnnxRuntime(precision="int8_dynamic").why_not(candidate)
    with pytest.raises(UsageError, match="Leave it at auto"):
        OnnxRuntime(operators="all")


def test_tensors_without_numpy_form():
    candidate = Candidate.of(nn.Identity(), (torch.randn(2, 2).bfloat16(),))
    assert "bfloat16" in no_numpy_form(candidate.signature, "ONNX Runtime")
    assert "takes none" in no_numpy_form(Candidate.of(Nothing(), ()).signature, "ONNX Runtime")


class Nothing(nn.Module):
    def forward(self):
        return torch.ones(1)


def test_a_traced_size_is_noticed():
    candidate = Candidate.of(SizeInside(), (torch.randn(2, 3),), dynamic={"x": {0: Dim("batch")}})
    assert "batch=3" in wrong_graph(lambda leaves: [leaves[0] * 2.0], candidate, candidate.signature)
    assert wrong_graph(lambda leaves: [leaves[0] * float(len(leaves[0]))], candidate, candidate.signature) is None
    assert "other values" in wrong_graph(lambda leaves: [candidate.args[0] * 2.0], candidate, candidate.signature)
    fails = wrong_graph(lambda leaves: [leaves[0].reshape(2, 3) * 2.0], candidate, candidate.signature)
    assert fails.startswith("it fails at batch=3")


@pytest.mark.parametrize(
    ("case", "why"),
    [("sorted", "torch.export cannot|data-dependent expression"), ("bessel", "No ONNX function found for .*bessel_j0")],
)
def test_what_cannot_be_exported_says_why(case, why):
    model = Sorted() if case == "sorted" else Bessel()
    with pytest.raises(CompileError, match=rf"dynamo exporter: .*({why}).*torchscript exporter") as raised:
        OnnxRuntime().compile(Candidate.of(model, (torch.rand(3),)))
    assert "\x1b" not in str(raised.value)
    assert "Next steps" not in str(raised.value)


class Differences(nn.Module):
    """An operator that OpenVINO does not know, with arguments that are none; another that no converter knows."""

    def forward(self, x):
        return torch.diff(x) + torch.special.bessel_j0(x).sum()


class Bessel(nn.Module):
    """An operator that no exporter has a form of."""

    def forward(self, x):
        return torch.special.bessel_j0(x) + 1


@pytest.mark.parametrize(
    ("model", "name"), [(Bessel(), "special_bessel_j0"), (Differences(), "diff")], ids=["one", "arguments"]
)
def test_what_openvino_cannot_convert_is_named(model, name):
    pytest.importorskip("openvino")
    with pytest.raises(CompileError, match=rf"trace: \w+: No conversion rule found for operations: aten::{name}\b"):
        BACKENDS["openvino"]().compile(Candidate.of(model, (torch.rand(3),)))


def test_what_a_graph_refuses_is_told_whole():
    def run(leaves):
        raise RuntimeError("Got invalid dimensions for the following indices:\n index: 0 Got: 3 Expected: 2\nmore")

    candidate = Candidate.of(nn.Linear(2, 2).eval(), (torch.rand(2, 2),))
    told = "it fails at the example (Got invalid dimensions for the following indices: index: 0 Got: 3 Expected: 2)"
    assert wrong_graph(run, candidate, candidate.signature) == told


def test_an_input_or_output_may_be_called_as_an_operator_is():
    class Joined(nn.Module):
        def forward(self, cat, mean):
            return torch.cat([cat, mean], 1).mean(1, keepdim=True) + cat

    executable = OnnxRuntime().compile(Candidate.of(Joined(), (torch.rand(2, 3), torch.rand(2, 3))))
    assert executable.notes == []
    cat, mean = torch.rand(2, 3), torch.rand(2, 3)
    torch.testing.assert_close(executable(cat, mean=mean), Joined()(cat, mean))
    executable.close()

    class Spread(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"mean": torch.relu(x).mean(1), "relu": x.mean(0) + x.std()}

    executable = OnnxRuntime().compile(Candidate.of(Spread(), (torch.rand(2, 3),)))
    assert list(executable.notes) == []
    x = torch.rand(2, 3)
    torch.testing.assert_close(executable(x), Spread()(x))
    executable.close()


def test_why_a_model_was_traced_is_told(monkeypatch):
    def refuses(*_):
        raise ValueError("it has no form for this")

    monkeypatch.setitem(onnx_export._EXPORTERS, "dynamo exporter", refuses)
    executable = OnnxRuntime().compile(small())
    assert "Exported by tracing, because the newer exporter cannot: ValueError: it has no form for this." in executable.notes
    executable.close()


def test_what_is_wrapped_around_an_error_is_taken_off():
    wrapped = RuntimeError("Couldn't get TorchScript module by tracing.\nException:\nx\nPlease check correctness")
    wrapped.__cause__ = ValueError("\x1b[96mno tracing\x1b[0m, please\nand more")
    assert causes.first_line(wrapped) == "ValueError: no tracing, please"
    assert causes.first_line(RuntimeError("plain")) == "RuntimeError: plain"


class Sorted(nn.Module):
    """Its output depends on values in plain Python."""

    def forward(self, x):
        return torch.tensor(sorted(x.tolist()))


def test_plain_names():
    names = plain_names(["a.b", "a_b", "0", "", "größe", "a.b"], taken=["t_0"])
    assert len(set(names) - {"t_0"}) == 6
    assert all(name.isidentifier() and name.isascii() for name in names)
    assert names[0] == "a_b"


def test_quiet_puts_everything_back():
    level, filters = logging.root.manager.disable, list(warnings.filters)
    with pytest.raises(KeyError), quiet():
        raise KeyError
    assert (logging.root.manager.disable, warnings.filters) == (level, filters)


def test_fingerprint_sees_what_matters():
    first = _scratch.fingerprint(small())
    assert first == _scratch.fingerprint(small()) == _scratch.fingerprint(small().with_settings({"threads": 7}))
    weights, plain, sizes = small(), small(), small()
    with torch.no_grad():
        weights.model.first.weight[0, 0] += 1e-3
    plain.model.slope = 0.25
    sizes = Candidate.of(sizes.model, (torch.randn(2, 4), torch.randn(2)), dynamic={"x": {0: Dim("batch", max=32)}})
    assert len({first, *map(_scratch.fingerprint, (weights, plain, sizes)), _scratch.fingerprint(small(), "v2")}) == 5


def test_an_export_is_used_again(tmp_path, monkeypatch):
    OnnxRuntime().compile(small(tmp_path)).close()
    monkeypatch.setattr("trimtab.backends.onnxruntime.export_onnx", None)
    executable = OnnxRuntime(precision="int8_dynamic").compile(small(tmp_path))
    assert executable.run(small().leaves)[0].shape == (1, 4)
    executable.close()
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("onnx-")] == []


def test_a_half_built_folder_is_never_found(tmp_path):
    def dies(folder: pathlib.Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("killed")

    candidate = small(tmp_path)
    with pytest.raises(RuntimeError), _scratch.shared_folder(candidate, "thing", dies):
        pass
    with _scratch.shared_folder(candidate, "thing", lambda folder: (folder / "whole").touch()) as folder:
        assert [p.name for p in folder.iterdir()] == ["whole"]
    with _scratch.shared_folder(candidate, "thing", dies) as folder:  # there already: not built
        assert folder == tmp_path / "thing"


def test_calibration_is_cut_to_a_frozen_batch():
    candidate = small()
    assert [len(row[0]) for row in calibration_rows(candidate, candidate.signature)] == [3] * 4
    rows = calibration_rows(candidate, candidate.keeping([]).signature)
    assert [len(row[0]) for row in rows] == [1] * 12
    assert torch.equal(torch.cat([row[0] for row in rows[:3]]), candidate.calibration[0][0][0])
    strange = Candidate.of(candidate.model, candidate.args, calibration=[((torch.randn(5, 4), torch.randn(2)), {})])
    with pytest.raises(CompileError, match="No calibration input fits"):
        calibration_rows(strange, strange.signature)


def test_an_encoder_that_drops_padding_is_refused_with_what_to_do() -> None:
    """Evaluated with a padding mask it sets padded positions to zero, which no export does."""

    class Encoder(nn.Module):
        def __init__(self, nested: bool) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

        def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.encoder(x, src_key_padding_mask=pad)
            return found

    inputs = (torch.randn(2, 6, 16), torch.arange(6)[None].expand(2, 6) >= torch.tensor([[6], [3]]))
    backend = BACKENDS["onnxruntime"]()
    with pytest.raises(
        CompileError, match=r"'encoder' sets padded positions to zero .* make it with enable_nested_tensor=False"
    ):
        backend.compile(Candidate.of(Encoder(nested=True).eval(), inputs))
    executable = backend.compile(Candidate.of(Encoder(nested=False).eval(), inputs))
    executable.close()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_in_groups_keeps_channels_of_every_size_in_int8(groups: int) -> None:
    """It is computed in float. With one scale for its weight, the channels that a batch norm makes small would be lost."""
    torch.manual_seed(0)
    up, norm = nn.ConvTranspose2d(8, 12, 3, stride=2, groups=groups), nn.BatchNorm2d(12)
    norm.weight.data = torch.logspace(-3, 0, 12)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), up, norm).eval()
    images = torch.randn(24, 1, 3, 12, 12)
    candidate = Candidate.of(model, (images[0],), calibration=[((each,), {}) for each in images[:16]])
    executable = OnnxRuntime(precision="int8_static").compile(candidate)
    assert "int8: 1 Conv; float: 1 ConvTranspose." in executable.notes
    if groups > 1:
        with torch.no_grad():
            wanted = torch.cat([model(each) for each in images[16:]])
        errors = torch.cat([executable(each) for each in images[16:]]) - wanted
        assert (errors.std((0, 2, 3)) / wanted.std((0, 2, 3))).max() < 0.05


class OneBias(nn.Module):
    """A product whose bias is one number for all channels: ONNX Runtime's quantizer takes a bias per channel or none there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.bias = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, self.first(x).relu(), self.weight)


def test_weights_get_one_scale_each_where_the_quantizer_fails_with_one_per_channel(tmp_path) -> None:
    torch.manual_seed(0)
    rows = torch.randn(32, 8, 8)
    calibration = [((each,), {}) for each in rows]
    candidate = Candidate.of(OneBias().eval(), (rows[0],), calibration=calibration, scratch=tmp_path)
    told = (
        "Each quantized weight has one scale, because the quantizer fails with one per channel: IndexError in "
        "_adjust_weight_scale_for_int32_bias of onnxruntime.quantization.qdq_quantizer."
    )
    for _ in range(2):  # the second takes the files of the first
        executable = OnnxRuntime(precision="int8_static").compile(candidate)
        assert told in executable.notes
        assert "int8: 2 Gemm; float: none." in executable.notes
        assert cosine(candidate, executable) > 0.99


def test_a_quantizer_that_fails_in_every_way_is_told_in_its_own_words(monkeypatch) -> None:
    def failing(*args, per_channel, **options):
        raise ValueError("No weight is constant" if per_channel else "operands could not be broadcast")

    monkeypatch.setattr(onnx_int8, "quantize_dynamic", failing)
    with pytest.raises(
        CompileError, match=r"^ONNX Runtime cannot quantize this model \(int8_dynamic\): .*: No weight is constant"
    ):
        OnnxRuntime(precision="int8_dynamic").compile(small())


def test_the_reason_of_several_attempts_is_said_once(tmp_path) -> None:
    def attempt(method, candidate):
        raise CompileError("it has no rule for Spiral.")

    with pytest.raises(CompileError) as raised:
        convert(small(), tmp_path, ("traced", "exported"), attempt, "The runtime cannot convert this model.")
    ways = "traced, dynamic sizes and exported, dynamic sizes and traced and exported"
    assert str(raised.value) == f"The runtime cannot convert this model. {ways}: it has no rule for Spiral."


def test_calibration_inputs_with_an_empty_tensor_are_left_out() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([past, x]))

    def call(length: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(3, 4), torch.randn(length, 4)

    def candidate(*lengths: int) -> Candidate:
        calibration = [(call(length), {}) for length in lengths]
        return Candidate.of(Cached().eval(), call(5), dynamic={"past": {0: Dim("length", min=0)}}, calibration=calibration)

    some = candidate(0, 5, 0, 7)
    assert [len(row[1]) for row in calibration_rows(some, some.signature)] == [5, 7]
    executable = OnnxRuntime(precision="int8_static").compile(some)
    assert cosine(some, executable) > 0.99
    with pytest.raises(CompileError, match="in each of them a tensor is empty, as 'past' in the first"):
        OnnxRuntime(precision="int8_static").compile(candidate(0, 0))
