"""Decisions that a model takes in Python on the values of its tensors: a trace keeps one outcome and forgets the others."""

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

from trimtab.backends.common.exported_program import EXPORT_ERRORS, quiet
from trimtab.core.candidate import Candidate
from trimtab.errors import CompileError

READS = frozenset(
    {
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__"),
        *("__dlpack__", "item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
    }
)
"""Names of what makes something of Python's own from the values of tensors. Not all of them have the tracer warn."""

BETWEEN = frozenset({torch.overrides.__file__, torch._tensor.__file__, __file__})
"""Files that stand between the line which reads and the mode that sees it."""

Place = tuple[str, int]


def refuse_decisions(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> None:
    """Raise :class:`CompileError` naming the line, if a trace of the model on ``leaves`` would keep one path of several.

    That is where Python reads a value which was computed from the inputs, both in a plain run and under the tracer. The plain
    run alone will not do: models leave out under the tracer what they check elsewhere. Nor will the tracer alone, to which
    sizes are tensors too, nor its warnings, which it does not give for each such read. Of sizes, those count which depend on
    values, such as how many boxes were found; in a plain run Python reads no tensor for them.
    """
    if (place := decision(candidate, leaves)) is not None:
        raise CompileError(
            f"the model decides in Python on values of its tensors ({place[0]}:{place[1]}); a trace keeps one path. Decide "
            "with torch.where, or outside of the model."
        )


def decision(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> Place | None:
    """File and line of the first decision, or ``None``."""
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
        return None  # whoever traces in earnest will say why it fails
    return next(iter([*traced.of_sizes, *(place for place in plain.places if place in traced.places)]), None)


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the memory of all that was computed from ``leaves``: what Python reads of weights alone decides on no data."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # a weak reference keeps the number of a storage from being given to another, and not the memory behind it
        self._known: dict[int, StorageWeakRef] = {}
        self._add(leaves)
        self.counted = 0
        """Operations so far whose result has a size that depends on values computed from the leaves."""

    def reaches(self, values: Any) -> bool:
        """Whether one of the tensors in ``values`` was computed from the leaves."""
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
    """Where Python reads values of tensors: of any, or of those that come from the leaves of ``flow``."""

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
    """Under the tracer, where sizes are tensors: reads of any value, and those of sizes that depend on values, ``of_sizes``."""

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
    """Whether the size of what ``func`` gives depends on values: of indices, it is masks that count."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    masks = (torch.bool, torch.uint8)
    return func.overloadpacket is not torch.ops.aten.index or any(index.dtype in masks for index in _tensors(args[1]))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``values``; those of a size under the tracer too, which is a tuple of another class."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.Size):
            yield from _tensors(list(leaf))


def _storages(values: Any) -> Iterator[StorageWeakRef | None]:
    """The memory of every tensor in ``values``; ``None`` for one that has none of its own to show."""
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
