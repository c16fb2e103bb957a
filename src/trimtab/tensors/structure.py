"""Nested values: :func:`opened` walks them, :func:`flatten` takes their tensors out and describes the rest.

Containers are tuples, named tuples, lists, mappings and dataclasses. Unlike torch's pytree, no class has to be registered.

Runtimes take and give flat lists of tensors; models take and give nested values. A :class:`Structure` describes a nested
value without its classes, which a deployment machine may not have: dataclasses and mappings with attributes (a transformers
``ModelOutput``) come back as :class:`Record`, which has its items as attributes, by key and by position.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from trimtab._internal.serialization import fields_from_json, fields_to_json
from trimtab._internal.text import counted
from trimtab.errors import UsageError

if TYPE_CHECKING:
    import torch
else:
    from trimtab.tensors import late_torch as torch

Kind = Literal["tensor", "constant", "tuple", "list", "dict", "namedtuple", "record"]
T = TypeVar("T")
NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Floats that JSON cannot express, by their names."""


class Record(dict[str, Any]):
    """A dict whose items are also attributes and elements by position; replaces a dataclass whose class is not at hand."""

    _class_name: str | None = None
    """The class that it replaces. A record and an object of that class have equal structures."""

    @classmethod
    def of(cls, class_name: str | None, items: Iterable[tuple[str, Any]]) -> Record:
        """A record that replaces an object of the class ``class_name``."""
        record = cls(items)
        record._class_name = class_name
        return record

    def __getattribute__(self, name: str) -> Any:
        # an item may have the name of a method of dict, such as `values`
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
        """The values in order; the method that transformers' outputs have."""
        return tuple(dict.values(self))


@dataclasses.dataclass(frozen=True)
class Structure:
    """A nested value without its tensors."""

    kind: Kind
    keys: tuple[str, ...] = ()
    items: tuple[Structure, ...] = ()
    value: bool | int | float | str | None = None
    """The constant, for kind ``constant``; the class name, for ``namedtuple`` and ``record``."""

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return 1 if self.kind == "tensor" else sum(item.tensors for item in self.items)

    def to_json(self) -> dict[str, Any]:
        """The fields. A constant that is not finite becomes ``{"float": "-inf"}``."""
        odd = isinstance(self.value, float) and not math.isfinite(self.value)
        return fields_to_json(self) | ({"value": {"float": repr(self.value)}} if odd else {})

    @classmethod
    def from_json(cls, data: Any) -> Structure:
        """The inverse of :meth:`to_json`.

        Raises:
            UsageError: ``data`` was not written by :meth:`to_json`.
        """
        if not isinstance(data, Mapping) or not isinstance(value := data.get("value"), Mapping):
            return fields_from_json(cls, data)
        if set(value) != {"float"} or value["float"] not in tuple(NONFINITE):
            raise UsageError(f"Structure.value: {value!r} is no number. Write it again with this version.")
        return fields_from_json(cls, {**data, "value": NONFINITE[value["float"]]})


TENSOR = Structure("tensor")


class Opened(NamedTuple):
    """The content of a container."""

    keys: Sequence[Any]
    """The keys of a mapping, the field names of a dataclass or named tuple, the positions in a tuple or list."""
    items: Sequence[Any]
    rebuild: Callable[[Iterable[Any]], Any]
    """Makes a container of the same class from other items, in the order of ``items``."""


def opened(value: Any) -> Opened | None:
    """The content of a container; ``None`` for anything else.

    A container whose class cannot be rebuilt becomes a plain tuple or dict; a dataclass that is a mapping becomes a
    :class:`Record`.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return Opened(range(len(value)), value, kind)
    if kind is dict:
        names = list(value)
        return Opened(names, list(value.values()), lambda items: dict(zip(names, items, strict=True)))
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, (tuple, list)):
        keys: Sequence[Any] = (isinstance(value, tuple) and _field_names(value)) or range(len(value))
        return Opened(keys, list(value), functools.partial(_sequence_like, value))
    if isinstance(value, Mapping):
        keys = list(value)  # not values(), which may be the name of an item
        return Opened(keys, [value[key] for key in keys], functools.partial(_mapping_like, value, keys))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return Opened(keys, [getattr(value, key) for key in keys], functools.partial(_dataclass_like, value, keys))
    return None


def items_of(value: Any) -> Sequence[Any]:
    """The items of a container, without those of containers inside it; none for anything else."""
    found = opened(value)
    return () if found is None else found.items


def map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same class with ``change(item)`` for each item; anything that is no container itself."""
    found = opened(value)
    return value if found is None else found.rebuild([change(item) for item in found.items])


