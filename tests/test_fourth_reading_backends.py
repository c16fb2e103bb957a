"""Decisions on data, memory that is given away, sizes that are lost, and questions that a model answers with an exception."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trimtab import artifact
from trimtab._golden import Golden
from trimtab._tree import flatten
from trimtab.backends._decisions import decision
from trimtab.backends._scratch import fingerprint
from trimtab.backends.eager import Eager
from trimtab.backends.inductor import Inductor
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.candidate import Candidate
from trimtab.contracts import BACKENDS, PASSES, Backend, Executable
from trimtab.environment import Environment
from trimtab.errors import CompileError
from trimtab.passes.autocast import Autocast
from trimtab.passes.channels_last import ChannelsLast
from trimtab.passes.fold_bn import FoldBn
from trimtab.passes.int8_weights import Int8Weights
from trimtab.passes.remove_dropout import RemoveDropout
from trimtab.recipe import Recipe
from trimtab.signature import Dim
from trimtab.testing.models import CASES, anchored, clipping, shared


class Doing(nn.Module):
    """A linear layer with any function behind it."""

    def __init__(self, function: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(width, width), function
        self.register_buffer("on", torch.ones(1))

    def forward(self, rows: torch.Tensor) -> Any:
        return self.function(self.layer(rows))


class Loop(nn.Module):
    """One step of a recurrent cell for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        scores: torch.Tensor = self.head(state)
        return scores


