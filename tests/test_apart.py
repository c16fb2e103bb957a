"""What the winner is confirmed on must be new to the search."""

from __future__ import annotations

import pytest
import torch

from trimtab import Evaluation, Workload
from trimtab.errors import UsageError
from trimtab.splits import Splits, split
from trimtab.study import apart


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=drawn), torch.randint(0, 2, (count,), generator=drawn)


def parts(evaluation: Evaluation, calibration: torch.Tensor | None = None) -> Splits:
    model = torch.nn.Linear(4, 2).eval()
    more = {} if calibration is None else {"calibration": calibration}
    return split(Workload(name="w", model=model, inputs=torch.zeros(1, 4), evaluation=evaluation, **more))


def test_parts_of_one_set_and_different_sets_are_apart() -> None:
    one = Evaluation(data=rows(60, 0), score=right)
    two = Evaluation(data=rows(60, 0), test=rows(60, 1), score=right)
    assert apart.check(parts(one), one) == []
    assert apart.check(parts(two, rows(30, 2)[0]), two) == []
    assert apart.check(parts(two), None) == []


def test_one_set_given_twice_is_refused() -> None:
    evaluation = Evaluation(data=rows(60, 0), test=rows(60, 0), score=right)
    with pytest.raises(UsageError) as raised:
        apart.check(parts(evaluation, rows(30, 2)[0]), evaluation)
    assert str(raised.value) == (
        "Evaluation(test=...) holds what data=... holds: 60 of its 60 inputs are the same, so that the winner would be "
        "confirmed on what it was chosen by. Give others, or leave test out, and data is divided."
    )


def test_some_doublets_are_told_of() -> None:
    inputs, targets = rows(60, 0)
    test = rows(60, 1)
    test[0][:6] = inputs[:6]
    evaluation = Evaluation(data=(inputs, targets), test=test, score=right)
    assert apart.check(parts(evaluation, rows(30, 2)[0]), evaluation) == [
        "6 of the 60 inputs of the test data are in the data that the search looks at too."
    ]


def test_calibration_on_what_scores_is_told_of() -> None:
    inputs, targets = rows(60, 0)
    evaluation = Evaluation(data=(inputs, targets), test=rows(60, 1), score=right)
    (note,) = apart.check(parts(evaluation, inputs), evaluation)
    assert note.startswith("60 of the 60 inputs of the data that the search looks at are in the calibration data too")


def test_batches_that_stay_whole_are_compared_whole() -> None:
    calls = [(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)), torch.tensor([seed])) for seed in range(4)]
    evaluation = Evaluation(data=calls, test=calls, score=right)
    with pytest.raises(UsageError, match="holds what data=... holds: 4 of its 4 inputs"):
        apart.check(parts(evaluation, torch.zeros(8, 4)), evaluation)
