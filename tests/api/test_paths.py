"""What is given in place of a path, or of something else that a call takes, is answered before anything is done with it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from trimtab import Workload
from trimtab._internal.files import path_of
from trimtab.core.recipe import Recipe
from trimtab.errors import UsageError
from trimtab.train.data.collate import Collate
from trimtab.train.data.memory_mapped import MappedTensors
from trimtab.train.telemetry.events import JsonLines, TensorBoard


def trainer(**more: Any) -> trimtab.Trainer:
    return trimtab.Trainer(nn.Linear(2, 2), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), **more)


def workload() -> Workload:
    return Workload(model=nn.Linear(2, 2), inputs=torch.ones(1, 2))


TAKES_A_PATH: dict[str, tuple[Callable[[Any], object], str]] = {
    "load": (trimtab.load, "The artifact"),
    "open_artifact": (trimtab.open_artifact, "The artifact"),
    "verify": (trimtab.verify, "The artifact"),
    "compare": (trimtab.compare, "What is timed"),
    "load_workload": (trimtab.load_workload, "The workload"),
    "optimize": (lambda path: trimtab.optimize(workload(), out=path), "out"),
    "Trainer": (lambda path: trainer(checkpoint=path), "checkpoint"),
    "JsonLines": (JsonLines, "path"),
    "TensorBoard": (TensorBoard, "folder"),
    "MappedTensors": (MappedTensors, "folder"),
    "MappedTensors.write": (lambda path: MappedTensors.write(path, {"x": [torch.ones(1)]}), "folder"),
}


@pytest.mark.parametrize(("value", "fault"), [(5, "an int"), ("", "empty"), ("a\0b", "'a\\x00b', and no path can hold")])
@pytest.mark.parametrize("call", TAKES_A_PATH)
def test_what_is_no_path_is_answered_with_a_sentence(call: str, value: Any, fault: str) -> None:
    function, name = TAKES_A_PATH[call]
    with pytest.raises(UsageError, match=f"^{name} is {re.escape(fault)}"):
        function(value)


def test_a_path_is_text_or_what_stands_for_one() -> None:
    assert path_of("a/b", "x", "y") == path_of(pathlib.Path("a/b"), "x", "y") == pathlib.Path("a/b")
    with pytest.raises(UsageError, match=r"^x is None; give a path, such as 'y'\.$"):
        path_of(None, "x", "y")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trimtab.Dim("b", "1"), "Dimension 'b' has the min '1'; it must be a whole number."),
        (lambda: trimtab.Dim("b", 1, 2.5), "Dimension 'b' has the max 2.5; it must be a whole number."),
        (lambda: Collate(multiple="8"), "Collate multiple is '8'; it must be a whole number of at least 1."),
        (lambda: Recipe(backend="onnxruntime"), "Recipe backend is 'onnxruntime'; give a backend, such as BACKENDS"),
        (
            lambda: Recipe(passes=("fold_bn",), backend=trimtab.BACKENDS["eager"]()),
            "Recipe passes is ('fold_bn',); give a tuple of passes, such as (PASSES",
        ),
        (
            lambda: trainer(world="two"),
            "world is a str; give what trimtab.train.distributed.launch.join() returns, or leave it out.",
        ),
        (lambda: trimtab.verify("artifact", seconds="10"), "seconds is '10'; it must be a plain number above zero"),
    ],
)
def test_what_is_of_another_kind_is_answered_with_a_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        call()