def is_flat(value: Any) -> bool:
    """True for a plain tuple or list of plain tensors, as most batches are; such a value needs no walk through containers."""
    if type(value) is not tuple and type(value) is not list:
        return False
    for item in value:  # noqa: SIM110  # called several times per update: all(...) takes twice as long
        if type(item) is not torch.Tensor:
            return False
    return True


def leaves_of(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Everything in nested containers that is no container, in order; ``is_leaf`` tells which containers are not opened."""
    found = None if is_leaf is not None and is_leaf(value) else opened(value)
    return [value] if found is None else [leaf for item in found.items for leaf in leaves_of(item, is_leaf)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers, in order."""
    return list(value) if is_flat(value) else [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Copies of the nested containers, with ``change(tensor)`` for each tensor; other leaves are shared."""
    return change(value) if isinstance(value, torch.Tensor) else map_items(value, lambda item: map_tensors(item, change))


def cloned(value: T) -> T:
    """Copies of the nested containers and their tensors; other leaves are shared."""
    copied: T = map_tensors(value, torch.clone)
    return copied


def flatten(value: Any, where: str = "value") -> tuple[list[torch.Tensor], Structure]:
    """Take the tensors out of ``value``, in order, and describe the rest. ``where`` names ``value`` in errors.

    Raises:
        UsageError: a leaf is neither a tensor nor a constant that JSON can hold, or a key is no string; names the place.
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


def rebuilder(structure: Structure) -> Callable[[Sequence[torch.Tensor]], Any]:
    """:func:`unflatten` for one ``structure``, prepared: a plain container of tensors takes a tenth of the time."""
    count, keys = len(structure.items), structure.keys
    whole = functools.partial(unflatten, structure)
    if structure.kind == "tensor":
        return lambda leaves: leaves[0]
    if any(item.kind != "tensor" for item in structure.items):
        return whole
    if structure.kind == "dict":
        return lambda leaves: dict(zip(keys, leaves, strict=True))
    if structure.kind == "tuple":
        return lambda leaves: tuple(leaves) if len(leaves) == count else whole(leaves)
    return whole


def ordered_like(value: Any, structure: Structure) -> Any:
    """``value`` with the keys of each dict in the order of ``structure``, where both have the same keys."""
    found = opened(value)
    if found is None or len(found.items) != len(structure.items):
        return value
    plain = isinstance(value, Mapping) and not (isinstance(value, Record) or dataclasses.is_dataclass(value))
    if plain and structure.kind == "dict" and set(found.keys) == set(structure.keys):
        held = dict(zip(found.keys, found.items, strict=True))
        return {key: ordered_like(held[key], item) for key, item in zip(structure.keys, structure.items, strict=True)}
    return found.rebuild([ordered_like(item, inner) for item, inner in zip(found.items, structure.items, strict=True)])


def first_difference(
    one: Structure,
    other: Structure,
    where: str,
    same: Callable[[Structure, Structure], bool] = lambda one, other: (one.kind, one.value) == (other.kind, other.value),
    *,
    lists: bool = False,
) -> tuple[str, Structure, Structure] | None:
    """The first place where two structures differ, and both parts there; ``None`` if they are equal.

    Args:
        where: the name of the whole, with which the place begins.
        same: compares two nodes without the items in them.
        lists: whether lists may differ in length.
    """
    longer = len(one.items) != len(other.items) and not (lists and one.kind == "list")
    if longer or one.keys != other.keys or not same(one, other):
        return where, one, other
    rows = zip(one.keys or map(str, itertools.count()), one.items, other.items, strict=False)
    inside = (first_difference(a, b, f"{where}.{key}" if where else key, same, lists=lists) for key, a, b in rows)
    return next(filter(None, inside), None)


def described(structure: Structure) -> str:
    """``structure`` in a few words: ``a dict with x, y``."""
    if structure.kind == "constant":
        return repr(structure.value)
    if structure.kind == "tensor":
        return "a tensor"
    if structure.kind in ("tuple", "list"):
        return f"a {structure.kind} of {len(structure.items)}"
    return f"a {structure.value or structure.kind} with {', '.join(structure.keys) or 'nothing in it'}"


def in_plain_containers(value: Any) -> Any:
    """``value`` as each runtime returns it: with its tensors in plain containers, named tuples and records."""
    leaves, structure = flatten(value, "the output")
    return unflatten(structure, leaves)


def names(structure: Structure, name: str) -> list[str]:
    """A name for each tensor of ``structure``: ``name`` for a single tensor, else dotted paths that begin with ``name``."""
    if structure.kind == "tensor":
        return [name]
    parts = structure.keys or tuple(str(i) for i in range(len(structure.items)))
    return [
        leaf
        for part, item in zip(parts, structure.items, strict=True)
        for leaf in names(item, f"{name}.{part}" if name else part)
    ]


def classes(structure: Structure) -> dict[str, tuple[str, ...]]:
    """The field names of each named tuple and record, by class name. Methods of these classes are lost in a structure."""
    own = {str(structure.value): structure.keys} if structure.kind in ("namedtuple", "record") and structure.value else {}
    for item in structure.items:
        own |= classes(item)
    return own


def _sequence_like(value: Any, items: Iterable[Any]) -> Any:
    """A tuple or list of the class of ``value``."""
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = items
        return made
    try:
        return getattr(type(value), "_make", type(value))(items)
    except TypeError:
        return tuple(items)


def _mapping_like(value: Mapping[Any, Any], keys: Sequence[Any], items: Iterable[Any]) -> Any:
    """A mapping of the class of ``value``; a dict or ``UserDict`` keeps its attributes too."""
    kind: Any = type(value)
    pairs = list(zip(keys, items, strict=True))
    try:
        if not isinstance(value, (dict, collections.UserDict)):  # copy.copy() of others may share the items
            return kind(dict(pairs))
        made = copy.copy(value)
        for key, item in pairs:
            made[key] = item
    except TypeError:  # its constructor has other arguments
        return Record.of(kind.__name__, pairs) if dataclasses.is_dataclass(value) else dict(pairs)
    return made


def _dataclass_like(value: T, keys: Sequence[str], items: Iterable[Any]) -> T:
    """A copy of a dataclass with other items in its fields. ``__post_init__`` does not run a second time."""
    made = copy.copy(value)
    for key, item in zip(keys, items, strict=True):
        object.__setattr__(made, key, item)  # of frozen dataclasses too
    return made


def _field_names(value: tuple[Any, ...]) -> Sequence[str]:
    """The field names of a named tuple, or of a named result of torch such as that of ``x.topk(5)``; empty for other tuples."""
    kind = type(value)
    found: Sequence[str] = getattr(kind, "__match_args__" if kind.__module__ == "torch.return_types" else "_fields", ())
    return found


def _flatten(value: Any, leaves: list[torch.Tensor], where: str) -> Structure:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return TENSOR
    if value is None or isinstance(value, (bool, int, float, str)):
        # two NaN are equal in a comparison of tuples only if they are one object
        return Structure("constant", value=math.nan if value != value else value)
    if isinstance(value, (tuple, list)) and not (isinstance(value, tuple) and _field_names(value)):  # called often: no opened()
        items = tuple([_flatten(item, leaves, f"{where}[{i}]") for i, item in enumerate(value)])
        return Structure("tuple" if isinstance(value, tuple) else "list", items=items)
    found = opened(value)
    if found is None:
        raise UsageError(_refusal(value, where))
    for key in found.keys:
        if not isinstance(key, str):
            raise UsageError(f"{where} has the key {key!r}; only string keys can cross to another runtime. Use those.")
    pairs = zip(found.keys, found.items, strict=True)
    items = tuple([_flatten(item, leaves, f"{where}[{key!r}]") for key, item in pairs])
    kind: Kind = "namedtuple" if isinstance(value, tuple) else "dict"
    name = type(value).__name__ if kind == "namedtuple" else None
    if isinstance(value, Record) or dataclasses.is_dataclass(value):
        kind, name = "record", value._class_name if isinstance(value, Record) else type(value).__name__
    return Structure(kind, tuple(found.keys), items, name)


def _refusal(value: Any, where: str) -> str:
    """Why ``value`` cannot be in a structure, and what to use."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    fix = "Use tensors, numbers, strings, tuples, lists, dicts or dataclasses, or wrap the model so that its forward does."
    if kind == "numpy.ndarray":
        fix = "Make it a tensor: torch.from_numpy(array)."
    if kind.startswith("transformers.cache_utils."):  # an output of every generative model, unless it is called without
        fix = "Give use_cache=False beside the other keyword inputs, and the model leaves it out."
    return f"{where} is a {kind}, which cannot cross to another runtime. {fix}"


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
    """A named tuple class; cached, because making one takes as long as a call of a small network."""
    return collections.namedtuple(name, fields)  # noqa: PYI024
