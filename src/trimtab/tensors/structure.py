"""Nested values (tuples, lists, dicts, dataclasses) to a flat list of tensors and back.

Runtimes take and give flat lists; models take and give structures. A :class:`Structure` describes one without naming
classes that a deployment machine may not have: dataclasses and mappings with attributes (a transformers ``ModelOutput``)
come back as :class:`Record`, which answers to attribute, key and position alike.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from trimtab._internal.serialization import fields_from_json, fields_to_json
from trimtab._internal.text import counted
from trimtab.errors import UsageError

Kind = Literal["tensor", "constant", "tuple", "list", "dict", "namedtuple", "record"]
T = TypeVar("T")
NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Floats that JSON has no word for."""


class Record(dict[str, Any]):
    """A dict whose items are also attributes and, by position, elements; stands in for a dataclass output."""

    _class_name: str | None = None
    """The class that it stands in for; a record of that class and the real thing have the same structure."""

    @classmethod
    def of(cls, class_name: str | None, items: Iterable[tuple[str, Any]]) -> Record:
        """A record that stands in for an object of the class ``class_name``."""
        record = cls(items)
        record._class_name = class_name
        return record

    def __getattribute__(self, name: str) -> Any:
        # an item may be called as a method of dict is, such as `values`
        own = name in self and not name.startswith("_")
        return dict.__getitem__(self, name) if own else super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"The output has no {name!r}; it has {', '.join(self)}.") from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(dict.values(self))[key]

    def __reduce__(self) -> Any:
        return Record.of, (self._class_name, list(dict.items(self)))

    def to_tuple(self) -> tuple[Any, ...]:
        """The items by position, as transformers' outputs offer them."""
        return tuple(dict.values(self))


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a nested value looks like once its tensors are taken out."""

    kind: Kind
    keys: tuple[str, ...] = ()
    items: tuple[Structure, ...] = ()
    value: bool | int | float | str | None = None
    """The constant itself, for kind ``constant``; the class name, for ``namedtuple`` and ``record``."""

    @property
    def tensors(self) -> int:
        """How many tensors the structure holds."""
        return 1 if self.kind == "tensor" else sum(item.tensors for item in self.items)

    def to_json(self) -> dict[str, Any]:
        """Its fields; a constant that is not finite is an object, ``{"float": "-inf"}``, as none may come back as another."""
        odd = isinstance(self.value, float) and not math.isfinite(self.value)
        return fields_to_json(self) | ({"value": {"float": repr(self.value)}} if odd else {})

    @classmethod
    def from_json(cls, data: Any) -> Structure:
        """The inverse of :meth:`to_json`.

        Raises:
            UsageError: it wrote no such thing.
        """
        if not isinstance(data, Mapping) or not isinstance(value := data.get("value"), Mapping):
            return fields_from_json(cls, data)
        if set(value) != {"float"} or value["float"] not in tuple(NONFINITE):
            raise UsageError(f"Structure.value: {value!r} is no number. Write it again with this version.")
        return fields_from_json(cls, {**data, "value": NONFINITE[value["float"]]})


TENSOR = Structure("tensor")


def flatten(value: Any, where: str = "value") -> tuple[list[torch.Tensor], Structure]:
    """Take the tensors out of ``value``, in order, and describe the rest.

    Raises:
        UsageError: something inside is neither a tensor, a plain constant nor a known container; names the place.
    """
    leaves: list[torch.Tensor] = []
    return leaves, _flatten(value, leaves, where)


def unflatten(structure: Structure, leaves: Sequence[torch.Tensor]) -> Any:
    """The inverse of :func:`flatten`. ``leaves`` must hold exactly ``structure.tensors`` tensors."""
    if len(leaves) != structure.tensors:
        raise UsageError(
            f"The structure holds {counted(structure.tensors, 'tensor')}, but {len(leaves)} were given. Give one for each."
        )
    return _unflatten(structure, iter(leaves))


def rearranged(structure: Structure, leaves: Sequence[torch.Tensor], like: Structure) -> tuple[Structure, list[torch.Tensor]]:
    """Both with the keys of dicts in the order of ``like``, where they are the same ones: their order means nothing."""
    if structure.kind != like.kind or len(structure.items) != len(like.items):
        return structure, list(leaves)
    keys, order = structure.keys, list(range(len(structure.items)))
    if structure.kind == "dict" and set(keys) == set(like.keys):
        keys, order = like.keys, [keys.index(key) for key in like.keys]
    ends = list(itertools.accumulate(item.tensors for item in structure.items))
    items, moved = list[Structure](), list[torch.Tensor]()
    for i, other in zip(order, like.items, strict=True):
        item = structure.items[i]
        item, own = rearranged(item, leaves[ends[i] - item.tensors : ends[i]], other)
        items.append(item)
        moved += own
    return (dataclasses.replace(structure, keys=keys, items=tuple(items)), moved) if items else (structure, list(leaves))


def difference(found: Structure, wanted: Structure, where: str) -> str | None:
    """The first place at which two structures differ, ``where`` being the name of the whole, in a clause; ``None`` if none."""
    if found == wanted:
        return None
    if (found.kind, found.keys, len(found.items)) == (wanted.kind, wanted.keys, len(wanted.items)):
        parts = found.keys or tuple(map(str, range(len(found.items))))
        rows = zip(parts, found.items, wanted.items, strict=True)
        inside = (clause for part, one, other in rows if (clause := difference(one, other, f"{where}.{part}")))
        if clause := next(inside, None):
            return clause
    return f"{where!r} is {_said(found)}, but this was built for {_said(wanted)}"


def _said(structure: Structure) -> str:
    if structure.kind == "constant":
        return repr(structure.value)
    if structure.kind == "tensor":
        return "a tensor"
    if structure.kind in ("tuple", "list"):
        return f"a {structure.kind} of {len(structure.items)}"
    return f"a {structure.value or structure.kind} with {', '.join(structure.keys) or 'nothing in it'}"


def handed_on(value: Any) -> Any:
    """``value`` as every runtime gives it: the same tensors, in containers that need no class of the model's own."""
    leaves, structure = flatten(value, "the output")
    return unflatten(structure, leaves)


