"""Distillation: what it compares, with a plain Trainer too."""

from typing import Any

import pytest
import torch
from torch import nn

from trimtab import Trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train import Distillation


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, width), nn.Tanh()), nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, 3)
    )


@pytest.mark.parametrize("kind", ["logits", "features", "relations"])
@pytest.mark.parametrize("temperature", [4.0, None])
def test_nothing_is_lost_against_oneself_and_widths_may_differ(kind: Any, temperature: float | None) -> None:
    teacher, rows = net(), torch.randn(6, 4)
    loss = Distillation(teacher, kind=kind, temperature=temperature)
    mean, weight = loss(teacher, rows)
    assert (mean.item(), weight) == (pytest.approx(0, abs=1e-5), 6)
    other, _ = loss(net(16), rows)
    assert other.item() > 1e-3


def test_labels_are_blended_in() -> None:
    teacher, student, rows, labels = net(), net(), torch.randn(6, 4), torch.randint(3, (6,))
    soft = Distillation(teacher)(student, rows)[0]
    hard = nn.functional.cross_entropy(student(rows), labels)
    both = Distillation(teacher, nn.CrossEntropyLoss(), alpha=0.25)(student, (rows, labels))[0]
    assert both.item() == pytest.approx(0.25 * soft.item() + 0.75 * hard.item(), rel=1e-5)


def test_a_trainer_follows_the_teacher_without_labels_and_leaves_it_as_it_was() -> None:
    teacher, student = net(), net()
    before = [parameter.clone() for parameter in teacher.parameters()]
    batches = [torch.randn(32, 4) for _ in range(8)]
    loss = Distillation(teacher, temperature=None)
    first = loss(student, batches[0])[0].item()
    Trainer(student, loss=loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02)).fit(batches, epochs=10)
    assert loss(student, batches[0])[0].item() < first / 4
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    assert not any(module._forward_hooks for module in teacher.modules())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "other"}, "kind is 'other'"),
        ({"temperature": 0}, "temperature is 0"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"loss": lambda model, batch: 0}, "calls the model itself"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Distillation(net(), **options)


def test_a_teacher_with_other_outputs_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"shape \(6, 3\) and the teacher's \(6, 5\)"):
        Distillation(nn.Linear(4, 5))(net(), torch.randn(6, 4))