class Detector(nn.Module):
    """As many rows as it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        keep = y[:, 4] > 0
        return {"boxes": y[keep, :4], "scores": y[keep, 4]}


def of(function: Callable[..., Any]) -> Candidate:
    return Candidate.of(Doing(function).eval(), (torch.randn(2, 6),))


def looping() -> Candidate:
    dims = {"x": {0: Dim("batch"), 1: Dim("time")}}
    return Candidate.of(Loop().eval(), (torch.randn(2, 4, 6),), dynamic=dims)


def reloaded(backend: Backend, executable: Executable, folder: pathlib.Path) -> Executable:
    executable.save(folder)
    return backend.load(folder, executable.signature, executable.settings)


def cut(x: torch.Tensor) -> torch.Tensor:
    norm = x.norm()
    return x * (10 / norm) if norm > 10 else x


def counted(x: torch.Tensor) -> torch.Tensor:
    return x + len([v for v in x.flatten().tolist() if v > 0])


def alike(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.equal(x, x.abs()) else x


def looked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.numpy().max() > 3 else x


def filled(x: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(2, 6)
    rows[:, 0] = x[:, 0]  # from here on it holds data
    return x * 2 if rows.sum() > 0 else x


@pytest.mark.parametrize("function", [cut, counted, alike, looked, filled])
def test_what_python_reads_of_data_is_found(function: Callable[..., Any]) -> None:
    candidate = of(function)
    place = decision(candidate, candidate.leaves)
    assert place is not None
    first = function.__code__.co_firstlineno
    assert pathlib.Path(place[0]).name == pathlib.Path(__file__).name
    assert first < place[1] <= first + 4


def sized(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 1 else x


def picked(x: torch.Tensor) -> torch.Tensor:
    return x[x[0, 0].long().abs() % 2]  # the tracer follows that


def guarded(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if not torch.jit.is_tracing() and x.sum() > 1e9 else x


@pytest.mark.parametrize("function", [sized, picked, guarded])
def test_sizes_indices_and_checks_outside_of_a_trace_decide_nothing(function: Callable[..., Any]) -> None:
    candidate = of(function)
    assert decision(candidate, candidate.leaves) is None


def test_what_is_read_of_weights_alone_decides_nothing() -> None:
    class Switched(Doing):
        def forward(self, rows: torch.Tensor) -> Any:
            return self.layer(rows) if self.on[0] * 2 > 1 else rows

    candidate = Candidate.of(Switched(cut).eval(), (torch.randn(2, 6),))
    assert decision(candidate, candidate.leaves) is None


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_suites_models_decide_nothing(name: str) -> None:
    candidate = CASES[name]()
    assert decision(candidate, candidate.dynamic_leaves()) is None


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_trace_of_one_path_is_refused_with_the_line(name: str) -> None:
    if BACKENDS[name]().blocked(candidate := clipping()):
        pytest.skip(f"{name} is not here")
    with pytest.raises(CompileError, match=r"decides in Python on values of its tensors \(.*models.py:\d+\)") as caught:
        BACKENDS[name]().compile(candidate)
    assert "torch.where" in str(caught.value)


def test_torchscript_compiles_the_source_of_a_decision_and_refuses_where_it_cannot() -> None:
    candidate = clipping()
    executable = TorchScript().compile(candidate)
    assert "models.py" in executable.notes[0]
    large = candidate.args[0] * 50
    torch.testing.assert_close(executable(large), candidate.model(large))
    with pytest.raises(CompileError, match="a trace keeps one path"):
        TorchScript().compile(of(lambda x: {**{"a": cut(x)}}["a"]))  # no word of TorchScript


class Custom(Exception):
    pass


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        if y.dtype is not torch.float32:
            raise Custom("float32 only")
        return y


@pytest.mark.parametrize("error", [AssertionError, Custom])
def test_autocast_asks_a_model_that_refuses(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Custom", error)
    reason = Autocast().blocked(Candidate.of(Picky().eval(), (torch.randn(2, 4),)))
    assert reason is not None
    assert "float32 only" in reason


def test_whatever_a_look_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FoldBn, candidate: Candidate) -> str | None:
        raise KeyError("levels.1.0")

    monkeypatch.setattr(FoldBn, "why_not", fails)
    assert (FoldBn().blocked(shared()) or "").startswith("fold_bn cannot look at this model: KeyError: 'levels.1.0'")


def test_a_layer_that_two_parents_share_is_folded_in_each() -> None:
    candidate = shared()
    assert FoldBn().why_not(candidate) is None
    folded = FoldBn().apply(candidate).model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(folded(x), candidate.model(x))


def test_a_look_leaves_the_model_as_it_was() -> None:
    candidate = shared()
    before = candidate.model.features
    assert FoldBn().why_not(candidate) is None
    assert candidate.model.features is before


def segmenting(channels: int = 5) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.BatchNorm2d(channels)).eval()
    with torch.no_grad():
        for tensor in (model[2].running_mean, model[2].running_var, model[2].weight, model[2].bias):
            tensor.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("last", [lambda x: x.argmax(1), lambda x: torch.fft.rfft(x)], ids=["integers", "complex"])
def test_a_wrong_fold_shows_in_outputs_of_any_kind(last: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.relu, self.norm = segmenting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return last(self.norm(self.relu(self.convolution(x))))

    with pytest.raises(CompileError, match="No batch norm could be folded"):
        FoldBn().apply(Candidate.of(Network().eval(), (torch.randn(2, 3, 16, 16),)))


def test_inputs_that_go_with_each_other_are_not_shuffled_into_a_failure() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)
            self.recurrent = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.convolution(x)).transpose(1, 2)
            packed = nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=True)
            last: torch.Tensor = self.recurrent(packed)[1][0]
            return last

    candidate = Candidate.of(Packed().eval(), (torch.randn(4, 3, 9), torch.tensor([9, 6, 4, 2])))
    torch.testing.assert_close(FoldBn().apply(candidate).model(*candidate.args), candidate.model(*candidate.args))


def test_eager_writes_what_keeps_the_sizes(tmp_path: pathlib.Path) -> None:
    candidate = looping()
    executable = Eager().compile(candidate)
    loaded = reloaded(Eager(), executable, tmp_path)
    assert [dim.name for dim in loaded.signature.dims] == ["batch", "time"]
    assert "TorchScript" in executable.notes[-1]
    x = torch.randn(3, 7, 6)
    torch.testing.assert_close(loaded(x), candidate.model(x))


def test_sizes_that_are_lost_while_saving_are_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(candidate: Candidate) -> Any:
        raise CompileError("no source")

    monkeypatch.setattr("trimtab.backends.eager.script_flat", fails)
    executable = Eager().compile(looping())
    executable.save(tmp_path)
    assert executable.signature.dims == ()
    assert executable.notes[-1].startswith("What is saved takes the example's batch, time only")


@pytest.mark.skipif(Inductor().why_not_here() is not None, reason="no C++ compiler")
def test_inductor_promises_no_size_that_it_would_compile_anew() -> None:
    executable = Inductor(mode="default").compile(looping())
    assert executable.signature.dims == ()
    assert "compiled anew" in executable.notes[-1]
    plain = Candidate.of(nn.Linear(6, 3).eval(), (torch.randn(2, 6),), dynamic={"input": {0: Dim("batch", max=8)}})
    kept = Inductor(mode="default").compile(plain)
    assert [dim.name for dim in kept.signature.dims] == ["batch"]
    for rows in range(1, 9):
        kept(torch.randn(rows, 6))


def test_outputs_of_any_length_are_verified(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    candidate = Candidate.of(Detector().eval(), (torch.randn(32, 16),))
    executable = Eager().compile(candidate)
    golden = Golden.of(candidate, candidate.signature, [[torch.randn(32, 16)] for _ in range(3)])
    assert len({case.outputs[1].shape for case in golden.cases}) > 1
    written = artifact.write_artifact(
        tmp_path / "artifact",
        executable=executable,
        recipe=Recipe(backend=Eager()),
        workload_name="detector",
        golden=golden,
        evidence={},
        environment=Environment.capture(),
    )
    assert [spec.shape for spec in written.manifest.signature.outputs] == [("?", 4), ("?",)]
    assert artifact.verify(written.path).ok


def test_a_model_that_torchao_quantized_is_taken(tmp_path: pathlib.Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")

    def made(seed: int) -> Candidate:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
        return Candidate.of(model, (torch.ones(2, 64),), dynamic={"input": {0: Dim("batch")}})

    candidate = made(0)
    assert fingerprint(candidate) == fingerprint(made(0)) != fingerprint(made(1))
    assert "the model has none" in (Int8Weights().blocked(candidate) or "")
    x = torch.randn(3, 64)
    for backend in (Eager(), OpenVino()):
        if backend.blocked(candidate) is None:
            (tmp_path / backend.name).mkdir()
            loaded = reloaded(backend, backend.compile(candidate), tmp_path / backend.name)
            torch.testing.assert_close(loaded(x), candidate.model(x), rtol=1e-3, atol=1e-4)


def test_attention_reads_the_weight_of_its_last_layer_itself() -> None:
    pytest.importorskip("torchao")
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    candidate = Candidate.of(nn.TransformerEncoder(layer, 1).eval(), (torch.randn(2, 5, 32),))
    quantized = Int8Weights().apply(candidate)
    x = torch.randn(2, 5, 32)
    assert functional.cosine_similarity(quantized.model(x).flatten(), candidate.model(x).flatten(), dim=0) > 0.999


@pytest.mark.parametrize("loaded", [False, True], ids=["built", "loaded"])
@pytest.mark.parametrize("backend", [Eager(), Eager(grad_mode="no_grad"), TorchScript()], ids=str)
def test_what_a_model_keeps_stays_its_own(backend: Backend, loaded: bool, tmp_path: pathlib.Path) -> None:
    candidate = anchored()
    want = [tensor.clone() for tensor in flatten(candidate.model(*candidate.args))[0]]
    executable = backend.compile(candidate)
    if loaded:
        executable = reloaded(backend, executable, tmp_path)
    for inside in (False, True, False):
        with torch.inference_mode(inside):
            for tensor in flatten(executable(*candidate.args))[0]:
                tensor += 1
    for other in (executable(*candidate.args), candidate.model(*candidate.args)):
        torch.testing.assert_close(flatten(other)[0], want)


@pytest.mark.parametrize("name", ["eager", "torchscript"])
def test_outputs_of_a_channels_last_model_can_be_viewed(name: str, tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    candidate = ChannelsLast().apply(Candidate.of(model, (torch.randn(2, 3, 12, 12),)))
    executable = BACKENDS[name]().compile(candidate)
    for each in (executable, reloaded(BACKENDS[name](), executable, tmp_path)):
        assert torch.allclose(each(*candidate.args).view(2, -1), model(*candidate.args).flatten(1), atol=1e-5)


def test_channels_last_leaves_weights_of_five_dimensions_alone() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.deep(self.flat(x).unsqueeze(2)).squeeze(2)
            return y

    model = PASSES["channels_last"]().apply(Candidate.of(Both().eval(), (torch.randn(2, 3, 6, 6),))).model
    assert model.flat.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_dropout_that_does_more_stays() -> None:
    class Residual(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    model = nn.Sequential(nn.Linear(4, 4), Residual(0.1), nn.Dropout(0.1)).eval()
    removed = RemoveDropout().apply(Candidate.of(model, (torch.randn(2, 4),))).model
    assert [type(part).__name__ for part in removed] == ["Linear", "Residual", "Identity"]
