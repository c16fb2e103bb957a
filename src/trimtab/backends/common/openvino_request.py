"""A compiled OpenVINO model with an inference request and little call overhead."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trimtab.backends.common import openvino_conversion as ir
from trimtab.backends.common.openvino_file import Array, Buffers, runtime
from trimtab.core.measurement import OperatorTime, operator_shares
from trimtab.core.signature import Signature


class Request:
    """A compiled model with one inference request. Outputs belong to the caller.

    ``passthrough`` maps outputs that are unchanged inputs to these inputs. The runtime uses one buffer for both, so setting an
    output buffer would replace the input's; such outputs are copied instead.
    """

    def __init__(self, compiled: Any, signature: Signature, passthrough: Mapping[int, int]) -> None:
        buffers = Buffers(compiled, signature, passthrough)
        self._passthrough = passthrough
        self._tensor = buffers.tensor
        self.compiled = compiled
        self.parallel = int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        self._request = buffers.request
        self._infer = self._request.infer
        self._queue: Any = None
        self._lock = threading.Lock()  # for the buffers below: several threads may call one executable
        self._input_buffers, self._output_buffers = _tensors(buffers.inputs), _tensors(buffers.outputs)
        self._output_shapes = [(shape, getattr(torch, dtype)) for shape, dtype in buffers.specs]
        self._all_buffered = None not in self._input_buffers and None not in self._output_buffers

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for inputs of the compiled sizes."""
        with self._lock:
            if not self._all_buffered:
                return self._run_large(leaves)
            for buffer, leaf in zip(self._input_buffers, leaves, strict=True):
                buffer.copy_(leaf.detach() if leaf.requires_grad else leaf)  # type: ignore[union-attr]
            self._infer(share_outputs=True)
            return [buffer.clone() for buffer in self._output_buffers]  # type: ignore[union-attr]

    def coverage(self) -> list[str]:
        """See :func:`trimtab.backends.common.openvino_conversion.coverage`."""
        return ir.coverage(self.compiled)

    def operator_times(self, leaves: Sequence[torch.Tensor], repeats: int) -> list[OperatorTime]:
        """Performance counters over ``repeats`` calls. The model must be compiled with ``PERF_COUNT``."""
        seen: list[Any] = []
        for turn in range(repeats + 1):
            self.run(leaves)
            if turn:  # the first call warms up
                seen += self._request.get_profiling_info()
        # an operator that took less than a microsecond counts as not executed in that call
        ran = {info.node_name for info in seen if info.status.name == "EXECUTED"}
        return operator_shares([_operator(info) for info in seen if info.node_name in ran], repeats)

    def _run_large(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        alive = []  # keeps the arrays alive: the request points into their memory
        for i, (buffer, leaf) in enumerate(zip(self._input_buffers, leaves, strict=True)):
            if buffer is not None:
                buffer.copy_(leaf.detach() if leaf.requires_grad else leaf)
            else:
                alive.append(leaf.contiguous().numpy(force=True))
                self._request.set_input_tensor(i, self._tensor(alive[-1], shared_memory=True))
        fresh = [self._set_output_tensor(i) for i, buffer in enumerate(self._output_buffers) if buffer is None]
        self._infer(share_outputs=True)
        outputs = iter(fresh)
        buffers = enumerate(self._output_buffers)
        return [buffer.clone() if buffer is not None else self._output(i, next(outputs)) for i, buffer in buffers]

    def _set_output_tensor(self, index: int) -> torch.Tensor | None:
        """Set a new tensor as the buffer of output ``index``; ``None`` if its size is not known in advance."""
        shape, dtype = self._output_shapes[index]
        if shape is None or index in self._passthrough:
            return None
        out = torch.empty(shape, dtype=dtype, device="cpu")
        self._request.set_output_tensor(index, self._tensor(out.numpy(), shared_memory=True))
        return out

    def _output(self, index: int, fresh: torch.Tensor | None) -> torch.Tensor:
        return fresh if fresh is not None else torch.from_numpy(np.array(self._request.get_output_tensor(index).data))


def _tensors(buffers: Sequence[Array | None]) -> list[torch.Tensor | None]:
    """The same memory as tensors."""
    with torch.inference_mode(mode=False):  # later calls may be in another mode than this one
        return [None if buffer is None else torch.from_numpy(buffer) for buffer in buffers]


def run_queue(request: Request, requests: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
    """Run ``requests`` with as many parallel requests as the model of ``request`` has streams."""
    answers: list[list[torch.Tensor]] = [[] for _ in requests]

    def done(finished: Any, index: int) -> None:
        answers[index] = [torch.from_numpy(np.array(tensor.data)) for tensor in finished.output_tensors]

    with request._lock:
        if request._queue is None:
            request._queue = runtime().AsyncInferQueue(request.compiled, request.parallel)
        request._queue.set_callback(done)
        alive = [[leaf.contiguous().numpy(force=True) for leaf in leaves] for leaves in requests]
        for index, arrays in enumerate(alive):
            request._queue.start_async({i: request._tensor(array, shared_memory=True) for i, array in enumerate(arrays)}, index)
        request._queue.wait_all()
    return list(answers)


def _operator(info: Any) -> tuple[str, int, float]:
    return f"{info.node_type} ({info.exec_type})", 1, info.real_time.total_seconds() * 1e3
