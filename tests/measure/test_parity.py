"""How far outputs are from a reference: the gates, the scale, and the tolerance by dtype."""

from __future__ import annotations

import dataclasses
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trimtab._internal.serialization import from_json, to_json
from trimtab.core.measurement import Parity
from trimtab.core.signature import TensorSpec
from trimtab.measure import parity, values
from trimtab.measure.parity import compare_outputs
from trimtab.tensors.comparison import errors, mask_bound
from trimtab.tensors.structure import flatten, unflatten


def outputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_identical_outputs_are_equal() -> None:
    found = compare_outputs([outputs(4, 3)], [outputs(4, 3)], exact=True)
    assert found.ok
    assert (found.n, found.max_abs, found.centred_error, found.tail_error, found.cosine) == (4, 0.0, 0.0, 0.0, pytest.approx(1))
    assert found.sqnr_db == math.inf
    assert from_json(Parity, to_json(found)).ok


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 100), (torch.float64, 1e4), (torch.float16, 25), (torch.bfloat16, 25), (torch.float32, 25)],
)
def test_a_constant_predictor_has_an_error_of_one_however_small_the_variation(dtype: torch.dtype, size: float) -> None:
    centre = (outputs(1, 10) > 0) * 2.0 * size - size
    reference = (centre + outputs(64, 10, seed=1)).to(dtype)
    constant = reference.double().mean(0, keepdim=True).to(dtype).expand_as(reference).contiguous()
    found = compare_outputs([reference[:40], reference[40:]], [constant[:40], constant[40:]], exact=False, max_error=0.5)
    assert found.cosine is not None
    assert found.cosine > 0.999, "cosine does not notice"
    assert found.centred_error == pytest.approx(1, abs=1e-3 if dtype.itemsize > 2 else 2e-2)
    assert found.relative_to == "examples"
    assert not found.ok
    assert found.reason is not None
    assert "centred error of " in found.reason
    assert "over the examples" in found.reason


def test_what_is_compared_is_held_in_double_precision_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = [0]
    plain = values.as_double

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        found = plain(tensor).clone()
        alive.add(found)
        most[0] = max(most[0], len(alive))
        return found

    monkeypatch.setattr(values, "as_double", watched)
    batches = list(outputs(200, 40).split(10))
    for reference in (batches, [batches[0]] * 20, [torch.ones(10, 3)] * 20):
        assert compare_outputs(reference, [batch + 1e-6 for batch in reference], exact=False).ok
    assert 1 < most[0] <= 4


def test_a_large_batch_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, found = detections(), 1.01 * detections()
    whole = compare_outputs([reference, reference[0, 0, 0]], [found, found[0, 0, 0]], exact=False, max_error=0.1)
    monkeypatch.setattr(parity, "PART", 5000)
    assert [len(part) for part in parity._parts(reference)] == [3, 3, 3, 3, 3, 1]
    assert [len(part) for part in parity._parts(reference[:, :0])] == [16]
    parts = compare_outputs([reference, reference[0, 0, 0]], [found, found[0, 0, 0]], exact=False, max_error=0.1)
    for field in dataclasses.fields(Parity):
        mine, other = getattr(whole, field.name), getattr(parts, field.name)
        assert mine == (pytest.approx(other) if isinstance(other, float) else other), field.name


def test_batches_make_no_difference() -> None:
    a, b = outputs(12, 5), outputs(12, 5) + 1e-3 * outputs(12, 5, seed=1)
    whole = compare_outputs([a], [b], exact=False)
    parts = compare_outputs([a[:5], a[5:]], [b[:5], b[5:]], exact=False)
    for name in ("n", "max_abs", "max_relative", "cosine", "sqnr_db", "centred_error", "tail_error"):
        assert getattr(whole, name) == pytest.approx(getattr(parts, name)), name


