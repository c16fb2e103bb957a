"""Errors about shapes and dtypes say the shapes and dtypes of both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab._internal.tensor_text import described
from trimtab._internal.user_code import user_code
from trimtab.data.batches import Batch
from trimtab.errors import WorkloadError
from trimtab.evaluation.prepared_workload import prepare
from trimtab.evaluation.reference import reference_of

LINEAR, IMAGES = nn.Linear(8, 5), torch.randn(51, 8)


class Net(nn.Module):
    """Fails in its own ``forward`` if ``scale`` has another size."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x @ scale


def test_tensors_are_described_with_the_path_of_nested_ones_and_at_most_six() -> None:
    """Arrays count as tensors; numbers and texts are left out."""
    nested = {"outputs": {"logits": torch.zeros(2, 3), "n": 3}, "targets": [np.zeros(4, dtype=np.int64), torch.tensor(True)]}
    assert described(nested) == "outputs.logits float32[2, 3], targets[0] int64[4], targets[1] bool[]"
    assert described({"x": [torch.zeros(1)] * 9}).endswith("x[5] float32[1] and 1 more")
    assert described({"x": 3}) == ""


@pytest.mark.parametrize(
    ("target", "judge", "sides"),
    [
        (torch.zeros(51), {"score": lambda o, t: o == t}, "outputs float32[51, 5], targets float32[51]"),
        (torch.zeros(51, 5).long(), {"score": lambda o, t: nn.functional.cross_entropy(o, t, reduction="none")},
         "outputs float32[51, 5], targets int64[51, 5]"),
        (torch.zeros(51, 4), {"metric": lambda o, t: (o - t).mean()}, "outputs float32[51, 5], targets float32[51, 4]"),
    ],
)  # fmt: skip
def test_a_score_or_metric_that_fails_on_shapes_says_both_sides(target: Any, judge: Any, sides: str) -> None:
    """After the error, with the line of the user's file."""
    evaluation = trimtab.Evaluation(data=[], **judge)
    with pytest.raises(WorkloadError) as raised:
        reference_of(LINEAR.eval(), [Batch(IMAGES, target, 51)], evaluation)
    assert f"; {sides}). Call it yourself " in str(raised.value)


@pytest.mark.parametrize(
    ("model", "inputs", "sides"),
    [
        (LINEAR, IMAGES.double(),
         "(Linear got input float64[51, 8] and has weight float32[5, 8], bias float32[5]: give input.float())."),
        (LINEAR, IMAGES.int(), "bias float32[5]: give input.float())."),
        (LINEAR, IMAGES[:, :7], "(Linear got input float32[51, 7] and has weight float32[5, 8], bias float32[5])."),
        (nn.Conv2d(3, 4, 3), torch.zeros(1, 8, 8, 3),
         "(Conv2d got input float32[1, 8, 8, 3] and has weight float32[4, 3, 3, 3], bias "),
        (Net(), (IMAGES, torch.zeros(4, 4)), "; Net got x float32[51, 8], scale float32[4, 4])."),
    ],
)  # fmt: skip
def test_a_model_that_fails_on_its_inputs_says_what_the_failing_layer_got_and_has(model: Any, inputs: Any, sides: str) -> None:
    """And how to give the dtype of the weights."""
    with pytest.raises(WorkloadError, match="The model failed on the example inputs") as raised:
        prepare(trimtab.Workload(model=model, inputs=inputs))
    assert sides in str(raised.value)


def test_the_users_function_is_described_where_no_module_fails() -> None:
    """A lambda has no name."""
    targets = torch.zeros(16)

    def loss(output: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(output, target)

    functions: dict[str, Callable[[Any, Any], Any]] = {
        "loss": loss,
        "it": lambda output, target: nn.functional.cross_entropy(output, target),
    }
    for name, function in functions.items():
        words = rf"; {name} got output float32\[16, 5\], target float32\[16\]\)$"
        with pytest.raises(WorkloadError, match=words), user_code("It raised"):
            function(torch.zeros(16, 5), targets)


def test_errors_about_anything_else_stay_as_they_are() -> None:
    """Tensors explain neither a missing key nor a failed assertion."""

    def broken(x: torch.Tensor) -> None:
        raise KeyError("shape")

    with pytest.raises(WorkloadError) as raised, user_code("It raised"):
        broken(IMAGES)
    assert "float32" not in str(raised.value)