def cloned(value: T) -> T:
    """``value`` with copies of its tensors, in the containers that torch itself looks into; any other object stays as it is."""
    copied: T = tree_map_only(torch.Tensor, torch.clone, value)
    return copied


def names(structure: Structure, name: str) -> list[str]:
    """A name for each tensor of ``structure``: ``name`` itself for a single tensor, else dotted paths below it."""
    if structure.kind == "tensor":
        return [name]
    parts = structure.keys or tuple(str(i) for i in range(len(structure.items)))
    return [
        leaf
        for part, item in zip(parts, structure.items, strict=True)
        for leaf in names(item, f"{name}.{part}" if name else part)
    ]


def classes(structure: Structure) -> dict[str, tuple[str, ...]]:
    """The classes of which the fields are kept and the methods are not, each with its fields."""
    own = {str(structure.value): structure.keys} if structure.kind in ("namedtuple", "record") and structure.value else {}
    for item in structure.items:
        own |= classes(item)
    return own


def opened(value: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]] | None:
    """The parts of a container, and what makes a container of the same kind of others; ``None`` for anything else.

    Mappings become plain dicts, or records where their items are attributes too. Other dataclasses are no containers.
    """
    if isinstance(value, tuple) and _field_names(value):
        return list(value), getattr(type(value), "_make", type(value))
    if isinstance(value, (tuple, list)):
        return list(value), tuple if isinstance(value, tuple) else list
    if not isinstance(value, Mapping):
        return None
    keys = list(value)
    if isinstance(value, Record) or dataclasses.is_dataclass(value):
        name = value._class_name if isinstance(value, Record) else type(value).__name__
        return [value[key] for key in keys], lambda parts: Record.of(name, zip(keys, parts, strict=True))
    return [value[key] for key in keys], lambda parts: dict(zip(keys, parts, strict=True))


def _field_names(value: tuple[Any, ...]) -> Sequence[str]:
    """The fields of a named tuple, or of one of torch's own, which ``x.topk(5)`` gives; none of any other tuple."""
    kind = type(value)
    found: Sequence[str] = getattr(kind, "__match_args__" if kind.__module__ == "torch.return_types" else "_fields", ())
    return found


def _flatten(value: Any, leaves: list[torch.Tensor], where: str) -> Structure:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return TENSOR
    if value is None or isinstance(value, (bool, int, float, str)):
        # one NaN equals another only where it is the same object
        return Structure("constant", value=math.nan if value != value else value)
    if isinstance(value, tuple) and (fields := _field_names(value)):
        return _branch("namedtuple", dict(zip(fields, value, strict=True)), leaves, where, type(value).__name__)
    if isinstance(value, (tuple, list)):
        items = tuple(_flatten(item, leaves, f"{where}[{i}]") for i, item in enumerate(value))
        return Structure("tuple" if isinstance(value, tuple) else "list", items=items)
    if dataclasses.is_dataclass(value) and isinstance(value, Mapping):
        return _branch("record", value, leaves, where, type(value).__name__)
    if isinstance(value, Mapping):
        if isinstance(value, Record):
            return _branch("record", value, leaves, where, value._class_name)
        return _branch("dict", value, leaves, where, None)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shallow = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _branch("record", shallow, leaves, where, type(value).__name__)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    fix = "Use tensors, numbers, strings, tuples, lists, dicts or dataclasses, or wrap the model so that its forward does."
    if kind == "numpy.ndarray":
        fix = "Make it a tensor: torch.from_numpy(array)."
    if kind.startswith("transformers.cache_utils."):  # which every generative model of theirs returns unless told not to
        fix = "Give use_cache=False beside the other keyword inputs, and the model leaves it out."
    raise UsageError(f"{where} is a {kind}, which cannot cross to another runtime. {fix}")


def _branch(kind: Kind, value: Mapping[Any, Any], leaves: list[torch.Tensor], where: str, name: str | None) -> Structure:
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"{where} has the key {key!r}; only string keys can cross to another runtime. Use those.")
    # not by items(), as which one of the items may be called
    items = tuple(_flatten(value[key], leaves, f"{where}[{key!r}]") for key in value)
    return Structure(kind, tuple(value), items, name)


def _unflatten(structure: Structure, leaves: Iterator[torch.Tensor]) -> Any:
    if structure.kind == "tensor":
        return next(leaves)
    if structure.kind == "constant":
        return structure.value
    items = [_unflatten(item, leaves) for item in structure.items]
    if structure.kind == "tuple":
        return tuple(items)
    if structure.kind == "list":
        return items
    if structure.kind == "namedtuple":
        return _namedtuple(str(structure.value), structure.keys)(*items)
    pairs = zip(structure.keys, items, strict=True)
    name = None if structure.value is None else str(structure.value)
    return Record.of(name, pairs) if structure.kind == "record" else dict(pairs)


@functools.lru_cache
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """The class, made once: that takes as long as a small network."""
    return collections.namedtuple(name, fields)  # noqa: PYI024
