"""Validate the pickles and the source of a TorchScript archive.

torch reads these pickles with a restricted reader. But that reader trusts the sizes in them, builds objects of registered
native classes, and compiles and runs ``__setstate__`` of the source. This module executes the pickle instructions symbolically:
classes are names, tensors are checked against their bytes, objects against the attributes that their class declares. Nothing is
called.
"""

from __future__ import annotations

import dataclasses
import math
import pickletools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab.errors import IntegrityError
from trimtab.safe_load.torchscript_source import ClassDeclaration, Type, declarations, read_type

MAX_STEPS = 5_000_000
_STORAGES = {
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "QInt8Storage", "QUInt8Storage"), 1),
    "ComplexDoubleStorage": 16,
}
_FUNCTIONS = frozenset(
    {
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_qtensor",
        "collections.OrderedDict",
        "torch.jit._pickle.restore_type_tag",
    }
    | {f"torch.jit._pickle.build_{kind}list" for kind in ("int", "tensor", "double", "bool")}
)
_CONSTANTS = re.compile(r"torch\.(per_tensor_affine|per_channel_affine|per_channel_affine_float_qparams)")
_CLASS = re.compile(r"__torch__(\.[A-Za-z_][A-Za-z0-9_]*)+")
_TYPE_TEXT = re.compile(r"[A-Za-z0-9_\[\], .()]{1,4000}")
_NAMES = re.compile(r"\b__torch__\b(?:\.\w+)*")
_NATIVE_ALLOWED = frozenset({"quantized", "mkldnn"})
_FORBIDDEN = re.compile(r"\b(save|from_file|__setstate__|__getstate__|rpc_async|rpc_sync|rpc_remote|debugprims|inductor)\b")
_OPS = re.compile(r"(?<![\w.])ops\b(\.(\w+)\.)?")
_OPS_ALLOWED = frozenset({"aten", "prim", "prims", "quantized", "quantized_decomposed", "mkldnn", "mkldnn_prepacked", "onednn"})
_GETATTR = re.compile(r"""getattr\([\w.]+, "(?![A-Za-z_]\w*")(?:(?!getattr)[^"'\\.\n]|\\')+"\)""")
"""How torch writes an attribute whose name is not a Python identifier: ``getattr(self.layers, "0")``."""
MAX_NESTED = 50
MAX_DEPTH = 100
"""Most levels of nested values in a pickle. A submodule is one level."""


def check_source(text: bytes | bytearray, name: str) -> dict[str, ClassDeclaration]:
    """Refuse TorchScript source that names operators which access files or run other code. Returns the declared classes.

    The search covers comments and strings too, because torch's parser is not Python's.

    Raises:
        IntegrityError: the source is not ASCII, contains a forbidden word, or is not formatted as torch formats it.
    """
    try:
        source = text.decode("ascii")
    except UnicodeDecodeError as error:
        raise IntegrityError(f"The source {name!r} is not plain text.") from error
    if found := _FORBIDDEN.search(source):
        raise IntegrityError(
            f"The source {name!r} uses the word {found[1]!r}, which a saved model has no need of; it is not read."
        )
    if odd := next((match for match in _OPS.finditer(source) if match[2] not in _OPS_ALLOWED), None):
        raise IntegrityError(
            f"The source {name!r} calls {source[odd.start() : odd.end() + 20]!r}, which no saved model may call."
        )
    if odd := next((found for found in _NAMES.findall(source) if _is_native(found)), None):
        raise IntegrityError(f"The source {name!r} uses the native class {odd!r}, which no saved model may use.")
    if _has_unusual_getattr(source):
        raise IntegrityError(f"The source {name!r} looks up an attribute in a way that no saved model does; it is not read.")
    return declarations(source, name)


def _is_native(name: str) -> bool:
    """Whether ``name`` is a native class that models do not need, or a prefix of one."""
    parts = name.split(".")[1:]
    return parts in ([], ["torch"]) or (parts[:2] == ["torch", "classes"] and not _NATIVE_ALLOWED.intersection(parts[2:3]))


