"""The graphs that ONNX Runtime is given: pooling in place of means over pixels, and float results of int8 products."""

import collections

import pytest
import torch
from torch import nn

from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
OnnxRuntime = BACKENDS["onnxruntime"]


class Means(nn.Module):
    """A convolution, and a mean of its output over ``dims``."""

    def __init__(self, dims, keepdim):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.dims, self.keepdim = nn.Conv2d(3, 4, 3), dims, keepdim

    def forward(self, x):
        return self.conv(x).relu().mean(self.dims, keepdim=self.keepdim)


def operators(executable, folder):
    executable.save(folder)
    return collections.Counter(node.op_type for node in onnx.load(folder / "model.onnx").graph.node)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("dims", "pooled"), [((2, 3), True), ((-1, -2), True), ((1, 2), False), ((3,), False), ((1, 2, 3), False)]
)
def test_a_mean_over_the_pixels_is_a_pooling(dims, pooled, keepdim, tmp_path):
    model = Means(dims, keepdim).eval()
    dynamic = {"x": {0: Dim("batch"), 2: Dim("height", min=3)}}
    executable = OnnxRuntime().compile(Candidate.of(model, (torch.rand(2, 3, 8, 8),), dynamic=dynamic))
    found = operators(executable, tmp_path)
    assert (found["GlobalAveragePool"], found["ReduceMean"]) == ((1, 0) if pooled else (0, 1))
    for x in (torch.rand(2, 3, 8, 8), torch.rand(1, 3, 5, 8)):
        torch.testing.assert_close(executable(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_mean_of_an_empty_batch_is_no_pooling(tmp_path):
    candidate = Candidate.of(Means((2, 3), False).eval(), (torch.rand(2, 3, 8, 8),), dynamic={"x": {0: Dim("batch", min=0)}})
    executable = OnnxRuntime().compile(candidate)
    assert executable(torch.rand(0, 3, 8, 8)).shape == (0, 4)
    assert operators(executable, tmp_path)["ReduceMean"] == 1


class Heads(nn.Module):
    """Int8 products that are read by the caller, by a float operator, and by another product."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        inner = self.second(self.first(x).relu())
        return self.third(torch.sin(inner)), inner


def test_int8_products_are_rounded_only_for_other_products(tmp_path):
    torch.manual_seed(1)
    model = Heads().eval()
    rows = torch.randn(32, 16).split(1)
    candidate = Candidate.of(model, (rows[0],), calibration=[((row,), {}) for row in rows])
    backend = OnnxRuntime(precision="int8_static")
    executable = backend.compile(candidate)
    assert executable.notes == ["int8: 3 Gemm; float: none."]
    executable.save(tmp_path)
    graph = onnx.load(tmp_path / "model.onnx").graph
    rounded = {name for node in graph.node if node.op_type == "QuantizeLinear" for name in node.input[:1]}
    products = [node.output[0] in rounded for node in graph.node if node.op_type in ("Gemm", "MatMul")]
    assert sorted(products) == [False, False, True]
    loaded = backend.load(tmp_path, executable.signature, Settings(threads=1))
    for row in rows:
        for got, again, want in zip(executable(row), loaded(row), model(row), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0.05)
            assert torch.equal(got, again)
