"""Train a smaller network so that it follows the original."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from trimtab._internal.files import out_of_space
from trimtab._internal.text import counted
from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.settings import Settings
from trimtab.core.technique import Choice, Pass
from trimtab.core.training_examples import TrainingExamples
from trimtab.data.batches import Batch, joined, rows_of
from trimtab.errors import CompileError, TrimtabError, UsageError
from trimtab.passes.common.quantized import is_quantized
from trimtab.passes.common.structure import difference, keep_zeros
from trimtab.passes.common.trained_weights import FOLDER, LossCurve, TrainingFiles
from trimtab.tensors.weights import raw
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.loss.adapter import LossAdapter, call
from trimtab.train.loss.distillation import Distillation
from trimtab.train.optim.schedules import one_cycle
from trimtab.train.runtime.world import World
from trimtab.train.trainer import Trainer

RATE, RATE_ATTENTION = 5e-3, 2e-4
"""Largest learning rate of AdamW, and that for networks with attention or layer norms."""
QUANTIZED_SHARE = 0.1
"""Factor on that rate for a network that is only quantized. Without it the loss of a digits network rose from 1e-4 to 2e-2."""
BATCH, BATCH_ATTENTION = 64, 32
CHECKPOINTS = 10
"""Number of checkpoints of a training, from which it resumes if its process was killed."""
SEED = 0
_ERRORS: tuple[type[Exception], ...] = (TrimtabError, *MODEL_ERRORS)


@dataclass(frozen=True, kw_only=True)
class Recover(Pass):
    """Train what the passes before it left of the network, with the original as teacher.

    Pays off after any pass that removes parts: the accuracy of a digits network with half of its channels rose from 0.16 to
    0.98 in 200 updates, about two seconds. Labels are not needed, but many different inputs are: 256 seldom suffice. It cannot
    pay where a network has lost nothing. The loss compares the outputs with the teacher's: by softmax at ``temperature`` if the
    labels are classes, else by squared error. If there are labels, it is blended with the task's loss. A tenth of the examples
    is held out, and the weights with the smallest loss on it are kept. Each training runs once in a study: its weights are
    stored under a hash of everything that determines them, and other trials load them.
    Source: Hinton et al. 2015, https://arxiv.org/abs/1503.02531
    """

    exact = False  # training changes the outputs
    needs = frozenset({"training"})
    compresses = True

    updates: Annotated[int, Choice(200, 800)] = 200
    """Updates of the weights."""
    loss: Literal["logits", "features", "relations", "task"] = "logits"
    """``logits``: outputs; ``features``: also inner layers; ``relations``: also example distances; ``task``: the task loss."""
    temperature: float = 4.0
    """Softmax temperature of the distillation loss."""
    alpha: float = 0.5
    """Weight of the distillation loss if there are labels; the task's loss has the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("updates", "temperature", "alpha"):
            if not getattr(self, name) > 0:
                raise UsageError(f"recover: {name} is {getattr(self, name)!r}; it must be above 0.")

    def describe(self) -> str:
        """Says how long it trains."""
        return f"recovered with {counted(self.updates, 'update')}"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs weights, and a model that leaves its inputs alone; the task's loss needs labels."""
        if not any(parameter.is_floating_point() for parameter in candidate.model.parameters()):
            return "recover needs a model with floating-point parameters to train, and this one has none."
        if candidate.signature.writes:
            return "recover needs a model that does not write to its inputs, because the teacher is called with the same ones."
        if self.loss == "task" and (candidate.training is None or not _labelled(candidate.training)):
            return (
                "recover with loss='task' needs labels and a loss(outputs, targets): give the workload "
                "training=Training(data=..., loss=...)."
            )
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with trained weights, from the study's folder if they were trained before."""
        training, teacher = candidate.training, candidate.teacher
        if training is None or teacher is None:
            raise CompileError(str(self.blocked(candidate)))
        model = candidate.own_model()
        folder = None if candidate.scratch is None else candidate.scratch / FOLDER
        files = None if folder is None else TrainingFiles(folder, self._key(candidate, training))
        facts = None if files is None else files.load(model)
        if facts is None:
            if training.cached_only:
                raise CompileError(
                    f"The weights that recover trained are gone from {folder}. Only the job of a study trains; the same "
                    "optimize command runs it again."
                )
            facts = self._train(model, teacher, training, files)
            if files is not None:
                files.write(model, facts)
        model.eval()
        if (reason := difference(candidate, model)) is not None:
            raise CompileError(f"What recover trained is not usable: {reason}.")
        note = (
            f"Trained on {counted(facts['examples'], 'example')} of the {training.source}, {facts['labels']}: "
            f"{counted(facts['updates'], 'update')} in {facts['seconds']:.1f} s; the loss on the held-out tenth went from "
            f"{facts['before']:.3g} to {facts['after']:.3g}."
        )
        facts |= {"file": None if files is None else files.weights.name}
        notes, trained = (*candidate.notes, note), (*candidate.trained, facts)
        return dataclasses.replace(candidate, model=model, notes=notes, trained=trained)

    def _key(self, candidate: Candidate, training: TrainingExamples) -> str:
        """A hash of all that decides the trained weights."""
        assert candidate.teacher is not None
        digest = hashlib.sha256()
        facts = [self.to_json(), training.digest, training.examples, torch.get_num_threads(), torch.__version__]
        facts += [torch.backends.cpu.get_cpu_capability(), platform.machine(), str(candidate.model), _loss_name(training)]
        digest.update(json.dumps(facts, default=str).encode())
        for model in (candidate.model, candidate.teacher):
            for name, tensor in model.state_dict().items():
                if isinstance(tensor, torch.Tensor):
                    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    digest.update(raw(tensor.detach().contiguous()).numpy().data)
        return digest.hexdigest()[:32]

    def _train(
        self, model: nn.Module, teacher: nn.Module, training: TrainingExamples, files: TrainingFiles | None
    ) -> dict[str, Any]:
        """Train ``model`` in place, from the last checkpoint in ``files`` if there is one. Returns the facts of the training.

        Raises:
            CompileError: the training fails, is cut off, or lowers no loss.
        """
        curve = LossCurve(files, self.updates)
        attention = any(isinstance(part, (nn.LayerNorm, nn.MultiheadAttention, nn.RMSNorm)) for part in teacher.modules())
        rate, size = (RATE_ATTENTION, BATCH_ATTENTION) if attention else (RATE, BATCH)
        if is_quantized(model) and _matrix_weights(model) == _matrix_weights(teacher):  # nothing was removed
            rate *= QUANTIZED_SHARE
        labelled = _labelled(training)
        if labelled:
            _check_labels(teacher, training)
        loss = self._loss(copy.deepcopy(teacher), training)
        train, held_out = (_Batches(part, size, labelled) for part in (training.batches, training.held_out))
        _unfreeze(model)
        keep_zeros(model)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(SEED)
            try:
                trainer = Trainer(
                    model,
                    loss=loss,
                    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01),
                    settings=Settings(),
                    schedule=one_cycle(rate),
                    early_stopping=EarlyStopping(patience=1_000_000),  # the schedule ends it; the best state is kept
                    progress=False,
                    world=World(),
                    checkpoint=None if files is None else files.checkpoints,
                    checkpoint_every=max(1, self.updates // CHECKPOINTS),
                    callbacks=[curve],
                    log_every=curve.report_every,
                )
                before = _mean(loss, model, held_out)
                if files is not None:
                    curve.resume(trainer.resume(missing_ok=True).position.update)
                summary = trainer.fit(train, held_out, steps=self.updates)
                after = _mean(loss, model, held_out)
            except _ERRORS as error:
                if out_of_space(error):  # says nothing about the model: the study ends, and goes on from the checkpoint
                    raise
                raise CompileError(f"recover cannot train this model: {' '.join(str(error).split())[:400]}") from error
        if trainer.position.update < self.updates:
            raise CompileError(f"The training was cut off after {counted(trainer.position.update, 'update')}: {summary.ended}")
        if not after < before:
            if files is not None:
                files.clear()
            raise CompileError(
                f"The training did not lower the loss on the held-out examples ({before:.3g} before, {after:.3g} after "
                f"{counted(self.updates, 'update')}). Give more different inputs: Workload(training=Training(data=...))."
            )
        labels = "with labels" if labelled else "without labels"
        found = {"examples": training.examples, "labels": labels, "before": before, "after": after}
        return curve.facts(self.updates) | found

    def _loss(self, teacher: nn.Module, training: TrainingExamples) -> Any:
        task = training.loss if _labelled(training) else None
        if self.loss == "task":
            return task
        classes = task is not None and all(_is_classes(target) for _, target in training.batches)
        temperature = self.temperature if classes else None
        return Distillation(teacher, task, kind=self.loss, temperature=temperature, alpha=self.alpha, mix=True)


