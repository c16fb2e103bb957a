"""The OpenVINO backend."""

import logging
import os
import re
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.backends.common import openvino_conversion
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim
from trimtab.errors import CompileError, InputError, IntegrityError, UsageError
from trimtab.testing.models import CASES

pytest.importorskip("openvino")
OpenVino = BACKENDS["openvino"]


class Mixed(nn.Module):
    """A large input and output beside small ones, the input given back, and an input that goes nowhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image, unused, scale):
        y = self.conv(image) * scale
        return {"map": y, "mean": y.mean((2, 3)), "given": image, "total": y.sum()}


class SizeInside(nn.Module):
    def forward(self, x):
        return torch.relu(x) * float(x.shape[0])


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 5)

    def forward(self, x):
        y, (h, c) = self.layers(x)
        return self.head(y[:, -1]), h, c


def mixed(size=96):
    args = (torch.randn(1, 3, size, size), torch.ones(2), torch.tensor(0.5))
    return Candidate.of(Mixed().eval(), args, dynamic={"image": {0: Dim("batch")}})


@pytest.fixture(scope="module")
def built():
    candidate = mixed()
    executable = OpenVino().compile(candidate)
    yield candidate, executable
    executable.close()


def assert_agrees(candidate, executable, leaves, tolerance=1e-4):
    want, got = candidate.flat()(*leaves), executable.run(leaves)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def test_the_example_and_other_sizes(built):
    candidate, executable = built
    assert [dim.name for dim in executable.signature.dims] == ["batch"]
    for batch in (1, 3, 2, 1):
        assert_agrees(candidate, executable, [torch.randn(batch, 3, 96, 96), torch.ones(2), torch.tensor(2.0)])
    assert None not in (executable._dynamic, executable._static)


def test_strided_tracked_and_channels_last_inputs(built):
    candidate, executable = built
    image = torch.randn(1, 3, 96, 96, requires_grad=True).to(memory_format=torch.channels_last)
    assert_agrees(candidate, executable, [image, torch.ones(4)[::2], torch.tensor(1.0)])
    assert_agrees(candidate, executable, [torch.randn(3, 96, 96, 2).permute(3, 0, 1, 2), torch.ones(2), torch.tensor(1.0)])


def test_an_input_with_gradients_leaves_no_trace_in_later_calls():
    candidate = Candidate.of(nn.Linear(4, 2).eval(), (torch.randn(1, 4),), dynamic={"input": {0: Dim("batch")}})
    executable = OpenVino().compile(candidate)
    for rows in (1, 3):
        for _ in range(3):
            assert not executable(torch.randn(rows, 4, requires_grad=True)).requires_grad
        assert_agrees(candidate, executable, [torch.randn(rows, 4)])
    small = mixed(16)
    executable = OpenVino().compile(small)
    executable(torch.randn(1, 3, 96, 96)[..., :16, :16], torch.ones(2, requires_grad=True), torch.tensor(1.0))
    assert not executable._static._input_buffers[1].requires_grad


def test_calls_in_inference_mode_and_outside_of_it_take_turns():
    candidate = Candidate.of(nn.Linear(4, 2).eval(), (torch.randn(1, 4),), dynamic={"input": {0: Dim("batch")}})
    with torch.inference_mode():
        executable = OpenVino().compile(candidate)
    for rows in (1, 3, 1, 3):
        leaves = [torch.randn(rows, 4)]
        with torch.inference_mode():
            assert_agrees(candidate, executable, leaves)
        assert_agrees(candidate, executable, leaves)


@pytest.mark.parametrize("batch", [1, 2])
def test_outputs_belong_to_the_caller(built, batch):
    _, executable = built
    image = torch.randn(batch, 3, 96, 96)
    first = executable(image, torch.ones(2), torch.tensor(1.0))
    kept = {name: value.clone() for name, value in first.items()}
    image.zero_()
    executable(torch.randn(batch, 3, 96, 96), torch.ones(2), torch.tensor(3.0))
    for name, value in kept.items():
        assert torch.equal(value, first[name]), name
        first[name].add_(1)


@pytest.mark.parametrize("size", [3, 100_000])
def test_an_input_given_back_and_an_output_given_twice(size):
    class Twice(nn.Module):
        def forward(self, x, mask):
            y = torch.relu(x)
            return y, y, x, (y > 0) & mask

    candidate = Candidate.of(Twice(), (torch.randn(size), torch.rand(size) > 0.5))
    executable = OpenVino().compile(candidate)
    assert_agrees(candidate, executable, [torch.randn(size), torch.rand(size) > 0.5])
    assert executable.run(candidate.leaves)[2].data_ptr() != candidate.leaves[0].data_ptr()


@pytest.mark.parametrize("hint", ["latency", "throughput"])
def test_many_requests_keep_their_order(hint):
    candidate = mixed(16)
    executable = OpenVino(hint=hint, streams=2).compile(candidate.with_settings({"threads": 2}))
    for batches in ((1,) * 7, (1, 2, 1, 3)):
        requests = [[torch.randn(b, 3, 16, 16), torch.ones(2), torch.tensor(1.0)] for b in batches]
        for leaves, answers in zip(requests, executable.run_many(requests), strict=True):
            for want, got in zip(candidate.flat()(*leaves), answers, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_float32_is_float32():
    notes = " ".join(OpenVino().compile(CASES["encoder"]()).notes)
    assert "FullyConnected in f32" in notes
    assert "bf16" not in notes


def test_bfloat16_where_the_cpu_can():
    candidate = CASES["convnet"]()
    reason = OpenVino(precision="bf16").blocked(candidate)
    if reason is not None:
        assert "avx512_bf16" in reason
        return
    executable = OpenVino(precision="bf16").compile(candidate)
    assert not OpenVino(precision="bf16").exact
    assert "Convolution in bf16" in " ".join(executable.notes)
    assert_agrees(candidate, executable, candidate.leaves, tolerance=0.05)


def test_quantized_lstm_with_dynamic_batch_collapses_only_on_request():
    torch.manual_seed(0)
    calibration = [((torch.randn(4, 20, 32),), {}) for _ in range(4)]
    dynamic = {"x": {0: Dim("batch"), 1: Dim("length", max=64)}}
    candidate = Candidate.of(Lstm().eval(), (torch.randn(1, 20, 32),), dynamic=dynamic, calibration=calibration)
    x = torch.randn(4, 20, 32)
    want = candidate.model(x)[1].flatten()
    auto = OpenVino(precision="int8_static").compile(candidate)
    assert torch.cosine_similarity(want, auto(x)[1].flatten(), dim=0) > 0.99
    assert "RNNSeq in f32" in " ".join(auto.notes)
    asked = OpenVino(precision="int8_static", operators="all").compile(candidate)
    # Whether it collapses depends on the runtime's version; what is promised is that it is the other form.
    assert "RNNSeq in f32" not in " ".join(asked.notes)


@pytest.mark.parametrize("precision", ["int8_static", "int8_weights"])
def test_int8_reaches_the_products(precision):
    candidate = CASES["encoder"]()
    executable = OpenVino(precision=precision).compile(candidate)
    want, got = candidate.flat()(*candidate.leaves)[0], executable.run(candidate.leaves)[0]
    assert torch.cosine_similarity(want.flatten(), got.flatten(), dim=0) > 0.98


@pytest.mark.parametrize(("case", "answer"), [("encoder", True), ("convnet", False), ("recurrent", False)])
def test_transformers_are_told_by_their_graph(case, answer, tmp_path):
    OpenVino().compile(CASES[case]()).save(tmp_path)
    assert openvino_conversion.is_transformer(openvino_conversion.core().read_model(tmp_path / "model.xml")) is answer


def test_a_traced_size_is_noticed_and_exported_or_frozen_instead(tmp_path):
    candidate = Candidate.of(SizeInside(), (torch.randn(2, 3),), dynamic={"x": {0: Dim("batch")}})
    executable = OpenVino().compile(candidate)
    if executable.signature.dims:
        assert_agrees(candidate, executable, [torch.randn(5, 3)])
    else:
        assert "Built for the example's batch only" in executable.notes[0]
        assert "not the model" in executable.notes[0]
    assert_agrees(candidate, executable, candidate.leaves)


def test_what_cannot_be_converted_says_why():
    class Sorted(nn.Module):
        def forward(self, x):
            return torch.tensor(sorted(x.tolist()))

    with pytest.raises(CompileError, match=r"trace: .*export: "):
        OpenVino().compile(Candidate.of(Sorted(), (torch.rand(3),)))


@pytest.mark.parametrize("damage", ["no weights", "half the weights", "half the graph", "garbage", "link"])
def test_damaged_files_are_refused(built, tmp_path, damage):
    _, executable = built
    assert executable.save(tmp_path / "a") == ["model.xml", "model.bin"]
    graph, weights = tmp_path / "a" / "model.xml", tmp_path / "a" / "model.bin"
    if damage == "no weights":
        weights.unlink()
    elif damage == "half the weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif damage == "half the graph":
        graph.write_bytes(graph.read_bytes()[: graph.stat().st_size // 2])
    elif damage == "garbage":
        graph.write_bytes(os.urandom(300))
    else:
        os.rename(weights, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", weights)
    with pytest.raises(IntegrityError, match=r"cannot be loaded|is missing or a link"):
        OpenVino().load(tmp_path / "a", executable.signature, Settings())


BODIES = "<body><layers><layer id='9' name='t' type='TensorIterator' version='opset1'>"


@pytest.mark.parametrize(
    ("place", "instead", "words"),
    [
        (r"<net ", "<!DOCTYPE net><net ", "declares a document type"),
        (r"<layers>", f"<layers>{BODIES * 5000}", "nests more than 100 elements"),
        (r'(<data element_type="f32" shape="[^"]+") ', r'\1 value="x" ', "a constant has the attributes"),
        (r'(<data element_type="f32" shape=")[^"]+', r"\g<1>1000, 1000", "a constant of 4000000 bytes"),
        (r'(<data element_type="f32" shape="[^"]+" offset=")\d+', r"\g<1>999999999", "bytes at 999999999"),
        (r'(<data element_type="f32" shape="[^"]+" offset=")\d+', r"\g<1>18446744073709551600", "a constant has the type"),
        (r'(<data element_type=")f32(" shape="[^"]+" offset)', r"\1string\2", "a constant has the type 'string'"),
    ],
)
def test_a_graph_that_reads_beyond_its_files_is_refused(built, tmp_path, place, instead, words):
    _, executable = built
    executable.save(tmp_path)
    graph = tmp_path / "model.xml"
    text, changed = re.subn(place, instead, graph.read_text(), count=1)
    assert changed
    graph.write_text(text)
    with pytest.raises(IntegrityError, match=words):
        OpenVino().load(tmp_path, executable.signature, Settings())


@pytest.mark.parametrize("shapes", ["x,y;2;", "1,3,96,96", "1,3,96,-96;2;", "1,3,5,5;2;", "9999999999999999999999;2;"])
def test_tampered_sizes_are_refused(built, tmp_path, shapes):
    _, executable = built
    executable.save(tmp_path)
    graph = tmp_path / "model.xml"
    text = graph.read_text().replace('value="1,3,96,96;2;"', f'value="{shapes}"')
    assert shapes in text
    graph.write_text(text)
    with pytest.raises(IntegrityError):
        OpenVino().load(tmp_path, executable.signature, Settings())


def test_another_signature_is_refused(built, tmp_path):
    _, executable = built
    executable.save(tmp_path)
    other = Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(1, 4),)).signature
    with pytest.raises(IntegrityError, match="signature"):
        OpenVino().load(tmp_path, other, Settings())


def test_script_runs_without_torch_at_several_sizes(built, tmp_path):
    candidate, executable = built
    executable.save(tmp_path)
    source = OpenVino(precision="f32").script()
    assert len(source.strip().splitlines()) <= 24
    program = f"""{source}
