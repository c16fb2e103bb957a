"""Quantizing takes most of an int8 trial: settings that leave the graph alone use the int8 graph of an earlier trial."""

import inspect
import io
import platform

import pytest
import torch
from torch import nn

from trimtab.backends.common import onnx_file, openvino_conversion
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.hardware import environment

ABOUT = {
    ("onnxruntime", "int8_static"): {"spinning": False},
    ("onnxruntime", "int8_dynamic"): {"spinning": False},
    ("openvino", "int8_static"): {"streams": 1},
    ("openvino", "int8_weights"): {"streams": 1},
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


def candidate(scratch, *, scale=1.0, threads=None):
    torch.manual_seed(1)
    rows = [((scale * torch.randn(4, 32),), {}) for _ in range(6)]
    made = Candidate.of(model(), (torch.randn(4, 32),), calibration=rows, scratch=scratch)
    return made.with_settings({"threads": threads})


def output(backend, one):
    executable = backend.compile(one)
    try:
        return executable(*one.args)
    finally:
        executable.close()


@pytest.mark.parametrize(("name", "precision"), ABOUT)
def test_a_trial_uses_the_int8_graph_of_an_earlier_one(tmp_path, monkeypatch, name, precision):
    pytest.importorskip("nncf" if name == "openvino" else name)
    backend = BACKENDS[name]
    first = output(backend(precision=precision), candidate(tmp_path))
    monkeypatch.setattr(backend, "_quantize", None)  # not callable: nothing is quantized again
    again = output(backend(precision=precision, **ABOUT[name, precision]), candidate(tmp_path, threads=1))
    torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="not callable"):
        output(backend(precision="int8_static", operators="all"), candidate(tmp_path))


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_other_calibration_data_makes_another_graph(tmp_path, name):
    pytest.importorskip("nncf" if name == "openvino" else name)
    backend = BACKENDS[name](precision="int8_static")
    narrow = output(backend, candidate(tmp_path, scale=0.01))
    wide = output(backend, candidate(tmp_path))
    truth = model()(candidate(tmp_path).args[0]).detach()
    assert (wide - truth).abs().max() < 0.1 * truth.abs().max() < (narrow - truth).abs().max()


@pytest.mark.parametrize(
    ("built", "here", "asked"), [(True, True, False), (True, False, True), (False, False, False), (False, True, False)]
)
def test_weights_of_eight_bits_are_multiplied_exactly_on_a_cpu_without_vnni(built, here, asked, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(environment, "has_vnni", lambda: built)
    backend = BACKENDS["onnxruntime"](precision="int8_dynamic")
    executable = backend.compile(candidate(None))
    executable.save(tmp_path)
    script = backend.script()
    monkeypatch.setattr(environment, "has_vnni", lambda: here)
    loaded = backend.load(tmp_path, executable.signature, executable.settings)
    assert asks_for_exact_sums(loaded._session) is asked
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    scope = {"open": lambda path: io.StringIO("flags : fpu avx2 avx512_4vnniw" + " avx512_vnni" * here)}
    exec(script, scope)  # noqa: S102 - the backend's own source is what is tested
    alone = scope["load"](tmp_path, None)
    assert asks_for_exact_sums(inspect.getclosurevars(alone).nonlocals["session"]) is asked


@pytest.mark.parametrize(
    ("more", "largest", "kinds"),
    [({}, 64, "QuantizeLinear"), ({"full_range": True}, 127, "QuantizeLinear"), ({"form": "qoperator"}, 64, "QGemm")],
)
def test_forms_of_static_int8_on_a_cpu_without_vnni(more, largest, kinds, tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx")
    saturates = more.get("full_range") and not environment.has_vnni()  # sums of 8-bit weights, on a real CPU of this kind
    monkeypatch.setattr(environment, "has_vnni", lambda: False)
    backend, one = BACKENDS["onnxruntime"](precision="int8_static", **more), candidate(None)
    executable = backend.compile(one)
    truth = model()(*one.args).detach()
    assert (executable(*one.args) - truth).abs().max() < (0.3 if saturates else 0.1) * truth.abs().max()
    executable.save(tmp_path)
    graph = onnx.load(tmp_path / "model.onnx").graph
    weights = [onnx.numpy_helper.to_array(tensor).astype(int) for tensor in graph.initializer if tensor.data_type == 3]
    assert max(abs(values).max() for values in weights if values.ndim == 2) == largest
    assert any(node.op_type.startswith(kinds) for node in graph.node)
    assert not asks_for_exact_sums(backend.load(tmp_path, executable.signature, executable.settings)._session)


@pytest.mark.parametrize(("vnni", "largest"), [(True, 127), (False, 64)])
def test_openvino_has_weights_of_seven_bits_where_sums_clip(vnni, largest, monkeypatch):
    pytest.importorskip("nncf")
    monkeypatch.setattr(environment, "has_vnni", lambda: vnni)
    one = candidate(None)
    plain = openvino_conversion.runtime().convert_model(model(), example_input=one.args[0])
    made = openvino_conversion.quantize(plain, [args for args, _ in one.calibration], recurrent=False)
    constants = [node.data for node in made.get_ops() if node.get_type_name() == "Constant"]
    weights = [values.astype(int) for values in constants if values.dtype == "int8"]
    assert sorted(values.shape for values in weights) == [(8, 64), (64, 32)]
    assert max(abs(values).max() for values in weights) == largest


def asks_for_exact_sums(session):
    try:
        return session.get_session_options().get_session_config_entry(onnx_file.EXACT_PRODUCTS) == "1"
    except RuntimeError:
        return False


def test_a_script_for_floats_asks_nothing_of_the_cpu():
    pytest.importorskip("onnxruntime")
    assert "cpuinfo" not in BACKENDS["onnxruntime"]().script()
