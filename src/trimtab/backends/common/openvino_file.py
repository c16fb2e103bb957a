"""The OpenVINO model of an artifact: check its files, compile it, and call it with numpy arrays. Without torch."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.backends.common.causes import CONVERSION_ERRORS, first_line
from trimtab.backends.common.openvino_rules import check_model
from trimtab.backends.common.process_lock import SHARED
from trimtab.core.signature import Signature
from trimtab.core.technique import require
from trimtab.errors import CompileError, IntegrityError

MODEL = "model.xml"
WEIGHTS = "model.bin"
FILES = (MODEL, WEIGHTS)
SHAPES_KEY = ["trimtab", "shapes"]
"""Metadata key of the shapes to optimize for, those of the example, such as ``1,8;1,8``."""
COPIED_BYTES = 65536
"""Tensors up to this size in bytes are copied to and from buffers of the request, which takes about 1 microsecond. Sharing
memory takes 3 microseconds and pays off for larger tensors. On an 8x8 CNN with one thread: 18 microseconds with copies, 25 with
shared memory, 44 with ``infer([x], share_inputs=True, share_outputs=True)``; the network itself takes 15."""

Array = npt.NDArray[Any]


def runtime() -> Any:
    """The openvino package, imported without telemetry."""
    with no_telemetry():
        return require("openvino")


@functools.cache
def core() -> Any:
    """The only ``Core`` of this process. It is never freed; :func:`signal_stack_kept` says why more than one is dangerous."""
    return runtime().Core()


@contextlib.contextmanager
def no_telemetry() -> Iterator[None]:
    """Disable the telemetry of openvino and nncf in the block; it uses the network and writes into the home folder.

    Both use a stub if ``openvino_telemetry`` cannot be imported, which is the case in the block. If openvino was imported
    before, the reference in its converter is replaced by the stub meanwhile.
    """
    with SHARED:
        known, swapped = "openvino_telemetry" in sys.modules, []
        before = sys.modules.get("openvino_telemetry")  # None in a nested call
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        if before is not None and "openvino.tools.ovc" in sys.modules:
            stub = require("openvino.tools.ovc.telemetry_stub")
            for name, module in list(sys.modules.items()):
                if name.startswith("openvino.tools.ovc.") and getattr(module, "tm", None) is before:
                    swapped.append(module)
                    module.tm = stub  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if known:
                sys.modules["openvino_telemetry"] = before  # type: ignore[assignment]
            else:
                del sys.modules["openvino_telemetry"]
            for module in swapped:
                module.tm = before  # type: ignore[attr-defined]


def example_shapes(model: Any, folder: pathlib.Path, signature: Signature) -> list[list[int]] | None:
    """The shapes of the example that the model was made for; ``None`` if they are not stored.

    Raises:
        IntegrityError: the signature does not allow them.
    """
    if not model.has_rt_info(SHAPES_KEY):
        return None
    text = str(model.get_rt_info(SHAPES_KEY).value)
    try:
        shapes = [[int(size) for size in shape.split(",") if size] for shape in text.split(";")]
    except ValueError:
        shapes = []
    if not signature.takes(shapes):
        raise IntegrityError(f"{folder / MODEL} names sizes that it was not built for: {text[:200]!r}.")
    return shapes


def smallest(signature: Signature) -> list[list[int]]:
    """The smallest sizes above 0 that the signature allows, for each input."""
    least = {dim.name: dim.holding(1) for dim in signature.dims}
    return [[least[size] if isinstance(size, str) else size for size in spec.shape] for spec in signature.inputs]


def passthrough_outputs(model: Any) -> dict[int, int]:
    """Outputs that are unchanged inputs, as ``{output index: input index}``."""
    inputs = {port.get_node().get_friendly_name(): i for i, port in enumerate(model.inputs)}
    sources = [port.get_node().input_value(0).get_node().get_friendly_name() for port in model.outputs]
    return {i: inputs[name] for i, name in enumerate(sources) if name in inputs}


def configuration(*, precision: str, rest: str, hint: str, streams: int | None, threads: int | None) -> dict[str, Any]:
    """OpenVINO's options for the fields of the backend of that name."""
    config: dict[str, Any] = {"PERFORMANCE_HINT": hint.upper(), "INFERENCE_PRECISION_HINT": "f32"}
    if "bf16" in (precision, rest):
        config["INFERENCE_PRECISION_HINT"] = "bf16"
    if threads is not None:
        config["INFERENCE_NUM_THREADS"] = threads
    if streams is not None:
        config["NUM_STREAMS"] = streams
    return config


