"""One copy of a model in the process of another server, such as Ray Serve: it answers whole infer requests."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import orjson

from trimtab.errors import TrimtabError, UsageError
from trimtab.serve.frames import aligned
from trimtab.serve.instance.load import load_artifact
from trimtab.serve.instance.served import Served
from trimtab.serve.instance.wire import as_bytes
from trimtab.serve.protocol import HEADER_LENGTH, Interface, Refusal, read_request, write_response


@dataclasses.dataclass(frozen=True)
class Response:
    """Status, body and headers of an HTTP answer."""

    status: int
    body: bytes
    headers: dict[str, str]


class Replica:
    """The artifact in ``path``, loaded and proven by its test vectors.

    Raises:
        TrimtabError: the artifact cannot be served, or its outputs on the test vectors are wrong.
    """

    def __init__(self, name: str, path: str, *, trust: bool = False, threads: int | None = None) -> None:
        self._name, self._served = name, Served(load_artifact(pathlib.Path(path), trust=trust, threads=threads))
        self._served.check_parity()
        self._interface = Interface.from_json(self._served.description())

    def answer(self, body: bytes, header_length: str | None = None) -> Response:
        """Answer an infer request of the Open Inference Protocol v2; a refusal is an answer, too.

        ``header_length`` is the request's header ``Inference-Header-Content-Length``, for binary tensors.
        """
        try:
            call, options = read_request(body, header_length, self._interface)
            buffer = bytearray()
            for tensor in call.tensors:
                buffer += bytes(tensor) + bytes(aligned(len(tensor)) - len(tensor))
            outputs = self._served.call(self._served.arrays(np.frombuffer(buffer, np.uint8), call.shapes))
        except Refusal as refusal:
            return _error(refusal.status, refusal.sentence)
        except TrimtabError as error:
            return _error(400 if isinstance(error, UsageError) else 500, str(error))
        head = {"model_name": self._name, "model_version": "1"}
        tensors, shapes = [as_bytes(array) for array in outputs], [list(array.shape) for array in outputs]
        parts, length = write_response(head, options, self._interface.outputs, tensors, shapes)
        headers = {"content-type": "application/json"}
        if length is not None:
            headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(length)}
        return Response(200, b"".join(parts), headers)


def _error(status: int, sentence: str) -> Response:
    return Response(status, orjson.dumps({"error": sentence}), {"content-type": "application/json"})
