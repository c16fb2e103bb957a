"""Call the user's loss on a batch, and find its weight: the number of examples, tokens or elements that it is a mean over.

Exact gradient accumulation and data-parallel training need the weights: a mean over 3 tokens counts less than one over 300.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from trimtab._internal.text import counted, of_type, summary_line
from trimtab._internal.user_code import user_code
from trimtab._internal.validation import refuses
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.batch_axis import length, uneven
from trimtab.tensors.structure import is_flat, map_items, tensors_of
from trimtab.train.loss import model_outputs, torch_losses
from trimtab.train.loss.manual_run import ManualRun
from trimtab.train.loss.torch_losses import IGNORED

Weight = float | torch.Tensor
Batch = Any
"""A batch of the loader: ``(inputs, targets)``, a mapping of keyword arguments, or anything that the user's loss takes."""

_RETURN_FORM = (
    "Give the mean alone, or (mean, weight) where the weight says how much the mean is over, such as the number of tokens; "
    "other figures are for metrics=... and callbacks."
)
_UNKNOWN_COUNT = (
    "Nothing tells how many examples a batch has, so that all batches count alike. If they are not alike, return "
    "(mean, weight) from loss(model, batch)."
)
_UNEVEN = (
    "The tensors of a batch differ in their first axis ({}): it counts for as many examples as the first has, {}. If the loss "
    "is a mean over something else, return (mean, weight) from loss(model, batch)."
)
_NOT_ALONE = (
    "One example has no statistics of its own. If it is what is left for the last batch, leave it out with drop_last=True; "
    "else make batches, or DataSettings(micro_batch=...), larger."
)
_NOT_CALLED_SO = (
    "A loss is called as loss(outputs, targets), but one that calls the model itself is known by the name of its first "
    "parameter: def loss(model, batch)."
)
_UNPAIRED = {
    True: "If (inputs, targets) of all examples were given in place of a loader, wrap them: trimtab.train.Loader((inputs, "
    "targets), batch=32). Otherwise give a loss whose first parameter is called model: def loss(model, batch).",
    False: "Give a loss whose first parameter is called model: def loss(model, batch).",
}
"""The fix in the error, by whether a batch is a single tensor."""
_MISCALLED = re.compile(r"'Tensor' object is not callable|missing \d+ required positional argument")
_MODEL_NAMES = frozenset({"model", "module", "net", "network"})
_RUN_NAME = "run"


class in_step(user_code):
    """A block of user code that explains BatchNorm's error on a batch of one example, as the last of an epoch may be."""

    def explain(self, error: BaseException) -> None:
        """Raise what ``error`` becomes."""
        alone = isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel")
        user_code(self.what, _NOT_ALONE if alone else self.fix).explain(error)


class _miscalled(user_code):
    """A block that explains how losses are called, if the loss takes other arguments than outputs and targets."""

    def explain(self, error: BaseException) -> None:
        """Raise what ``error`` becomes."""
        if isinstance(error, TypeError) and _MISCALLED.search(str(error)):
            super().explain(error)


_LOSS = _miscalled("The loss raised", _NOT_CALLED_SO)