def read_model(folder: pathlib.Path) -> Any:
    """The model with its weights in memory; mapped weights would change if the file is overwritten in place.

    Raises:
        CompileError: OpenVINO cannot read it.
    """
    try:
        return core().read_model(folder / MODEL, folder / WEIGHTS, {"ENABLE_MMAP": False})
    except CONVERSION_ERRORS as error:
        raise CompileError(f"OpenVINO cannot read the model: {first_line(error)}.") from error


def reshape(model: Any, shapes: Sequence[Sequence[int]]) -> None:
    """Fix the sizes of the inputs.

    Raises:
        CompileError: the model does not take them.
    """
    try:
        model.reshape({port: runtime().PartialShape(list(shape)) for port, shape in zip(model.inputs, shapes, strict=True)})
    except CONVERSION_ERRORS as error:
        raise CompileError(f"OpenVINO cannot compile the model for the sizes {list(shapes)}: {first_line(error)}.") from error


def compiled(model: Any, config: Mapping[str, Any]) -> Any:
    """The compiled model. Raises ``CompileError`` if OpenVINO cannot compile it."""
    try:
        return core().compile_model(model, "CPU", dict(config))
    except CONVERSION_ERRORS as error:
        raise CompileError(f"OpenVINO cannot compile the model: {first_line(error)}.") from error


def check_files(folder: pathlib.Path) -> None:
    """Refuse files that are missing, links, or not safe to read. Raises ``IntegrityError``."""
    for file in FILES:
        if (folder / file).is_symlink() or not (folder / file).is_file():
            raise IntegrityError(f"{folder / file} is missing or a link.")
    check_model(folder / MODEL, folder / WEIGHTS)


class Buffers:
    """A compiled model with one inference request, and buffers of the request for small tensors of known sizes.

    ``passthrough`` maps outputs that are unchanged inputs to these inputs. The runtime uses one buffer for both, so setting an
    output buffer would replace the input's; such outputs are copied instead.
    """

    def __init__(self, compiled: Any, signature: Signature, passthrough: Mapping[int, int]) -> None:
        self.compiled, self.passthrough = compiled, passthrough
        self.tensor = runtime().Tensor
        self.request = compiled.create_infer_request()
        inputs = [(_static_shape(port), spec.dtype) for port, spec in zip(compiled.inputs, signature.inputs, strict=True)]
        self.specs = [(_static_shape(port), spec.dtype) for port, spec in zip(compiled.outputs, signature.outputs, strict=True)]
        self.inputs = [self._buffer(i, shape, dtype, "input") for i, (shape, dtype) in enumerate(inputs)]
        self.outputs = [
            None if i in passthrough else self._buffer(i, shape, dtype, "output") for i, (shape, dtype) in enumerate(self.specs)
        ]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """The outputs for inputs of the compiled sizes. They belong to the caller."""
        alive = []  # the request points into their memory
        for i, (kept, array) in enumerate(zip(self.inputs, arrays, strict=True)):
            if kept is not None:
                kept[...] = array
            else:
                alive.append(np.ascontiguousarray(array))
                self.request.set_input_tensor(i, self.tensor(alive[-1], shared_memory=True))
        self.request.infer(share_outputs=True)
        return [
            kept.copy() if kept is not None else np.array(self.request.get_output_tensor(i).data)
            for i, kept in enumerate(self.outputs)
        ]

    def _buffer(self, index: int, shape: list[int] | None, dtype: str, side: str) -> Array | None:
        """A buffer of the request for a small tensor of known size; ``None`` for other tensors."""
        if shape is None or np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize > COPIED_BYTES:
            return None
        kept = np.zeros(shape, dtype)
        getattr(self.request, f"set_{side}_tensor")(index, self.tensor(kept, shared_memory=True))
        return kept


def _static_shape(port: Any) -> list[int] | None:
    shape = port.partial_shape
    return [int(size) for size in shape.to_shape()] if shape.is_static else None
