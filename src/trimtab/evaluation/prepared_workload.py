"""Prepare a workload: model in evaluation mode, candidate with dynamic sizes, data splits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from trimtab._internal.text import counted
from trimtab._internal.user_code import BY_HAND, user_code
from trimtab.core.candidate import Candidate, call_model
from trimtab.core.capture import Call
from trimtab.core.dynamic_dims import BATCHES, Dims, describe_dims, find_dims, mark_dynamic
from trimtab.core.signature import Dim, TensorSpec, input_names, parameter_names, require_plain, specs
from trimtab.core.workload import Workload, as_call
from trimtab.data.batch_independence import ROUNDING, Judge, RowOutputs
from trimtab.data.batches import Batch, arrays_to_tensors, rows_of
from trimtab.data.dynamic_shapes import Specs, specs_of, with_accepted_dims
from trimtab.data.readers import MOST_CALIBRATION
from trimtab.data.splits import Splits, split
from trimtab.data.training_data import training_examples
from trimtab.errors import InputError, UsageError, WorkloadError
from trimtab.tensors.comparison import is_discrete, is_sorted, resample_sorted
from trimtab.tensors.structure import cloned, flatten, unflatten
from trimtab.tensors.weights import tolerance

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
RECORDED = 3
"""Items on which ``run`` is recorded to learn how it calls the model, if no calibration data is needed."""
RESAMPLED = 7
"""Copies of the example with resampled values, used as data if a workload has none."""
SEARCHED, SEARCH_S = 10_000, 5.0
"""Most items of a data set that are read to name the one that is refused, and most seconds for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A prepared workload. ``notes`` are sentences about what was assumed."""

    workload: Workload
    candidate: Candidate
    splits: Splits
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The model as written, in evaluation mode."""
        return self.candidate.model