class LossAdapter:
    """The user's loss behind one signature: ``objective(model, batch)`` -> ``(loss, weight)``.

    Args:
        loss: one of

            - ``loss(outputs, targets)``, such as :class:`torch.nn.CrossEntropyLoss`, for batches of ``(inputs, targets)``. The
              weights of torch's losses are known (labels that are not ignored, class weights, elements). Any other loss is
              taken for a mean over the examples;
            - ``loss(model, batch)``, known by the name of its first parameter. It calls the model, and returns the mean over
              the examples, or ``(mean, weight)``, where the weight may be a number of tokens;
            - a function whose first parameter is called ``run``: ``step(run, batch)`` makes the backward passes and steps
              of its update through a :class:`~trimtab.train.loss.manual_run.ManualRun`.
            - ``None`` for a model that takes the batch, a mapping, as keywords and returns its loss, as those of transformers.
    """

    def __init__(self, loss: Callable[..., Any] | None) -> None:
        _refuse_other(loss)
        self.loss = loss
        self.summed = torch_losses.options(loss).get("reduction") == "sum"
        """True for a loss with ``reduction="sum"``; sums of several batches are added without weights."""
        first = None if loss is None else _first_parameter(loss)
        self.manual = first == _RUN_NAME
        """True if the loss makes its own backward passes and steps: ``def step(run, batch)``."""
        self.optimizers: dict[str, Optimizer] = {}
        """The optimizers by name, for such a loss."""
        self._with_model = first in _MODEL_NAMES
        self.calls_model = loss is None or self._with_model or self.manual
        """True if the loss calls the model, so that its outputs are not known here."""
        self._weight_known = False
        """True if the weight of the last loss was known, so that the number of examples did not replace it."""
        self.count_warning: str | None = None
        """Why the number of examples of a batch, which served as its weight, may be wrong."""
        self.weights_checked = False
        """True once :meth:`weight_warning` has checked the weights."""
        self._elementwise = torch_losses.kind(loss) in torch_losses.ELEMENTWISE

    @property
    def known(self) -> bool:
        """True for a loss of torch, whose weights are known."""
        return not self.calls_model and torch_losses.kind(self.loss) in (*torch_losses.CLASSES, *torch_losses.ELEMENTWISE)

    @property
    def module(self) -> nn.Module | None:
        """The loss, if it is a module that may have parameters or buffers to train or store; those of torch have none."""
        return self.loss if isinstance(self.loss, nn.Module) and not self.known else None

    def __call__(self, model: nn.Module, batch: Batch, *, weighed: bool = True) -> tuple[torch.Tensor, Weight]:
        """The loss of ``batch``, a scalar with gradients, and its weight.

        The containers of ``batch`` are copied for the loss, because some batches are used more than once.

        Args:
            weighed: without it, the weight is 1, unless the loss may be a mean over nothing, as over labels that are all
                ignored.

        Raises:
            WorkloadError: the loss is no scalar or has no gradient; the second value that it returned is no weight; or the
                batch has another form than the loss needs.
        """
        return self.evaluate(model, batch, weighed=weighed)[:2]

    def evaluate(self, model: nn.Module, batch: Batch, *, weighed: bool = True) -> tuple[torch.Tensor, Weight, Any]:
        """Loss, weight, and the outputs for metrics (``None`` if the loss calls the model). Raises as :meth:`__call__`."""
        given = copy_containers(batch)
        outputs: Any = None
        targets: Any = None
        if self.loss is None:
            loss, weight, outputs = self._model_loss(model, given)
        elif self.manual:
            loss, weight = self.manual_loss(ManualRun(model, self.optimizers), given)
        elif self._with_model:
            found = self.loss(model, given)
            loss, weight = _weighed(found) if isinstance(found, tuple) else (found, None)
        else:
            inputs, targets = _pair(given)
            outputs = call(model, inputs)
            if self._elementwise:
                self._refuse_broadcast(outputs, targets)
            try:
                loss, weight = self.loss(outputs, targets), None
            except IndexError as error:
                raise WorkloadError(torch_losses.wrong_label(self.loss, outputs, targets, error)) from error
            except (TypeError, AttributeError) as error:
                _LOSS.explain(error)
                if (text := model_outputs.unusable(self.loss, outputs)) is None:
                    raise
                raise WorkloadError(f"{text} It raised {type(error).__name__}: {summary_line(str(error))}") from error
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise WorkloadError(_no_scalar(loss))
        if not (loss.requires_grad or self.manual) and torch.is_grad_enabled():
            raise WorkloadError(
                "The loss does not depend on any parameter that is trained. Look for detach(), no_grad() or item() between the "
                "model and the loss, and for a model that is frozen."
            )
        if self.summed or not (weighed or _may_be_empty_mean(loss)):
            return loss, 1.0, outputs
        if self.loss is not None and not self.calls_model:
            weight = torch_losses.denominator(self.loss, targets)
        self._weight_known = weight is not None
        if weight is None and self.count_warning is None:
            self.count_warning = count_warning(batch)
        return loss, examples(batch) if weight is None else weight, outputs

    def manual_loss(self, run: ManualRun, batch: Batch) -> tuple[torch.Tensor, Weight | None]:
        """The loss that a function ``step(run, batch)`` reports, and its weight if it returned one.

        Raises:
            WorkloadError: it is no scalar, or there is none.
        """
        assert self.loss is not None
        found = run.reported(self.loss(run, batch))
        loss, weight = _weighed(found) if isinstance(found, tuple) else (found, None)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise WorkloadError(_no_scalar(loss))
        self._weight_known = weight is not None
        return loss, weight

    def weight_warning(self, group: Sequence[Batch], *, alone: bool) -> str | None:
        """A sentence if the losses of ``group``, the micro-batches of an update, may have wrong weights.

        It is called after each update, and checks the first update whose result depends on weights.

        Args:
            alone: there is one process.
        """
        if self.weights_checked or (alone and len(group) == 1):
            return None
        self.weights_checked = True
        if self.summed or self._weight_known:
            return None
        if (text := next(filter(None, map(count_warning, group)), None)) is not None:
            return text
        if any(map(_has_ignored_label, group)):
            return (
                f"Some targets are {IGNORED}. If the loss leaves them out, as torch's own do, its mean is over fewer than the "
                "examples that it counts for: return (mean, weight) from loss(model, batch), or give one of torch's losses."
            )
        return None

    def _refuse_broadcast(self, outputs: Any, targets: Any) -> None:
        """Refuse shapes that torch would broadcast with a warning, which compares outputs with targets of other examples."""
        if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            return
        if outputs.shape != targets.shape:
            raise WorkloadError(
                f"The outputs have shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}. The loss compares them "
                "element by element, and would stretch one to fit the other: outputs would meet the targets of other examples. "
                "Give both one shape, for example with squeeze(-1) at the end of the model or unsqueeze(-1) on the targets."
            )

    def _model_loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Weight | None, Any]:
        """The loss that the model computes, its weight if that is known, and all that the model returned."""
        if not isinstance(batch, Mapping):
            raise WorkloadError(
                f"Without loss=..., batches must be mappings that the model takes as keywords, but this is a "
                f"{type(batch).__name__}. Give loss=..., for example torch.nn.CrossEntropyLoss(); or, for a model that returns "
                "(logits, loss), loss=lambda model, batch: model(*batch)[1]."
            )
        found = model(**batch)
        loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if loss is None:
            raise WorkloadError(model_outputs.without_loss(found))
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return loss, None, found
        model = getattr(model, "_orig_mod", model)  # a compiled model
        model = getattr(model, "module", model)  # DDP
        return loss, (labels[..., 1:] if _shifts_labels(model) else labels).ne(IGNORED).sum(), found


