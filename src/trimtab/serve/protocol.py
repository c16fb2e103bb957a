"""Open Inference Protocol v2: data types, requests and responses in JSON and in the binary tensor extension."""

from __future__ import annotations

import array
import dataclasses
import functools
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from trimtab._internal.text import shortened

DATATYPES: Final = {
    **{"bool": ("BOOL", "?"), "uint8": ("UINT8", "u1"), "uint16": ("UINT16", "u2"), "uint32": ("UINT32", "u4")},
    **{"uint64": ("UINT64", "u8"), "int8": ("INT8", "i1"), "int16": ("INT16", "i2"), "int32": ("INT32", "i4")},
    **{"int64": ("INT64", "i8"), "float16": ("FP16", "f2"), "float32": ("FP32", "f4"), "float64": ("FP64", "f8")},
    "bfloat16": ("BF16", "u2"),
}
"""dtype of the signature -> datatype of the protocol, and numpy's code. numpy has no bfloat16: its bits are held as uint16."""
HEADER_LENGTH = "inference-header-content-length"
"""HTTP header: bytes of JSON at the start of a body whose tensors follow in binary."""
MOST_DIMS = 64
SHORT, LARGEST = 256, float(np.finfo("f4").max)
"""Longest list that is converted without numpy, whose overhead dominates for short lists; and the largest FP32."""
_IDS = random.Random()
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

Bytes = bytes | bytearray | memoryview


class Refusal(Exception):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry_after = status, shortened(sentence, 1000), retry_after