def test_figures_are_what_they_say() -> None:
    a = torch.tensor([[1.0], [3.0]])
    found = compare_outputs([a], [torch.tensor([[1.0], [3.3]])], exact=False)
    assert found.max_abs == pytest.approx(0.3, rel=1e-5)
    assert found.max_relative == pytest.approx(0.1, rel=1e-5)
    assert found.tail_error == pytest.approx(0.3, rel=1e-5), "the deviation of 1 and 3 is 1"
    assert found.centred_error == pytest.approx(0.3 / math.sqrt(2), rel=1e-5)
    assert found.sqnr_db == pytest.approx(10 * math.log10(10 / 0.09), rel=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda t: t[:, :2], "has the shape [4, 2], but the reference has [4, 3]"),
        (lambda t: t.double(), "is float64, but the reference is float32"),
        (lambda t: t.index_fill(1, torch.tensor([1]), math.nan), "4 of 12 values that are NaN where the reference has none"),
        (lambda t: t.index_fill(1, torch.tensor([1]), math.inf), "4 of 12 values that are infinite"),
        (lambda t: (t, t), "The output is a tuple of 2, but the reference is a tensor"),
    ],
)
def test_gates_hold_for_every_recipe(changed, words: str, exact: bool) -> None:  # type: ignore[no-untyped-def]
    found = compare_outputs([outputs(4, 3)], [changed(outputs(4, 3))], exact=exact)
    assert not found.ok
    assert words in str(found.reason)


def test_counts_of_batches_must_agree() -> None:
    assert "1 batches and references for 2" in str(compare_outputs([outputs(1), outputs(1)], [outputs(1)], exact=False).reason)
    assert not compare_outputs([], [], exact=False).ok, "nothing compared is no evidence"


def test_nan_and_masks_in_the_same_places_are_equal() -> None:
    a = outputs(4, 3)
    a[0, 0], a[1, 1], a[2, 2] = math.nan, -math.inf, torch.finfo(torch.float32).min
    b = a + 1e-6
    b[2, 2] = -math.inf
    found = compare_outputs([a], [b], exact=True)
    assert found.ok, found.reason
    assert found.max_abs is not None
    assert found.max_abs < 1e-5
    b[1, 1] = 0.0
    assert "finite where the reference is infinite" in str(compare_outputs([a], [b], exact=False).reason)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_an_exact_recipe_and_eight_bits_do_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).double()
    x = outputs(32, 64, dtype=torch.float64)
    reference = model(x)
    rounded = (reference * (1 + torch.finfo(dtype).eps / 2)).to(dtype)
    assert compare_outputs([reference.to(dtype)], [rounded], exact=True).ok
    step = reference.abs().max() / (127 if dtype != torch.bfloat16 else 7)
    assert not compare_outputs([reference.to(dtype)], [((reference / step).round() * step).to(dtype)], exact=True).ok


def test_one_wrong_value_among_thousands_is_found() -> None:
    a = outputs(1000, 10)
    b = a.clone()
    b[123, 4] += 0.05
    found = compare_outputs([a], [b], exact=True)
    assert not found.ok
    assert "largest error of 0.049" in str(found.reason)


def test_large_outputs_that_hardly_vary_are_allowed_their_roundings() -> None:
    a = 1000 + 0.05 * outputs(64, 8)
    assert compare_outputs([a], [torch.nextafter(a, torch.full_like(a, 2000))], exact=True).ok
    assert not compare_outputs([a], [a + 0.02], exact=True).ok


@pytest.mark.parametrize(
    ("reference", "relative_to", "words"),
    [
        (outputs(1, 50), "output", "within an example"),
        (outputs(1, 50).repeat(8, 1), "output", "within an example"),
        (torch.full((4, 3), 7.0), "size", "as it is constant"),
        (torch.zeros(4, 3), "one", "zero throughout"),
        (torch.tensor(3.0), "size", "as it is constant"),
    ],
)
def test_without_spread_over_examples_another_scale_is_used_and_named(
    reference: torch.Tensor, relative_to: str, words: str
) -> None:
    assert compare_outputs([reference], [reference.clone()], exact=True).ok
    found = compare_outputs([reference], [reference + 0.5], exact=True)
    assert found.relative_to == relative_to
    assert words in str(found.reason)
    assert all(math.isfinite(v) for v in (found.centred_error, found.tail_error, found.cosine) if v is not None)


