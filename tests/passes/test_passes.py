"""Passes: what the contract suite cannot know about each of them."""

import copy
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from trimtab.backends.common.exported_program import export_program
from trimtab.core.candidate import Candidate
from trimtab.core.settings import CompilerSettings
from trimtab.core.signature import Dim
from trimtab.core.technique import PASSES
from trimtab.errors import CompileError, UsageError
from trimtab.hardware import system
from trimtab.hardware.system import usable_cores
from trimtab.passes.autocast import Autocast
from trimtab.passes.batch import Batch
from trimtab.passes.compile import Compile
from trimtab.passes.fold_bn import FoldBn
from trimtab.passes.int8_weights import Int8Weights
from trimtab.passes.remove_dropout import RemoveDropout
from trimtab.passes.threads import Threads
from trimtab.testing.models import convnet, encoder, recurrent, shared


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


class Liar(nn.Module):
    """Registers conv, norm next to each other but calls something in between; the second pair is honest."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.last, self.last_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(functional.relu(self.conv(x)))
        return self.last_norm(self.last(x))


class Untraceable(Liar):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > -1e9 else x


class OnlyLies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(functional.relu(self.conv(x)))


@pytest.mark.parametrize("cls", [Liar, Untraceable])
def test_fold_bn_keeps_a_norm_that_only_looks_adjacent(cls: type[nn.Module]) -> None:
    # fresh statistics: mean 0 and variance 1, with which the wrong fold changes the outputs by 1e-5 only
    candidate = Candidate.of(cls().eval(), (torch.randn(2, 3, 6, 6),))
    folded = FoldBn().apply(candidate).model
    assert isinstance(folded.norm, nn.BatchNorm2d)
    assert isinstance(folded.last_norm, nn.Identity)


class EarlyExit(nn.Module):
    """A pair that only some inputs reach, registered in the order in which it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem_norm(self.stem(x))
        return y + self.conv(self.norm(y)) if x.mean() > 0 else y


def test_fold_bn_keeps_a_norm_that_the_example_does_not_reach() -> None:
    candidate = Candidate.of(EarlyExit().eval(), (torch.randn(2, 3, 6, 6) - 2,))
    folded = FoldBn().apply(candidate).model
    assert isinstance(folded.norm, nn.BatchNorm2d)
    assert isinstance(folded.stem_norm, nn.Identity)
    assert not any(module._forward_hooks for module in (*folded.modules(), *candidate.model.modules()))