def _has_unusual_getattr(source: str) -> bool:
    """Whether ``source`` uses ``getattr`` in a way that torch's printer does not.

    ``getattr(torch, "...")`` finds operators as well, and the compiler joins and decodes string literals first, so that the
    forbidden words need not appear. The expressions removed here contain no inner ``getattr`` and no quotes, so they cannot
    hide a call between two strings.
    """
    for _ in range(MAX_NESTED):
        source, found = _GETATTR.subn("_", source)
        if not found:
            break
    return "getattr" in source


@dataclasses.dataclass(frozen=True)
class _Word:
    """A class or function that a pickle refers to by name."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    elements: int


@dataclasses.dataclass(frozen=True)
class _Unbuilt:
    """An object without its state yet."""

    maker: str


@dataclasses.dataclass(frozen=True)
class _Thing:
    """The result of a call, or an object with its state."""

    maker: str
    depth: int = 0


class _List(list[Any]):
    depth = 1


class _Dict(list[Any]):
    """Keys and values in alternation."""

    depth = 1


class _Tuple(tuple[Any, ...]):
    depth = 1


def _nesting(items: Iterable[Any]) -> int:
    """The nesting depth of a container with ``items``."""
    depth = 1 + max((getattr(item, "depth", 0) for item in items), default=0)
    if depth > MAX_DEPTH:
        raise ValueError("values are nested too deep")
    return depth


def check_pickle(data: bytes | bytearray, name: str, sizes: Mapping[str, int], classes: Mapping[str, ClassDeclaration]) -> None:
    """Execute the pickle ``data`` symbolically and refuse anything unusual.

    ``sizes`` maps storage keys to their number of bytes; ``classes`` are the classes that the source declares.

    Raises:
        IntegrityError: an instruction, class or function that TorchScript does not write; a tensor that exceeds its bytes; or
            an object whose attributes do not have the declared types.
    """
    machine = _Machine(name, sizes, classes)
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(bytes(data))):
            if steps > MAX_STEPS:
                raise ValueError("too long")
            machine.step(opcode.name, argument)
        if len(machine.stack) != 1:
            raise ValueError("it does not end with one value")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(
            f"The pickle {name!r} is not one that TorchScript writes: {error or type(error).__name__}."
        ) from error


class _Machine:
    def __init__(self, name: str, sizes: Mapping[str, int], classes: Mapping[str, ClassDeclaration]) -> None:
        self.name = name
        self.sizes = sizes
        self.classes = classes
        self.compared = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.shared: set[int] = set()
        """Ids of values that were read from the memo. They must not grow any more, so that no value contains itself."""

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in _PUSHES:
            self.stack.append(argument if _PUSHES[opcode] is None else _PUSHES[opcode]())  # type: ignore[misc]
        elif handler := _HANDLERS.get(opcode):
            handler(self, argument)
        else:
            raise IntegrityError(f"The pickle {self.name!r} uses the instruction {opcode}, which TorchScript does not write.")

    def pop_to_mark(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def tuple_of(self, items: list[Any]) -> None:
        made = _Tuple(items)
        made.depth = _nesting(items)
        self.stack.append(made)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("too few values")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def push_global(self, argument: str) -> None:
        name = argument.replace(" ", ".", 1)
        storage = name.startswith("torch.") and name.removeprefix("torch.") in _STORAGES
        plain = storage or name in _FUNCTIONS or _CONSTANTS.fullmatch(name) or _CLASS.fullmatch(name)
        if not plain or (name.startswith("__torch__") and _is_native(name)):
            raise IntegrityError(f"The pickle {self.name!r} names {name[:120]!r}, which would run code; it is not read.")
        self.stack.append(_Word(name))

    def new_object(self, _: Any) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if arguments != () or not isinstance(cls, _Word) or not _CLASS.fullmatch(cls.name):
            raise ValueError("an object of no TorchScript class")
        self.stack.append(_Unbuilt(cls.name))

    def call(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Word) or function.name not in _FUNCTIONS or not isinstance(arguments, tuple):
            raise IntegrityError(f"The pickle {self.name!r} calls {function!r}, which TorchScript does not do; it is not read.")
        if function.name.endswith(("_rebuild_tensor_v2", "_rebuild_qtensor")):
            self.check_tensor(arguments)
            self.stack.append(_Thing("tensor"))
        elif function.name.endswith("restore_type_tag"):
            value, text = arguments
            if not isinstance(text, str) or not _TYPE_TEXT.fullmatch(text):
                raise ValueError("an odd type")
            if not self.fits(value, read_type(text)):
                raise ValueError(f"a value that is no {text[:80]}")
            self.stack.append(value)
        else:
            self.stack.append(_Thing(function.name, _nesting(arguments)))

    def check_tensor(self, arguments: tuple[Any, ...]) -> None:
        storage, offset, shape, strides = arguments[:4]
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > 64:
            raise ValueError("a tensor without its bytes")
        if any(type(item) is not int or not 0 <= item < 2**48 for item in numbers):
            raise ValueError("a tensor of an impossible size")
        elements = math.prod(shape)
        reach = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if elements else 0
        if reach > storage.elements or elements > max(storage.elements, 2**24):
            raise IntegrityError(f"The pickle {self.name!r} claims a tensor of shape {shape}, beyond the bytes that back it.")

    def storage(self, _: Any) -> None:
        word, kind, key, device, elements = self.stack.pop()
        width = _STORAGES[kind.name.removeprefix("torch.")]
        if (
            word != "storage"
            or type(elements) is not int
            or not isinstance(device, str)
            or not re.fullmatch(r"[a-z]+(:\d+)?", device)
        ):
            raise ValueError("an odd storage")
        if self.sizes[key] != elements * width:
            raise IntegrityError(
                f"The pickle {self.name!r} claims {elements * width} bytes for {key!r}, which has {self.sizes[key]}."
            )
        self.stack.append(_Storage(elements))

    def build(self, _: Any) -> None:
        state, thing = self.stack.pop(), self.stack.pop()
        if not isinstance(thing, _Unbuilt):
            raise ValueError("a state for something that is no object")
        if not thing.maker.startswith("__torch__.torch.classes."):
            self.check_state(thing.maker, state)
        self.stack.append(_Thing(thing.maker, _nesting([state])))

    def check_state(self, name: str, state: Any) -> None:
        """Check an object's state against its class: torch stores it into the slots and trusts the declared types."""
        if name not in self.classes or not isinstance(state, _Dict):
            raise ValueError(f"an object of the class {name[:120]}, which the source does not declare")
        declared = self.classes[name].attributes
        for key, value in zip(state[::2], state[1::2], strict=True):
            if not isinstance(key, str) or key not in declared or not self.fits(value, declared[key]):
                raise ValueError(f"the attribute {str(key)[:80]!r} of {name[:120]} is not what its class declares")

    def fits(self, value: Any, kind: Type) -> bool:
        """Whether ``value`` has the type ``kind``. ``Any`` and ``Union`` accept every value; source must check it."""
        self.compared += 1
        if self.compared > MAX_STEPS:
            raise ValueError("too long")
        if value is None or kind.name in ("Any", "Union"):
            return kind.name in ("Any", "Union", "Optional", "NoneType")
        if kind.name == "Optional" and len(kind.items) == 1:
            return self.fits(value, kind.items[0])
        if kind.name in self.classes or "." in kind.name:
            return self.is_a(value, kind.name)
        if isinstance(value, _List):
            return kind.name == "List" and len(kind.items) == 1 and all(self.fits(item, kind.items[0]) for item in value)
        if isinstance(value, _Dict):
            pairs = kind.items * (len(value) // 2)
            return kind.name == "Dict" and len(kind.items) == 2 and all(map(self.fits, value, pairs))
        if isinstance(value, _Tuple):
            return kind.name == "Tuple" and len(value) == len(kind.items) and all(map(self.fits, value, kind.items))
        if isinstance(value, _Thing):
            return (kind.name, *(item.name for item in kind.items)) == _RESULT_TYPES.get(value.maker)
        return isinstance(value, (bool, int, float, str)) and type(value) in _PLAIN_TYPES.get(kind.name, (int, float, str))

    def is_a(self, value: Any, name: str) -> bool:
        """Whether ``value`` is an object of the class ``name``, or has all methods of the interface ``name``."""
        declared = self.classes.get(name, ClassDeclaration("", {}, {}))
        if declared.base == "NamedTuple":
            return isinstance(value, _Tuple) and self.fits(value, Type("Tuple", tuple(declared.attributes.values())))
        if not isinstance(value, _Thing):
            return False
        own = self.classes.get(value.maker, ClassDeclaration("", {}, {}))
        implements = declared.base.endswith("Interface") and declared.methods.items() <= own.methods.items()
        return value.maker == name or implements

    def put(self, argument: Any) -> None:
        # torch allocates memory up to this index and then appends; its own writer counts from 0
        if argument != len(self.memo) or isinstance(self.stack[-1], _Unbuilt):
            raise ValueError("a memo out of order")
        self.memo.append(self.stack[-1])

    def get(self, argument: Any) -> None:
        self.shared.add(id(self.memo[argument]))
        self.stack.append(self.memo[argument])

    def extend(self, items: list[Any], kind: type[_List | _Dict], pairs: bool) -> None:
        holder = self.stack[-1]
        if not isinstance(holder, kind) or (pairs and len(items) % 2) or id(holder) in self.shared:
            raise ValueError("items for something that takes none")
        holder.extend(items)
        holder.depth = max(holder.depth, _nesting(items))


_PUSHES: dict[str, Callable[[], Any] | None] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINSTRING"), None),
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "NONE": lambda: None,
    "EMPTY_TUPLE": _Tuple,
    "EMPTY_LIST": _List,
    "EMPTY_DICT": _Dict,
}
_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    **{name: (kind,) for name, kind in (("bool", bool), ("int", int), ("float", float), ("str", str))},
    **dict.fromkeys(("Tensor", "List", "Dict", "Tuple", "Optional", "NoneType"), ()),
}
"""Python types of pickled values for types without items; types that are missing here are pickled as numbers or text."""
_RESULT_TYPES = {
    "tensor": ("Tensor",),
    **{f"torch.jit._pickle.build_{kind}list": ("List", kind) for kind in ("int", "bool")},
    "torch.jit._pickle.build_doublelist": ("List", "float"),
    "torch.jit._pickle.build_tensorlist": ("List", "Tensor"),
}
_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, argument: None,
    "STOP": lambda machine, argument: None,
    "MARK": lambda machine, argument: machine.marks.append(len(machine.stack)),
    "GLOBAL": _Machine.push_global,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": lambda machine, argument: machine.tuple_of(machine.pop_to_mark()),
    "TUPLE1": lambda machine, argument: machine.tuple_of(machine.pop(1)),
    "TUPLE2": lambda machine, argument: machine.tuple_of(machine.pop(2)),
    "TUPLE3": lambda machine, argument: machine.tuple_of(machine.pop(3)),
    "NEWOBJ": _Machine.new_object,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.storage,
    "APPEND": lambda machine, argument: machine.extend(machine.pop(1), _List, False),
    "APPENDS": lambda machine, argument: machine.extend(machine.pop_to_mark(), _List, False),
    "SETITEM": lambda machine, argument: machine.extend(machine.pop(2), _Dict, True),
    "SETITEMS": lambda machine, argument: machine.extend(machine.pop_to_mark(), _Dict, True),
}
