"""The Open Inference Protocol without a server: what is read, refused and written."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.serve.frames import Reader, pack, unpack
from trimtab.serve.protocol import Bounds, Interface, Refusal, TensorFormat, read_request, values_of, write_response

INTERFACE = Interface(
    inputs=(TensorFormat.of("x", "float32", ("batch", 3)), TensorFormat.of("ids", "int8", ("batch", "steps"))),
    outputs=(TensorFormat.of("y", "float32", ("batch",)), TensorFormat.of("half", "bfloat16", ("batch", 2))),
    dims={"batch": Bounds(1, 64, 1), "steps": Bounds(2, 8, 2)},
    batch="batch",
    joinable=True,
)
X = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2.5, 3]}
IDS = {"name": "ids", "shape": [1, 2], "datatype": "INT8", "data": [[1, -1]]}


def body(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def test_json_and_binary_give_the_same_call() -> None:
    call, asked = read_request(body(X, IDS, id="7"), None, INTERFACE)
    assert (call.shapes, call.rows, call.key, asked.id) == ([(1, 3), (1, 2)], 1, ((3,), (2,)), "7")
    assert np.frombuffer(call.tensors[0], "f4").tolist() == [1, 2.5, 3]
    raw = {**X, "parameters": {"binary_data_size": 12}}
    del raw["data"]
    head = body(IDS, raw)
    other, _ = read_request(head + np.array([1, 2.5, 3], "f4").tobytes(), str(len(head)), INTERFACE)
    assert [bytes(tensor) for tensor in other.tensors] == [bytes(tensor) for tensor in call.tensors]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([X], "The input 'ids' is missing. The model takes x: FP32[batch, 3], ids: INT8[batch, steps]."),
        ([X, IDS, X], "The input 'x' is given twice."),
        ([X, IDS, {**X, "name": "z"}], "There is no input 'z'."),
        ([{**X, "datatype": "FP64"}, IDS], "Input 'x' has the datatype 'FP64'; the model takes x: FP32[batch, 3]."),
        ([{**X, "shape": [1, 4]}, IDS], "Input 'x' has the shape [1, 4]; the model takes x: FP32[batch, 3]."),
        ([{**X, "shape": [True, 3]}, IDS], "Input 'x' has the shape"),
        ([{**X, "shape": [-1, 3]}, IDS], "Input 'x' has the shape"),
        ([{**X, "shape": [2**60, 3]}, IDS], "Input 'x' has the shape"),
        ([{**X, "shape": None}, IDS], "Input 'x' has the shape"),
        ([{**X, "shape": [0, 3], "data": []}, IDS], "Dimension 'batch' of 'x' is 0. Give at least one row."),
        ([{**X, "shape": [2, 3], "data": [1] * 6}, IDS], "Dimension 'batch' is 2 in one input and 1 in 'ids'."),
        ([X, {**IDS, "shape": [1, 3]}], "Dimension 'steps' of 'ids' is 3; the model was built for 2 to 8 in multiples of 2."),
        ([{**X, "data": [1, 2]}, IDS], "Input 'x' of shape [1, 3] holds 2 values; 3 are needed."),
        ([{**X, "data": [1, 2, "3"]}, IDS], "The data of input 'x' does not hold values of FP32 alone."),
        ([{**X, "data": [1, 2, None]}, IDS], "The data of input 'x' does not hold values of FP32 alone."),
        ([{**X, "data": [[1, 2], [3]]}, IDS], "The data of input 'x' is no regular list of numbers."),
        ([X, {**IDS, "data": [1, 1.5]}], "The data of input 'ids' does not hold values of INT8 alone."),
        ([X, {**IDS, "data": [1, 128]}], "The data of input 'ids' exceeds INT8, -128 to 127."),
        ([{**X, "data": [1, 2, 1e39]}, IDS], "The data of input 'x' exceeds FP32: 1e+39."),
        ([X, {**IDS, "data": [1, 2**70]}], "The data of input 'ids'"),
        ([{**X, "data": 1}, IDS], "Input 'x' has no list \"data\" and no binary_data_size."),
        ([{**X, "parameters": {"binary_data_size": 12}}, IDS], "Input 'x' has a binary_data_size of 12; the body holds less."),
        ([{**X, "parameters": 3}, IDS], "The parameters of 'x' are no object."),
        ([3, IDS], 'An input has no "name".'),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(inputs: list[Any], sentence: str) -> None:
    with pytest.raises(Refusal) as refused:
        read_request(body(*inputs), None, INTERFACE)
    assert refused.value.status == 400
    assert refused.value.sentence.startswith(sentence)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"inputs": 3}', b'{"inputs": [], "id": 3}', b"\xff"])
def test_a_body_that_is_no_request_is_refused(text: bytes) -> None:
    with pytest.raises(Refusal):
        read_request(text, None, INTERFACE)


@pytest.mark.parametrize("length", ["-1", "99999", "x", "1e3", ""])
def test_a_wrong_header_length_is_refused(length: str) -> None:
    with pytest.raises(Refusal, match="Inference-Header-Content-Length"):
        read_request(body(X, IDS), length, INTERFACE)


def test_bytes_that_no_input_claims_are_refused() -> None:
    head = body(X, IDS)
    with pytest.raises(Refusal, match="but its inputs account for"):
        read_request(head + b"more", str(len(head)), INTERFACE)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_is_read_or_refused(value: Any) -> None:
    for request in (
        value,
        {"inputs": value},
        {"inputs": [value]},
        {"inputs": [{**X, "data": value}, IDS]},
        {"inputs": [X, IDS], "outputs": value},
    ):
        with contextlib.suppress(Refusal):
            assert read_request(json.dumps(request).encode(), None, INTERFACE) is not None


def test_outputs_are_chosen_and_written() -> None:
    tensors = [
        np.array([1.5, 2], "f4").tobytes(),
        torch.tensor([[1, 2], [3, 4.5]], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes(),
    ]
    _, asked = read_request(
        body(X, IDS, outputs=[{"name": "half"}, {"name": "y", "parameters": {"binary_data": True}}]), None, INTERFACE
    )
    parts, length = write_response({"model_name": "m"}, asked, INTERFACE.outputs, tensors, [[2], [2, 2]])
    assert length == len(parts[0])
    answer = json.loads(parts[0])
    assert [output["name"] for output in answer["outputs"]] == ["half", "y"]
    assert answer["outputs"][0]["data"] == [1, 2, 3, 4.5]
    assert answer["outputs"][1]["parameters"] == {"binary_data_size": 8}
    assert bytes(parts[1]) == tensors[0]
    with pytest.raises(Refusal, match="There is no output 'z'. The model gives y, half."):
        read_request(body(X, IDS, outputs=[{"name": "z"}]), None, INTERFACE)


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1))
def test_bf16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    form = TensorFormat.of("x", "bfloat16", ("n",))
    interface = Interface((form,), (), {"n": Bounds(1, None, 1)}, None, False)
    finite = [value for value in values if np.isfinite(value)]
    if not finite:
        return
    given = {"x": ("BF16", [len(finite)], finite)}
    want = torch.tensor(finite, dtype=torch.float32).to(torch.bfloat16).float()
    if not want.isfinite().all():  # beyond the largest bfloat16
        with pytest.raises(Refusal, match="exceeds BF16"):
            interface.call(given)
        return
    assert values_of(form, interface.call(given).tensors[0]).tolist() == want.tolist()


@given(st.lists(st.binary(max_size=200), max_size=4), st.integers(1, 50))
def test_frames_come_out_as_they_went_in(tensors: list[bytes], step: int) -> None:
    sent = b"".join(pack({"id": 1}, [[tensor[:3], tensor[3:]] for tensor in tensors])) * 2
    reader, found = Reader(), []
    for start in range(0, len(sent), step):
        found += reader.feed(sent[start : start + step])
    assert len(found) == 2
    for head, content in found:
        assert head == {"id": 1}
        assert [bytes(tensor) for tensor in unpack(content, [len(tensor) for tensor in tensors])] == tensors