@dataclasses.dataclass(frozen=True)
class TensorFormat:
    """One input or output: name, datatype, numpy code, bytes of one element, and sizes (numbers, or names of dimensions)."""

    name: str
    datatype: str
    code: str
    itemsize: int
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, name: str, dtype: str, shape: Sequence[int | str]) -> TensorFormat:
        """The format of a tensor of the artifact's signature."""
        datatype, code = DATATYPES[dtype]
        return cls(name, datatype, code, np.dtype(code).itemsize, tuple(shape))

    def __str__(self) -> str:
        return f"{self.name}: {self.datatype}[{', '.join(map(str, self.shape))}]"

    def metadata(self) -> dict[str, Any]:
        """Name, datatype and shape as the protocol has them; -1 for a size that varies."""
        shape = [size if isinstance(size, int) else -1 for size in self.shape]
        return {"name": self.name, "datatype": self.datatype, "shape": shape}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The sizes that a dynamic dimension may have: multiples of ``step`` from ``min`` to ``max``."""

    min: int
    max: int | None
    step: int

    def __contains__(self, size: int) -> bool:
        return size >= self.min and (self.max is None or size <= self.max) and size % self.step == 0

    def __str__(self) -> str:
        steps = f" in multiples of {self.step}" if self.step > 1 else ""
        return f"{self.min} to {'any' if self.max is None else self.max}{steps}"


@dataclasses.dataclass(slots=True)
class Call:
    """The checked tensors of one request, in the order of the signature."""

    tensors: list[Bytes]
    shapes: list[tuple[int, ...]]
    rows: int
    """Size of the batch dimension; 1 without one."""
    key: tuple[Any, ...] | None
    """Requests of equal keys can be joined along the batch; ``None`` if this one runs alone."""


@dataclasses.dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a served model, as its instances describe them."""

    inputs: tuple[TensorFormat, ...]
    outputs: tuple[TensorFormat, ...]
    dims: Mapping[str, Bounds]
    batch: str | None
    """Name of the batch dimension."""
    joinable: bool
    """Whether the batch is the first axis of every input and output, so that requests can be joined and answers cut."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Interface:
        """Read the description that an instance sends when it is ready."""
        inputs, outputs = ([TensorFormat.of(**tensor) for tensor in data[kind]] for kind in ("inputs", "outputs"))
        dims = {name: Bounds(*bounds) for name, bounds in data["dims"].items()}
        return cls(tuple(inputs), tuple(outputs), dims, data["batch"], data["joinable"])

    def describe(self) -> str:
        """The inputs as text: ``images: FP32[batch, 1, 8, 8]``."""
        return ", ".join(map(str, self.inputs))

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(wanted.name for wanted in self.inputs)

    def call(self, given: Mapping[str, tuple[str, Any, Any]]) -> Call:
        """Check a request. ``given``: name -> (datatype, shape, contents: bytes, or a list of JSON values).

        Raises:
            Refusal: 400, with the sentence that says what was expected.
        """
        if unknown := given.keys() - self._names:
            raise Refusal(400, f"There is no input {min(unknown)!r}. The model takes {self.describe()}.")
        sizes: dict[str, int] = {}
        tensors, shapes = list[Bytes](), list[tuple[int, ...]]()
        for wanted in self.inputs:
            if wanted.name not in given:
                raise Refusal(400, f"The input {wanted.name!r} is missing. The model takes {self.describe()}.")
            datatype, shape, contents = given[wanted.name]
            if datatype != wanted.datatype:
                raise Refusal(400, f"Input {wanted.name!r} has the datatype {datatype!r:.50}; the model takes {wanted}.")
            shapes.append(self._shape(wanted, shape, sizes))
            tensors.append(_contents(wanted, shapes[-1], contents))
        rows = sizes[self.batch] if self.batch is not None else 1
        return Call(tensors, shapes, rows, tuple([shape[1:] for shape in shapes]) if self.joinable else None)

    def _shape(self, wanted: TensorFormat, shape: Any, sizes: dict[str, int]) -> tuple[int, ...]:
        if not isinstance(shape, (list, tuple)) or len(shape) != len(wanted.shape) or len(shape) > MOST_DIMS:
            raise Refusal(400, f"Input {wanted.name!r} has the shape {shape!r:.200}; the model takes {wanted}.")
        for size, want in zip(shape, wanted.shape, strict=True):
            if type(size) is not int or size < 0 or size >= 1 << 48 or (isinstance(want, int) and size != want):
                raise Refusal(400, f"Input {wanted.name!r} has the shape {shape!r:.200}; the model takes {wanted}.")
            if isinstance(want, str):
                self._size(wanted, want, size, sizes.setdefault(want, size))
        return tuple(shape)

    def _size(self, wanted: TensorFormat, dim: str, size: int, known: int) -> None:
        if size != known:
            raise Refusal(
                400, f"Dimension {dim!r} is {known} in one input and {size} in {wanted.name!r}. Give one size in all."
            )
        if dim == self.batch and self.joinable:  # instances split and pad batches
            if not size:
                raise Refusal(400, f"Dimension {dim!r} of {wanted.name!r} is 0. Give at least one row.")
        elif size not in self.dims[dim]:
            raise Refusal(400, f"Dimension {dim!r} of {wanted.name!r} is {size}; the model was built for {self.dims[dim]}.")


def _contents(wanted: TensorFormat, shape: tuple[int, ...], contents: Any) -> Bytes:
    """The bytes of one tensor, from bytes or from JSON values."""
    count = math.prod(shape)
    if not isinstance(contents, list):
        if len(contents) != count * wanted.itemsize:
            raise Refusal(
                400,
                f"Input {wanted.name!r} of shape {list(shape)} holds {len(contents)} bytes; {wanted.datatype} takes "
                f"{count * wanted.itemsize}.",
            )
        return contents  # type: ignore[no-any-return]
    if (packed := _short_floats(wanted, contents)) is not None and len(packed) == count:
        return packed.tobytes()
    found = _array(wanted, contents)
    if found.size != count:
        raise Refusal(400, f"Input {wanted.name!r} of shape {list(shape)} holds {found.size} values; {count} are needed.")
    return found.tobytes()


def _short_floats(wanted: TensorFormat, values: list[Any]) -> array.array[float] | None:
    """A short, flat list of numbers that FP32 holds; ``None`` for others."""
    if wanted.code != "f4" or not 0 < len(values) <= SHORT or type(values[0]) is bool:
        return None
    try:
        packed = array.array("f", values)
        return packed if min(values) >= -LARGEST and max(values) <= LARGEST else None
    except (TypeError, OverflowError):  # nested, or no numbers
        return None


def _array(wanted: TensorFormat, values: list[Any]) -> npt.NDArray[Any]:
    """JSON values, flat or nested, as an array. Values that the datatype cannot hold are refused, never converted."""
    try:
        found = np.array(values)
    except (ValueError, OverflowError) as error:
        raise Refusal(400, f"The data of input {wanted.name!r} is no regular list of numbers.") from error
    kinds = {"BOOL": "b"}.get(wanted.datatype, "iu" if wanted.code[0] in "iu" and wanted.datatype != "BF16" else "iuf")
    if found.dtype.kind not in kinds and found.size:
        raise Refusal(400, f"The data of input {wanted.name!r} does not hold values of {wanted.datatype} alone.")
    if wanted.code[0] == "f" or wanted.datatype == "BF16":
        return _floats(wanted, found)
    if wanted.code[0] in "iu" and found.size:
        info = np.iinfo(wanted.code)
        if not info.min <= int(found.min()) <= int(found.max()) <= info.max:
            raise Refusal(400, f"The data of input {wanted.name!r} exceeds {wanted.datatype}, {info.min} to {info.max}.")
    return found.astype(wanted.code)


def _floats(wanted: TensorFormat, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Finite numbers in the float format of the input. A number beyond the largest one is refused."""
    with np.errstate(over="ignore"):
        if wanted.datatype == "BF16":
            found: npt.NDArray[Any] = _to_bf16(values.astype("f4"))
            infinite = (found & 0x7FFF) == 0x7F80
        else:
            found = values.astype(wanted.code)
            infinite = np.isinf(found)
    if infinite.any():
        raise Refusal(400, f"The data of input {wanted.name!r} exceeds {wanted.datatype}: {values[infinite][0]:.6g}.")
    return found


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to nearest even. NaN stays NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Id, requested outputs and timeout of a request."""

    id: str | None
    outputs: tuple[tuple[int, bool], ...]
    """Index of each output in the answer, and whether its contents are binary."""
    timeout_s: float | None


def request_id(given: str | None) -> str:
    """The id of a request: the one that the client has sent, or a new one if that is missing, long, or not plain text."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else f"{_IDS.getrandbits(64):016x}"