def prepare(workload: Workload, scratch: pathlib.Path | None = None, *, compress: bool = False) -> Subject:
    """Build the model, learn its signature on the example inputs, split the data; to ``compress``, read training data too.

    Raises:
        UsageError: inputs or data are not what a workload can hold.
        WorkloadError: the user's own code raised, or the model's output is unusable; says what and where.
    """
    if workload.mode == "train":
        raise UsageError(f"The workload {workload.name!r} is for training: trimtab.tune(...) takes it.")
    workload, notes = _with_data(workload), list(workload.notes)
    with user_code("The workload's model could not be built", "Call the function that makes it yourself."):
        model = workload.build_model()
    _check_model(model)
    notes += _training_mode_note(model)
    model.eval()
    args, kwargs = as_call(workload.inputs)
    _check_example(model, args, kwargs, workload.stated_dims or {})
    rows = _rows(args, kwargs)
    judge = Judge(model, tolerance(model, ROUNDING), _other_batch_axis(workload))
    splits = split(workload, rows if _calibrates(workload) and _batch_is_fixed(workload) else None, judge)
    recorded = _recorded(workload, model, splits)
    calls = [] if workload.dynamic is not None else _known_specs(workload, model, splits, recorded)
    dynamic = _dims(workload, calls, judge, notes)
    make = functools.partial(Candidate.of, model, args, kwargs, scratch=scratch)
    try:
        with user_code("The model failed on the example inputs", BY_HAND):
            candidate = make(dynamic=dynamic)
    except (WorkloadError, UsageError):
        if workload.dynamic is not None or not dynamic:
            raise
        candidate = with_accepted_dims(make, dynamic, calls, notes)
        if candidate.signature.batch is None and _calibrates(workload) and _is_rereadable(workload):
            splits = split(workload, rows, judge)  # batches of unequal sizes were cut by trimtab
    if workload.dynamic is not None:
        _check_stated(workload, candidate, splits)
        candidate = dataclasses.replace(candidate, all_sizes=True)
    candidate = _with_batch_axis(candidate, judge, notes)
    notes += _write_note(candidate)
    some = recorded[:: -(-len(recorded) // MOST_CALIBRATION) or 1]
    calibration = [batch.call for batch in splits.calibration] if _calibrates(workload) else some
    candidate = dataclasses.replace(candidate, calibration=tuple(calibration))
    if compress:
        training, more = training_examples(workload, splits, candidate.signature)
        candidate, notes = dataclasses.replace(candidate, training=training, teacher=model), [*notes, *more]
    with user_code("The workload's student could not be built", "Call the function that makes it yourself."):
        student = workload.build_student()
    if student is not None:
        candidate = dataclasses.replace(candidate, student=student.eval())
    if not candidate.signature.outputs:
        nothing = unflatten(candidate.signature.output_structure, [])
        raise WorkloadError(
            f"The model returns no tensor: its output is {nothing!r}. Return what it computes from its forward."
        )
    if not splits.selection or not splits.test:
        stand_ins = _resampled_batches(candidate)
        splits = dataclasses.replace(splits, selection=splits.selection or stand_ins, test=stand_ins)
    return Subject(workload=workload, candidate=candidate, splits=splits, notes=(*notes, *splits.notes))


def refuse_nan(candidate: Candidate) -> None:
    """Refuse a model that gives NaN for its example: test vectors would be useless.

    Raises:
        WorkloadError: the outputs contain NaN.
    """
    with user_code("The model failed on the example inputs", BY_HAND):
        output = call_model(candidate.model, candidate.signature.input_structure, candidate.leaves)
    for spec, leaf in zip(candidate.signature.outputs, flatten(output, "output")[0], strict=True):
        if not is_discrete(leaf.dtype) and (bad := int(torch.isnan(leaf).sum())):
            raise WorkloadError(
                f"The model gives NaN for the workload's inputs: {bad} of {leaf.numel()} values of {spec.name!r}. An artifact "
                "is tested with them, and nothing can be held against NaN. Take inputs from the data: inputs=images[:1]."
            )


def _with_data(workload: Workload) -> Workload:
    """``workload`` with the results of functions that read data in their place.

    Raises:
        WorkloadError: a function raised.
    """

    def read(data: Any, what: str) -> Any:
        if not callable(data) or isinstance(data, (Dataset, Iterable)):
            return data
        with user_code(f"The function that reads the {what} data raised", "Call it yourself to see why."):
            return data()

    evaluation = workload.evaluation
    if evaluation is not None:
        read_now = {"data": read(evaluation.data, "evaluation"), "test": read(evaluation.test, "test")}
        evaluation = dataclasses.replace(evaluation, **read_now)
    return dataclasses.replace(workload, evaluation=evaluation, calibration=read(workload.calibration, "calibration"))


def _check_stated(workload: Workload, candidate: Candidate, splits: Splits) -> None:
    """Refuse data of sizes that the workload's ``dynamic`` does not allow: they would fail every trial, or the confirmation.

    Raises:
        UsageError: such data exists; says which sizes, in how many calls, and which item is the first.
    """
    signature, data = candidate.signature, [*splits.calibration] if _calibrates(workload) else []
    data += [*splits.selection, *splits.test] if _is_plain(workload) else []
    refused: list[tuple[list[torch.Size], str]] = []
    for batch in data:
        args, kwargs = batch.call
        leaves = list(signature.bind(args, kwargs))
        try:
            signature.sizes(leaves)
        except InputError as error:
            refused.append(([leaf.shape for leaf in leaves], str(error)))
    if not refused:
        return
    shapes, reason = refused[0]
    calls = f"{len(refused)} of {counted(len(data), 'call')} that the data makes"
    raise _beyond_stated(workload, shapes, reason, calls, "the first of them")


def within_stated(call: Callable[..., Any], subject: Subject) -> Callable[..., Any]:
    """``call``, which refuses sizes that the workload's ``dynamic`` does not allow. Only a run of ``Evaluation(run=...)`` shows
    the calls that it makes, and eager mode would take them."""
    workload, stated = subject.workload, subject.candidate.signature
    if workload.dynamic is None or _is_plain(workload):
        return call
    any_batch = [dataclasses.replace(dim, min=0, max=None, step=1) if dim.name == stated.batch else dim for dim in stated.dims]
    signature = dataclasses.replace(stated, dims=tuple(any_batch))  # a trial splits or pads the batches of a call

    def checked(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(InputError):  # a call of another form is no error here, such as a first one without a state
            leaves = list(signature.bind(args, kwargs))
            try:
                signature.sizes(leaves)
            except InputError as error:
                shapes = [leaf.shape for leaf in leaves]
                raise _beyond_stated(workload, shapes, str(error), "a call that Evaluation run makes", "as of") from error
        return call(*args, **kwargs)

    return checked


def _beyond_stated(workload: Workload, shapes: Sequence[torch.Size], reason: str, calls: str, such: str) -> UsageError:
    index = _index_of(workload, shapes)
    item = "" if index is None else f", {such} item {index} of the data"
    return UsageError(
        f"dynamic does not allow the sizes of {calls}{item}: {reason} State the sizes that occur, as in Dim(min=..., max=...), "
        "or cut the data to what is stated, as by a tokenizer's truncation=True."
    )


def _index_of(workload: Workload, shapes: Sequence[torch.Size]) -> int | None:
    """The place of the first item of the data with inputs of these shapes, in the order of a list or of the data set itself.
    ``shapes`` may be those of a batch, in which an item lacks the first axis."""
    evaluation = workload.evaluation
    for data in (workload.calibration, *(() if evaluation is None else (evaluation.data, evaluation.test))):
        items = data.dataset if isinstance(data, DataLoader) else data
        until = time.monotonic() + SEARCH_S
        for index in range(min(len(items), SEARCHED)) if isinstance(items, Sized) and hasattr(items, "__getitem__") else ():
            # an item may hold a target that is no nested value of tensors, or may fail where no split has read it
            if time.monotonic() > until:
                break
            with contextlib.suppress(UsageError, WorkloadError), user_code("An item of the data could not be read"):
                leaves = flatten(arrays_to_tensors(items[index]), "item")[0]
                found = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)][: len(shapes)]
                if found == list(shapes) or found == [shape[1:] for shape in shapes]:
                    return index
    return None


def _training_mode_note(model: nn.Module) -> list[str]:
    """A note if the model or a part of it came in training mode."""
    if getattr(model, "training", False):
        return ["The model came in training mode; it is measured, and ships, in evaluation mode."]
    # modules of other libraries need not have the attribute
    parts = [name for name, part in model.named_modules() if getattr(part, "training", False)]
    if not parts:
        return []
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return [f"A part of the model came in training mode: {parts[0]}{more}. It is measured, and ships, in evaluation mode."]


def _write_note(candidate: Candidate) -> list[str]:
    """A note if the model writes to its inputs, which not every runtime does by itself."""
    names = " and ".join(repr(name) for name in candidate.signature.writes)
    if not names:
        return []
    return [
        f"The model writes to its input{'s' * (len(candidate.signature.writes) > 1)} {names}. Whatever ships does so too, and "
        "was held to it. If nobody looks at them afterwards, have the model write to a copy: several runtimes then do less."
    ]


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows of the example: the first size of its first tensor."""
    leaves, _ = flatten((args, kwargs), "the example inputs")
    return leaves[0].shape[0] if leaves[0].dim() else None


def _is_rereadable(workload: Workload) -> bool:
    """Whether the data can be read again; ``False`` for a generator."""
    labelled = () if workload.evaluation is None else (workload.evaluation.data, workload.evaluation.test)
    return not any(isinstance(data, Iterator) for data in (workload.calibration, *labelled))


def _batch_is_fixed(workload: Workload) -> bool:
    """Whether the workload states dynamic dimensions, and none of them is the first axis or the batch."""
    first = any(0 in axes for axes in (workload.stated_dims or {}).values())
    return workload.dynamic is not None and not first and _other_batch_axis(workload) is None


def _check_example(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stated: Mapping[str, Mapping[int, Dim]]
) -> None:
    """Refuse example inputs and ``stated`` axes that would fail later with a less clear message."""
    leaves, structure = flatten((args, kwargs), "the example inputs")
    known = input_names(parameter_names(model.forward, len(args)), structure)
    require_plain(leaves, known, "input")
    mark_dynamic(specs(leaves, known), stated)
    for leaf in leaves:
        if leaf.device.type not in ("cpu", "meta"):
            raise UsageError(
                f"The workload's inputs are on {leaf.device}. Inference is optimized, timed and shipped for the CPU: give the "
                "model as model.cpu() and its inputs as tensors of the CPU."
            )
        if leaf.is_meta:
            raise UsageError("The workload's inputs are on the meta device, where tensors have no values. Give real ones.")
        if leaf.is_floating_point() and (bad := int(torch.isnan(leaf).sum())):
            raise UsageError(f"The workload's inputs hold NaN: {bad} of {leaf.numel()} values. Give clean ones.")


def _check_model(model: nn.Module) -> None:
    """Refuse weights without values, weights on another device, and weights that no runtime supports."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WorkloadError(
                f"The model's {name!r} has no shape yet, as in a lazy layer that was never called. Call it once on the inputs "
                "before handing it over."
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise UsageError(
                f"The model's {name!r} is on {tensor.device}. Inference is optimized, timed and shipped for the CPU: give the "
                "model as model.cpu(), and its inputs as tensors of the CPU."
            )
        if tensor.layout is not torch.strided:
            raise WorkloadError(
                f"The model's {name!r} is a sparse tensor, which cannot cross to another runtime. Make it dense, with "
                ".to_dense(), before you hand it over."
            )
    on_meta = next(
        (name for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor) and tensor.is_meta), None
    )
    if on_meta is not None:
        raise WorkloadError(
            f"The model's {on_meta!r} is on the meta device, where tensors have no values. Load its weights before you hand it "
            "over."
        )


