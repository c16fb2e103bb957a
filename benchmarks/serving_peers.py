"""An ONNX model behind another server, for ``benchmarks/serving.py``: ``python serving_peers.py KIND MODEL.onnx PORT``.

Written as the tutorials of each server write it, with its own batching where it has one. Runs in the benchmark's own
environment, which has no trimtab. Every server takes ``{"input name": nested list of one row, ...}`` and answers a list; Triton
speaks the Open Inference Protocol. One copy of the model, one thread.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import onnxruntime

BATCH, WAIT_S = 32, 0.005
"""Rows of the largest batch, and how long a server waits for more."""
TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class Model:
    """One session with one thread; ``identity`` is no file but a function, which costs nothing."""

    def __init__(self, path: str) -> None:
        self.session = None
        if path != "identity":
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def __call__(self, rows: list[dict[str, Any]]) -> np.ndarray:
        """The first output for a list of requests."""
        if self.session is None:
            return np.asarray([next(iter(row.values())) for row in rows], np.float32)
        kinds = {item.name: TYPES[item.type] for item in self.session.get_inputs()}
        feeds = {name: np.asarray([row[name] for row in rows], kind) for name, kind in kinds.items()}
        return self.session.run(None, feeds)[0]


def fastapi(path: str, port: int) -> None:
    """FastAPI by hand: the model in a thread, one request at a time."""
    import fastapi
    import uvicorn

    app, model = fastapi.FastAPI(), Model(path)

    @app.post("/predict")
    async def predict(row: dict[str, Any]) -> dict[str, Any]:
        output = await asyncio.to_thread(model, [row])
        return {"output": output[0].tolist()}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if "litserve" in sys.argv:  # its workers import this module and look for the class
    import litserve as lit

    class Api(lit.LitAPI):
        """The model, with or without batches."""

        path = sys.argv[2]

        def setup(self, device: str) -> None:
            """Load."""
            self.model = Model(self.path)

        def predict(self, x: Any) -> Any:
            """The outputs of a batch, or of one row."""
            return self.model([x])[0] if isinstance(x, dict) else self.model(x)

        def encode_response(self, output: np.ndarray) -> dict[str, Any]:
            """The answer."""
            return {"output": output.tolist()}

    class Batching(Api):
        """The model with batches."""

        def batch(self, inputs: list[Any]) -> list[Any]:
            """The rows."""
            return inputs

        def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
            """An output for each row."""
            return list(output)


def litserve(path: str, port: int) -> None:
    """LitServe with its fast queue; it batches where a model pays for it."""
    api = Api() if path == "identity" else Batching(max_batch_size=BATCH, batch_timeout=WAIT_S)
    server = lit.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")


def ray(path: str, port: int) -> None:
    """Ray Serve with one replica; it batches where a model pays for it."""
    import time

    import ray as runtime
    from ray import serve

    @serve.deployment(num_replicas=1, max_ongoing_requests=256)
    class Predictor:
        def __init__(self) -> None:
            self.model = Model(path)

        @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
        async def many(self, rows: list[dict[str, Any]]) -> list[Any]:
            return [output.tolist() for output in self.model(rows)]

        async def __call__(self, request: Any) -> dict[str, Any]:
            row = await request.json()
            return {"output": (await self.many(row)) if path != "identity" else self.model([row])[0].tolist()}

    runtime.init(_node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=4, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    serve.run(Predictor.bind(), route_prefix="/predict")
    while True:
        time.sleep(1)


def triton(path: str, port: int) -> None:
    """Triton with its Python backend and dynamic batching, by PyTriton."""
    import socket

    from pytriton.decorators import batch
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    model = Model(path)
    inputs, outputs = ([Tensor(name=name, dtype=np.float32, shape=(16,))] for name in ("input", "output"))
    if model.session is not None:

        def tensors(items: Any) -> list[Tensor]:
            shapes = [tuple(size if isinstance(size, int) else -1 for size in item.shape[1:]) for item in items]
            return [Tensor(name=one.name, dtype=TYPES[one.type], shape=shape) for one, shape in zip(items, shapes, strict=True)]

        inputs, outputs = tensors(model.session.get_inputs()), tensors(model.session.get_outputs())

    @batch
    def infer(**arrays: np.ndarray) -> list[np.ndarray]:
        return [arrays["input"]] if model.session is None else model.session.run(None, arrays)

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [listening.getsockname()[1] for listening in (one, other)]
    config = TritonConfig(http_address="127.0.0.1", http_port=port, grpc_port=ports[0], metrics_port=ports[1])
    with Triton(config=config) as server:
        server.bind(
            model_name="model",
            infer_func=infer,
            inputs=inputs,
            outputs=outputs,
            config=ModelConfig(max_batch_size=BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
        )
        server.serve()


if __name__ == "__main__":
    kinds = {"fastapi": fastapi, "litserve": litserve, "ray": ray, "triton": triton}
    kinds[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