def read_request(body: Bytes, header_length: str | None, interface: Interface) -> tuple[Call, RequestOptions]:
    """Parse and check the body of an infer request. ``header_length`` is the value of the HTTP header of that name.

    Raises:
        Refusal: 400.
    """
    view = memoryview(body)
    cut = len(view)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdigit() or int(header_length) > len(view):
            raise Refusal(400, f"Inference-Header-Content-Length is {header_length!r:.50}; the body has {len(view)} bytes.")
        cut = int(header_length)
    try:
        request = orjson.loads(view[:cut])
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"The body is no JSON: {error}.") from error
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise Refusal(400, 'The body has no list "inputs". Give {"inputs": [{"name", "shape", "datatype", "data"}]}.')
    given, end = _read_inputs(request["inputs"], view, cut)
    if end != len(view):
        raise Refusal(400, f"The body has {len(view)} bytes, but its inputs account for {end}.")
    return interface.call(given), _read_options(request, interface)


def _read_inputs(inputs: list[Any], view: memoryview, offset: int) -> tuple[dict[str, tuple[str, Any, Any]], int]:
    """The inputs by name, and the offset of the end of the last binary tensor."""
    given = {}
    for item in inputs:
        if not isinstance(item, dict) or not isinstance(name := item.get("name"), str):
            raise Refusal(400, 'An input has no "name". Give {"name", "shape", "datatype", "data"}.')
        if name in given:
            raise Refusal(400, f"The input {name!r:.200} is given twice.")
        contents: Any = item.get("data")
        size = _parameters(item, name).get("binary_data_size")
        if size is not None:
            if type(size) is not int or size < 0 or offset + size > len(view):
                raise Refusal(400, f"Input {name!r:.200} has a binary_data_size of {size!r:.50}; the body holds less.")
            contents = view[offset : offset + size]
            offset += size
        elif not isinstance(contents, list):
            raise Refusal(400, f'Input {name!r:.200} has no list "data" and no binary_data_size.')
        given[name] = (item.get("datatype", ""), item.get("shape"), contents)
    return given, offset