def _recorded(workload: Workload, model: nn.Module, splits: Splits) -> list[Arguments]:
    """The calls of the model that ``run`` makes over the calibration items or, if these are the model's own inputs, over some
    selection items; empty if items are passed to the model directly."""
    calls: list[Arguments] = []
    if _is_plain(workload) or (_calibrates(workload) and workload.dynamic is not None):
        return calls

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(cloned((args, kwargs)))  # the model may write to them
        with torch.no_grad():
            return model(*args, **kwargs)

    assert workload.evaluation is not None
    assert workload.evaluation.run is not None
    what, items = ("data", splits.selection[:RECORDED]) if _calibrates(workload) else ("calibration data", splits.calibration)
    with user_code("The model failed on the example inputs", BY_HAND):
        args, kwargs = cloned(as_call(workload.inputs))
        record(*args, **kwargs)
    with user_code(f"Evaluation run failed on the {what}", "Call it with the model and such inputs yourself."):
        for batch in items:
            workload.evaluation.run(record, cloned(batch.inputs))
    return calls[1:]


def _is_plain(workload: Workload) -> bool:
    """Whether items of the labelled data are the model's own inputs; ``False`` if ``run`` calls the model."""
    return workload.evaluation is None or workload.evaluation.run is None


def _calibrates(workload: Workload) -> bool:
    """Whether items of the calibration data are the model's own inputs."""
    return workload.calibration is not None or _is_plain(workload)


