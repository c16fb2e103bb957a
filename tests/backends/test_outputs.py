"""What executables give back: right but for near-ties, and the caller's own to change."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import nn

from _backends import needs_compiler, reloaded
from trimtab.backends.common.exported_program import disagreement
from trimtab.backends.common.foreign import wrong_graph
from trimtab.backends.common.owned_outputs import held_addresses, owned
from trimtab.backends.eager import Eager
from trimtab.backends.inductor import Inductor
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import BACKENDS, Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.measure.parity import compare_outputs
from trimtab.passes.channels_last import ChannelsLast
from trimtab.tensors.comparison import NEAR_TIES, too_many_differ
from trimtab.tensors.structure import Record, flatten
from trimtab.testing.models import anchored


class Detector(nn.Module):
    """Boxes as corner and size, beside what they were made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        boxes = self.layer(rows)
        return {"boxes": boxes, "parts": (boxes.sigmoid(), rows * 2)}


class Binned(nn.Module):
    """Scores and the bins that they fall into, as a quantizer's codes or a class map would."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.conv(images)
        return {"logits": logits, "bin": (logits * 1000).floor().long()}


def corners(executable: Executable | nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The post-processing that most detectors come with."""
    found = executable(rows)
    boxes: torch.Tensor = found["boxes"]
    boxes[:, 2:] += boxes[:, :2]
    found["parts"][0][:] = 0
    return boxes


@pytest.mark.parametrize(
    "backend",
    [Eager(), Eager(grad_mode="no_grad"), TorchScript(), pytest.param(Inductor(mode="default"), marks=needs_compiler)],
    ids=str,
)
def test_outputs_can_be_post_processed_in_place(backend: Backend, tmp_path: pathlib.Path) -> None:
    candidate = Candidate.of(Detector().eval(), (torch.randn(3, 6),))
    with torch.no_grad():
        want = corners(candidate.model, *candidate.args)
    executable = backend.compile(candidate)
    executable.save(tmp_path)
    for each in (executable, backend.load(tmp_path, executable.signature, executable.settings)):
        for _ in range(2):
            torch.testing.assert_close(corners(each, *candidate.args), want)


def test_what_a_model_keeps_is_not_changed_with_its_outputs() -> None:
    class Running(nn.Module):
        kept: torch.Tensor | None = None

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.kept = rows * 1 if self.kept is None else self.kept + rows
            return self.kept

    rows = torch.ones(2, 3)
    executable = Eager().compile(Candidate.of(Running().eval(), (rows,)))
    first = executable(rows)
    before = first.clone()
    first.zero_()
    torch.testing.assert_close(executable(rows), before + rows)


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Frozen:
    scores: torch.Tensor
    name: str = "frozen"


def test_containers_keep_their_class_and_only_what_must_be_is_copied() -> None:
    plain = torch.ones(2)
    with torch.inference_mode():
        made = collections.OrderedDict(
            pair=Pair(torch.ones(2), [torch.ones(2), plain]),
            frozen=Frozen(torch.ones(2)),
            record=Record(scores=torch.ones(2)),
            best=torch.ones(2, 3).max(1),
            number=3,
        )
        assert owned(made) is made
        assert made["frozen"].scores.is_inference(), "nothing to do within inference mode"
    found = owned(made)
    assert [type(value) for value in found.values()] == [Pair, Frozen, Record, torch.return_types.max, int]
    assert found["pair"].right[1] is plain
    tensors = [found["pair"].left, *found["pair"].right, found["frozen"].scores, found["record"].scores, found["best"].values]
    for tensor in tensors:
        tensor += 1
        assert tensor.tolist() == [2.0, 2.0]


