"""Load a workload from a reference, such as a Python file or a model file."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab._internal.files import path_of
from trimtab._internal.text import message_line, no_file, with_remedy
from trimtab._internal.validation import checked_call
from trimtab.core.candidate import MODEL_ERRORS
from trimtab.core.workload import Workload
from trimtab.errors import IntegrityError, TrimtabError, UsageError
from trimtab.importers.exported_program import ProgramFile
from trimtab.importers.input_spec import Inputs, InputSpec, inputs_of
from trimtab.importers.onnx.load import OnnxFile
from trimtab.importers.python_file import read_script
from trimtab.importers.torchscript import ScriptFile
from trimtab.importers.transformers_folder import TransformersFolder, transformers_inputs

HF = "hf:"
FORMS = "file.py, file.py:name, package.module:name, a model file (.pt2, .pt, .onnx) or hf:FOLDER"
SCRIPTS = (".pt", ".pth", ".jit", ".ts", ".torchscript")
FILE_ERRORS: tuple[type[Exception], ...] = (*MODEL_ERRORS, MemoryError)
"""Errors that an invalid model file can cause."""
_PYTHON_REFERENCE = re.compile(r"\.py(:[A-Za-z_]\w*)?$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


@checked_call("trimtab.load_workload")
def load_workload(
    reference: str | os.PathLike[str],
    *,
    inputs: str | os.PathLike[str] | None = None,
    shapes: Mapping[str, str | Sequence[int]] | None = None,
    task: str | None = None,
) -> Workload:
    """Load the workload that ``reference`` names.

    - ``file.py``, ``file.py:name``, ``package.module:name``: a :class:`Workload` or a function that returns one. Without
      ``name`` it is ``workload``, or the only workload in the file. The file's folder is added to ``sys.path``.
    - ``model.pt2`` (:func:`torch.export.save`), ``model.pt`` (TorchScript), ``model.onnx``: a model file. Nothing in it is
      executed. Without ``inputs`` the inputs are random; the workload's notes say so.
    - ``hf:FOLDER``: a transformers model, loaded offline.

    Args:
        reference: one of the forms above.
        inputs: for model files: a ``.npz``, ``.npy`` or ``.safetensors`` file with real inputs by name, one row per example.
        shapes: for model files: shapes of the example inputs by name: ``"1x3x224x224"``, ``"1x16:int64"`` or a sequence.
        task: for ``hf:FOLDER``: the model's task, if it differs from the configuration.

    Raises:
        UsageError: the file, module or name does not exist or is not a workload, or an argument does not fit.
        IntegrityError: a model file is damaged, or contains something that models do not need.
        WorkloadError: a Python file raised an error, which is the cause.
    """
    text = os.fspath(path_of(reference, "The workload", "model.py"))
    given = {"inputs": inputs, "shapes": shapes, "task": task}
    if text.startswith(HF):  # first, because a folder's name may contain colons and suffixes
        return _with_reference(_from_folder(text.removeprefix(HF), inputs, shapes or {}, task), _cli_words(text, given))
    if _PYTHON_REFERENCE.search(text):
        _refuse_options(given, text, ())
        return read_script(text)
    path = pathlib.Path(text)
    if path.suffix in (".pt2", ".onnx", *SCRIPTS):
        _refuse_options(given, text, ("inputs", "shapes"))
        found = _from_file(path, None if inputs is None else pathlib.Path(inputs), shapes or {})
        return _with_reference(found, _cli_words(text, given))
    if os.path.isfile(os.path.join(text, "config.json")):
        raise UsageError(f"{text!r} is a folder. For the transformers model in it, write {HF + text!r}.")
    raise UsageError(f"{text!r} is not a workload. Write {FORMS}.")


def is_python(reference: str) -> bool:
    """Whether ``reference`` names Python code, which each worker process runs again."""
    return not reference.startswith(HF) and _PYTHON_REFERENCE.search(reference) is not None


@with_remedy("Export the model again, or bring it in a workload file: trimtab init custom.")
def _from_file(path: pathlib.Path, inputs: pathlib.Path | None, shapes: Mapping[str, str | Sequence[int]]) -> Workload:
    if not os.path.isfile(path):  # False for a forbidden folder, where pathlib's is_file raises
        raise no_file(path, "Check the path, or write a workload file to start from: trimtab init.")
    if not os.path.getsize(path):
        raise IntegrityError(f"{path} is empty: it has 0 bytes. Copy it again.")
    with _as_integrity_error(path):
        return _workload(path, inputs, shapes)


@contextlib.contextmanager
def _as_integrity_error(path: pathlib.Path) -> Iterator[None]:
    """Turn errors of the block, which runs no code of the user, into an :class:`IntegrityError` about ``path``."""
    try:
        yield
    except TrimtabError:
        raise
    except FILE_ERRORS as error:
        message = message_line(error)[:300]
        raise IntegrityError(f"{path} holds no model that can be used: {type(error).__name__}: {message}") from error


def _workload(path: pathlib.Path, inputs: pathlib.Path | None, shapes: Mapping[str, str | Sequence[int]]) -> Workload:
    absolute = str(path.resolve())
    model: Any
    notes: tuple[str, ...] = ()
    if path.suffix in SCRIPTS:
        model = ScriptFile(absolute)
        spec = model.input_spec(inputs, shapes)
    else:
        model = (ProgramFile if path.suffix == ".pt2" else OnnxFile)(absolute)
        spec = model.input_spec()
    found = inputs_of(spec, inputs, shapes, model)
    if not isinstance(model, ScriptFile):
        spec, notes = model.verified_spec(spec, found.example)
    return _to_workload(model, path.stem, spec, found, notes)


def _to_workload(model: Any, name: str, spec: InputSpec, found: Inputs, notes: tuple[str, ...] = ()) -> Workload:
    """A workload of a model file; characters that a workload's name must not have are left out of ``name``."""
    return Workload(
        model=model,
        inputs=found.example,
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-") or "model",
        calibration=found.calibration,
        dynamic=spec.dims or None,
        notes=(*notes, *found.notes),
    )


@with_remedy("Save the model into it again with save_pretrained.")
def _from_folder(
    folder: str, inputs: str | os.PathLike[str] | None, shapes: Mapping[str, str | Sequence[int]], task: str | None
) -> Workload:
    path = pathlib.Path(os.path.realpath(os.path.expanduser(folder)))  # unlike pathlib's methods these do not raise
    model = TransformersFolder(str(path), task)
    with _as_integrity_error(path):
        spec, found = transformers_inputs(model, None if inputs is None else pathlib.Path(inputs), shapes)
    return _to_workload(model, path.name, spec, found)


def _with_reference(found: Workload, words: tuple[str, ...]) -> Workload:
    """Set ``reference`` of ``found``; the field is not a constructor argument."""
    object.__setattr__(found, "reference", words)
    return found


def _cli_words(text: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The reference and its options as command-line words."""
    words = [text]
    for name, shape in (given["shapes"] or {}).items():
        words += ["--shape", f"{name}={shape if isinstance(shape, str) else 'x'.join(map(str, shape))}"]
    words += [word for name in ("inputs", "task") if given[name] for word in (f"--{name}", os.fspath(given[name]))]
    return tuple(words)


def _refuse_options(given: Mapping[str, Any], text: str, taken: Sequence[str]) -> None:
    for name, value in given.items():
        if value and name not in taken:
            option = {"inputs": "--inputs", "shapes": "--shape", "task": "--task"}[name]
            use = {"inputs": "model files", "shapes": "model files", "task": "hf:FOLDER"}[name]
            raise UsageError(f"{option} is for {use}; {text!r} brings its own. Leave it out.")