def _known_specs(workload: Workload, model: nn.Module, splits: Splits, recorded: Sequence[Arguments]) -> list[Specs]:
    """Specs of all known inputs: the example, further examples, the data if its items are the model's own inputs, and those
    ``recorded`` calls that have the form of the example."""
    data = [*splits.calibration] if _calibrates(workload) else []
    data += [*splits.selection, *splits.test] if _is_plain(workload) else []
    given = [as_call(workload.inputs), *map(as_call, workload.examples), *(batch.call for batch in data)]
    found = specs_of(model, [Call(args, kwargs) for args, kwargs in given])
    for args, kwargs in recorded:
        with contextlib.suppress(UsageError):  # a call of another form is no error, such as a first one without a state
            other = specs_of(model, [Call(*given[0]), Call(args, kwargs)])[1]
            if all(_same_kind(spec, first) for spec, first in zip(other, found[0], strict=True)):
                found.append(other)
    return found


def _same_kind(spec: TensorSpec, first: TensorSpec) -> bool:
    """Whether inputs of the two specs may go to one executable, apart from sizes."""
    return (spec.dtype, len(spec.shape)) == (first.dtype, len(first.shape))


def _dims(workload: Workload, calls: Sequence[Specs], judge: Judge, notes: list[str]) -> Dims:
    """The dynamic dimensions: as stated, else the sizes that differ between the example, further examples and the data."""
    if workload.dynamic is not None:
        return workload.stated_dims or {}
    dims = find_dims(calls, batched=judge.verdict is None or judge.verdict.independent)
    if dims:
        notes.append(f"Dynamic dimensions, as the data shows them: {describe_dims(dims)}.")
    return dims


def _other_batch_axis(workload: Workload) -> str | None:
    """Why the workload's statements make the first axis another axis than the batch; ``None`` if they do not."""
    stated = workload.stated_dims or {}
    if any(axes[0].name.lower() in BATCHES for axes in stated.values() if 0 in axes):
        return None
    for name, axes in stated.items():
        for axis, dim in axes.items():
            if dim.name.lower() in BATCHES:
                lead = f", and axis 0 {axes[0].name!r}" if 0 in axes else ""
                return f"dynamic calls axis {axis} of {name!r} {dim.name!r}{lead}"
    return None


