"""Counts against numbers that were worked out by hand: a multiplication with its addition is two operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.measure.flops import count_flops
from trimtab.tensors.weights import weight_bytes

T, B, X, H = 7, 3, 20, 16


def linear(rows: int, inputs: int, outputs: int) -> int:
    return 2 * rows * inputs * outputs


def attention(batch: int, queries: int, keys: int, width: int) -> int:
    """Both products, all heads together."""
    return 2 * (2 * batch * queries * keys * width)


def encoder_layer(lengths: list[int], width: int, hidden: int) -> int:
    rows = sum(lengths)
    return linear(rows, width, 4 * width) + sum(attention(1, n, n, width) for n in lengths) + 2 * linear(rows, width, hidden)


CASES: list[tuple[str, nn.Module, tuple[Any, ...], int]] = [
    ("linear", nn.Linear(X, H), (torch.randn(B, X),), linear(B, X, H)),
    ("linear on sequences", nn.Linear(X, H, bias=False), (torch.randn(B, T, X),), linear(B * T, X, H)),
    ("conv", nn.Conv2d(3, 8, 3, padding=1), (torch.randn(2, 3, 9, 9),), 2 * 2 * 8 * 81 * 27),
    ("grouped conv", nn.Conv2d(8, 8, 3, groups=8), (torch.randn(1, 8, 9, 9),), 2 * 8 * 49 * 9),
    ("transposed conv", nn.ConvTranspose1d(3, 8, 4, stride=2), (torch.randn(2, 3, 9),), 2 * 2 * 9 * 3 * 8 * 4),
    ("grouped transposed conv", nn.ConvTranspose1d(8, 8, 4, groups=4), (torch.randn(2, 8, 9),), 2 * 2 * 9 * 8 * 2 * 4),
    ("bilinear", nn.Bilinear(4, 5, 6), (torch.randn(2, 4), torch.randn(2, 5)), 2 * 2 * 6 * (4 * 5 + 5)),
    ("lstm", nn.LSTM(80, 256, 2), (torch.randn(T, B, 80),), linear(T * B, 80 + 3 * 256, 4 * 256)),
    ("lstm batch first", nn.LSTM(X, H, batch_first=True), (torch.randn(B, T, X),), linear(T * B, X + H, 4 * H)),
    ("lstm both ways", nn.LSTM(X, H, 2, bidirectional=True), (torch.randn(T, B, X),), 2 * linear(T * B, X + 4 * H, 4 * H)),
    (
        "lstm projected",
        nn.LSTM(X, H, proj_size=4),
        (torch.randn(T, B, X),),
        linear(T * B, X + 4, 4 * H) + linear(T * B, H, 4),
    ),
    ("lstm without batch", nn.LSTM(X, H), (torch.randn(T, X),), linear(T, X + H, 4 * H)),
    ("gru", nn.GRU(X, H, 2, bidirectional=True), (torch.randn(T, B, X),), 2 * linear(T * B, X + 4 * H, 3 * H)),
    ("rnn", nn.RNN(X, H), (torch.randn(T, B, X),), linear(T * B, X + H, H)),
    ("lstm cell", nn.LSTMCell(X, H), (torch.randn(B, X),), linear(B, X + H, 4 * H)),
    (
        "encoder layer",
        nn.TransformerEncoderLayer(H, 2, 40, batch_first=True),
        (torch.randn(B, T, H),),
        encoder_layer([T] * B, H, 40),
    ),
]


@pytest.mark.parametrize(("model", "args", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("training", [False, True])
def test_modules(model: nn.Module, args: tuple[Any, ...], expected: int, training: bool) -> None:
    found = count_flops(model.train(training), args)
    assert found.total == expected
    assert sum(found.by_operator.values()) == expected
    assert found.uncounted == ()


TRAINED = (
    "linear",
    "conv",
    "grouped conv",
    "transposed conv",
    "grouped transposed conv",
    "lstm",
    "lstm both ways",
    "encoder layer",
)


@pytest.mark.parametrize("name", TRAINED)
def test_a_backward_pass_is_two_forward_passes(name: str) -> None:
    model, args, expected = next(case[1:] for case in CASES if case[0] == name)

    def step() -> None:
        outputs = model.train()(*(each.clone().requires_grad_() for each in args))
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()

    found = count_flops(step, gradients=True)
    assert found.uncounted == ()
    assert found.total == 3 * expected


def test_attention_computes_what_it_has_not_kept_again() -> None:
    q, k, v = (torch.randn(B, 4, n, 8, requires_grad=True) for n in (6, T, T))
    found = count_flops(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward(), gradients=True)
    assert found.uncounted == ()
    assert found.total == 3.5 * attention(B * 4, 6, T, 8)


def test_a_gradient_that_nobody_asks_for_does_not_count() -> None:
    model = nn.Conv2d(8, 8, 3, groups=8)
    found = count_flops(lambda: model(torch.randn(1, 8, 9, 9)).sum().backward(), gradients=True)
    assert found.total == 2 * (2 * 8 * 49 * 9)


def test_a_packed_sequence_counts_its_real_steps() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, X), torch.tensor([5, 4, 2]))
    assert count_flops(nn.GRU(X, H).eval(), (packed,)).total == linear(11, X + H, 3 * H)
    assert count_flops(nn.LSTM(X, H).eval(), (packed,)).total == linear(11, X + H, 4 * H)


@pytest.mark.parametrize("training", [False, True])
def test_multi_head_attention(training: bool) -> None:
    model = nn.MultiheadAttention(H, 4, batch_first=True).train(training)
    x = torch.randn(B, T, H)
    expected = linear(B * T, H, 4 * H) + attention(B, T, T, H)
    assert count_flops(model, (x, x, x)).total == expected
    assert count_flops(model, (x, x, x), {"need_weights": False}).total == expected


def test_attention_over_another_sequence() -> None:
    model = nn.MultiheadAttention(H, 4, batch_first=True).eval()
    query, memory = torch.randn(B, 2, H), torch.randn(B, T, H)
    expected = linear(B * 2, H, 2 * H) + linear(B * T, H, 2 * H) + attention(B, 2, T, H)
    assert count_flops(model, (query, memory, memory)).total == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_encoder_skips_padding_and_so_does_the_count() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(H, 2, 40, batch_first=True), 2).eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    found = count_flops(model, (torch.randn(2, 5, H),), {"src_key_padding_mask": mask})
    assert found.total == 2 * encoder_layer([5, 3], H, 40)
    assert set(found.by_operator) == {"aten._transformer_encoder_layer_fwd"}


@pytest.mark.parametrize("masked", [False, True])
def test_scaled_dot_product_attention(masked: bool) -> None:
    q, k, v = torch.randn(B, 4, 6, 8), torch.randn(B, 4, T, 8), torch.randn(B, 4, T, 8)
    mask = torch.ones(6, T, dtype=torch.bool) if masked else None
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).total == attention(B * 4, 6, T, 8)


def test_shared_key_heads_are_computed_for_every_query_head() -> None:
    q, k = torch.randn(1, 8, 5, 4), torch.randn(1, 2, 5, 4)
    found = count_flops(lambda: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    assert found.total == attention(8, 5, 5, 4)


def test_products_with_vectors_and_tensors() -> None:
    a, v = torch.randn(4, 5), torch.randn(5)
    assert count_flops(lambda: a @ v).total == 2 * 20
    assert count_flops(lambda: torch.dot(v, v)).total == 2 * 5
    assert count_flops(lambda: torch.addmv(torch.ones(4), a, v)).total == 2 * 20
    assert (
        count_flops(lambda: torch.einsum("bij,bjk->bik", torch.ones(2, 3, 4), torch.ones(2, 4, 5))).total == 2 * 2 * 3 * 4 * 5
    )


def test_a_loss_that_is_made_of_gradients() -> None:
    """A penalty on the slope: the backward pass is run through once more, and the leaf's gradient is asked for."""
    model, x = nn.Linear(X, 1, bias=False), torch.randn(B, X, requires_grad=True)

    def loss() -> None:
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + slope.square().mean()).backward()  # type: ignore[no-untyped-call]

    # y = x w; slope = 1 w'; of the sum: w and x by y, w by the slope.
    assert count_flops(loss, gradients=True).total == 5 * linear(B, X, 1)


