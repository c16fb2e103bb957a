"""Strict readers of torch's archive formats. Nothing in a file is run, evaluated or unpickled.

``torch.export.load`` executes what a crafted file contains: pickled samples, weights and constants, native libraries, and text
of the program (see :mod:`trimtab.safe_load.export_program`). These readers use the standard library for the records, check
them, and only then build objects.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import pathlib
import pickle
import re
import zipfile
from typing import Any

import torch
from torch.export import ExportedProgram

from trimtab._internal.text import message_line
from trimtab.errors import CompileError, IntegrityError
from trimtab.safe_load.export_program import check_weight, clean_payloads, clean_program, program_json
from trimtab.safe_load.torchscript_pickle import check_pickle, check_source
from trimtab.safe_load.torchscript_source import ClassDeclaration
from trimtab.safe_load.zip_records import Records

MODEL = "models/model.json"
TABLES = {
    "data/weights/": "data/weights/model_weights_config.json",
    "data/constants/": "data/constants/model_constants_config.json",
}
SAMPLES = "data/sample_inputs/model.pt"
_ALLOWED = re.compile(
    r"models/model\.json|data/weights/(weight_[0-9]+|model_weights_config\.json)|data/sample_inputs/model\.pt"
    r"|data/constants/(tensor_[0-9]+|model_constants_config\.json)|archive_format|archive_version|byteorder|\.data/[a-z_]+"
)
_SCRIPT_KEPT = re.compile(
    r"data\.pkl|constants\.pkl|(data|constants)/[0-9]+|code/[A-Za-z0-9_/]+\.py|(\.data/)?version|byteorder"
)
_SCRIPT_ALLOWED = re.compile(
    _SCRIPT_KEPT.pattern
    + r"|code/[A-Za-z0-9_/]+\.py\.debug_pkl|traced_inputs(\.pkl|/[0-9]+)|\.data/[a-z_]+|extra/[A-Za-z0-9_.]+"
)
MAX_JSON = 256 << 20
MAX_EXPANDED = 2**24
"""Most elements of a constant that is larger than its bytes because it has strides of zero."""

PROGRAM_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    SyntaxError,
    LookupError,
    MemoryError,
    EOFError,
)
"""Errors of torch for an invalid program, besides torch's own error classes that derive from ``Exception`` directly."""


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Load the exported program that :func:`torch.export.save` or :func:`save_program` wrote to ``path``, without sample
    inputs.

    Raises:
        IntegrityError: the file is damaged, or contains something that saved models do not need: pickles, native code,
            operators that access files, text that would be evaluated.
    """
    from torch._export.serde.serialize import ExportedProgramDeserializer

    with Records(path) as records:
        _check_names(records)
        program = clean_program(records.read(MODEL, MAX_JSON))
        weights, constants = (_tensors(records, folder, program) for folder in TABLES)
    _check_targets(records.path, program, {**weights, **constants})
    try:
        return ExportedProgramDeserializer().deserialize(program, weights, constants, None)
    except (*PROGRAM_ERRORS, *_spec_errors()) as error:
        raise IntegrityError(f"{records.path} is not a program that torch can read: {message_line(error)[:300]}") from error


def save_program(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write ``program`` to ``path`` without pickles. :func:`load_program` and :func:`torch.export.load` can read the file.

    Sample inputs, stack traces and module names are dropped: they are not needed, and contain paths of this machine.

    Raises:
        CompileError: the program needs something that is not written, such as an object of a custom class.
        OSError: the file cannot be written.
    """
    target = pathlib.Path(path)
    raw, clean = io.BytesIO(), io.BytesIO()
    try:
        torch.export.save(program, raw)
        _rewrite(raw, clean)
    except (IntegrityError, RuntimeError, ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
        raise CompileError(f"The program has no form that stands alone: {message_line(error)[:300]}") from error
    # everything before is in memory; if the disk is full, no partial file is left
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(clean.getbuffer())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_torchscript(path: str | os.PathLike[str]) -> torch.jit.ScriptModule:
    """Load the TorchScript module that :func:`torch.jit.save` wrote to ``path``.

    Raises:
        IntegrityError: the file is damaged, or its pickles or source contain more than TorchScript writes for a plain model.
    """
    kept = check_torchscript(path)
    buffer = io.BytesIO()
    # torch reads a new archive of the checked records, because its zip reader may interpret the original differently
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in kept.items():
            archive.writestr(f"archive/{name}", bytes(data))
    buffer.seek(0)
    try:
        module: torch.jit.ScriptModule = torch.jit.load(buffer, map_location="cpu")  # type: ignore[no-untyped-call]
    except PROGRAM_ERRORS as error:
        raise IntegrityError(f"{path} is not a TorchScript module that torch can read: {message_line(error)[:300]}") from error
    return module


def check_torchscript(path: str | os.PathLike[str]) -> dict[str, bytearray]:
    """The records of the TorchScript file ``path`` that are needed to run it, checked.

    Raises:
        IntegrityError: as for :func:`load_torchscript`.
    """
    with Records(path, deflated=(".py", ".debug_pkl")) as records:
        return _script_records(records)


def _script_records(records: Records) -> dict[str, bytearray]:
    """The checked records that a module needs to run. Debug information and recorded inputs are dropped."""
    kept: dict[str, bytearray] = {}
    for name in records:
        if not _SCRIPT_ALLOWED.fullmatch(name):
            raise IntegrityError(f"{records.path}: the record {name!r} has no place in a TorchScript module; it is not read.")
        if _SCRIPT_KEPT.fullmatch(name):
            kept[name] = records.read(name)
    if "byteorder" in kept and kept["byteorder"] != b"little":
        raise IntegrityError(f"{records.path} was written on a machine with another byte order.")
    classes: dict[str, ClassDeclaration] = {}
    for name, data in kept.items():
        if name.endswith(".py"):
            classes |= check_source(data, name)
    for name in ("data.pkl", "constants.pkl"):
        if name not in kept:
            raise IntegrityError(f"{records.path}: the record {name!r} is missing.")
        folder = name.removesuffix(".pkl") + "/"
        sizes = {key[len(folder) :]: len(data) for key, data in kept.items() if key.startswith(folder)}
        check_pickle(kept[name], name, sizes, classes)
    return kept


def _rewrite(source: io.BytesIO, target: io.BytesIO) -> None:
    from torch.export.pt2_archive import PT2ArchiveWriter

    with Records(source) as records, PT2ArchiveWriter(target) as writer:
        _check_names(records)
        for name in records:
            if name == MODEL:
                writer.write_bytes(name, program_json(clean_program(records.read(name))))
            elif name in TABLES.values():
                writer.write_bytes(name, program_json(clean_payloads(records.read(name))))
            elif name == SAMPLES:
                writer.write_bytes(name, b"")
            elif name.startswith("data/"):
                writer.write_bytes(name, records[name])
        for folder in TABLES:
            _tensors(records, folder)


def _check_names(records: Records) -> None:
    for name in records:
        if not _ALLOWED.fullmatch(name):
            raise IntegrityError(
                f"{records.path}: the record {name!r} has no place in an exported program of plain tensors; it is not read."
            )
    if "byteorder" in records and records["byteorder"] != b"little":
        raise IntegrityError(f"{records.path} was written on a machine with another byte order.")


def _tensors(records: Records, folder: str, program: Any = None) -> dict[str, torch.Tensor]:
    table = clean_payloads(records.read(TABLES[folder], MAX_JSON), program).config
    flat: dict[tuple[str, int], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, entry in table.items():
        where = f"{records.path}: the tensor {name[:80]!r}"
        check_weight(name, where)
        if entry.use_pickle or entry.tensor_meta is None:
            raise IntegrityError(f"{where} is stored as a pickle, which runs code when it is read; it is not read.")
        key = (entry.path_name, int(entry.tensor_meta.dtype))
        if key not in flat:
            flat[key] = _flat_tensor(records, folder, entry, where)
        tensor = _view(flat[key], entry.tensor_meta, where)
        if entry.is_param:
            found[name] = torch.nn.Parameter(tensor, requires_grad=entry.tensor_meta.requires_grad)
        else:
            found[name] = tensor
    return found


def _flat_tensor(records: Records, folder: str, entry: Any, where: str) -> torch.Tensor:
    from torch._export.serde.serialize import deserialize_device, deserialize_scalar_type

    record = folder + entry.path_name
    if not _ALLOWED.fullmatch(record) or record in TABLES.values():
        raise IntegrityError(f"{where} lies in {entry.path_name[:80]!r}, which is not a name that torch gives a tensor.")
    try:
        dtype, device = deserialize_scalar_type(entry.tensor_meta.dtype), deserialize_device(entry.tensor_meta.device)
    except (KeyError, RuntimeError) as error:
        raise IntegrityError(f"{where} has a dtype or device that this torch does not know.") from error
    if records.size(record) % dtype.itemsize:
        raise IntegrityError(f"{where} has {records.size(record)} bytes, which is no whole number of {dtype} values.")
    data = records.read(record)
    tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = message_line(error)[:300]
        raise IntegrityError(f"{where} was saved for the device {device}, which is not here: {reason}") from error


def _view(flat: torch.Tensor, meta: Any, where: str) -> torch.Tensor:
    """The tensor that ``meta`` describes, as a view of ``flat``. Refused if it exceeds ``flat``."""
    if any(item.type != "as_int" for item in (*meta.sizes, *meta.strides, meta.storage_offset)) or int(meta.layout) != 7:
        raise IntegrityError(f"{where} has no fixed size or is not stored row by row; it is not read.")
    sizes, strides = [item.as_int for item in meta.sizes], [item.as_int for item in meta.strides]
    offset, elements = meta.storage_offset.as_int, math.prod(sizes)
    reach = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1 if elements else 0
    if reach > flat.numel() or elements > max(flat.numel(), MAX_EXPANDED):
        raise IntegrityError(
            f"{where} claims the shape {sizes}, more than the {flat.numel() * flat.itemsize} bytes that the file has for it."
        )
    return flat.as_strided(sizes, strides, offset if elements else 0)


def _check_targets(path: str, program: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse a program with a missing weight, before torch fails on it."""
    for spec in program.graph_module.signature.input_specs:
        field = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}.get(
            spec.type
        )
        if field and getattr(spec.value, field) not in tensors:
            raise IntegrityError(f"{path}: the weight {getattr(spec.value, field)!r} of the program is missing.")


def _spec_errors() -> tuple[type[Exception], ...]:
    """torch's only error class that derives from ``Exception`` directly. Imported late: it imports torch's compiler."""
    verifier = importlib.import_module("torch._export.verifier")
    return (verifier.SpecViolationError,)