def test_probes_let_near_ties_pass_and_say_the_share_of_what_is_more() -> None:
    candidate = Candidate.of(Binned().eval(), (torch.randn(1, 3, 12, 12),))  # 1600 integers

    def turning(count: int, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            found = candidate.model(*leaves)
        found["bin"].view(-1)[:count] += 1
        return list(found.values())

    allowed = int(NEAR_TIES * 1600)
    assert wrong_graph(lambda leaves: turning(allowed, list(leaves)), candidate, candidate.signature) is None
    assert disagreement(candidate, lambda leaves: turning(allowed, list(leaves)), candidate.leaves) is None
    for said in (
        wrong_graph(lambda leaves: turning(16, list(leaves)), candidate, candidate.signature),
        disagreement(candidate, lambda leaves: turning(16, list(leaves)), candidate.leaves),
    ):
        assert "is wrong: 1.00% of its values differ, where 0.50% may" in str(said)
    assert too_many_differ(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)) is None


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_bins_of_another_runtime_pass_beside_their_scores(name: str) -> None:
    pytest.importorskip(name)
    if name == "onnxruntime":
        pytest.importorskip("onnx")
    candidate = Candidate.of(Binned().eval(), (torch.randn(2, 3, 96, 96),))
    executable = BACKENDS[name]().compile(candidate)
    with torch.no_grad():
        want = candidate.model(*candidate.args)
    found = compare_outputs([want], [executable(*candidate.args)], exact=True)
    assert found.ok, found.reason
    executable.close()


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


class Features(nn.Module):
    """Takes the logarithm of what is never negative, as of the energies in a sound."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, energies: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(torch.log(energies + 1e-6)))


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_probes_stay_where_the_model_has_an_answer(name: str) -> None:
    candidate = Candidate.of(Features().eval(), (torch.rand(2, 6),), dynamic={"energies": {0: Dim("batch")}})
    asked: list[torch.Tensor] = []

    def careless(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(leaves[0])
        with torch.no_grad():
            return [candidate.model(leaves[0]).nan_to_num()]  # as a ReLU in oneDNN makes zero of NaN

    assert wrong_graph(careless, candidate, candidate.signature) is None
    assert all((leaf >= 0).all() for leaf in asked)
    assert torch.equal(asked[1].reshape(-1).flip(0), candidate.leaves[0].reshape(-1)), "other values, of the same sign"
    assert "at other values" in str(
        wrong_graph(
            lambda leaves: careless(candidate.leaves), Candidate.of(candidate.model, candidate.args), candidate.signature
        )
    ), "which still tell a constant from a model"

    pytest.importorskip(name)
    if name == "onnxruntime":
        pytest.importorskip("onnx")
    executable = BACKENDS[name]().compile(candidate)
    assert executable.signature.dims
    executable.close()


def test_masks_of_infinity_are_no_reason_to_ask_nothing() -> None:
    class Masking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(x < 0, -torch.inf)

    candidate = Candidate.of(Masking().eval(), (torch.rand(2, 3) + 0.1,))
    said = wrong_graph(lambda leaves: [leaves[0].clamp(min=0)], candidate, candidate.signature)
    assert said == "output 0 has NaN or infinity in other places at other values"


class Listed(nn.Module):
    """Keeps its layers in a list, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.kept = [torch.ones(8)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


@pytest.mark.parametrize("how", ["scripted", "traced"])
def test_lists_of_modules_inside_torchscript_are_taken(how: str) -> None:
    rows, inner = torch.randn(3, 8), Listed().eval()
    script = torch.jit.script(inner) if how == "scripted" else torch.jit.trace(inner, rows)
    candidate = Candidate.of(nn.Sequential(script, nn.Linear(8, 2)).eval(), (rows,))
    torch.testing.assert_close(Eager().compile(candidate)(rows), candidate.model(rows))


def test_what_a_model_keeps_may_contain_itself() -> None:
    net = nn.Sequential(nn.Linear(8, 2))
    ring: dict[str, object] = {"kept": torch.ones(2)}
    ring["me"], ring["all"] = ring, [ring]
    net.cfg = ring  # type: ignore[assignment]
    assert ring["kept"].data_ptr() in held_addresses(net)  # type: ignore[attr-defined]
    rows = torch.randn(3, 8)
    torch.testing.assert_close(Eager().compile(Candidate.of(net.eval(), (rows,)))(rows), net(rows))