def test_examples_of_different_length_are_compared() -> None:
    reference = [outputs(2, 5, 4), outputs(2, 9, 4, seed=1)]
    assert compare_outputs(reference, [t + 1e-6 for t in reference], exact=True).relative_to == "output"
    assert not compare_outputs(reference, [t * 1.1 for t in reference], exact=True).ok


@pytest.mark.parametrize(("beside", "allowed"), [(True, 5), (False, 1)])
def test_an_exact_recipe_may_turn_near_ties_over_and_no_more(beside: bool, allowed: int) -> None:
    def turned(count: int) -> Parity:
        a = torch.arange(1000).reshape(100, 10)
        b = a.clone()
        b.view(-1)[:count] += 1
        floats = (outputs(100, 2),) * beside
        return compare_outputs([(*floats, a)], [(*floats, b)], exact=True)

    assert turned(allowed).ok
    found = turned(allowed + 1)
    assert f"differs from the reference in 0.{allowed + 1}00% of its integers, where 0.{allowed}00% may" in str(found.reason)
    assert ("return the scores beside it, and 0.5% may differ" in str(found.reason)) is not beside
    if beside:
        assert found.centred_error == 0, "class numbers have no distance"


def test_bins_of_another_rounding_pass_beside_their_scores() -> None:
    torch.manual_seed(0)
    conv, images = nn.Conv2d(3, 16, 3), torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        scores = conv(images), conv.double()(images.double()).float()
    ours, other = ({"scores": s, "bin": (s * 1000).floor().long()} for s in scores)
    assert 0 < (ours["bin"] != other["bin"]).double().mean() < 0.005
    assert compare_outputs([ours], [other], exact=True).ok
    wrong = other | {"scores": other["scores"] + 0.01}
    assert "'output.scores'" in str(compare_outputs([ours], [wrong], exact=True).reason), "nothing excuses wrong scores"


def test_a_score_judges_integers_that_stand_alone() -> None:
    ours = torch.zeros(1000, dtype=torch.long)
    other = ours.clone()
    other[:4] = 1
    assert not compare_outputs([ours], [other], exact=True).ok
    assert compare_outputs([ours], [other], exact=True, scored=True).ok
    other[:6] = 1
    assert "0.600% of its integers" in str(compare_outputs([ours], [other], exact=True, scored=True).reason)


def test_integers_of_a_lossy_recipe_are_held_to_its_error() -> None:
    a = torch.arange(200).reshape(100, 2)
    b = a.clone()
    b[3, 0] += 1
    assert compare_outputs([a], [b], exact=False).ok, "the score judges them"
    assert compare_outputs([a], [b], exact=False, max_error=0.01).ok
    assert "allow a larger max_error" in str(compare_outputs([a], [b], exact=False, max_error=0.001).reason)
    assert not compare_outputs([a > 5], [a > 9], exact=True).ok


@dataclasses.dataclass
class Said:
    logits: torch.Tensor
    loss: float


def test_nested_outputs_keep_their_names_and_may_lose_their_class() -> None:
    leaves, structure = flatten(Said(outputs(3, 2), 0.25))
    assert compare_outputs([Said(outputs(3, 2), 0.25)], [unflatten(structure, leaves)], exact=True).ok
    found = compare_outputs([Said(outputs(3, 2), 0.25)], [Said(-outputs(3, 2), 0.25)], exact=True)
    assert "'output.logits'" in str(found.reason)
    assert found.cosine == pytest.approx(-1)
    assert ".loss is 0.75" in str(compare_outputs([Said(outputs(1), 0.25)], [Said(outputs(1), 0.75)], exact=False).reason)


def test_complex_and_empty_outputs() -> None:
    a = torch.complex(outputs(4, 3), outputs(4, 3, seed=1))
    assert compare_outputs([a], [a * (1 + 1e-7)], exact=True).ok
    assert not compare_outputs([a], [a.conj().resolve_conj()], exact=True).ok
    assert compare_outputs([torch.zeros(0, 3)], [torch.zeros(0, 3)], exact=True).ok


