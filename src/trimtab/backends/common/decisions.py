"""Find data-dependent control flow in Python: a trace keeps one branch and drops the others."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.backends.common.exported_program import EXPORT_ERRORS
from trimtab.backends.common.process_lock import quiet
from trimtab.core.candidate import Candidate
from trimtab.errors import CompileError

READS = frozenset(
    {
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__"),
        *("__dlpack__", "item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
    }
)
"""Names of functions that convert tensor values to Python values. torch's tracer does not warn about all of them."""

BETWEEN = frozenset({torch.overrides.__file__, torch._tensor.__file__, __file__})
"""Files whose frames lie between the model's line and the mode that observes it."""

Place = tuple[str, int]


def refuse_decisions(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> None:
    """Raise :class:`CompileError`, with file and line, if a trace of the model on ``leaves`` would drop a branch.

    A decision is a read of a value that was computed from the inputs, which happens both in a plain run and under the tracer.
    The plain run alone is not enough, because models skip checks under the tracer. The tracer alone is not enough either: sizes
    are tensors there, and it does not warn about every read. Reads of sizes count if the size depends on values, such as the
    number of detected boxes; a plain run reads no tensor for them.
    """
    if (place := decision(candidate, leaves)) is not None:
        raise CompileError(
            f"the model decides in Python on values of its tensors ({place[0]}:{place[1]}); a trace keeps one path. Decide "
            "with torch.where, or outside of the model."
        )


def decision(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> Place | None:
    """File and line of the first decision; ``None`` if there is none."""
    own, others = ([leaf.clone() for leaf in leaves] for _ in range(2))
    try:
        with torch.no_grad(), quiet():
            with _Flow(own) as flow, _Reads(flow) as plain:
                candidate.flat(copied=False)(*own)
            if not plain.places and not flow.counted:
                return None
            with _Flow(others) as counting, _Traced(counting) as traced:
                torch.jit.trace(candidate.flat(), tuple(others), check_trace=False)  # type: ignore[no-untyped-call]
    except EXPORT_ERRORS:
        return None  # the actual trace will raise the error again
    return next(iter([*traced.of_sizes, *(place for place in plain.places if place in traced.places)]), None)


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of all tensors computed from ``leaves``. Reads of weights are not decisions on data."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # a weak reference keeps the storage's id from being reused, without keeping its memory
        self._known: dict[int, StorageWeakRef] = {}
        self._add(leaves)
        self.counted = 0
        """Number of operations so far whose output size depends on values computed from the leaves."""

    def reaches(self, values: Any) -> bool:
        """Whether a tensor in ``values`` was computed from the leaves."""
        return any(ref is None or ref.cdata in self._known for ref in _storages(values))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self.reaches((args, kwargs)):
            self._add(found)
            self.counted += _counts(func, args)
            if func._schema.is_mutable:  # type: ignore[attr-defined]
                self._add((args, kwargs))
        return found

    def _add(self, values: Any) -> None:
        self._known |= {ref.cdata: ref for ref in _storages(values) if ref is not None}


class _Reads(TorchFunctionMode):
    """Records where Python reads tensor values: of any tensor, or only of those computed from the leaves of ``flow``."""

    def __init__(self, flow: _Flow | None) -> None:
        super().__init__()
        self._flow = flow
        self.places: list[Place] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in READS and (self._flow is None or self._flow.reaches((args, kwargs))):
            self.places.append(_place())
        return func(*args, **kwargs)


class _Traced(_Reads):
    """Under the tracer, where sizes are tensors: ``places`` of all reads, ``of_sizes`` of data-dependent sizes."""

    def __init__(self, flow: _Flow) -> None:
        super().__init__(None)
        self.of_sizes: list[Place] = []
        self._counting = flow
        self._depending: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self._counting.counted
        depends = any(id(tensor) in self._depending for tensor in _tensors((args, kwargs or {})))
        if depends and getattr(func, "__name__", "") in READS:
            self.of_sizes.append(_place())
        found = super().__torch_function__(func, types, args, kwargs)
        if depends or self._counting.counted > before:
            self._depending |= {id(tensor): tensor for tensor in _tensors(found)}
        return found


def _counts(func: Any, args: Sequence[Any]) -> bool:
    """Whether the output size of ``func`` depends on values. For indexing this is the case with masks only."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    masks = (torch.bool, torch.uint8)
    return func.overloadpacket is not torch.ops.aten.index or any(index.dtype in masks for index in _tensors(args[1]))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``values``, including the size tensors inside of a ``torch.Size`` under the tracer."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.Size):
            yield from _tensors(list(leaf))


def _storages(values: Any) -> Iterator[StorageWeakRef | None]:
    """The storage of every tensor in ``values``; ``None`` for tensors without one."""
    for tensor in _tensors(values):
        try:
            yield StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):
            yield None


def _place() -> Place:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in BETWEEN:
        frame = frame.f_back
    path, here = pathlib.Path(frame.f_code.co_filename), pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path), frame.f_lineno
