"""What others say of a failure stands in our sentences as a part of them: one line, and one stop at the end."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trimtab._internal.text import counted, message_line, of_type, summary_line
from trimtab._internal.user_code import user_code
from trimtab.backends.torchscript import TorchScript
from trimtab.core.candidate import Candidate
from trimtab.errors import WorkloadError
from trimtab.evaluation.evaluate import describe, save


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
        return rows * rows.sigmoid()


class Net(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Swish.apply(rows)
        return found


def test_of_torchscript_is_told_what_was_raised() -> None:
    @torch.jit.script
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    with pytest.raises(RuntimeError, match="failed in the TorchScript interpreter") as raised:
        product(torch.ones(2, 5), torch.ones(6, 3))
    assert summary_line(str(raised.value)) == "mat1 and mat2 shapes cannot be multiplied (2x5 and 6x3)"


def test_a_message_is_told_without_its_stop_and_with_what_it_announces() -> None:
    assert summary_line("\n  Might not generalize to other inputs!\nat line 3") == "Might not generalize to other inputs"
    assert summary_line("No rule for this constant:\n\n  it is a number.\nmore") == "No rule for this constant: it is a number"
    assert summary_line("Nothing follows:") == "Nothing follows"
    assert summary_line(" \n ") == "no message"


def test_why_a_model_cannot_be_written_is_one_line(tmp_path: pathlib.Path) -> None:
    executable = TorchScript().compile(Candidate.of(Net().eval(), (torch.randn(2, 3),)))
    reason = save(executable, tmp_path)["cannot_ship"]
    assert "Could not export Python function call 'Swish'" in reason
    assert "\n" not in reason
    assert reason.endswith(".")


def test_numbers_and_articles_agree_with_their_nouns() -> None:
    assert [counted(1, "value"), counted(0, "score"), counted(1234, "batch")] == ["1 value", "0 scores", "1,234 batches"]
    assert [counted(1, "axis"), counted(2, "axis"), counted(2, "class")] == ["1 axis", "2 axes", "2 classes"]
    assert (of_type(3), of_type(2.0), of_type(None)) == ("an int", "a float", "None")


def test_of_a_users_torchscript_is_told_what_was_raised_and_where_it_was_called() -> None:
    class Wrong(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.view(3, 5)

    scripted = torch.jit.script(Wrong())
    with pytest.raises(WorkloadError) as failed, user_code("The model failed"):
        scripted(torch.ones(2, 2))
    told = r"The model failed: RuntimeError: shape '\[3, 5\]' is invalid for input of size 4 \(.*_error_text\.py, line \d+\)"
    assert re.fullmatch(told, str(failed.value))


class Broken(Dataset[torch.Tensor]):
    """Raises another kind of exception for each of its examples."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            return torch.tensor({}["label"])
        if index == 1:
            return torch.tensor(len(b"\xff".decode()))  # torch cannot make this one anew, which has four arguments
        try:
            raise ValueError("no image")
        except ValueError as error:
            raise LookupError("Image 2 is broken.\nIt has no header.") from error


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_worker_of_a_loader_raised_is_told_as_if_it_had_been_raised_here(workers: int) -> None:
    told = [
        r"KeyError: 'label'",
        r"UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        r"LookupError: Image 2 is broken.\nIt has no header.",
    ]
    for index, words in enumerate(told):
        with pytest.raises(WorkloadError) as failed, user_code("The loader raised"):
            next(iter(DataLoader(Broken(), sampler=[index], num_workers=workers)))
        assert re.fullmatch(rf"The loader raised: {words} \(.*test_error_text\.py, line \d+\)", str(failed.value))


def test_every_place_that_tells_an_error_in_one_line_finds_that_of_torchscript() -> None:
    @torch.jit.script
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    with pytest.raises(RuntimeError) as raised:
        product(torch.ones(2, 5), torch.ones(6, 3))
    assert message_line(raised.value) == "mat1 and mat2 shapes cannot be multiplied (2x5 and 6x3)"
    assert describe(raised.value) == "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 6x3)"
    assert describe(ValueError(" ")) == "ValueError: no message"
    assert message_line(ValueError("\n first \nsecond")) == "first"