@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=2, max_size=12),
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=2, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_no_finite_values_divide_by_zero(left: list[float], right: list[float]) -> None:
    size = min(len(left), len(right))
    a, b = torch.tensor(left[:size]), torch.tensor(right[:size])
    found = compare_outputs([a], [b], exact=True)
    for name in ("max_abs", "max_relative", "cosine", "centred_error", "tail_error"):
        assert math.isfinite(getattr(found, name)), name
    assert found.ok or not torch.equal(a, b)


def test_outputs_that_are_conjugated_lazily_are_compared() -> None:
    a = torch.complex(outputs(4, 3), outputs(4, 3, seed=1)).conj()
    assert a.is_conj()
    assert compare_outputs([a], [a.resolve_conj()], exact=True).ok
    assert compare_outputs([a.resolve_conj()], [a], exact=True).ok
    assert not compare_outputs([a], [a.conj()], exact=True).ok


def test_every_batch_is_compared_though_it_has_another_number_of_tensors() -> None:
    reference = [[outputs(3, seed=i) for i in range(clips)] for clips in (2, 4, 1)]
    assert compare_outputs(reference, reference, exact=True).ok
    wrong = [[t.clone() for t in clips] for clips in reference]
    wrong[1][3] += 1.0  # which only the second batch has
    assert "'output.3' has a centred error" in str(compare_outputs(reference, wrong, exact=True).reason)
    found = compare_outputs(reference, [reference[0], reference[1][:3], reference[2]], exact=True)
    assert found.reason == "The output is a list of 3, but the reference is a list of 4 (batch 1)."


BOXES = (TensorSpec("output.boxes", "float32", (5, 4)), TensorSpec("output.tags", "float32", ("batch", 3)))


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    """What a detector finds in images of which each holds another number of things."""
    return [{"boxes": outputs(count, 4, seed=count), "tags": outputs(1, 3, seed=count)} for count in counts]


def scored(reference: list[object], found: list[object], *, exact: bool = False, specs: object = None) -> Parity:
    return compare_outputs(reference, found, exact=exact, scored=True, specs=specs)  # type: ignore[arg-type]


def test_a_score_judges_how_many_boxes_a_lossy_recipe_finds() -> None:
    found = scored(boxes(5, 2, 7), boxes(5, 3, 7), specs=BOXES)
    assert found.ok, found.reason
    assert (found.left_out, found.n, found.max_abs) == (1, 14, 0.0)
    assert "has the shape [3, 4], but the reference has [2, 4]" in str(
        scored(boxes(5, 2, 7), boxes(5, 3, 7), exact=True, specs=BOXES).reason
    ), "an exact one has to find the same"
    assert not compare_outputs(boxes(5, 2, 7), boxes(5, 3, 7), exact=False, max_error=9.0, specs=BOXES).ok, "nothing judges it"
    assert "[4, 4], but the reference has [5, 4]" in str(scored(boxes(5, 5), boxes(5, 4), specs=BOXES).reason), (
        "a size that is always the same does not follow from data"
    )


def test_what_follows_a_size_of_the_inputs_stays_held() -> None:
    reference = [{"boxes": outputs(2, 4), "tags": outputs(rows, 3)} for rows in (1, 2, 3)]
    fewer = [each | {"tags": each["tags"][:1]} for each in reference]
    assert "'output.tags' has the shape [1, 3], but the reference has [2, 3]" in str(
        scored(reference, fewer, specs=BOXES).reason
    )
    assert scored(reference, fewer).ok, "what run makes of the outputs may have any size that follows from data"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda t: t.unsqueeze(0), "has the shape [1, 3, 4]"),
        (lambda t: t.double(), "is float64, but the reference is float32"),
        (lambda t: t.index_fill(0, torch.tensor([1]), math.nan), "4 of 12 values that are NaN where the reference has none"),
        (lambda t: t.index_fill(0, torch.tensor([1]), math.inf), "4 of 12 values that are infinite"),
        (lambda t: t[:, :3], "has the shape [3, 3], but the reference has [2, 4]"),
    ],
)
def test_gates_hold_where_sizes_follow_from_data(changed, words: str) -> None:  # type: ignore[no-untyped-def]
    found = boxes(5, 3, 7)
    found[1]["boxes"] = changed(found[1]["boxes"])
    assert words in str(scored(boxes(5, 2, 7), found, specs=BOXES).reason)