import sys, numpy
call = load(".", 1)
for batch in (1, 2, 1, 3):
    data = numpy.load(f"in{{batch}}.npy")
    numpy.save(f"out{{batch}}.npy", call([data, numpy.ones(2, "float32"), numpy.array(1.0, "float32")])[0])
assert "torch" not in sys.modules
"""
    images = {batch: torch.randn(batch, 3, 96, 96) for batch in (1, 2, 3)}
    for batch, image in images.items():
        np.save(tmp_path / f"in{batch}.npy", image.numpy())
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    for batch, image in images.items():
        want = candidate.flat()(image, torch.ones(2), torch.tensor(1.0))[0].detach().numpy()
        np.testing.assert_allclose(np.load(tmp_path / f"out{batch}.npy"), want, rtol=1e-3, atol=1e-4)


def test_no_telemetry_starts(tmp_path):
    """In a fresh process with a home of its own: no telemetry module, nothing in the home folder, no thread left, no socket."""
    program = textwrap.dedent("""
        import os, socket, sys, threading
        def refuse(*args): raise SystemExit("a socket was opened")
        socket.socket.connect = refuse
        socket.getaddrinfo = refuse
        from trimtab.core.backend import BACKENDS
        from trimtab.testing.models import CASES
        for precision in ("f32", "int8_static", "int8_weights"):
            BACKENDS["openvino"](precision=precision).compile(CASES["convnet"]()).close()
        assert "nncf" in sys.modules and "openvino_telemetry" not in sys.modules
        assert not os.path.exists(os.path.expanduser("~/intel"))
        assert [t.name for t in threading.enumerate() if not t.daemon] == ["MainThread"]
    """)
    environment = os.environ | {"HOME": str(tmp_path)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_no_telemetry_where_openvino_was_imported_before(tmp_path):
    program = textwrap.dedent("""
        import sys
        import openvino
        from openvino_telemetry import Telemetry
        def refuse(*args, **more): raise SystemExit("telemetry was called")
        Telemetry.send_event = Telemetry.start_session = Telemetry.init = refuse
        from openvino.tools.ovc import telemetry_utils
        before = telemetry_utils.tm
        from trimtab.core.backend import BACKENDS
        from trimtab.testing.models import CASES
        BACKENDS["openvino"]().compile(CASES["convnet"]()).close()
        assert telemetry_utils.tm is before
        assert "openvino_telemetry" in sys.modules
    """)
    pytest.importorskip("openvino_telemetry")
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="only there does OpenVINO replace the signal stack")
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "not-guarded"])
def test_ctrl_c_is_heard_after_openvino_was_used(guarded):
    """Two CPU plug-ins that end in the order in which they began free the memory that signal handlers run on."""
    program = textwrap.dedent("""
        import contextlib, os, signal, sys
        from trimtab.backends.common.openvino_conversion import core
        from trimtab.backends.common.signal_stack import signal_stack_kept
        from trimtab.core.backend import BACKENDS
        from trimtab.testing.models import CASES
        first, second = (BACKENDS["openvino"](precision=p).compile(CASES["convnet"]()) for p in ("f32", "int8_weights"))
        first.close()
        second.close()
        del first, second
        with signal_stack_kept() if sys.argv[1] == "True" else contextlib.nullcontext():
            import openvino
            plugins = [openvino.Core() for _ in range(2)]
            for plugin in plugins:
                plugin.get_property("CPU", "FULL_DEVICE_NAME")
            del plugin
            while plugins:
                plugins.pop(0)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("heard")
    """)
    done = subprocess.run([sys.executable, "-c", program, str(guarded)], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0 and done.stdout == "heard\n") is guarded, done.stderr[-2000:]


def test_logging_is_left_alone():
    level = logging.root.manager.disable
    OpenVino(precision="int8_weights").compile(CASES["structured"]()).close()
    assert logging.root.manager.disable == level


def test_fields_are_checked():
    with pytest.raises(UsageError, match="at least 1"):
        OpenVino(streams=0)
    with pytest.raises(UsageError, match="Leave it at auto"):
        OpenVino(operators="all")
    assert "has none" in OpenVino(precision="int8_weights").why_not(Candidate.of(nn.ReLU(), (torch.randn(2),)))


def test_a_conversion_is_used_again(tmp_path, monkeypatch):
    candidate = Candidate.of(Mixed().eval(), mixed(16).args, scratch=tmp_path)
    OpenVino().compile(candidate).close()
    monkeypatch.setattr(openvino_conversion, "convert", None)
    executable = OpenVino(precision="int8_weights").compile(candidate)
    assert_agrees(candidate, executable, candidate.leaves, tolerance=0.1)


def test_several_threads_may_call_it_and_each_gets_its_own_answer(tmp_path):
    model = nn.Linear(64, 64).eval()
    candidate = Candidate.of(model, (torch.randn(1, 64),), scratch=tmp_path)
    executable = OpenVino().compile(candidate)
    wrong = []

    def calls(number):
        given = torch.full((1, 64), float(number))
        expected = model(given)
        for _ in range(300):
            if not torch.allclose(executable(given), expected, atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_loaded_stays_the_same_when_others_take_its_place_on_disk(tmp_path):
    dim, folder = {"input": {0: Dim("batch")}}, tmp_path / "model"
    models = [nn.Linear(4, 4).eval() for _ in range(2)]
    built = [OpenVino().compile(Candidate.of(model, (torch.ones(1, 4),), dynamic=dim)) for model in models]
    folder.mkdir()
    built[0].save(folder)
    loaded = OpenVino().load(folder, built[0].signature, Settings())
    folder.rename(tmp_path / "older")
    folder.mkdir()
    built[1].save(folder)
    for rows in (1, 3):
        assert torch.allclose(loaded(torch.ones(rows, 4)), models[0](torch.ones(rows, 4)), atol=1e-5)
    loaded.close()
    with pytest.raises(InputError, match="or it is closed"):
        loaded(torch.ones(1, 4))
