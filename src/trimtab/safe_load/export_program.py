"""Validate the JSON of an exported program against torch's schema, before torch reads it.

``torch.export.load`` turns parts of that JSON into Python code. Names of values, parameters and arguments and string inputs
become source code; guards are executed; sympy evaluates size expressions; operators are looked up as attributes of ``torch``,
``math`` and ``operator``; tree specs import modules. Therefore every type is checked, names must be identifiers, and operators
must be on a list. Debug information, which is not needed and holds paths of the exporting machine, is dropped.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import keyword
import re
import types
import typing
import unicodedata
from collections.abc import Callable
from typing import Any

import torch
from torch._export.serde import schema, union

from trimtab.errors import IntegrityError
from trimtab.safe_load.symbolic_expressions import SYMBOL, clean_expression

MAX_ELEMENTS = 2**48
MAX_NESTED = 100
"""Most levels of nested lists and objects in the JSON. A nested graph takes about eight levels; readers recurse per level."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOTTED = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_UNSAFE_CHARACTERS = frozenset("\"'\\{}")
"""Characters that end a string in source code, start an escape, or are format fields of ``str.format``."""
_OPERATOR = re.compile(r"torch\.ops\.([a-z_0-9]+)\.([A-Za-z_0-9]+)\.([A-Za-z_0-9]+)")
_NAMESPACES = frozenset({"aten", "prims", "quantized", "quantized_decomposed", "onednn", "mkldnn", "torchao"})
_LOGICAL = frozenset({"__and__", "__or__", "__xor__", "__lshift__", "__rshift__"})
"""Operators of aten with dunder names. Models of transformers combine masks with them."""
_FILE_OPERATORS = frozenset({"from_file", "save", "load"})
_HIGHER_ORDER = frozenset({"cond", "while_loop", "scan", "map_impl", "wrap_with_set_grad_enabled", "wrap_with_autocast"})
_SYMBOLIC = frozenset(
    {
        *("_operator.eq", "_operator.ne", "_operator.le", "_operator.ge", "_operator.lt", "_operator.gt", "_operator.neg"),
        *("_operator.pos", "_operator.mul", "_operator.add", "_operator.sub", "_operator.floordiv", "_operator.mod"),
        *("_operator.pow", "_operator.truediv", "_operator.and_", "_operator.or_", "_operator.lshift", "_operator.rshift"),
        *("torch.sym_not", "torch.sym_int", "torch.sym_float", "torch.sym_ite", "torch.sym_max", "torch.sym_min"),
        *("torch.sym_sqrt", "math.trunc"),
    }
)
_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu", "meta"})
_GRAPH_INPUTS = frozenset({"as_tensor", "as_sym_int", "as_none", "as_int", "as_float", "as_bool"})
_REFUSED_KINDS = {
    "Argument": frozenset({"as_custom_obj", "as_operator", "as_string_to_argument"}),
    "InputSpec": frozenset({"custom_obj", "token"}),
    "OutputSpec": frozenset({"token"}),
    "ConstantValue": frozenset({"as_string"}),
}
_NAME_FIELDS = {"name", "as_name", "user_input_name"}
_WEIGHT_FIELDS = {"parameter_name", "buffer_name", "tensor_constant_name"}


def clean_program(text: bytes | bytearray) -> schema.ExportedProgram:
    """Validate ``models/model.json`` and return it as torch's schema object. Nothing in the result is executed as code.

    Raises:
        IntegrityError: ``text`` is not JSON or does not fit this torch's schema, or holds something that models do not need.
    """
    found = parse_json(text, "the program")
    data = _clean(
        schema.ExportedProgram, found, "program", newer=isinstance(found, dict) and _is_newer(found.get("schema_version"))
    )
    from_dict: Callable[..., Any] = _from_dict()
    program: schema.ExportedProgram = from_dict(schema.ExportedProgram, data)
    return program


def clean_payloads(text: bytes | bytearray, program: schema.ExportedProgram | None = None) -> schema.PayloadConfig:
    """Validate an archive's table of weights or constants. ``program`` gives the version of its schema. The tensors' bytes are
    checked when they are read.

    Raises:
        IntegrityError: as for :func:`clean_program`.
    """
    newer = program is not None and _is_newer(vars(program.schema_version))
    data = _clean(schema.PayloadConfig, parse_json(text, "the table of weights"), "payloads", newer=newer)
    payloads: schema.PayloadConfig = _from_dict()(schema.PayloadConfig, data)
    return payloads