def _refuse_other(loss: Any) -> None:
    """Refuse what is no loss.

    Raises:
        UsageError: it cannot be called, does not take two arguments, or is a class.
    """
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise UsageError(f"loss is {loss.__name__}, a class, and no loss yet. Give what it makes: {loss.__name__}().")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss is {of_type(loss)}, which cannot be called. Give a function or a torch.nn loss.")
    if loss is not None and (error := refuses(loss, None, None)):
        name = getattr(loss, "__name__", None) or repr(loss)
        raise UsageError(f"loss is {name}, which does not take two arguments: {error}. {_NOT_CALLED_SO}")


def call(model: nn.Module, inputs: Any) -> Any:
    """Call the model on a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    return model(inputs)


def copy_containers(batch: Batch) -> Batch:
    """Copies of the nested containers of ``batch``. Tensors, other leaves and mappings that are no dict are shared."""
    if is_flat(batch):
        return batch if type(batch) is tuple else list(batch)
    shared = isinstance(batch, Mapping) and not isinstance(batch, (dict, UserDict))
    return batch if shared else map_items(batch, copy_containers)


def examples(batch: Batch) -> int:
    """The number of examples in ``batch``; 1 if it is not known."""
    found = length(batch)
    return 1 if found is None else found


def count_warning(batch: Batch) -> str | None:
    """A sentence if :func:`examples` may be wrong for ``batch``."""
    if (count := length(batch)) is None:
        return _UNKNOWN_COUNT
    shapes = uneven(batch)
    return None if shapes is None else _UNEVEN.format(shapes, count)


def is_pair(batch: Batch) -> bool:
    """True for ``(inputs, targets)``."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _pair(batch: Batch) -> tuple[Any, Any]:
    if is_pair(batch):
        return batch[0], batch[1]
    shape = of_type(batch) + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
    fix = _UNPAIRED[isinstance(batch, torch.Tensor)]
    raise WorkloadError(f"loss(outputs, targets) needs batches of (inputs, targets), but the loader gives {shape}. {fix}")


