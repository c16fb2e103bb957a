"""Distillation: a loss by which a model follows a teacher, with or without labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.batch_axis import take
from trimtab.tensors.structure import flatten, map_tensors, tensors_of
from trimtab.train.loss.adapter import LossAdapter, call, examples

Kind = Literal["logits", "features", "relations"]
LAYERS = 3
"""Inner layers that ``features`` compares by default."""
SMALL = 1e-6


class Distillation:
    """A loss for :class:`~trimtab.train.trainer.Trainer` by which ``model`` follows the outputs of ``teacher``.

    Example::

        import torch
        from trimtab import Trainer
        from trimtab.train import Distillation
        teacher, student = torch.nn.Linear(8, 3).eval(), torch.nn.Linear(8, 3)
        batches = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(4)]
        loss = Distillation(teacher, torch.nn.CrossEntropyLoss())
        Trainer(student, loss=loss, optimizer=torch.optim.AdamW).fit(batches, epochs=5)

    Args:
        teacher: the model to follow, on the device of the trained one. It is put into evaluation mode, and never changed.
        loss: ``loss(outputs, targets)`` of the task, for batches of ``(inputs, targets)``. Without it there are no labels: a
            batch is what the model takes, a tensor, a tuple of positional or a mapping of keyword arguments.
        kind: ``logits`` compares outputs; ``features`` also compares, at inner layers, how similar the examples of a batch are
            to each other, so that widths may differ; ``relations`` also compares the distances between the outputs of the
            examples of a batch.
        temperature: of the softmax over the last axis of each floating-point output, for outputs that are logits; ``None``
            compares outputs by their squared error, relative to the variance of the teacher's.
        alpha: share of the teacher's part in the loss; the rest is the task's loss. 1 without ``loss``.
        mix: in training mode, replace every second example by a mixture of itself and another, where all inputs are
            floating-point tensors. The teacher answers the mixtures; the task's loss is that of the other examples. It is worth
            as much as several times as many different inputs.
        layers: names of the modules that ``features`` compares; by default three that both models have.

    Sources: Hinton et al. 2015, https://arxiv.org/abs/1503.02531 (logits); Tung & Mori 2019, https://arxiv.org/abs/1907.09682
    (features); Park et al. 2019, https://arxiv.org/abs/1904.05068 (relations); Beyer et al. 2022,
    https://arxiv.org/abs/2106.05237 (mixtures).

    Raises:
        UsageError: an argument is out of its range.
        WorkloadError: when called, the outputs of model and teacher cannot be compared.
    """

    def __init__(
        self,
        teacher: nn.Module,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        kind: Kind = "logits",
        temperature: float | None = 4.0,
        alpha: float = 0.5,
        mix: bool = False,
        layers: Sequence[str] = (),
    ) -> None:
        if kind not in ("logits", "features", "relations"):
            raise UsageError(f"Distillation kind is {kind!r}; it can be 'logits', 'features' or 'relations'.")
        if temperature is not None and not temperature > 0:
            raise UsageError(f"Distillation temperature is {temperature!r}; it must be above 0, or None for a squared error.")
        if not 0 < alpha <= 1:
            raise UsageError(f"Distillation alpha is {alpha!r}; it must be above 0 and at most 1.")
        if loss is not None and LossAdapter(loss).calls_model:
            raise UsageError("Distillation calls the model itself: give it a loss of the form loss(outputs, targets).")
        self.teacher, self.loss, self.kind, self.temperature = teacher, loss, kind, temperature
        self.alpha, self.mix, self.layers = alpha if loss is not None else 1.0, mix, tuple(layers)
        teacher.eval()

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """The loss of ``batch``, a scalar with gradients, and the number of examples that it is a mean over."""
        inputs, targets = batch if self.loss is not None else (batch, None)
        mixed = _mixed(inputs) if self.mix and model.training else None
        inputs = inputs if mixed is None else mixed
        names = self._names(model) if self.kind == "features" else ()
        with _recorded(model, names) as ours:
            outputs = call(model, inputs)
        with torch.no_grad(), _recorded(self.teacher, names) as theirs:
            wanted = call(self.teacher, inputs)
        found = self._compared(outputs, wanted)
        if names:
            pairs = [(ours[name], theirs[name]) for name in names if name in ours and name in theirs]
            found = found + sum((_similarity_error(a, b) for a, b in pairs), torch.zeros(())) / max(len(pairs), 1)
        if self.loss is not None:
            if mixed is not None:
                outputs, targets = (take(value, slice(None, None, 2), lambda _: False) for value in (outputs, targets))
            found = self.alpha * found + (1 - self.alpha) * self.loss(outputs, targets)
        return found, examples(inputs)

    def _compared(self, outputs: Any, wanted: Any) -> torch.Tensor:
        parts = []
        for ours, theirs in zip(flatten(outputs, "output")[0], flatten(wanted, "output")[0], strict=True):
            if not ours.is_floating_point() or (torch.is_grad_enabled() and not ours.requires_grad):
                continue
            if ours.shape != theirs.shape:
                raise WorkloadError(
                    f"The model's output has shape {tuple(ours.shape)} and the teacher's {tuple(theirs.shape)}. Distillation "
                    "compares them element by element: give a teacher with the same outputs."
                )
            parts.append(
                _squared_error(ours, theirs) if self.temperature is None else _divergence(ours, theirs, self.temperature)
            )
            if self.kind == "relations" and ours.dim() and len(ours) > 2:
                parts.append(_distance_error(ours, theirs))
        if not parts:
            raise WorkloadError(
                "The model returns no floating-point output that depends on its parameters. Nothing can be compared."
            )
        return torch.stack(parts).sum()

    def _names(self, model: nn.Module) -> tuple[str, ...]:
        if self.layers:
            return self.layers
        both = dict(self.teacher.named_modules())
        # containers of layers, such as blocks: what single layers compute is arbitrary, and their number is large
        inner = [name for name, part in model.named_modules() if name and name in both and len(list(part.children())) > 1] or [
            name for name, part in model.named_modules() if name in both and not list(part.children())
        ]
        step = max(1, len(inner) // LAYERS)
        return tuple(inner[step - 1 :: step][:LAYERS])


def _mixed(inputs: Any) -> Any:
    """``inputs`` with every second example mixed with another; ``None`` if they hold anything but floating-point rows."""
    rows, tensors = examples(inputs), tensors_of(inputs)
    if rows < 2 or not all(tensor.is_floating_point() and tensor.dim() and len(tensor) == rows for tensor in tensors):
        return None
    other, share = torch.randperm(rows), torch.rand(rows)
    share[::2] = 1.0

    def mix(tensor: torch.Tensor) -> torch.Tensor:
        weight = share.to(tensor).reshape(-1, *[1] * (tensor.dim() - 1))
        return weight * tensor + (1 - weight) * tensor[other.to(tensor.device)]

    return map_tensors(inputs, mix)


@contextlib.contextmanager
def _recorded(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """A block in which the outputs of the modules ``names`` are recorded, those that are tensors."""
    found: dict[str, torch.Tensor] = {}
    parts = dict(model.named_modules()) if names else {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.dim() > 1:
                found[name] = output

        return hook

    handles = [parts[name].register_forward_hook(keep(name)) for name in names if name in parts]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _divergence(ours: torch.Tensor, theirs: torch.Tensor, temperature: float) -> torch.Tensor:
    """Kullback-Leibler divergence of the softened distributions over the last axis, times the squared temperature."""
    size = ours.shape[-1] if ours.dim() else 1
    one, other = (functional.log_softmax(each.reshape(-1, size).float() / temperature, -1) for each in (ours, theirs))
    return functional.kl_div(one, other, reduction="batchmean", log_target=True) * temperature**2


def _squared_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Mean squared error, relative to the variance of ``theirs``."""
    scale = theirs.float().var(correction=0).clamp_min(SMALL)
    return (ours.float() - theirs.float()).square().mean() / scale


def _similarity_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Squared distance of the cosine similarities between the examples of a batch."""
    one, other = (functional.normalize(each.flatten(1).float(), dim=1) for each in (ours, theirs))
    return (one @ one.T - other @ other.T).square().mean()


def _distance_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Huber loss of the distances between the examples of a batch, relative to their mean."""
    pairs = torch.triu_indices(len(ours), len(ours), 1, device=ours.device)
    one, other = ((each.flatten(1)[pairs[0]] - each.flatten(1)[pairs[1]]).float().norm(dim=1) for each in (ours, theirs))
    return functional.smooth_l1_loss(one / one.mean().clamp_min(SMALL), other / other.mean().clamp_min(SMALL))