def test_operators_without_a_formula_are_named() -> None:
    x = torch.randn(8, 8)
    found = count_flops(lambda: torch.fft.fft(x).real.relu_() + torch.cdist(x, x) + torch.linalg.inv(x + 9) + x @ x)
    assert found.total == 2 * 8**3
    assert set(found.uncounted) == {"aten._fft_r2c", "aten._cdist_forward", "aten.linalg_inv_ex"}


def test_light_work_is_not_named() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.GELU()
    ).eval()
    assert count_flops(model, (torch.randn(2, 3, 8, 8),)).uncounted == ()
    assert count_flops(lambda: F.normalize(torch.randn(4, 8))).uncounted == ()
    assert count_flops(model.half(), (torch.randn(2, 3, 8, 8).half(),)).total == 0


def test_a_model_as_it_is_kept() -> None:
    model = nn.Linear(3, 3)
    count_flops(model, (torch.randn(1, 3),))
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count_flops(model, (torch.randn(1, 4),))


@pytest.mark.filterwarnings("ignore")
def test_quantized_linear_layers() -> None:
    from torch.ao.quantization import quantize_dynamic

    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU()).eval()
    packed = quantize_dynamic(plain, {nn.Linear})
    assert count_flops(packed, (torch.randn(5, 64),)).total == linear(5, 64, 32)
    assert weight_bytes(packed) == 64 * 32 + 32 * 4


def test_weight_bytes() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10))
    assert weight_bytes(model) == 400 + 4 * 40 + 8
    assert weight_bytes(model.half()) == 200 + 4 * 20 + 8
    assert weight_bytes(nn.ReLU()) == 0


def test_shared_weights_weigh_once() -> None:
    first, second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    second.weight = first.weight
    assert weight_bytes(nn.ModuleList([first, second])) == 400
    second.weight = nn.Parameter(first.weight.detach().t())
    assert weight_bytes(nn.ModuleList([first, second])) == 400
    flat = torch.zeros(100)
    first.weight, second.weight = (nn.Parameter(flat[i : i + 50].view(5, 10)) for i in (0, 50))
    assert weight_bytes(nn.ModuleList([first, second])) == 400