def program_json(program: Any) -> bytes:
    """The inverse of :func:`clean_program` and :func:`clean_payloads`."""
    from torch._export.serde.serialize import _to_json_bytes

    encoded: bytes = _to_json_bytes(program)
    return encoded


def parse_json(text: bytes | bytearray, what: str) -> Any:
    """Parse JSON. Repeated keys, NaN and nesting deeper than :data:`MAX_NESTED` are refused.

    Raises:
        IntegrityError: ``text`` is not such JSON.
    """
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        layer = [found]
        for _ in range(MAX_NESTED):
            nested = [item for item in layer if isinstance(item, (dict, list))]
            layer = [part for item in nested for part in (item.values() if isinstance(item, dict) else item)]
        if layer:
            raise ValueError(f"it nests more than {MAX_NESTED} deep")
        return found
    except (ValueError, RecursionError, MemoryError) as error:
        raise IntegrityError(f"The JSON of {what} cannot be read: {error}.") from error


def _is_newer(version: Any) -> bool:
    """Whether ``version`` is a later minor version of this torch's schema. It may add fields, which torch ignores; fields that
    must be known change the major version."""
    match version:
        case {"major": int(major), "minor": int(minor)}:
            return major == schema.SCHEMA_VERSION[0] and minor > schema.SCHEMA_VERSION[1]
    return False


def _from_dict() -> Callable[..., Any]:
    # imported late: this module imports sympy and much of torch's compiler
    from torch._export.serde.serialize import _dict_to_dataclass

    return _dict_to_dataclass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, globalns=vars(schema))


