"""Torch's own losses of unequal batches, against a loop by hand over everything that an update is made from."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trimtab import DataSettings, Settings, Trainer
from trimtab.errors import WorkloadError

CLASSES = 5
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def sequences(targets: Callable[[torch.Tensor], torch.Tensor]) -> Pairs:
    """Batches of sequences that are of one length within a batch, and of others in the next."""
    random = torch.Generator().manual_seed(1)
    shapes = [(4, 2), (4, 9), (2, 5)]
    return [
        (torch.randn(*shape, 3, generator=random), targets(torch.randn(*shape, CLASSES, generator=random))) for shape in shapes
    ]


def signs(random: torch.Tensor) -> torch.Tensor:
    return random.sign()


def shares(random: torch.Tensor) -> torch.Tensor:
    return random.softmax(-1)


def yes_or_no(random: torch.Tensor) -> torch.Tensor:
    return (random > 0).float()


@pytest.mark.parametrize(
    ("loss", "targets", "examples"),
    [
        (nn.KLDivLoss(reduction="batchmean"), shares, True),
        (functools.partial(functional.kl_div, reduction="batchmean"), shares, True),
        (functools.partial(functional.kl_div, reduction="mean"), shares, False),
        (nn.SoftMarginLoss(), signs, False),
        (nn.HingeEmbeddingLoss(), signs, False),
        (nn.MultiLabelSoftMarginLoss(), yes_or_no, False),
    ],
)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_batches_of_other_lengths_count_for_what_torch_divides_by(
    loss: Callable[..., torch.Tensor], targets: Callable[[torch.Tensor], torch.Tensor], examples: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, CLASSES), nn.LogSoftmax(-1))
    plain, batches = copy.deepcopy(model), sequences(targets)
    optimizer = SGD(plain.parameters())
    counts = [len(y) if examples else y.numel() for _, y in batches]
    mean = sum(loss(plain(x), y) * count for (x, y), count in zip(batches, counts, strict=True)) / sum(counts)
    mean.backward()
    optimizer.step()
    trainer = Trainer(model, loss=loss, optimizer=SGD, settings=Settings(data=DataSettings(accumulate=len(batches))))
    update = next(trainer.updates(batches, epochs=1))
    assert float(update.loss) == pytest.approx(float(mean.detach()))
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("loss", [nn.KLDivLoss(reduction="batchmean"), nn.SoftMarginLoss(), nn.MultiLabelSoftMarginLoss()])
def test_targets_are_not_stretched_to_the_outputs(loss: nn.Module) -> None:
    def answer(outputs: Any) -> None:
        Trainer(nn.Linear(3, CLASSES), loss=loss, optimizer=SGD).fit([(torch.randn(4, 3), outputs)], epochs=1)

    with pytest.raises(WorkloadError, match=r"outputs have shape \(4, 5\) and the targets \(5,\)"):
        answer(torch.rand(CLASSES))