@dataclasses.dataclass
class Heard:
    text: str
    words: int
    times: list[torch.Tensor]


def test_a_score_judges_what_run_reads_out_of_the_outputs_of_a_lossy_recipe() -> None:
    def heard(text: str) -> Heard:
        return Heard(text, len(text.split()), [torch.tensor(float(i)) for i, _ in enumerate(text.split())])

    reference, found = [heard("good day"), heard("no")], [heard("good old day"), heard("no")]
    passed = scored(reference, found)
    assert passed.ok, passed.reason
    assert passed.left_out == 1
    assert "but the reference is 'good day'" in str(scored(reference, found, exact=True).reason)
    specs = [TensorSpec("output.times.0", "float32", ())]
    assert "but the reference is 'good day'" in str(scored(reference, found, specs=specs).reason), (
        "no runtime makes another text of other inputs, so that it was kept from when it was built"
    )
    found[0].times[2] = torch.tensor(math.nan)
    assert "The output holds NaN where the reference has none (batch 0)." in str(scored(reference, found).reason)
    for wrong in (None, 3.0, True):
        assert "The output.text is" in str(scored(reference, [dataclasses.replace(reference[0], text=wrong), found[1]]).reason)
    assert ".words is nan" in str(scored(reference, [dataclasses.replace(reference[0], words=math.nan), found[1]]).reason)  # type: ignore[arg-type]


def detections(examples: int = 16) -> torch.Tensor:
    """Boxes in pixels beside the probabilities of three classes, as most detectors give them."""
    pixels = 640 * outputs(examples, 4, 200).sigmoid()
    return torch.cat([pixels, (outputs(examples, 3, 200, seed=1) - 3).sigmoid()], 1)


@pytest.mark.parametrize("examples", [1, 16])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_large_in_an_output_does_not_hide_what_is_small(exact: bool, examples: int) -> None:
    reference = detections(examples)
    found = reference.clone()
    found[:, 4:] = 0
    passed = compare_outputs([reference], [found], exact=exact, max_error=0.05)
    assert passed.centred_error is not None
    assert passed.centred_error < 1e-3
    assert not passed.ok
    assert "3 of the 7 slices along axis 1" in str(passed.reason)
    assert from_json(Parity, to_json(passed)) == passed
    assert compare_outputs([reference], [found], exact=False).ok, "the score judges it"
    if not exact:
        assert compare_outputs([reference], [found], exact=exact, max_error=1.0).ok, "which allows constants"
    last = [t.transpose(1, 2) for t in (reference, found)]
    assert "along axis 2" in str(compare_outputs(last[:1], last[1:], exact=exact, max_error=0.05).reason)


def test_what_a_score_may_not_look_at_may_be_off_but_not_lost() -> None:
    def held(factor: float, **more: object) -> Parity:
        logits, first, second = outputs(64, 3), outputs(64, 8, seed=1), detections(64)
        found = second.clone()
        found[:, 4:] *= factor
        options = {"exact": False, "scored": True, "gated": None} | more
        return compare_outputs([(logits, first, second)], [(logits, factor * first, found)], **options)  # type: ignore[arg-type]

    lost = held(0.0)
    assert str(lost.reason).startswith("'output.1' has a centred error of 1")
    hidden = held(0.0, gated=("output.2",))
    assert str(hidden.reason).startswith("'output.2' has lost 3 of the 7 slices along axis 1")
    assert str(hidden.reason).endswith("If nobody needs it, name the outputs that count: Evaluation(outputs=...).")
    assert held(0.7).ok
    assert held(0.0, gated=()).ok, "the score judges it"