def _clean(hint: Any, data: Any, where: str, *, newer: bool) -> Any:
    """``data`` checked against the type ``hint`` and the rules for the classes in it. Unknown fields are dropped if ``newer``,
    and refused otherwise."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _clean(next(a for a in arguments if a is not type(None)), data, where, newer=newer)
    if origin is list:
        _require(isinstance(data, list), where, "a list", data)
        return [_clean(arguments[0], item, f"{where}[{i}]", newer=newer) for i, item in enumerate(data)]
    if origin is dict:
        _require(isinstance(data, dict), where, "an object", data)
        return {key: _clean(arguments[1], item, f"{where}.{key}", newer=newer) for key, item in data.items()}
    if isinstance(hint, type) and issubclass(hint, union._Union):
        return _clean_union(hint, data, where, newer=newer)
    if dataclasses.is_dataclass(hint):
        return _clean_object(typing.cast(type, hint), data, where, newer=newer)
    return _clean_scalar(hint, data, where)


def _clean_union(cls: type, data: Any, where: str, *, newer: bool) -> dict[str, Any]:
    _require(isinstance(data, dict) and len(data) == 1, where, f"one kind of {cls.__name__}", data)
    kind, value = next(iter(data.items()))
    _require(kind in _hints(cls), where, f"a kind of {cls.__name__}", kind)
    if kind in _REFUSED_KINDS.get(cls.__name__, ()):
        raise IntegrityError(f"{where} is {kind}, which a saved model has no need of and which could run code; it is not read.")
    cleaned = {kind: _clean(_hints(cls)[kind], value, f"{where}.{kind}", newer=newer)}
    if kind == "as_name":
        _check_name(value, where)
    return cleaned


def _clean_object(cls: type, data: Any, where: str, *, newer: bool) -> dict[str, Any]:
    _require(isinstance(data, dict), where, cls.__name__, data)
    hints = _hints(cls)
    if (unknown := sorted(set(data) - set(hints))) and newer:
        data = {name: item for name, item in data.items() if name in hints}
    elif unknown:
        raise IntegrityError(
            f"{where} has the field {unknown[0][:80]!r}, which this torch ({torch.__version__}) does not know."
        )
    for field in dataclasses.fields(cls):
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        _require(optional or field.name in data, where, f"{cls.__name__} with {field.name}", sorted(data))
    if drop := _DROPPED.get(cls.__name__):
        data = drop(data)
    cleaned = {name: _clean(hints[name], item, f"{where}.{name}", newer=newer) for name, item in data.items()}
    for name, item in cleaned.items():
        if name in _NAME_FIELDS and item is not None and not (cls is schema.NamedArgument and item == ""):
            _check_name(item, where)
        if name in _WEIGHT_FIELDS:
            check_weight(item, where)
    if rule := _RULES.get(cls.__name__):
        rule(cleaned, where)
    return cleaned


def _clean_scalar(hint: Any, data: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        _require(type(data) is int and data in {int(item) for item in hint}, where, hint.__name__, data)
    elif hint is float:
        infinite = data in ("Infinity", "-Infinity", "NaN") if isinstance(data, str) else False
        _require(infinite or type(data) in (int, float), where, "a number", data)
    elif hint is int:
        _require(type(data) is int and -(2**63) <= data < 2**63, where, "a whole number of 64 bits", data)
    elif hint in (bool, str):
        _require(type(data) is hint, where, hint.__name__, data)
    else:
        raise IntegrityError(f"{where}: this torch has a kind of value, {hint}, that trimtab cannot check.")
    return data


def _require(truth: bool, where: str, wanted: str, got: Any) -> None:
    if not truth:
        raise IntegrityError(f"{where[-120:]} should be {wanted}, but is {repr(got)[:80]}.")


def _check_name(name: str, where: str) -> None:
    plain = _IDENTIFIER.fullmatch(name) and len(name) <= 1000 and not keyword.iskeyword(name) and not name.startswith("__")
    _require(bool(plain), where, "a name", name)


def check_weight(name: str, where: str) -> None:
    """Refuse a ``name`` that is not a path of attribute names, such as ``encoder.0.weight`` or ``by.hours-per-week.bias``.

    torch writes names that are not identifiers into source code as quoted strings. A name must not be able to end such a
    string, and must not contain escapes.
    """
    plain = name.isprintable() and unicodedata.is_normalized("NFKC", name) and not _UNSAFE_CHARACTERS.intersection(name)
    parts = all(part and not part.startswith("__") for part in name.split("."))
    _require(plain and parts and len(name) <= 2000, where, "the name of a weight", name)


def _check_key(key: str, where: str) -> None:
    plain = _DOTTED.fullmatch(key) and len(key) <= 2000 and not any(part.startswith("__") for part in key.split("."))
    _require(bool(plain), where, "a plain key", key)


def _check_operator(node: dict[str, Any], where: str) -> None:
    target = node["target"]
    if target in _SYMBOLIC or target.removeprefix("torch.ops.higher_order.") in _HIGHER_ORDER - {target}:
        return
    match = _OPERATOR.fullmatch(target)
    known = match is not None and match[1] in _NAMESPACES and match[2] not in _FILE_OPERATORS
    if match is None or not known or (match[2].startswith("__") and not (match[1] == "aten" and match[2] in _LOGICAL)):
        raise IntegrityError(f"The program calls {target[:80]!r}, which is not an operator that a saved model may use.")
    try:
        found = getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3])
    except (AttributeError, RuntimeError) as error:
        raise IntegrityError(f"The program calls {target!r}, which this torch ({torch.__version__}) does not have.") from error
    if not isinstance(found, torch._ops.OpOverload):
        raise IntegrityError(f"The program calls {target!r}, which is not an operator that a saved model may use.")


def _check_graph(graph: dict[str, Any], where: str) -> None:
    for kind in graph["inputs"]:
        # a text as graph input would be pasted into the source of a guard
        _require(set(kind) <= _GRAPH_INPUTS, f"{where}.inputs", "a tensor or a number", kind)
    _require(not graph.get("custom_obj_values"), where, "a graph without objects of other classes", "one with them")
    for table in ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"):
        for name in graph.get(table, {}):
            _check_name(name, f"{where}.{table}")


def _check_tensor(meta: dict[str, Any], where: str) -> None:
    for field in ("sizes", "strides"):
        _require(len(meta[field]) <= 64, where, "a tensor of at most 64 axes", len(meta[field]))
    _require(len(meta["sizes"]) == len(meta["strides"]), where, "a tensor with a stride for every axis", meta["strides"])
    known = [item["as_int"] for item in (*meta["sizes"], *meta["strides"], meta["storage_offset"]) if "as_int" in item]
    _require(all(0 <= item < MAX_ELEMENTS for item in known), where, "a tensor of a sensible size", known)
    elements = 1
    for item in meta["sizes"]:
        elements *= item.get("as_int", 1)
    _require(elements < MAX_ELEMENTS, where, "a tensor of a sensible size", known)


def _check_expression(expression: dict[str, Any], where: str) -> None:
    expression["expr_str"] = clean_expression(expression["expr_str"])


def _check_device(device: dict[str, Any], where: str) -> None:
    _require(device["type"] in _DEVICES, where, "a device", device["type"])
    _require(device.get("index") is None or 0 <= device["index"] < 64, where, "a device", device.get("index"))


def _check_call(signature: dict[str, Any], where: str) -> None:
    for name in signature.get("forward_arg_names") or ():
        _check_name(name, f"{where}.forward_arg_names")
    for field in ("in_spec", "out_spec"):
        _check_tree(signature[field], f"{where}.{field}")


def _check_tree(text: str, where: str) -> None:
    parsed = parse_json(text.encode("utf-8", "replace"), where)
    _require(isinstance(parsed, list) and len(parsed) == 2 and parsed[0] == 1, where, "a tree of arguments", text)
    _check_branch(parsed[1], where, 0)


def _check_branch(node: Any, where: str, depth: int) -> None:
    """Tuples, lists and dicts only: for other types torch imports the module that the text names."""
    _require(isinstance(node, dict) and set(node) == {"type", "context", "children_spec"} and depth < 60, where, "a tree", node)
    kind, context, children = node["type"], node["context"], node["children_spec"]
    _require(kind in (None, "builtins.tuple", "builtins.list", "builtins.dict"), where, "a tuple, list or dict", kind)
    _require(isinstance(children, list) and (kind is not None or not children), where, "a tree", children)
    if kind == "builtins.dict":
        _require(isinstance(context, str), where, "a dict with its keys", context)
        keys = parse_json(context.encode("utf-8", "replace"), where)
        _require(isinstance(keys, list) and all(isinstance(key, str) for key in keys), where, "a dict with text keys", keys)
        for key in keys:
            _check_key(key, where)
    else:
        _require(context in (None, "null"), where, "a tree without context", context)
    for child in children:
        _check_branch(child, where, depth + 1)


def _check_program(program: dict[str, Any], where: str) -> None:
    ranges = program["range_constraints"]
    for name in filter(str.isidentifier, ranges):
        _require(bool(SYMBOL.fullmatch(name)), f"{where}.range_constraints", "a symbol", name)
    # those of sizes that are computed, such as "2*s0", follow from the symbols', and torch would read the text as an expression
    program["range_constraints"] = {name: bounds for name, bounds in ranges.items() if SYMBOL.fullmatch(name)}
    _require(
        set(program.get("verifiers", ())) <= {"", "ATEN", "TRAINING"}, where, "a verifier of torch", program.get("verifiers")
    )


def _root_only(module: dict[str, Any]) -> dict[str, Any]:
    """Drop the call graph of submodules: it is not needed to run a program, and may name arbitrary types."""
    calls = module["module_call_graph"] if isinstance(module["module_call_graph"], list) else []
    kept = [entry for entry in calls if isinstance(entry, dict) and entry.get("fqn") == ""]
    return module | {"module_call_graph": kept, "metadata": {}, "treespec_namedtuple_fields": {}}


_DROPPED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Node": lambda node: node | {"metadata": {}},
    "GraphModule": _root_only,
    "ExportedProgram": lambda program: program | {"guards_code": []},
}
"""Parts that are removed before the check: they are not needed to run, and torch executes or imports some of them."""

_RULES: dict[str, Callable[[dict[str, Any], str], None]] = {
    "Node": _check_operator,
    "Graph": _check_graph,
    "TensorMeta": _check_tensor,
    "SymExpr": _check_expression,
    "Device": _check_device,
    "ModuleCallSignature": _check_call,
    "ExportedProgram": _check_program,
}