def _weighed(found: tuple[Any, ...]) -> tuple[Any, Weight]:
    """Check the pair ``(mean, weight)`` that a loss returned: another second value would count as a weight."""
    if len(found) != 2:
        raise WorkloadError(f"The loss returned {counted(len(found), 'value')}. {_RETURN_FORM}")
    loss, weight = found
    if (text := model_outputs.logits_and_loss(loss, weight)) is not None:
        raise WorkloadError(text)
    if isinstance(weight, torch.Tensor):
        if weight.dim():
            raise WorkloadError(f"The loss returned a tensor of shape {tuple(weight.shape)} beside the mean. {_RETURN_FORM}")
        if weight.requires_grad:  # most often a part of the loss
            raise WorkloadError(f"The loss returned a tensor that carries gradients beside the mean. {_RETURN_FORM}")
        if weight.device.type != "cpu":  # reading it would wait for the GPU
            return loss, weight
    elif not isinstance(weight, Real):
        raise WorkloadError(f"The loss returned {of_type(weight)} beside the mean. {_RETURN_FORM}")
    if not 0 <= (number := float(weight)) < math.inf:
        raise WorkloadError(f"The loss returned {number} beside the mean, which no mean is over. {_RETURN_FORM}")
    return loss, weight if isinstance(weight, torch.Tensor) else number


def _may_be_empty_mean(loss: torch.Tensor) -> bool:
    """True if ``loss`` may be a mean over nothing, which is nan. On a GPU always, because reading it would wait."""
    return loss.device.type != "cpu" or not math.isfinite(loss.item())


def _first_parameter(loss: Callable[..., Any]) -> str:
    """The name of the first parameter of the loss; empty if it is not known."""
    try:
        return next(iter(inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters), "")
    except (TypeError, ValueError):  # builtins have no signature
        return ""


def _shifts_labels(model: nn.Module) -> bool:
    """True for a causal language model of transformers, which compares each position with the label of the next.

    The class of the model counts first. ``config.architectures`` names the class that wrote the checkpoint, which may differ.
    """
    names = [type(model).__name__]
    if not re.search("For[A-Z]", names[0]):
        names += getattr(getattr(model, "config", None), "architectures", None) or []
    if any("CausalLM" in name or "LMHead" in name for name in names):
        return True
    if getattr(getattr(model, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        return False
    calls = [inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind)]
    return any("loss_function" in call.__code__.co_names for call in calls if inspect.isfunction(call))


def _has_ignored_label(batch: Batch) -> bool:
    """True if a label is ``IGNORED``: among the targets, or in the whole batch if the targets are not known."""
    found = tensors_of(batch[1] if is_pair(batch) else batch)
    whole = [t for t in found if t.dtype.is_signed and not (t.is_floating_point() or t.is_complex())]
    return any(bool((t == IGNORED).any()) for t in whole)


def _no_scalar(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return (
            f"The loss is a tensor of shape {tuple(loss.shape)}, but one number is needed. Use reduction='mean', or return its "
            "mean()."
        )
    own = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", None)
    fix = " Return the loss that is in it alone: answer['loss'], or answer.loss." if isinstance(own, torch.Tensor) else ""
    return f"The loss is {of_type(loss)}, but a tensor with one number is needed.{fix}"
