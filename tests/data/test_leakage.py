"""What the winner is confirmed on must be new to the search."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch

from trimtab import Evaluation, Workload
from trimtab.data import leakage
from trimtab.data.splits import Splits, split
from trimtab.errors import UsageError


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
    assert leakage.check(parts(one), one) == []
    assert leakage.check(parts(two, rows(30, 2)[0]), two) == []
    assert leakage.check(parts(two), None) == []


def test_one_set_given_twice_is_refused() -> None:
    evaluation = Evaluation(data=rows(60, 0), test=rows(60, 0), score=right)
    with pytest.raises(UsageError) as raised:
        leakage.check(parts(evaluation, rows(30, 2)[0]), evaluation)
    assert str(raised.value) == (
        "Evaluation(test=...) holds what data=... holds: 60 of its 60 inputs are the same, so that the winner would be "
        "confirmed on what it was chosen by. Give others, or leave test out, and data is divided."
    )


def test_some_doublets_are_told_of() -> None:
    inputs, targets = rows(60, 0)
    test = rows(60, 1)
    test[0][:6] = inputs[:6]
    evaluation = Evaluation(data=(inputs, targets), test=test, score=right)
    assert leakage.check(parts(evaluation, rows(30, 2)[0]), evaluation) == [
        "6 of the 60 inputs of the test data are in the data that the search looks at too."
    ]


def test_calibration_on_what_scores_is_told_of() -> None:
    inputs, targets = rows(60, 0)
    evaluation = Evaluation(data=(inputs, targets), test=rows(60, 1), score=right)
    (note,) = leakage.check(parts(evaluation, inputs), evaluation)
    assert note.startswith("60 of the 60 inputs of the data that the search looks at are in the calibration data too")


def test_batches_that_stay_whole_are_compared_whole() -> None:
    calls = [(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)), torch.tensor([seed])) for seed in range(4)]
    evaluation = Evaluation(data=calls, test=calls, score=right)
    with pytest.raises(UsageError, match="holds what data=... holds: 4 of its 4 inputs"):
        leakage.check(parts(evaluation, torch.zeros(8, 4)), evaluation)


def texts(word: str) -> list[tuple[object, torch.Tensor]]:
    return [({"text": f"{word} {i}", "speed": 1.5}, torch.zeros(1)) for i in range(24)]


@pytest.mark.parametrize("item", [dict, lambda given: given["text"], lambda given: [pathlib.Path(given["text"]), 8000]])
def test_items_without_tensors_are_told_apart_by_what_they_hold(item: Callable[[object], object]) -> None:
    def judged(word: str) -> Evaluation:
        given, test = ([(item(inputs), target) for inputs, target in texts(each)] for each in ("one", word))
        return Evaluation(data=given, test=test, score=right, run=lambda call, item: call(torch.zeros(1, 4)))

    assert leakage.check(parts(judged("other")), judged("other")) == []
    with pytest.raises(UsageError, match="holds what data=... holds: 19 of its 24 inputs are the same"):
        leakage.check(parts(judged("one")), judged("one"))
    things = Evaluation(
        data=[(object(), 0) for _ in range(12)], test=[(object(), 0) for _ in range(12)], score=right, run=lambda call, item: 0
    )
    assert leakage.check(parts(things), things) == [], "nobody knows what they are"


def test_items_of_tensors_without_bytes_in_one_place_are_not_compared() -> None:
    def graphs(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(seed)
        edges = [torch.randint(0, 2, (5, 5), generator=drawn).float() for _ in range(24)]
        return [(each.to_sparse(), each.sum()) for each in edges]

    judged = Evaluation(data=graphs(0), test=graphs(1), score=right, run=lambda call, item: call(torch.zeros(1, 4)))
    assert leakage.check(parts(judged), judged) == []


def test_values_that_are_read_as_conjugates_are_compared_by_what_is_read() -> None:
    waves = torch.randn(24, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    given = [(wave[None].conj(), 0) for wave in waves]
    judged = Evaluation(data=given, test=given, score=right, run=lambda call, item: call(torch.zeros(1, 4)))
    with pytest.raises(UsageError, match="holds what data=... holds: 19 of its 24 inputs are the same"):
        leakage.check(parts(judged), judged)


def test_rows_are_told_apart_by_the_constants_beside_them_too() -> None:
    inputs, targets = rows(60, 0)
    batches = {word: [({"x": inputs, "language": word}, targets)] for word in ("en", "de")}
    both = Evaluation(data=batches["en"], test=batches["de"], score=right)
    assert leakage.check(parts(both), both) == []
    same = Evaluation(data=batches["en"], test=batches["en"], score=right)
    with pytest.raises(UsageError, match="48 of its 60 inputs are the same"):
        leakage.check(parts(same), same)