class Several(nn.Module):
    """Leaves a norm out for a single row, as code does that met BatchNorm's complaint about it in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.last, self.last_norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if len(x) > 1:
            x = self.first_norm(x)
        found: torch.Tensor = self.last_norm(self.last(x.relu()))
        return found


def test_fold_bn_keeps_a_norm_that_other_sizes_leave_out() -> None:
    rows = torch.randn(8, 6)
    folded = FoldBn().apply(Candidate.of(Several().eval(), (rows,), dynamic={"x": {0: Dim("batch")}})).model
    assert isinstance(folded.first_norm, nn.BatchNorm1d)
    assert isinstance(folded.last_norm, nn.Identity)
    assert norms(FoldBn().apply(Candidate.of(Several().eval(), (rows,), dynamic={"x": {0: Dim("batch", min=2)}})).model) == 0


def test_fold_bn_says_when_nothing_is_safe() -> None:
    candidate = Candidate.of(OnlyLies().eval(), (torch.randn(2, 3, 6, 6),))
    assert FoldBn().why_not(candidate) is None
    with pytest.raises(CompileError, match="every fold that was tried changed the model's outputs"):
        FoldBn().apply(candidate)


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 9)),
        (nn.Conv3d(3, 4, 2, bias=False), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
        (nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4), (2, 3, 5, 5)),
        (nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4, affine=False), (2, 4, 5, 5)),
        (nn.Linear(5, 4), nn.BatchNorm1d(4), (3, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_fold_bn_kinds(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    candidate = Candidate.of(nn.Sequential(layer, norm).eval(), (torch.randn(shape),))
    folded = FoldBn().apply(candidate).model
    assert norms(folded) == 0
    assert norms(candidate.model) == 1
    torch.testing.assert_close(folded(*candidate.args), candidate.model(*candidate.args), rtol=1e-4, atol=1e-5)


def test_fold_bn_folds_everything_in_a_residual_net() -> None:
    candidate = convnet()
    assert norms(candidate.model) == 2
    assert norms(FoldBn().apply(candidate).model) == 0


def test_fold_bn_without_norms() -> None:
    assert FoldBn().why_not(encoder()) == "fold_bn needs a batch norm, and the model has no BatchNorm."


def test_autocast_refuses_what_cannot_run() -> None:
    reason = Autocast(dtype="float16").why_not(recurrent())
    assert reason is None or reason.startswith("The model fails under autocast to float16: ")
    wide = Candidate.of(nn.Linear(4, 4).double().eval(), (torch.randn(2, 4, dtype=torch.float64),))
    assert Autocast().why_not(wide) == "autocast needs float32 weights, and the model has none."
    with pytest.raises(UsageError, match="'int4'"):
        Autocast(dtype="int4")  # type: ignore[arg-type]


def test_threads() -> None:
    candidate = encoder()
    assert Threads(count=1).apply(candidate).settings.threads == 1
    many = usable_cores() + 1
    assert Threads(count=many).blocked(candidate) == (
        f"threads asks for {many} threads, and the cores that this process may use are {usable_cores()}."
    )
    with pytest.raises(UsageError, match="count is 0; it is at least 1"):
        Threads(count=0)


def test_compile_keeps_what_the_settings_ask_of_the_compiler() -> None:
    plain = Candidate.of(nn.Linear(2, 2), (torch.zeros(3, 2),))
    asked = plain.with_settings({"compiler.dynamic": True, "compiler.options": {"epilogue_fusion": True}})
    found = Compile().apply(asked).settings
    assert (found.compile, found.compiler) == (True, asked.settings.compiler)
    assert Compile(dynamic=True).apply(plain).settings.compiler == CompilerSettings(dynamic=True)
    timed, tuned = Compile(kernels="max-autotune-no-cudagraphs"), Compile(kernels="coordinate_descent_tuning")
    assert timed.apply(plain).settings.compiler == CompilerSettings(mode="max-autotune-no-cudagraphs")
    assert tuned.apply(plain).settings.compiler == CompilerSettings(options={"coordinate_descent_tuning": True})
    on_gpu = {"device": "cuda"}
    for each in (timed, tuned):
        assert str(each.why_not(asked)).startswith("compile would choose kernels, and the settings give the compiler a mode")
        assert each.why_not(plain) == f"compile with {each.kernels} changes kernels for GPUs only."
        assert each.why_not(plain.with_settings(on_gpu)) is None
        assert each.why_not(plain.with_settings(on_gpu | {"compiler.mode": "reduce-overhead"})) is not None


def test_batch_rebuilds_the_inputs() -> None:
    candidate = recurrent()
    sixteen = Batch(size=16).apply(candidate)
    assert [tuple(leaf.shape) for leaf in sixteen.leaves] == [(16, 5, 6), (1, 16, 12), (1, 16, 12)]
    assert sixteen.settings.data.batch == 16
    assert sixteen.model(*sixteen.args)[0].shape == (16, 4)
    fixed = Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    assert "dynamic batch" in str(Batch().why_not(fixed))
    small = Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), dynamic={"input": {0: Dim("rows", max=8)}})
    assert Batch(size=16).why_not(small) == "batch asks for 16 examples, and 'rows' goes from 1 to 8."


def test_remove_dropout_in_a_transformer_layer() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True).eval()
    candidate = Candidate.of(layer, (torch.randn(2, 5, 16),))
    cleaned = RemoveDropout().apply(candidate).model
    assert not any(isinstance(module, nn.Dropout) for module in cleaned.modules())
    assert cleaned.self_attn.dropout == 0.0
    assert layer.self_attn.dropout == 0.3
    torch.testing.assert_close(cleaned(*candidate.args), layer(*candidate.args))


def test_int8_weights_is_made_of_plain_operators() -> None:
    pytest.importorskip("torchao")
    candidate = Int8Weights().apply(encoder())
    program, signature = export_program(candidate)
    assert [dim.name for dim in signature.dims] == ["batch", "length"]
    assert any(tensor.dtype is torch.int8 for tensor in program.state_dict.values())
    assert not any("torchao" in str(node.target) for node in program.graph.nodes)


def test_int8_weights_leaves_the_rest_alone() -> None:
    pytest.importorskip("torchao")
    candidate = convnet()
    before = copy.deepcopy(candidate.model.state_dict())
    quantized = Int8Weights().apply(candidate).model
    assert torch.equal(quantized.stem.weight, candidate.model.stem.weight)
    assert all(torch.equal(before[name], value) for name, value in candidate.model.state_dict().items())
    assert "at least 17 inputs" in str(Int8Weights(activations="int8").why_not(candidate))


def test_every_pass_registers_under_its_file_name() -> None:
    assert {"autocast", "batch", "channels_last", "fold_bn", "int8_weights", "remove_dropout", "threads"} <= set(PASSES)


@pytest.mark.skipif(not system.has_glibc(), reason="needs the GNU C library")
def test_kept_memory_is_not_asked_for_again() -> None:
    """Counted in page faults, in a process of its own: with blocks of 40 MB each call would touch 20,000 pages anew."""
    program = textwrap.dedent("""
        import resource, sys, torch
        from torch import nn
        from trimtab.core.candidate import Candidate
        from trimtab.core.backend import BACKENDS; from trimtab.core.technique import PASSES
        from trimtab.evaluation.evaluate import apply_passes
        from trimtab.core.recipe import Recipe
        torch.set_num_threads(1)
        candidate = Candidate.of(nn.Sequential(nn.ReLU(), nn.Sigmoid()), (torch.randn(10_000_000),))
        recipe = Recipe(passes=tuple(PASSES[name]() for name in sys.argv[1:]), backend=BACKENDS["eager"]())
        executable = recipe.backend.compile(apply_passes(recipe, candidate))
        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(3):
            executable(*candidate.args)
        before = faults()
        for _ in range(10):
            executable(*candidate.args)
        print(faults() - before)
    """)

    def faults(*passes: str) -> int:
        done = subprocess.run([sys.executable, "-c", program, *passes], capture_output=True, text=True, timeout=120, check=True)
        return int(done.stdout.splitlines()[-1])

    assert faults("keep_memory") < 100 < faults()


def test_memory_of_a_gpu_is_not_the_c_librarys() -> None:
    candidate = Candidate.of(nn.ReLU(), (torch.randn(2),)).with_settings({"device": "cuda"})
    assert "keep_memory is about memory of the CPU" in str(PASSES["keep_memory"]().why_not(candidate))


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


def test_attention_reads_the_weight_of_its_last_layer_itself() -> None:
    pytest.importorskip("torchao")
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    candidate = Candidate.of(nn.TransformerEncoder(layer, 1).eval(), (torch.randn(2, 5, 32),))
    quantized = Int8Weights().apply(candidate)
    x = torch.randn(2, 5, 32)
    assert functional.cosine_similarity(quantized.model(x).flatten(), candidate.model(x).flatten(), dim=0) > 0.999


def test_attention_is_tried_without_the_gpus_that_it_does_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    candidate = Candidate.of(Attending(), (torch.randn(1, 2, 4, 8),))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # and no driver, which their generators would be asked for
    drawn = torch.get_rng_state()
    assert PASSES["attention"](kernel="math").why_not(candidate) is None
    assert torch.equal(torch.get_rng_state(), drawn)


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


class ByHand(nn.Module):
    """Causal attention as in tutorials: a scale by the width of a head, and a mask in a buffer that is cut to the length."""

    causal: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.heads, self.dropout = how, 4, nn.Dropout(0.1)
        self.joint, self.last = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("causal", torch.tril(torch.ones(64, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.size()
        q, k, v = self.joint(x).split(32, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        hidden = self.causal[:length, :length] == 0
        scores = scores.masked_fill(hidden, float("-inf")) if self.how != "bias" else scores * 0.5 + hidden * -3.0
        weights = torch.softmax(scores, dim=-1)
        out = (self.dropout(weights) @ v).transpose(1, 2).reshape(rows, length, width)
        found: torch.Tensor = self.last(out)
        return found + weights.mean() if self.how == "shown" else found


@pytest.mark.parametrize("how", ["masked", "bias"])
def test_attention_by_hand_becomes_one_kernel_for_every_length(how: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), ByHand(how)).eval()
    sizes = {"input": {0: Dim("batch", max=8), 1: Dim("length", max=64)}}
    candidate = Candidate.of(model, (torch.randn(2, 20, 32),), dynamic=sizes)
    fused = PASSES["fused_attention"]().apply(candidate).model
    assert "scaled_dot_product_attention" in fused[1].code
    assert "softmax" not in fused[1].code
    other = torch.randn(3, 33, 32)
    torch.testing.assert_close(fused(other), model(other))
    assert list(fused.state_dict()) == list(model.state_dict())


def test_attention_whose_weights_are_read_stays_as_it_is() -> None:
    candidate = Candidate.of(ByHand("shown").eval(), (torch.randn(2, 20, 32),))
    assert "two products with a softmax between" in str(PASSES["fused_attention"]().why_not(candidate))
