"""What one looks at before and during a run: learning rates, layers, progress in a notebook."""

from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from _runs import loader, trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train import find_batch, find_lr, model_summary

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_learning_rate_is_found_on_a_copy(tmp_path: pathlib.Path) -> None:
    made, plain = trainer(), trainer()
    data = loader()
    found = find_lr(made, data, lowest=1e-5, highest=10.0, updates=60)
    assert 1e-5 <= found.rate < 10.0
    assert len(found.rates) == len(found.losses) == len(found.smoothed) <= 60
    assert f"{found.rate:.2g}" in str(found)
    found.picture(tmp_path / "rates.svg")
    assert (tmp_path / "rates.svg").read_text().count("<polyline") == 1
    found.tensorboard(tmp_path / "events")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = accumulator.EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.value for event in written.Scalars("find_lr/loss")] == pytest.approx(list(found.losses))
    torch.manual_seed(1)
    made.fit(data, epochs=1)
    torch.manual_seed(1)
    plain.fit(loader(), epochs=1)
    torch.testing.assert_close(made.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    with pytest.raises(UsageError, match="find_lr goes from 1 to 0.1 in 60 updates; give at least 10, and a higher end"):
        find_lr(made, data, lowest=1, highest=0.1, updates=60)


def test_searches_refuse_a_loss_that_makes_its_own_steps() -> None:
    made = trainer(loss=lambda run, batch: run.backward(run.model(batch[0]).mean()))
    with pytest.raises(UsageError, match=r"find_lr makes one backward pass .* makes its own\. Try several learning rates"):
        find_lr(made, loader())
    with pytest.raises(UsageError, match=r"find_batch times updates of .* makes its own\. Try several batch sizes"):
        find_batch(made, loader())


class Shared(nn.Module):
    """One layer that is called twice, and another whose weight it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.norm(self.first(self.first(x))))
        return found


def test_a_model_is_summed_up_layer_by_layer() -> None:
    model = Shared()
    found = model_summary(model, (torch.randn(4, 8), torch.zeros(4)))
    layers = {layer.name: layer for layer in found.layers}
    assert found.parameters == sum(value.numel() for value in model.parameters()) == 64 + 8 + 16
    assert layers["first"].flops == 2 * 2 * 4 * 8 * 8
    assert found.flops == 3 * 2 * 4 * 8 * 8
    assert layers["norm"].trained == 0
    assert layers["first"].activations_mb == pytest.approx(2 * 4 * 8 * 4 / 1e6)
    assert model.training
    assert not model.norm.num_batches_tracked
    assert "88 parameters, 72 of them trained" in str(found)
    assert found._repr_html_().startswith("<pre>layer")
    with pytest.raises(WorkloadError, match=r"In model_summary\(\) the model raised"):
        model_summary(model, torch.randn(4, 3))


def test_progress_in_a_notebook_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's interface, as a kernel has it: one display that is updated."""
    pages: list[str] = []
    handle = types.SimpleNamespace(update=pages.append)
    display: Any = types.ModuleType("IPython.display")
    display.HTML, display.display = str, lambda page, display_id: pages.append(page) or handle
    shell: Any = types.ModuleType("IPython")
    shell.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    trainer(log_every=1).fit(loader(), loader(), epochs=2)
    assert "epoch 2, update 16: validation loss" in pages[-1]
    assert "update 16 of 16" in pages[-1]

    pages.clear()
    trainer(log_every=1, validate_every=5).fit(loader(), loader(), epochs=2)
    lines = [line for line in pages[-1].splitlines() if "validation" in line]
    assert [line.partition(":")[0].removeprefix("<pre>") for line in lines] == [
        "epoch 1, update 5", "epoch 2, update 10", "epoch 2, update 15", "epoch 2, update 16",
    ]  # fmt: skip