def _with_batch_axis(candidate: Candidate, judge: Judge, notes: list[str]) -> Candidate:
    """``candidate`` with the knowledge whether its first axis counts examples, tested on the example if there is no data."""
    asked, batch = judge.verdict is not None, candidate.signature.batch
    if not asked:
        inputs = _inputs(candidate.signature.input_structure, candidate.leaves)
        if (rows := rows_of(inputs, None)) > 1:
            judge(Batch(inputs, None, rows))
        elif batch is not None and (rows := candidate.leaves[0].shape[0]) > 1:
            judge.verdict_on(_answer_along(candidate, batch), rows)  # some inputs lack that axis: edges of a graph are no nodes
    if judge.verdict is None or judge.verdict.independent:
        return candidate
    if not asked:
        notes.append(f"The first axis of the inputs is not taken for the batch: {judge.verdict.reason}.")
    return dataclasses.replace(candidate, signature=dataclasses.replace(candidate.signature, batched=False))


def _answer_along(candidate: Candidate, name: str) -> RowOutputs:
    """The model's output for some positions of the dimension ``name`` of its example; all other inputs stay."""

    def answer(index: torch.Tensor) -> Any:
        leaves = list(candidate.leaves)
        for i, spec in enumerate(candidate.signature.inputs):
            for axis in (axis for axis, size in enumerate(spec.shape) if size == name):
                leaves[i] = leaves[i].index_select(axis, index.to(leaves[i].device))
        return call_model(candidate.model, candidate.signature.input_structure, leaves)

    return answer


def _resampled_batches(candidate: Candidate) -> tuple[Batch, ...]:
    """The example, and copies with values resampled from the example that the model accepts."""
    generator = torch.Generator().manual_seed(0)
    structure = candidate.signature.input_structure
    batches = [Batch(_inputs(structure, candidate.leaves))]
    for _ in range(RESAMPLED):
        leaves = [_resample(leaf, generator) for leaf in candidate.leaves]
        if not _accepts(candidate, leaves):
            break  # resampling breaks the form of these inputs; only the example is left
        batches.append(Batch(_inputs(structure, leaves)))
    return tuple(batches)


def _accepts(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the model returns outputs without NaN for resampled inputs; any exception means no."""
    try:
        with user_code("The model failed on resampled inputs"):
            output = call_model(candidate.model, candidate.signature.input_structure, leaves)
        found = flatten(output, "output")[0]
    except (UsageError, WorkloadError):
        return False
    return not any(not is_discrete(leaf.dtype) and leaf.isnan().any() for leaf in found)


def fresh_inputs(subject: Subject, seed: int = 1) -> Candidate:
    """The candidate with inputs of the same shapes that the search has not seen: from the test data, else resampled."""
    candidate = subject.candidate
    own = _is_plain(subject.workload) and subject.splits.test is not subject.splits.selection
    unseen = subject.splits.test if own else ()
    found = next((leaves for batch in unseen if (leaves := _rows_like(candidate, batch)) is not None), None)
    generator = torch.Generator().manual_seed(seed)
    leaves = found if found is not None else [_resample(leaf, generator) for leaf in candidate.leaves]
    if not _accepts(candidate, leaves):
        return candidate
    args, kwargs = unflatten(candidate.signature.input_structure, leaves)
    return dataclasses.replace(candidate, args=args, kwargs=kwargs)


def _rows_like(candidate: Candidate, batch: Batch) -> list[torch.Tensor] | None:
    """The first rows of ``batch`` in the shapes of the example; ``None`` if they cannot be cut to these."""
    args, kwargs = batch.call
    try:
        leaves = list(candidate.signature.bind(args, kwargs))
    except UsageError:
        return None
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    for i, (leaf, example) in enumerate(zip(leaves, candidate.leaves, strict=True)):
        if leaf.dim() and example.dim() and leaf.shape[0] > example.shape[0]:
            leaves[i] = leaf[: example.shape[0]]
    same = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(leaves, candidate.leaves, strict=True))
    return [leaf.clone() for leaf in leaves] if same else None


def _inputs(structure: Any, leaves: Sequence[torch.Tensor]) -> Any:
    args, kwargs = unflatten(structure, leaves)
    return Call(args, kwargs) if args and kwargs else kwargs or args


def _resample(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = leaf.flatten()
    if values.numel() == 0:
        return leaf
    index = torch.randint(values.numel(), (values.numel(),), generator=generator)
    return resample_sorted(leaf, index) if is_sorted(leaf) else values[index].reshape(leaf.shape)
