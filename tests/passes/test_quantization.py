"""Layers in 8 bits in the model itself, trained or not, and layers that stay float because rounding harms them most."""

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trimtab.artifact.artifact import replay, write_artifact
from trimtab.artifact.test_vectors import Golden
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.limits import Limits
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES
from trimtab.core.training_examples import TrainingExamples
from trimtab.errors import CompileError, UsageError
from trimtab.hardware.environment import Environment
from trimtab.measure.parity import compare_outputs
from trimtab.passes.common.quantized import Quantized, without_rounding
from trimtab.passes.common.sensitivity import FOLDER, most_sensitive, sensitivities
from trimtab.passes.fake_quant import FakeQuant
from trimtab.passes.recover import Recover


class Tied(nn.Module):
    """Two layers with one weight, a convolution whose batch norm is folded, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(3, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x))).transpose(1, 2)
        x = torch.relu(self.first(self.lstm(x)[0][:, -1]))
        found: torch.Tensor = self.head(torch.relu(self.second(x)))
        return found


@pytest.fixture
def given(tmp_path) -> Candidate:
    torch.manual_seed(0)
    model = Tied().eval()
    with torch.no_grad():
        model.head.weight[:, 0] *= 40  # an outlier: one scale for all activations rounds the others away
    inputs = torch.randn(240, 3, 10)
    calibration = [((part,), {}) for part in inputs.split(40)]
    batches = tuple(((part,), None) for part in inputs.split(40))
    training = TrainingExamples(
        batches=batches[1:], held_out=batches[:1], examples=200, source="training data", digest="made here"
    )
    made = Candidate.of(model, (inputs[40:80],), calibration=calibration, scratch=tmp_path)
    return dataclasses.replace(made, training=training, teacher=model)


def layers(model: nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if isinstance(module, Quantized))


def error(one: nn.Module, other: nn.Module, inputs: torch.Tensor) -> float:
    with torch.no_grad():
        return float((one(inputs) - other(inputs)).square().mean() / other(inputs).var())


def test_layers_round_and_tied_weights_stay_tied_and_are_trained(given) -> None:
    quantized = FakeQuant().apply(given)
    model = quantized.model
    assert list(layers(model)) == ["stem", "first", "second", "head"]
    assert model.second.weight is model.first.weight
    assert isinstance(model.norm, nn.Identity)
    inputs = given.calibration[0][0][0]
    before = error(model, given.model, inputs)
    assert 0 < before < 0.05
    assert error(without_rounding(model), given.model, inputs) < 1e-10
    for ranges in ("percentile", "mse"):
        assert error(FakeQuant(ranges=ranges).apply(given).model, given.model, inputs) < 2 * before + 0.01
    trained = Recover(updates=30).apply(quantized).model
    assert trained.second.weight is trained.first.weight
    assert error(trained, given.model, inputs) < before
    assert torch.equal(trained.first.weight_scale, trained.first._scale()), "the scale of the weights is that of before"


def test_runtimes_run_it_in_int8_and_it_is_not_quantized_again(given, tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    quantized = FakeQuant(float_layers=1).apply(given)
    assert len(list(layers(quantized.model))) == 3
    wanted = quantized.model(*given.args).detach()
    for name, said in (("onnxruntime", "int8: "), ("openvino", " in u8")):
        executable = BACKENDS[name]().compile(quantized)
        assert any(said in note for note in executable.notes), executable.notes
        torch.testing.assert_close(executable(*given.args), wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))
        made = write_artifact(
            tmp_path / name,
            executable=executable,
            recipe=Recipe(passes=(FakeQuant(float_layers=1),), backend=BACKENDS[name]()),
            workload_name="tied",
            golden=Golden.of(quantized, executable.signature),
            evidence={},
            environment=Environment.capture(),
            limits=Limits(),
            baseline=None,
        )
        parity = replay(made.load(), made.golden(), made.manifest)
        assert parity.ok, parity.reason
        rounding = float((wanted - given.model(*given.args)).detach().abs().max())
        assert parity.tolerance[0] < rounding, "verify would not see the rounding"
        executable.close()
    backend = BACKENDS["onnxruntime"](precision="int8_static")
    said = Recipe(passes=(FakeQuant(),), backend=backend).why_not(given)
    assert said == (
        "fake_quant and onnxruntime both quantize, and what is quantized once is not quantized again. Leave one out."
    )


def test_the_most_sensitive_layers_stay_float_in_every_runtime(given, tmp_path) -> None:
    table = sensitivities(given)
    assert list(table.values()) == sorted(table.values(), reverse=True)
    assert set(table) == {"stem", "lstm", "first", "second", "head"}
    first = next(iter(table))
    [path] = (tmp_path / FOLDER).iterdir()
    path.write_text(json.dumps(dict.fromkeys(table, 0.5) | {"lstm": 1.0}))
    assert next(iter(sensitivities(given))) == "lstm", "it was measured again"
    path.write_text("{")
    assert next(iter(sensitivities(given))) == first
    inputs, truth = given.calibration[0][0][0], given.model
    for name, precision in (("onnxruntime", "int8_static"), ("onnxruntime", "int8_dynamic"), ("openvino", "int8_static")):
        pytest.importorskip("nncf" if name == "openvino" else name)
        off = []
        for count in (0, 4):
            executable = BACKENDS[name](precision=precision, float_layers=count).compile(given)
            with torch.no_grad():
                off.append(float((executable(inputs) - truth(inputs)).square().mean()))
            assert any(f"rounding harms most: {first}, " in note for note in executable.notes) is bool(count)
            executable.close()
        assert off[1] < 0.5 * off[0], (name, precision, off)
    with pytest.raises(CompileError, match="No layer is left to quantize: float_layers is 5, and the model has 5"):
        BACKENDS["openvino"](precision="int8_static", float_layers=5).compile(given)


def test_layers_are_ranked_by_what_outputs_vary_by_over_the_examples() -> None:
    """Both layers round alike. The outputs of one stay near large constants, which are not what the judge relates errors to."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steady, self.varying = nn.Linear(16, 8), nn.Linear(16, 8)
            self.steady.bias.data = torch.linspace(-50, 50, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.steady(x), self.varying(y)

    torch.manual_seed(0)
    model, inputs = Apart().eval(), (torch.randn(64, 16), torch.randn(64, 16))
    given = Candidate.of(model, inputs, calibration=[(inputs, {})])
    table, quantized = sensitivities(given), FakeQuant().apply(given).model
    assert list(table) == ["steady", "varying"]
    with torch.no_grad():
        for wanted, found, change in zip(model(*inputs), quantized(*inputs), table.values(), strict=True):
            error = compare_outputs([wanted], [found], exact=False).centred_error
            assert change == pytest.approx(error**2, rel=0.01)


def test_embeddings_are_measured_too_and_go_back_where_a_runtime_quantizes_them(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Embedding(50, 128),
            nn.Flatten(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 3),
        )
    ).eval()
    with torch.no_grad():
        model[0].weight[:, 0] *= 100  # in the rows of the table, whose other numbers round to zero
    calls = [((torch.randint(50, (16, 4)),), {}) for _ in range(4)]
    given = Candidate.of(model, *calls[0], calibration=calls, scratch=tmp_path)
    table = sensitivities(given)
    assert set(table) == {"0", "2", "4", "6"}
    assert most_sensitive(given, 1) == ("2",)
    assert set(most_sensitive(given, 2, every=True)) == {"0", "2"}
    pytest.importorskip("nncf")
    sizes = []
    for fields in (
        {"precision": "int8_weights"},
        {"precision": "int4_weights"},
        {"precision": "int4_weights", "float_layers": 1},
    ):
        executable = BACKENDS["openvino"](**fields).compile(given)
        sizes.append(sum((tmp_path / name).stat().st_size for name in executable.save(tmp_path)))
        executable.close()
    assert sizes[0] > sizes[2] > sizes[1], "the most sensitive layer has 8 bits, the others 4"
    assert "Try int8_weights" in str(BACKENDS["openvino"](precision="int4_weights").why_not(given))


def test_wrong_fields_are_refused(given) -> None:
    with pytest.raises(UsageError, match="float_layers is -1"):
        FakeQuant(float_layers=-1)
    with pytest.raises(UsageError, match="float_layers=2 is about int8"):
        BACKENDS["onnxruntime"](float_layers=2)
    with pytest.raises(UsageError, match="ranges=percentile is about int8_static, not int8_weights"):
        BACKENDS["openvino"](precision="int8_weights", ranges="percentile")
    with pytest.raises(CompileError, match="No layer is left to quantize"):
        FakeQuant(float_layers=4).apply(given)
    assert "needs a convolution" in str(PASSES["fake_quant"]().why_not(given.with_model(nn.ReLU())))
