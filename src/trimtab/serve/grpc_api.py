"""The gRPC interface: the Open Inference Protocol v2 with unary and streaming inference."""

from __future__ import annotations

import hmac
import importlib.metadata
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from trimtab.errors import UsageError
from trimtab.serve.http.application import EXTENSIONS, configuration, load, metadata, unload
from trimtab.serve.protocol import DATATYPES, Refusal, output_index, request_id, timeout_of
from trimtab.serve.repository import Repository
from trimtab.serve.traces import Record, Tracer

SERVICE = "inference.GRPCInferenceService"
FIELDS = {
    **{"BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents"},
    **{"INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents"},
    **{"UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents"},
}
"""Datatype -> the field of ``InferTensorContents``. FP16 and BF16 have none: they come in ``raw_input_contents``."""
LOGGED = ("ModelInfer", "RepositoryModelLoad", "RepositoryModelUnload")
"""Methods whose successful calls are logged, too."""
CODES_OF = dict(DATATYPES.values())
"""Datatype -> numpy's code."""
CODES = {
    **{400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 404: grpc.StatusCode.NOT_FOUND},
    **{503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED, 500: grpc.StatusCode.INTERNAL},
}


def messages() -> dict[str, Any]:
    """The message classes of the protocol by name. A pool of their own lets a client's stubs be loaded in the same process."""
    found = descriptor_pb2.FileDescriptorSet.FromString((pathlib.Path(__file__).parent / "open_inference.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in found.file:
        pool.Add(file)
    names = [message.name for file in found.file for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in names}


class Service:
    """The methods of the gRPC service."""

    def __init__(self, repository: Repository, tracer: Tracer | None = None) -> None:
        self._repository, self._tracer = repository, tracer
        self._messages = messages()
        token = repository.options.token
        self._token = None if token is None else f"Bearer {token}"

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler to add to a server."""
        methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            **{"ServerLive": self._live, "ServerReady": self._ready, "ModelReady": self._model_ready},
            **{"ServerMetadata": self._server, "ModelMetadata": self._metadata, "ModelInfer": self._infer},
            **{"ModelConfig": self._config, "ModelStatistics": self._statistics, "RepositoryIndex": self._index},
            **{"RepositoryModelLoad": self._load, "RepositoryModelUnload": self._unload},
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary_handler(name, method),
                request_deserializer=self._messages[f"{name}Request"].FromString,
                response_serializer=self._messages[f"{name}Response"].SerializeToString,
            )
            for name, method in methods.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=self._messages["ModelInferRequest"].FromString,
            response_serializer=self._messages["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _unary_handler(self, name: str, method: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        kind = self._messages[f"{name}Response"]

        async def answer(request: Any, context: Any) -> Any:
            tag, record = _request_id(context), Record()
            try:
                if name not in ("ServerLive", "ServerReady"):
                    self._authorize(context)
                found = await (self._infer(request, record) if name == "ModelInfer" else method(request))
            except Refusal as refusal:
                self._log_and_trace(tag, name, context, record, refusal)
                await context.abort(CODES.get(refusal.status, grpc.StatusCode.INVALID_ARGUMENT), refusal.sentence)
            if name in LOGGED:
                self._log_and_trace(tag, name, context, record)
            return kind(**found) if isinstance(found, dict) else found

        return answer

    def _log_and_trace(self, tag: str, name: str, context: Any, record: Record, refusal: Refusal | None = None) -> None:
        """Log the request if ``--log-requests`` is on, and add a span if tracing is on."""
        status = 200
        if refusal is not None:
            status, record.facts["error"] = refusal.status, refusal.sentence
        if self._repository.options.log_requests:
            facts = {"method": "gRPC", "path": name, "status": status, "ms": record.ms, **record.all_facts()}
            self._repository.log("request", request_id=tag, **facts)
        if self._tracer is not None:
            code = CODES.get(status, grpc.StatusCode.OK).value[0]
            attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": name, "rpc.grpc.status_code": code}
            carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            self._tracer.add(f"{SERVICE}/{name}", status, record, carrier, attributes | {"trimtab.request_id": tag})

    def _authorize(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if self._token is not None and not hmac.compare_digest(str(given).encode(), self._token.encode()):
            raise Refusal(401, "This server wants a token. Send the metadata authorization: Bearer TOKEN.")

    async def _live(self, request: Any) -> dict[str, Any]:
        return {"live": True}

    async def _ready(self, request: Any) -> dict[str, Any]:
        return {"ready": self._repository.ready}

    async def _model_ready(self, request: Any) -> dict[str, Any]:
        ready = self._repository.model(request.name).serving(request.version or None).ready
        return {"ready": ready and not self._repository.draining}

    async def _server(self, request: Any) -> dict[str, Any]:
        return {"name": "trimtab", "version": importlib.metadata.version("trimtab"), "extensions": EXTENSIONS}

    async def _metadata(self, request: Any) -> dict[str, Any]:
        return metadata(self._repository, request.name, request.version or None)

    async def _config(self, request: Any) -> dict[str, Any]:
        found = configuration(self._repository, request.name, request.version or None)
        return {"config": {key: found[key] for key in ("name", "platform", "max_batch_size", "input", "output")}}

    async def _statistics(self, request: Any) -> dict[str, Any]:
        if request.name:
            found = [self._repository.model(request.name).serving(request.version or None)]
        else:
            found = list(self._repository.deployments())
        statistics = [one.metrics.statistics() for one in found]
        beside = ("shadow", "input_drift")  # no part of the protocol's message
        return {"model_stats": [{key: value for key, value in one.items() if key not in beside} for one in statistics]}

    async def _index(self, request: Any) -> dict[str, Any]:
        return {"models": self._repository.index(request.ready)}

    async def _load(self, request: Any) -> dict[str, Any]:
        if request.parameters:
            raise Refusal(400, "A model is loaded from the folder that the server was started with; it takes no parameters.")
        await load(self._repository, request.model_name)
        return {}

    async def _unload(self, request: Any) -> dict[str, Any]:
        await unload(self._repository, request.model_name)
        return {}

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer the requests of a stream in their order; one that is refused does not end the stream."""
        kind, tag = self._messages["ModelStreamInferResponse"], _request_id(context)
        try:
            self._authorize(context)
        except Refusal as refusal:
            await context.abort(CODES[401], refusal.sentence)
        async for request in requests:
            record = Record()
            try:
                found = await self._infer(request, record)
                self._log_and_trace(tag, "ModelStreamInfer", context, record)
                yield kind(infer_response=found)
            except Refusal as refusal:
                self._log_and_trace(tag, "ModelStreamInfer", context, record, refusal)
                yield kind(error_message=refusal.sentence, infer_response={"id": request.id})

    async def _infer(self, request: Any, record: Record | None = None) -> Any:
        if self._repository.draining:
            raise Refusal(503, "The server is stopping and takes no further requests.", 1)
        model = self._repository.model(request.model_name)
        deployment = model.route(request.model_version or None)
        interface = deployment.interface
        assert interface is not None
        start, record = time.perf_counter(), record or Record()
        record.facts |= {"model": model.name, "version": deployment.metrics.version}
        try:
            call = interface.call(_read_inputs(request))
            timeout = timeout_of({name: _parameter(value) for name, value in request.parameters.items() if name == "timeout"})
            chosen = [output_index(interface, output.name) for output in request.outputs] or range(len(interface.outputs))
            most = self._repository.options.deadline_s
            record.mark_queued()
            answer = await deployment.submit(call, most if timeout is None else min(timeout, most))
            record.mark_computed(answer)
        except Refusal as refusal:
            deployment.metrics.count_refusal(refusal.status)
            raise
        outputs = [
            {"name": form.name, "datatype": form.datatype, "shape": shape}
            for form, shape in [(interface.outputs[index], answer.shapes[index]) for index in chosen]
        ]
        found = self._messages["ModelInferResponse"](
            model_name=model.name,
            model_version=deployment.metrics.version,
            id=request.id,
            outputs=outputs,
            raw_output_contents=[bytes(answer.tensors[index]) for index in chosen],
        )
        deployment.metrics.count_answer(time.perf_counter() - start, answer)
        return found


def _request_id(context: Any) -> str:
    """The request id: the client's ``x-request-id`` or a new one. It is returned as trailing metadata."""
    found = dict(context.invocation_metadata() or ()).get("x-request-id")
    tag = request_id(found if isinstance(found, str) else None)
    context.set_trailing_metadata((("x-request-id", tag),))
    return tag


def _read_inputs(request: Any) -> dict[str, tuple[str, Any, Any]]:
    """The inputs of a request by name: datatype, shape and contents."""
    raw, given = list(request.raw_input_contents), dict[str, tuple[str, Any, Any]]()
    if raw and len(raw) != len(request.inputs):
        raise Refusal(400, f"raw_input_contents holds {len(raw)} tensors for {len(request.inputs)} inputs. Give one for each.")
    for number, tensor in enumerate(request.inputs):
        if tensor.name in given:
            raise Refusal(400, f"The input {tensor.name!r:.200} is given twice.")
        if raw and tensor.HasField("contents"):
            raise Refusal(400, f"The input {tensor.name!r:.200} has contents beside raw_input_contents. Give one of them.")
        contents = raw[number] if raw else _contents(tensor)
        given[tensor.name] = (tensor.datatype, list(tensor.shape), contents)
    return given


def _contents(tensor: Any) -> bytes:
    """The typed contents of an input as bytes."""
    if tensor.datatype not in CODES_OF:
        return b""  # the model has no such input, which is what is refused
    if tensor.datatype not in FIELDS:
        raise Refusal(400, f"Input {tensor.name!r:.200} of datatype {tensor.datatype!r:.50} must come in raw_input_contents.")
    values = np.array(list(getattr(tensor.contents, FIELDS[tensor.datatype])))
    code = CODES_OF[tensor.datatype]
    if values.size and code[0] in "iu":
        info = np.iinfo(code)
        if values.min() < info.min or values.max() > info.max:
            raise Refusal(400, f"The data of input {tensor.name!r:.200} exceeds {tensor.datatype}, {info.min} to {info.max}.")
    return values.astype(code).tobytes()


def _parameter(parameter: Any) -> Any:
    chosen = parameter.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(parameter, chosen)


async def start(repository: Repository, tracer: Tracer | None = None) -> tuple[grpc.aio.Server, int]:
    """Start the gRPC server. Returns it and its port.

    Raises:
        UsageError: the port is taken.
    """
    options = repository.options
    most = int(options.max_body_mb * 1e6)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Service(repository, tracer).handler(),))
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.grpc_port}"
    try:
        if options.tls is None:
            port = server.add_insecure_port(address)
        else:
            certificate, key = (path.read_bytes() for path in options.tls)
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    except RuntimeError as error:
        raise UsageError(f"{address} cannot be used for gRPC. Choose another with --grpc-port, or give --no-grpc.") from error
    await server.start()
    return server, port
