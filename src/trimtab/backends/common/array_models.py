"""Models of ONNX Runtime and OpenVINO, called with numpy arrays. Without torch.

They load the same files, with the same checks and options, as the executables of the backends.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.backends.common import openvino_file
from trimtab.backends.common.io_names import io_names
from trimtab.backends.common.onnx_file import MODEL, load_model
from trimtab.core.signature import Signature
from trimtab.errors import CompileError, IntegrityError
from trimtab.importers.onnx.session import runtime_errors

Array = npt.NDArray[Any]
ArrayModel = Callable[[Sequence[Array]], Sequence[Array]]


class OnnxArrays:
    """A session of ONNX Runtime. ``backend`` holds the fields of the backend of that name.

    Raises:
        IntegrityError: the file is unsafe, cannot be opened, or does not fit the signature.
    """

    def __init__(self, folder: pathlib.Path, backend: Mapping[str, Any], signature: Signature, threads: int | None) -> None:
        self._session = load_model(
            folder, threads=threads, spinning=backend["spinning"] is True, int8=backend["precision"] != "f32"
        )
        order, taken = io_names(signature)[0], [item.name for item in self._session.get_inputs()]
        self._outputs = [item.name for item in self._session.get_outputs()]
        if not set(taken) <= set(order) or len(self._outputs) != len(signature.outputs):
            raise IntegrityError(f"{folder / MODEL} takes {', '.join(taken)}, but the signature lists {', '.join(order)}.")
        self._places = [(name, order.index(name)) for name in taken]
        self._errors = runtime_errors()

    def __call__(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """The outputs. Raises ``RuntimeError`` if the session fails."""
        feeds = {name: np.ascontiguousarray(arrays[place]) for name, place in self._places}
        try:
            found: list[Array] = self._session.run(self._outputs, feeds)
        except self._errors as error:
            raise RuntimeError(str(error)) from error
        return found


class OpenVinoArrays:
    """A model of OpenVINO, compiled for the example's sizes and, when other sizes come, once more for any size.

    Raises:
        IntegrityError: the files are unsafe, cannot be read, or do not fit the signature.
    """

    def __init__(self, folder: pathlib.Path, backend: Mapping[str, Any], signature: Signature, threads: int | None) -> None:
        openvino_file.check_files(folder)
        fields = {name: backend[name] for name in ("precision", "rest", "hint", "streams")}
        self._config = openvino_file.configuration(**fields, threads=threads)
        self._signature = signature
        try:
            model = openvino_file.read_model(folder)
            if (len(model.inputs), len(model.outputs)) != (len(signature.inputs), len(signature.outputs)):
                raise IntegrityError(
                    f"{folder / openvino_file.MODEL} has other inputs or outputs than the signature: {signature.describe()}."
                )
            shapes = openvino_file.example_shapes(model, folder, signature)
            self._model = model.clone() if shapes is None or signature.dims else None
            self._passthrough = openvino_file.passthrough_outputs(model)
            self._static: openvino_file.Buffers | None = None
            self._dynamic: openvino_file.Buffers | None = None
            self._shapes = [] if shapes is None else [tuple(shape) for shape in shapes]
            if shapes is not None:
                openvino_file.reshape(model, shapes)
                self._static = self._compile(model)
        except CompileError as error:
            raise IntegrityError(f"{folder / openvino_file.MODEL} cannot be loaded: {error}") from error

    def __call__(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """The outputs."""
        if self._static is not None and [array.shape for array in arrays] == self._shapes:
            return self._static.run(arrays)
        if self._dynamic is None:
            self._dynamic = self._compile(self._model)
            if any(dim.min == 0 for dim in self._signature.dims):  # a first call with empty inputs gives wrong outputs later
                shapes = zip(openvino_file.smallest(self._signature), self._signature.inputs, strict=True)
                self._dynamic.run([np.zeros(shape, spec.dtype) for shape, spec in shapes])
        return self._dynamic.run(arrays)

    def _compile(self, model: Any) -> openvino_file.Buffers:
        return openvino_file.Buffers(openvino_file.compiled(model, self._config), self._signature, self._passthrough)


ARRAY_MODELS: Mapping[str, Callable[[pathlib.Path, Mapping[str, Any], Signature, int | None], ArrayModel]] = {
    "onnxruntime": OnnxArrays,
    "openvino": OpenVinoArrays,
}
"""Name of a backend -> what loads its files without torch."""