def test_what_follows_data_and_what_is_alone_is_the_scores() -> None:
    def held(reference: list[object], found: list[object]) -> bool:
        return compare_outputs(reference, found, exact=False, scored=True, gated=None).ok

    boxes = [outputs(size, 4, seed=size) for size in (5, 9, 7)]
    classes = [outputs(size, 3, seed=size) for size in (16, 16, 16)]
    lost = [0 * each for each in boxes]
    assert held([*boxes], [*lost])
    assert held([*zip(classes, boxes, strict=True)], [*zip(classes, lost, strict=True)])
    assert not held([*zip(boxes, classes, strict=True)], [*zip(boxes, [0 * each for each in classes], strict=True)])


def test_slices_are_compared_over_all_batches_as_far_as_their_sizes_agree() -> None:
    reference = [detections()[:3, :, :150], detections()[3:], detections()[:2, :, :2]]
    found = [t * (1 + 1e-6) for t in reference]
    assert compare_outputs(reference, found, exact=True).ok
    found[1][:, 4:] *= 1.05
    assert "an error of up to 0.0" in str(compare_outputs(reference, found, exact=True).reason)
    assert compare_outputs(reference, found, exact=False, max_error=0.05).ok, "five percent are no loss"


def test_a_slice_of_which_nothing_is_left_is_refused_whatever_its_share() -> None:
    """One row of scores among 38 of pixels: int8 made all of it 0, and a tenth of the slices was still right."""
    reference = outputs(64, 39, 4)
    reference[:, 38] *= 1e-3

    def judged(row: torch.Tensor) -> Parity:
        found = reference.clone()
        found[:, 38] = row
        return compare_outputs([reference], [found], exact=False, max_error=0.05)

    score = reference[:, 38]
    assert "has lost 1 of the 39 slices along axis 1" in str(judged(torch.zeros_like(score)).reason)
    assert "has lost 1 of the 39" in str(judged(score.mean() + 1e-3 * (score - score.mean())).reason), "next to constant"
    assert "has lost 1 of the 39" in str(judged(score - 3 * (score - score.mean())).reason), "far off"
    assert "has lost 1 of the 39" in str(judged(score - 1.5 * (score - score.mean())).reason), "worse than a constant"
    assert judged(score + 0.3 * score.std() * torch.randn_like(score)).ok, "worse than the others, but not lost"
    reference = reference[:4, :, :3]
    score = reference[:, 38]
    assert judged(score - 1.5 * (score - score.mean())).ok, "12 values, which may hardly vary by chance"
    assert not judged(score - 3 * (score - score.mean())).ok


def test_a_slice_of_zeros_but_for_a_few_small_values_may_become_zero() -> None:
    reference = outputs(64, 40).relu()
    reference[:, 0] = 0
    reference[::16, 0] = 1e-3
    found = reference.clone()
    found[:, 0] = 0
    assert compare_outputs([reference], [found], exact=False, max_error=0.05).ok


def test_slices_that_are_off_by_rounding_pass() -> None:
    reference = outputs(64, 40)
    reference[:, :3] *= 1e-3
    found = reference.clone()
    found[:, :3] = 0
    assert "3 of the 40 slices" in str(compare_outputs([reference], [found], exact=True).reason)
    reference[:, :4] *= 1e-3
    found = reference + 5e-6 * outputs(64, 40, seed=1)
    assert compare_outputs([reference], [found], exact=True).ok, "rounding, at the size of the whole"
    assert compare_outputs([reference[:4]], [found[:4] * 1.0001], exact=True).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_slices_of_any_dtype_with_masks_and_nothing_in_them(dtype: torch.dtype) -> None:
    reference = detections().to(dtype)
    if not dtype.is_complex:
        reference[:, 2, :50], reference[:, 3], reference[:, 5, 3] = math.nan, -math.inf, torch.finfo(dtype).max
    reference[:, 6] = 0
    for most in (None, 0.05):
        found = compare_outputs([reference], [reference.clone()], exact=most is None, max_error=most)
        assert found.ok, found.reason
    lost = reference.clone()
    lost[:, 4] = 0
    assert not compare_outputs([reference], [lost], exact=False, max_error=0.5).ok
    empty = torch.zeros(0, 5, 3, dtype=dtype)
    assert compare_outputs([empty], [empty], exact=True).ok
    assert compare_outputs([empty[:, :, :0]], [empty[:, :, :0]], exact=True).ok