class _Batches:
    """Batches in a new order in each epoch. The order depends on the seed and the epoch number only."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]], size: int, labelled: bool) -> None:
        targets = [target if labelled else None for _, target in pairs]
        batches = [Batch(pair[0], target, rows_of(pair[0], target)) for pair, target in zip(pairs, targets, strict=True)]
        whole = joined(batches) if batches and all(batch.rows for batch in batches) else None
        self._whole, self._batches, self._size, self._labelled = whole, batches, size, labelled
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch, as the Trainer asks."""
        self._epoch = epoch

    def __len__(self) -> int:
        if self._whole is None:
            return len(self._batches)
        return max(1, self._whole.rows // self._size)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(SEED + self._epoch)
        if self._whole is None:
            order = torch.randperm(len(self._batches), generator=generator).tolist()
            chosen: Iterator[Batch] = (self._batches[i] for i in order)
        else:
            # parts of about equal size: batch normalisation fails on a last batch of one row
            order_of = torch.randperm(self._whole.rows, generator=generator)
            whole = self._whole
            chosen = (whole.take(index) for index in order_of.tensor_split(len(self)))
        for batch in chosen:
            yield (batch.inputs, batch.target) if self._labelled else batch.inputs


def _labelled(training: TrainingExamples) -> bool:
    """Whether all examples have labels, and the user's loss compares outputs with them."""
    if training.loss is None or any(target is None for _, target in training.batches):
        return False
    return not LossAdapter(training.loss).calls_model


def _check_labels(teacher: nn.Module, training: TrainingExamples) -> None:
    """Call the user's loss once, on outputs of the teacher.

    Raises:
        CompileError: it does not take these labels.
    """
    assert training.loss is not None
    inputs, target = training.batches[0]
    try:
        with torch.no_grad():
            training.loss(call(teacher, inputs), target)
    except _ERRORS as error:
        why = " ".join(str(error).split())[:300].rstrip(".")
        raise CompileError(
            f"The loss of the training does not take the model's outputs with the labels of its data: {why}. Give labels that "
            "loss(outputs, targets) takes, or leave loss=... out: smaller networks are trained without labels too."
        ) from error


def _is_classes(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and target.dim() == 1 and not target.is_floating_point()


def _loss_name(training: TrainingExamples) -> str:
    loss = training.loss
    return str(loss) if isinstance(loss, nn.Module) else str(getattr(loss, "__qualname__", type(loss).__name__))


def _matrix_weights(model: nn.Module) -> int:
    """The number of weights of convolutions, linear and recurrent layers. Folding batch norms does not change it."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)


def _unfreeze(model: nn.Module) -> None:
    """Enable gradients of all floating-point parameters except embeddings: few of their rows occur in the examples."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(parameter.is_floating_point() and not isinstance(module, nn.Embedding))


def _mean(loss: Any, model: nn.Module, batches: _Batches) -> float:
    """The mean loss of ``model`` in evaluation mode."""
    model.eval()
    objective, total, weight = LossAdapter(loss), 0.0, 0.0
    with torch.no_grad():
        for batch in batches:
            found, size = objective(model, batch)
            total, weight = total + float(found) * float(size), weight + float(size)
    return total / max(weight, 1.0)
