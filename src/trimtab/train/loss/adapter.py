"""How a batch becomes a loss, and what the loss is an average over.

Losses of several batches may only be added up if it is known how much each of them stands for: the mean over 3 tokens and the
mean over 300 are not worth the same. Gradient accumulation and training on several processes rest on this.
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

from trimtab._internal.text import counted, of_type
from trimtab._internal.validation import refuses
from trimtab.core.workload import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.batch_axis import length, uneven
from trimtab.tensors.structure import map_items, tensors_of
from trimtab.train.loss import torch_losses
from trimtab.train.loss.torch_losses import IGNORED

Weight = float | torch.Tensor
Batch = Any
"""What the loader gives: ``(inputs, targets)``, a mapping of keyword arguments, or whatever the user's own loss takes."""

_EITHER = (
    "Give the mean alone, or (mean, weight) where the weight says how much the mean is over, such as the number of tokens; "
    "other figures are for metrics=... and callbacks."
)
_UNTOLD = (
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
"""What to do, by whether a batch is a tensor alone."""
_MISCALLED = re.compile(r"'Tensor' object is not callable|missing \d+ required positional argument")
_MODEL_NAMES = frozenset({"model", "module", "net", "network"})


class in_step(user_code):
    """Says what to do about a batch of one example that BatchNorm does not take, as the last one of an epoch may be."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        alone = isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel")
        user_code(self.what, _NOT_ALONE if alone else self.fix).__exit__(kind, error, trace)


class _miscalled(user_code):
    """Tells how losses are called where one takes something else than outputs and targets; the model is called outside."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TypeError) and _MISCALLED.search(str(error)):
            super().__exit__(kind, error, trace)


_LOSS = _miscalled("The loss raised", _NOT_CALLED_SO)


class LossAdapter:
    """The loss as the user gave it, called in one way: ``objective(model, batch)`` -> ``(loss, weight)``.

    Args:
        loss: one of

            - ``loss(outputs, targets)``, such as :class:`torch.nn.CrossEntropyLoss`, for batches of ``(inputs, targets)``. What
              torch's own losses average over is known (labels that are not ignored, class weights, elements); any other is
              taken to be the mean over the examples;
            - ``loss(model, batch)``, recognised by the name of its first parameter, which calls the model itself and returns
              the mean, or ``(mean, weight)`` where the batch stands for something else than its examples, such as its tokens;
            - ``None`` for a model that is called with the batch, a mapping, and answers with its loss, as transformers' do.
    """

    def __init__(self, loss: Callable[..., Any] | None) -> None:
        _refuse_other(loss)
        self.loss = loss
        self.summed = torch_losses.options(loss).get("reduction") == "sum"
        """Whether the loss is a sum, so that those of several batches add up as they are."""
        self._with_model = loss is not None and _takes_model(loss)
        self.calls_model = loss is None or self._with_model
        """Whether nobody but the loss sees the model's outputs."""
        self._weighs = False
        """Whether what the last loss is a mean over was known."""
        self.untold: str | None = None
        """Why a batch, of which nothing told what its loss is a mean over, may not have as many examples as it counted for."""
        self.doubted = False
        """Whether it was told already that losses may count for something else than they are a mean over."""
        self._elementwise = torch_losses.kind(loss) in torch_losses.ELEMENTWISE

    @property
    def known(self) -> bool:
        """Whether it is one of torch's own losses, so that what it is a mean over is known."""
        return not self.calls_model and torch_losses.kind(self.loss) in (*torch_losses.CLASSES, *torch_losses.ELEMENTWISE)

    @property
    def module(self) -> nn.Module | None:
        """The loss where it may have parameters or a state; those of torch have options only."""
        return self.loss if isinstance(self.loss, nn.Module) and not self.known else None

    def __call__(self, model: nn.Module, batch: Batch, *, weighed: bool = True) -> tuple[torch.Tensor, Weight]:
        """The loss of ``batch``, a scalar that carries gradients, and what it is a mean over.

        Where that is not ``weighed`` it is 1, unless the loss may be a mean over nothing, such as over labels that are all left
        out, which is no number.

        ``batch`` stays as it is, whatever the loss takes out of it or puts into it: some batches are used more than once.

        Raises:
            WorkloadError: the loss is no scalar, carries no gradient, what stands beside it is no weight, or the batch has not
                the form that the loss asks for.
        """
        return self.answered(model, batch, weighed=weighed)[:2]

    def answered(self, model: nn.Module, batch: Batch, *, weighed: bool = True) -> tuple[torch.Tensor, Weight, Any]:
        """The same, and the outputs, as metrics get them: ``None`` where the loss alone sees them."""
        given = fresh(batch)
        outputs: Any = None
        targets: Any = None
        if self.loss is None:
            loss, weight, outputs = self._own(model, given)
        elif self._with_model:
            found = self.loss(model, given)
            loss, weight = _weighed(found) if isinstance(found, tuple) else (found, None)
        else:
            inputs, targets = _pair(given)
            outputs = call(model, inputs)
            self._refuse_broadcast(outputs, targets)
            try:
                with _LOSS:
                    loss, weight = self.loss(outputs, targets), None
            except IndexError as error:
                raise WorkloadError(torch_losses.wrong_label(self.loss, outputs, targets, error)) from error
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise WorkloadError(_no_scalar(loss))
        if not loss.requires_grad and torch.is_grad_enabled():
            raise WorkloadError(
                "The loss does not depend on any parameter that is trained. Look for detach(), no_grad() or item() between the "
                "model and the loss, and for a model that is frozen."
            )
        if self.summed or not (weighed or _may_be_of_nothing(loss)):
            return loss, 1.0, outputs
        if self.loss is not None and not self._with_model:
            weight = torch_losses.denominator(self.loss, targets)
        self._weighs = weight is not None
        if weight is None and self.untold is None:
            self.untold = untold(batch)
        return loss, examples(batch) if weight is None else weight, outputs

    def doubt(self, group: Sequence[Batch], *, alone: bool) -> str | None:
        """Why the losses of ``group``, from which an update was made, may count for something else than they are a mean over.

        It is asked after each update, by one process ``alone`` or several, and looks at the first to which it matters.
        """
        if self.doubted or (alone and len(group) == 1):
            return None
        self.doubted = True
        if self.summed or self._weighs:
            return None
        if (text := next(filter(None, map(untold, group)), None)) is not None:
            return text
        if any(map(_ignores, group)):
            return (
                f"Some targets are {IGNORED}. If the loss leaves them out, as torch's own do, its mean is over fewer than the "
                "examples that it counts for: return (mean, weight) from loss(model, batch), or give one of torch's losses."
            )
        return None

    def _refuse_broadcast(self, outputs: Any, targets: Any) -> None:
        """Stop where torch would only warn, and then compare outputs with the targets of other examples."""
        if not (self._elementwise and isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            return
        if outputs.shape != targets.shape:
            raise WorkloadError(
                f"The outputs have shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}. The loss compares them "
                "element by element, and would stretch one to fit the other: outputs would meet the targets of other examples. "
                "Give both one shape, for example with squeeze(-1) at the end of the model or unsqueeze(-1) on the targets."
            )

    def _own(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Weight | None, Any]:
        """The loss that the model itself computes, what it is a mean over, and the whole answer."""
        if not isinstance(batch, Mapping):
            raise WorkloadError(
                f"Without loss=..., batches must be mappings that the model takes as keywords, but this is a "
                f"{type(batch).__name__}. Give loss=..., for example torch.nn.CrossEntropyLoss()."
            )
        found = model(**batch)
        loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if loss is None:
            raise WorkloadError("The model answered without a loss. Give loss=..., or batches with the labels it asks for.")
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return loss, None, found
        model = getattr(model, "_orig_mod", model)  # what is compiled
        model = getattr(model, "module", model)  # what DDP wraps
        return loss, (labels[..., 1:] if _shifts(model) else labels).ne(IGNORED).sum(), found


def _refuse_other(loss: Any) -> None:
    """Refuse what is no loss.

    Raises:
        UsageError: it cannot be called, or not with two arguments, or is a class of modules, whose call makes one.
    """
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise UsageError(f"loss is {loss.__name__}, a class, and no loss yet. Give what it makes: {loss.__name__}().")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss is {of_type(loss)}, which cannot be called. Give a function or a torch.nn loss.")
    if loss is not None and (error := refuses(loss, None, None)):
        name = getattr(loss, "__name__", None) or repr(loss)
        raise UsageError(f"loss is {name}, which does not take two arguments: {error}. {_NOT_CALLED_SO}")


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on inputs that are a tensor, a tuple of positional or a mapping of keyword arguments."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    return model(inputs)


def fresh(batch: Batch) -> Batch:
    """Copies of the nested containers of ``batch``. Tensors, other leaves and mappings that are no dict are shared."""
    shared = isinstance(batch, Mapping) and not isinstance(batch, (dict, UserDict))
    return batch if shared else map_items(batch, fresh)


def examples(batch: Batch) -> int:
    """The number of examples in ``batch``; 1 if nothing tells."""
    found = length(batch)
    return 1 if found is None else found


def untold(batch: Batch) -> str | None:
    """Why ``batch`` may not be of as many :func:`examples` as it is taken for, if there is a reason to think so."""
    if (count := length(batch)) is None:
        return _UNTOLD
    shapes = uneven(batch)
    return None if shapes is None else _UNEVEN.format(shapes, count)


def is_pair(batch: Batch) -> bool:
    """Whether ``batch`` is of inputs and targets."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _pair(batch: Batch) -> tuple[Any, Any]:
    if is_pair(batch):
        return batch[0], batch[1]
    shape = of_type(batch) + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
    fix = _UNPAIRED[isinstance(batch, torch.Tensor)]
    raise WorkloadError(f"loss(outputs, targets) needs batches of (inputs, targets), but the loader gives {shape}. {fix}")


def _weighed(found: tuple[Any, ...]) -> tuple[Any, Weight]:
    """The mean and its weight, as a loss has returned them; anything else beside the mean would be taken for a weight."""
    if len(found) != 2:
        raise WorkloadError(f"The loss returned {counted(len(found), 'value')}. {_EITHER}")
    loss, weight = found
    if isinstance(weight, torch.Tensor):
        if weight.dim():
            raise WorkloadError(f"The loss returned a tensor of shape {tuple(weight.shape)} beside the mean. {_EITHER}")
        if weight.requires_grad:  # a part of the loss, most often
            raise WorkloadError(f"The loss returned a tensor that carries gradients beside the mean. {_EITHER}")
        if weight.device.type != "cpu":  # nobody waits for a GPU to find out
            return loss, weight
    elif not isinstance(weight, Real):
        raise WorkloadError(f"The loss returned {of_type(weight)} beside the mean. {_EITHER}")
    if not 0 <= (number := float(weight)) < math.inf:
        raise WorkloadError(f"The loss returned {number} beside the mean, which no mean is over. {_EITHER}")
    return loss, weight if isinstance(weight, torch.Tensor) else number


def _may_be_of_nothing(loss: torch.Tensor) -> bool:
    """Whether ``loss`` may be a mean over nothing; where a GPU computes it, nobody waits to see that it is a number."""
    return loss.device.type != "cpu" or not math.isfinite(loss.item())


def _takes_model(loss: Callable[..., Any]) -> bool:
    """Whether the first parameter of a function is called as a model would be."""
    try:
        first = next(iter(inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters), "")
    except (TypeError, ValueError):  # builtins have no signature
        return False
    return first in _MODEL_NAMES


def _shifts(model: nn.Module) -> bool:
    """Whether a model of transformers compares each position with the label of the next, as causal language models do.

    A checkpoint says what it was written from, which need not be what it was read into: the class of the model goes first.
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


def _ignores(batch: Batch) -> bool:
    """Whether there are labels that are commonly left out of a mean: among the targets, or anywhere if these are not known."""
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