def test_examples_that_have_nothing_to_do_with_the_reference_are_counted() -> None:
    reference = outputs(1024, 100)
    found = reference.clone()
    found[7] = outputs(100, seed=1)
    passed = compare_outputs([reference[:1000], reference[1000:]], [found[:1000], found[1000:]], exact=False, max_error=0.05)
    assert passed.ok, "one flip among many does not refuse what may lose accuracy"
    assert passed.unrelated == 1
    assert compare_outputs([reference.long()], [found.long()], exact=False).unrelated == 0, "class numbers have no distance"
    numbers = list(reference[:, 0])
    wrong = [*numbers[:3], numbers[3] + 9, *numbers[4:]]
    assert compare_outputs(numbers, wrong, exact=False).unrelated == 1, "numbers, one for each batch"


MASKS = {
    "everywhere": (torch.rand(64, 10, generator=torch.Generator().manual_seed(1)) < 0.3),
    "one column": torch.arange(10).expand(64, 10) == 3,
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [-1e9, -1e4])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_finite_values_hides_nothing(mask: str, value: float, exact: bool) -> None:
    def held(a: torch.Tensor, b: torch.Tensor) -> Parity:
        return compare_outputs([a[:40], a[40:]], [b[:40], b[40:]], exact=exact, max_error=0.05)

    def put(logits: torch.Tensor, to: float = value) -> torch.Tensor:
        return logits.masked_fill(MASKS[mask], to)

    logits = outputs(64, 10)
    assert held(put(logits), put(logits + 1e-6)).ok
    assert held(logits + MASKS[mask] * value, logits + MASKS[mask] * value + 1e-6).ok, "added to logits"
    garbage = held(put(logits), put(torch.zeros(64, 10)))
    assert garbage.centred_error == pytest.approx(1, abs=0.1)
    assert not garbage.ok
    for other in (put(logits, 0.0), put(logits, -value), put(logits, 1.1 * value)):
        assert "has values far beyond all others, such as a mask's, that are off by" in str(held(put(logits), other).reason)
    assert largest(put(logits), put(torch.zeros(64, 10))) == pytest.approx(1)
    assert largest(put(logits), put(logits, 0.0)) == pytest.approx(1)
    assert largest(put(logits), put(logits + 1e-6)) < 1e-5


def largest(want: torch.Tensor, got: torch.Tensor) -> float:
    return max(error / size for error, size in errors(want, got) or [(math.inf, 1.0)])


def test_a_mask_is_told_from_large_values() -> None:
    logits = outputs(64, 10)
    two = logits.masked_fill(MASKS["everywhere"], -1e4).masked_fill(MASKS["one column"], -1e9)
    assert mask_bound([two]) == 1e4
    assert mask_bound([torch.full((4, 10), -1e9), logits]) == 1e9, "a batch that is masked throughout"
    assert mask_bound([logits.half().masked_fill(MASKS["everywhere"], -6e4)]) == 6e4
    usual = {
        "as they are": logits,
        "probabilities": (40 * logits).softmax(1),
        "powers": (3 * outputs(100, 50)).exp().square(),
        "large alone": 1e6 + logits,
        "nothing beside": torch.eye(4) * 1e6,
        "none": torch.zeros(0, 3),
        "not finite": torch.tensor([math.nan, math.inf, 1.0]),
    }
    assert {name: mask_bound([values]) for name, values in usual.items()} == dict.fromkeys(usual, math.inf)