def _parameters(item: Mapping[str, Any], of: str) -> Mapping[str, Any]:
    found = item.get("parameters", {})
    if not isinstance(found, dict):
        raise Refusal(400, f"The parameters of {of!r:.200} are no object.")
    return found


def _read_options(request: Mapping[str, Any], interface: Interface) -> RequestOptions:
    parameters = _parameters(request, "the request")
    binary, identity = parameters.get("binary_data_output") is True, request.get("id")
    if identity is not None and not isinstance(identity, str):
        raise Refusal(400, 'The "id" is no text.')
    outputs = request.get("outputs")
    if not outputs:
        chosen = tuple([(index, binary) for index in range(len(interface.outputs))])
        return RequestOptions(identity, chosen, timeout_of(parameters))
    if not isinstance(outputs, list) or not all(isinstance(item, dict) for item in outputs):
        raise Refusal(400, 'The "outputs" are no list of objects. Give [{"name"}].')
    found = list[tuple[int, bool]]()
    for item in outputs:
        own = _parameters(item, str(item.get("name")))
        found.append((output_index(interface, item.get("name")), own.get("binary_data", binary) is True))
        if own.get("classification"):
            raise Refusal(400, "The classification extension is not supported. Ask for the output itself.")
    return RequestOptions(identity, tuple(found), timeout_of(parameters))


def output_index(interface: Interface, name: Any) -> int:
    """The index of the output ``name``. Raises ``Refusal`` 400 if there is none."""
    for index, output in enumerate(interface.outputs):
        if output.name == name:
            return index
    names = ", ".join(output.name for output in interface.outputs)
    raise Refusal(400, f"There is no output {name!r:.200}. The model gives {names}.")


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """The request's own deadline in seconds, from its parameter ``timeout`` in microseconds."""
    timeout = parameters.get("timeout")
    if timeout is None or timeout == 0:
        return None
    if type(timeout) is not int or timeout < 0:
        raise Refusal(400, f"The parameter timeout is {timeout!r:.50}; it is a number of microseconds.")
    return timeout * 1e-6


def write_response(
    head: dict[str, Any],
    options: RequestOptions,
    formats: Sequence[TensorFormat],
    tensors: Sequence[Bytes],
    shapes: Sequence[Sequence[int]],
) -> tuple[list[Bytes], int | None]:
    """The body of an infer response in parts, and the length of its JSON if binary tensors follow."""
    outputs, parts = list[dict[str, Any]](), list[Bytes]()
    for index, binary in options.outputs:
        tensor, form = tensors[index], formats[index]
        output: dict[str, Any] = {"name": form.name, "datatype": form.datatype, "shape": shapes[index]}
        if binary:
            output["parameters"] = {"binary_data_size": len(tensor)}
            parts.append(tensor)
        else:
            output["data"] = values_of(form, tensor)
        outputs.append(output)
    answer = {**head, "outputs": outputs} if options.id is None else {**head, "id": options.id, "outputs": outputs}
    text = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return [text, *parts], len(text) if parts else None


def values_of(form: TensorFormat, tensor: Bytes) -> npt.NDArray[Any]:
    """The values of a tensor as a flat array that JSON can hold; NaN and infinities become ``null`` there."""
    found = np.frombuffer(tensor, dtype=form.code)
    return (found.astype(np.uint32) << 16).view(np.float32) if form.datatype == "BF16" else found
