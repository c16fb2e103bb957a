"""A real server for tests: ``trimtab serve`` in a process of its own, on a free port."""

from __future__ import annotations

import http.client
import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch import nn

from trimtab.artifact.artifact import Artifact, write_artifact
from trimtab.artifact.test_vectors import Golden
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.limits import Limits
from trimtab.core.measurement import Interval
from trimtab.core.recipe import Recipe
from trimtab.core.signature import Dim
from trimtab.hardware.environment import Environment

READY = re.compile(r"ready at https?://127\.0\.0\.1:(\d+), gRPC on port (\d+)")


class Net(nn.Module):
    """Two outputs, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits and class."""
        logits = self.layer(x)
        return {"logits": logits, "class": logits.argmax(1)}


def write(
    folder: pathlib.Path,
    *,
    seed: int = 0,
    model: nn.Module | None = None,
    inputs: Any = None,
    dynamic: Any = None,
    name: str = "net",
    backend: str = "eager",
    evidence: Mapping[str, Any] | None = None,
    original: bool = False,
) -> Artifact:
    """An artifact of ``backend``, without a search; the original model travels with it if ``original``."""
    torch.manual_seed(seed)
    inputs = (torch.randn(2, 16),) if inputs is None else inputs
    dynamic = {"x": {0: Dim("batch", 1, 64)}} if dynamic is None else dynamic
    subject = Candidate.of((model or Net()).eval(), inputs, dynamic=dynamic)
    technique = BACKENDS[backend]()
    executable = technique.compile(subject)
    return write_artifact(
        folder,
        executable=executable,
        recipe=Recipe(backend=technique),
        workload_name=name,
        golden=Golden.of(subject, executable.signature),
        evidence={"speedup": Interval(2.0, 1.9, 2.1), "size_mb": 0.01, **(evidence or {})},
        environment=Environment.capture(),
        limits=Limits(max_drop=0.01),
        baseline=technique.compile(subject) if original else None,
    )


class Server:
    """``trimtab serve`` with ``arguments``. A context, which sends SIGTERM and checks that no process is left."""

    def __init__(self, log: pathlib.Path, *arguments: str, python: str = sys.executable) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [python, "-m", "trimtab", "serve", "--port", "0", "--grpc-port", "0", *arguments],
                stdout=file,
                stderr=file,
            )

    def __enter__(self) -> Self:
        while (found := READY.search(self.text)) is None:
            assert self.process.poll() is None, self.text
            time.sleep(0.02)
        self.port, self.grpc_port = int(found[1]), int(found[2])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.stop()

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(encoding="utf-8")

    @property
    def instances(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.process.pid).children()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("trimtab_queue_depth{")))

    def stop(self) -> int:
        """SIGTERM; its exit code. No process of it is left."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        code = self.process.wait(30)
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        return code

    def ask(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, answer (parsed where it is JSON) and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers or {})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        is_json = data and found.get("content-type") == "application/json"
        return answer.status, json.loads(data) if is_json else data, found

    def infer(self, rows: list[list[float]], model: str = "net", **more: Any) -> tuple[int, Any, dict[str, str]]:
        """An infer request in JSON."""
        tensor = {"name": "x", "shape": [len(rows), len(rows[0])], "datatype": "FP32", "data": rows}
        return self.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor], **more})
