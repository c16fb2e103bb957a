"""`trimtab serve` beside LitServe, FastAPI by hand, Ray Serve with HAProxy and Triton, and beside the bare executable.

    python benchmarks/serving.py                                  # at most 15 minutes on two cores that nobody else uses
    python benchmarks/serving.py --quick                          # one short round of two models; about 2 minutes
    python benchmarks/serving.py --check                          # starts every server once, and asks it for a second
    python benchmarks/serving.py --json benchmarks/results/serving.json            # one piece, at most 7 minutes
    python benchmarks/serving.py --json FILE --only identity --fresh               # one model, from the beginning

With --json the measurements add up in a file, which is written after each: the same command goes on where the last one has
ended, until no measurement is left. The exit status is 2 while some are left.

Three interleaved rounds. In each round every server is started alone, answers one request that is compared with the bare model,
and gets the same load: 32 connections of wrk, closed loop, JSON. Client and server share the CPUs. All servers have one copy of
the same ONNX model with one thread, and batches of up to 32 rows; trimtab finds its own batch size. `identity` is a function
without a model for the peers, and an artifact like any other for trimtab.

The peers run in environments of their own below the cache folder, which are made at the first run; trimtab does not need them.
Triton's Python backend is linked with the Python of the system, and is left out with the reason where it does not install.
wrk is a package of Debian: apt-get install wrk.

Targets, medians of the rounds:

- identity: 5 times the requests of LitServe and 2.5 times those of the next best; a lone client waits at most 0.5 ms more than
  for the bare call; the idle server takes less than 1% of a CPU.
- minilm: 0.9 of what the bare executable computes in a loop with one thread at its best batch.
- mlp: compute per request at most 1.1 times the bare one's, both in CPU time, as client, front and instance share cores. The
  bare executable computes batches of the same sizes in a mixed order, in turns with the load.

Each target is printed as met, MISSED or not measured, with its figure for the medians and its range over the rounds. The exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import psutil
from serving_report import PEERS, Store, median, verdicts

from trimtab._internal.units import seconds
from trimtab.hardware.environment import Environment
from trimtab.hardware.system import cache_folder
from trimtab.measure.host import other_load

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = ("litserve==0.2.19", "ray[serve]==2.60.0", "fastapi", "uvicorn[standard]", "numpy", "onnxruntime")
TRITON_PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2", "onnxruntime")
SYSTEM_PYTHON = "/usr/bin/python3"
"""The Python whose library Triton's Python backend is linked with."""
MODELS = ("identity", "mlp", "digits", "minilm")
CONNECTIONS, WARM_S, IDLE_S, START_S = 32, 1.0, 2.0, 60.0
TURNS, TURN_S = 4, 1.0
"""Turns of load and bare executable for the compute of a request, and seconds of each."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
UNFINISHED, FIRST_S = 2, 60.0
"""Exit status if measurements are left, and seconds that the first measurement of a piece may take."""
LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = io.open("{body}"):read("*a")
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %g %g %d\\n", summary.requests, summary.duration, latency:percentile(50),
    latency:percentile(99), e.connect + e.read + e.write + e.timeout + e.status))
end
"""
Sizes = Mapping[int, float]
"""Rows of a batch -> how many of them."""


def prepare(name: str, folder: pathlib.Path) -> None:
    """Write the artifact of a model, its example as JSON, and the bare outputs, into ``folder``."""
    import torch
    from torch import nn

    from trimtab.artifact.artifact import write_artifact
    from trimtab.artifact.test_vectors import Golden
    from trimtab.backends.onnxruntime import OnnxRuntime
    from trimtab.core.candidate import Candidate
    from trimtab.core.recipe import Recipe
    from trimtab.core.signature import Dim

    sys.path.insert(0, str(HERE.parent / "examples"))
    torch.manual_seed(0)
    batch = {0: Dim("batch", 1, 256)}
    if name == "minilm":
        import minilm

        model, example = minilm.build(), minilm.tokenize(minilm.corpus("lee.cor")[:2])
        dynamic = {"input_ids": batch, "attention_mask": batch}
    elif name == "digits":
        import digits

        model, example, dynamic = digits.Digits().eval(), (torch.rand(2, 1, 8, 8),), {"images": batch}
    elif name == "mlp":
        layers = [nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        model, example, dynamic = nn.Sequential(*layers, nn.Linear(1024, 16)), (torch.randn(2, 64),), {"input": batch}
    else:
        model, example, dynamic = nn.Identity(), (torch.randn(2, 16),), {"input": batch}
    subject = Candidate.of(model.eval(), example, dynamic=dynamic)
    technique = OnnxRuntime(spinning=False)
    executable = technique.compile(subject)
    write_artifact(
        folder / "artifact",
        executable=executable,
        recipe=Recipe(backend=technique),
        workload_name=name,
        golden=Golden.of(subject, executable.signature),
        evidence={},
        environment=Environment.capture(),
    )
    row = {spec.name: leaf[0].tolist() for spec, leaf in zip(executable.signature.inputs, example, strict=True)}
    (folder / "peer.json").write_text(json.dumps(row))
    tensors = [
        {
            "name": spec.name,
            "datatype": {"float32": "FP32", "int64": "INT64"}[spec.dtype],
            "shape": [1, *leaf.shape[1:]],
            "data": leaf[:1].flatten().tolist(),
        }
        for spec, leaf in zip(executable.signature.inputs, example, strict=True)
    ]
    (folder / "trimtab.json").write_text(json.dumps({"inputs": tensors}))
    output = executable.run([leaf[:1] for leaf in subject.leaves])[0]
    (folder / "want.json").write_text(json.dumps(output.flatten().tolist()))


def bare_loop(folder: pathlib.Path) -> None:
    """The process of :class:`Bare`: a line of JSON with sizes and seconds in, one with figures out."""
    from trimtab.artifact.artifact import load as load_artifact
    from trimtab.artifact.artifact import open_artifact

    executable = load_artifact(folder / "artifact", threads=1)
    example = open_artifact(folder / "artifact").golden().cases[0].inputs
    draw = random.Random(0)
    for line in sys.stdin:
        asked = json.loads(line)
        sizes = {int(rows): count for rows, count in asked["sizes"].items()}
        batches = {rows: [leaf[:1].expand(rows, *leaf.shape[1:]).contiguous() for leaf in example] for rows in sizes}
        order = draw.choices(list(sizes), list(sizes.values()), k=10_000)
        for rows in sizes:
            executable.run(batches[rows])
        start, used, done = time.perf_counter(), time.process_time(), 0
        for rows in order:
            executable.run(batches[rows])
            done += rows
            if time.perf_counter() - start > asked["seconds"]:
                break
        took, used = time.perf_counter() - start, time.process_time() - used
        print(json.dumps({"rate": done / took, "cpu_ms": 1e3 * used / done}), flush=True)


class Bare:
    """The executable of an artifact in a loop with one thread, in a process of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        words = [sys.executable, __file__, "--bare", str(folder)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, sizes: Sizes, seconds: float) -> dict[str, float]:
        """Rows per second and CPU milliseconds of a row, for batches of ``sizes`` in a mixed order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"sizes": sizes, "seconds": seconds}), file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def rates(self, seconds: float) -> dict[str, float]:
        """Rows per second by rows of a batch."""
        return {str(rows): self.run({rows: 1}, seconds)["rate"] for rows in BATCHES}


def environment_of(name: str, packages: Sequence[str], python: str) -> pathlib.Path:
    """A Python with ``packages``, in an environment that is made at the first run.

    Raises:
        RuntimeError: the packages cannot be installed.
    """
    folder = cache_folder() / "benchmarks" / name
    found, stamp = folder / "bin" / "python", folder / "packages.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != list(packages):
        pip = [sys.executable, "-m", "pip", "--python", str(found), "install", "-qq", "--disable-pip-version-check", *packages]
        for words in ([python, "-m", "venv", "--without-pip", "--clear", str(folder)], pip):
            print(" ".join(words), flush=True)
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-500:])
        stamp.write_text(json.dumps(packages))
    return found


def peers_that_install(names: Sequence[str]) -> dict[str, pathlib.Path]:
    """Name of a peer -> its Python. Triton is left out where it does not install."""
    found = dict[str, pathlib.Path]()
    for name in names:
        if name != "triton":
            found[name] = environment_of("serving-peers", PACKAGES, sys.executable)
            continue
        try:
            found[name] = environment_of("serving-triton", TRITON_PACKAGES, SYSTEM_PYTHON)
        except (OSError, RuntimeError) as error:
            print(f"triton is left out: {error}", flush=True)
    return found


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def serving(words: list[str], url: str, body: pathlib.Path, want: list[float], log: pathlib.Path) -> Iterator[psutil.Process]:
    """A server that answers rightly, until the block ends; all its processes end with it."""
    with log.open("w") as file:
        own = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
        own |= {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True, env=own)
    try:
        until = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(words)} did not become ready:\n{log.read_text()[-3000:]}")
            with contextlib.suppress(OSError, ValueError):
                request = urllib.request.Request(url, data=body.read_bytes(), headers={"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=10) as answer:
                    found = json.load(answer)
                break
            time.sleep(0.1)
        values = flat(found["outputs"][0]["data"] if "outputs" in found else found["output"])
        assert all(abs(a - b) < 1e-3 for a, b in zip(values, want, strict=True)), f"{url} answers wrongly"
        yield psutil.Process(process.pid)
    finally:
        family = [process, *descendants(process.pid)]
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        for one in family:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                one.kill()
        process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below ``pid``."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def flat(values: Any) -> list[float]:
    """The numbers of a nested list."""
    return [one for item in values for one in flat(item)] if isinstance(values, list) else [values]


def load(url: str, body: pathlib.Path, connections: int, seconds: float) -> dict[str, float]:
    """Requests per second, and p50 and p99 in milliseconds, of a closed loop of ``connections``."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA.replace("{body}", str(body)))
        script.flush()
        words = ["wrk", "-t1", f"-c{connections}", f"-d{max(round(seconds), 1)}s", "--timeout", "20s", "-s", script.name, url]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"RESULT (\S+) (\S+) (\S+) (\S+) (\S+)", text)
    assert found is not None, text
    count, duration, p50, p99, errors = map(float, found.groups())
    return {"rps": count / duration * 1e6, "p50_ms": p50 / 1e3, "p99_ms": p99 / 1e3, "errors": errors}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process and its children so far."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def batches_of(port: int, name: str) -> dict[int, int]:
    """Rows of a batch -> how many the server has computed so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{name}/stats") as answer:
        found = json.load(answer)["model_stats"][0]["batch_stats"]
    return {one["batch_size"]: one["compute_infer"]["count"] for one in found}


def computing(port: int) -> float:
    """CPU seconds of computing batches so far, of the only model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = re.search(r"^trimtab_batch_cpu_seconds_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def compute_ratio(url: str, body: pathlib.Path, port: int, model: str, server: psutil.Process, bare: Bare) -> dict[str, float]:
    """CPU time of computing a request in the instance, and in the bare executable for batches of the same sizes, in turns.

    ``all_ms`` is all CPU time of the instance: to receive and to answer, too.
    """
    (instance,) = server.children()
    turns = []
    for _ in range(TURNS):
        before, computed, used = batches_of(port, model), computing(port), cpu_seconds(instance)
        load(url, body, CONNECTIONS, TURN_S)
        after, computed, used = batches_of(port, model), computing(port) - computed, cpu_seconds(instance) - used
        sizes = {rows: count - before.get(rows, 0) for rows, count in after.items() if count > before.get(rows, 0)}
        rows = sum(size * count for size, count in sizes.items())
        served = {"cpu_ms": 1e3 * computed / rows, "all_ms": 1e3 * used / rows, "rows": rows / sum(sizes.values())}
        turns.append(served | {"bare_cpu_ms": bare.run(sizes, TURN_S)["cpu_ms"]})
    return median([turn | {"cpu_ratio": turn["cpu_ms"] / turn["bare_cpu_ms"]} for turn in turns])


def command_of(
    server: str, model: str, folder: pathlib.Path, python: pathlib.Path, port: int
) -> tuple[list[str], str, pathlib.Path]:
    """The command of a server, its address, and the file with a request."""
    if server == "trimtab":
        words = [sys.executable, "-m", "trimtab", "serve", f"{model}={folder / 'artifact'}", "--no-grpc"]
        words += ["--instances", "1", "--threads", "1", "--port", str(port)]
        return words, f"http://127.0.0.1:{port}/v2/models/{model}/infer", folder / "trimtab.json"
    onnx = "identity" if model == "identity" else str(folder / "artifact" / "model" / "model.onnx")
    words = [str(python), str(HERE / "serving_peers.py"), server, onnx, str(port)]
    if server == "triton":
        return words, f"http://127.0.0.1:{port}/v2/models/model/infer", folder / "trimtab.json"
    return words, f"http://127.0.0.1:{port}/predict", folder / "peer.json"


def measure(
    server: str, model: str, folder: pathlib.Path, python: pathlib.Path, seconds: float, bare: Bare
) -> dict[str, float]:
    """The figures of one server in one round."""
    port = free_port()
    words, url, body = command_of(server, model, folder, python, port)
    want, own = json.loads((folder / "want.json").read_text()), server == "trimtab"
    with serving(words, url, body, want, folder / f"{server}.log") as process:
        load(url, body, CONNECTIONS, WARM_S)
        found = load(url, body, CONNECTIONS, seconds)
        if own and model == "mlp":
            found |= compute_ratio(url, body, port, model, process, bare)
        if own and model == "identity":
            found["lone_ms"] = load(url, body, 1, seconds / 2)["p50_ms"]
            start = cpu_seconds(process)
            time.sleep(IDLE_S)
            found["idle"] = (cpu_seconds(process) - start) / IDLE_S
    return found


def check(models: Sequence[str], pythons: Mapping[str, pathlib.Path], scratch: pathlib.Path) -> int:
    """Start every server with every model, ask it for a second, and say which did not answer."""
    failed = 0
    for model in models:
        folder = prepared(model, scratch)
        for server in ("trimtab", *pythons):
            start, port = time.monotonic(), free_port()
            words, url, body = command_of(server, model, folder, pythons.get(server, pathlib.Path()), port)
            try:
                with serving(words, url, body, json.loads((folder / "want.json").read_text()), folder / f"{server}.log"):
                    took, found = time.monotonic() - start, load(url, body, 4, 1.0)
            except (RuntimeError, AssertionError) as error:
                failed += 1
                print(f"{model}: {server} FAILED: {error}", flush=True)
                continue
            print(f"{model}: {server} answers, {took:.1f} s after its start, {found['errors']:.0f} errors", flush=True)
    return int(failed > 0)


def prepared(model: str, scratch: pathlib.Path) -> pathlib.Path:
    """The folder of a model, written by a process of its own."""
    folder = scratch / model
    folder.mkdir()
    subprocess.run([sys.executable, __file__, "--prepare", model, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> int:
    """Run what is left of the rounds, print the tables and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 2 s on identity and mlp")
    parser.add_argument("--check", action="store_true", help="measure nothing; see that every server starts and answers")
    parser.add_argument("--only", default=",".join(MODELS), help="some of " + ", ".join(MODELS))
    parser.add_argument("--peers", default=",".join(PEERS), help="which peers; empty: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load; twice as many for minilm")
    parser.add_argument("--json", type=pathlib.Path, help="keep the figures here, and go on from those that it holds")
    parser.add_argument("--fresh", action="store_true", help="forget what the file holds of these models")
    parser.add_argument("--at-most", default="7m", help="how long one piece takes with --json")
    parser.add_argument("--prepare", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.prepare:
        prepare(given.prepare[0], pathlib.Path(given.prepare[1]))
        return 0
    if given.bare:
        bare_loop(pathlib.Path(given.bare))
        return 0
    if shutil.which("wrk") is None:
        sys.exit("This benchmark needs wrk: apt-get install wrk")
    models = ["identity", "mlp"] if given.quick else given.only.split(",")
    if unknown := set(models) - set(MODELS):
        sys.exit(f"There is no model {min(unknown)!r}. Give some of {', '.join(MODELS)}.")
    rounds, length = (1, 2.0) if given.quick else (given.rounds, given.seconds)
    pythons = peers_that_install([name for name in given.peers.split(",") if name])
    environment, busy = Environment.capture(), other_load()
    print(f"{environment.cpu}, {environment.usable_cores} CPUs; others use {busy}; {rounds} rounds of {length:g} s", flush=True)
    conditions = {"cpu": environment.cpu, "cores": environment.usable_cores, "seconds": length}
    store = Store(given.json, conditions | {"packages": [*PACKAGES, *TRITON_PACKAGES]}, models if given.fresh else ())
    store.begin(others=str(busy), peers=list(pythons))
    with tempfile.TemporaryDirectory() as scratch:
        if given.check:
            return check(models, pythons, pathlib.Path(scratch))
        until = time.monotonic() + seconds(given.at_most, "--at-most") if given.json else math.inf
        left = run_pieces(store, models, pythons, rounds, length, until, pathlib.Path(scratch))
    for model in models:
        if {"bare", "trimtab"} <= store.runs.get(model, {}).keys():
            show(model, store.runs[model])
    found = list(verdicts(store.runs))
    print("\n".join(line for line, *_ in found))
    if left:
        print(f"{left} measurements are left. The same command goes on with them.")
        return UNFINISHED
    kept = [kept for *_, kept in found if kept is not None]
    print(f"{sum(kept)} of {len(kept)} measured targets met, by the medians of the rounds; client and server share the CPUs")
    return 0 if all(kept) else 1


def run_pieces(
    store: Store,
    models: Sequence[str],
    pythons: Mapping[str, pathlib.Path],
    rounds: int,
    length: float,
    until: float,
    scratch: pathlib.Path,
) -> int:
    """Measure what is missing in ``store``, until another measurement could end after ``until``. How many are left."""
    servers, longest = ("bare", "trimtab", *pythons), FIRST_S
    for model in models:
        todo = store.missing([model], servers, rounds)
        if not todo or time.monotonic() + longest > until:
            continue
        folder = prepared(model, scratch)
        with Bare(folder) as bare:
            for _, server in todo:
                start = time.monotonic()
                if start + longest > until:
                    break
                if server == "bare":
                    found = bare.rates(length / 8)
                else:
                    python = pythons.get(server, pathlib.Path())
                    found = measure(server, model, folder, python, length * 2 if model == "minilm" else length, bare)
                store.add(model, server, found)
                longest = max(longest, time.monotonic() - start)
                print(f"  {model}: {server}, {time.monotonic() - start:.0f} s", flush=True)
    return len(store.missing(models, servers, rounds))


def show(model: str, runs: Mapping[str, Sequence[dict[str, float]]]) -> None:
    """The table of one model."""
    loop = median(runs["bare"])
    best = max(loop, key=loop.__getitem__)
    print(f"{model}: bare loop {loop['1']:,.0f} rows/s at 1 row, {loop[best]:,.0f} at {best}")
    for name, rounds in runs.items():
        if name == "bare":
            continue
        found, rates = median(rounds), [one["rps"] for one in rounds]
        more = f", idle {found['idle']:.1%}" if "idle" in found else ""
        more += f", lone {found['lone_ms']:.2f} ms" if "lone_ms" in found else ""
        if "cpu_ms" in found:
            more += (
                f", CPU {found['cpu_ms']:.4f} ms a row, {found['rows']:.1f} rows a batch; bare {found['bare_cpu_ms']:.4f} ms"
                f" (all of the instance {found['all_ms']:.4f} ms)"
            )
        print(
            f"  {name:9} {found['rps']:8,.0f} requests/s ({min(rates):,.0f} to {max(rates):,.0f}), "
            f"p50 {found['p50_ms']:7.2f} ms, p99 {found['p99_ms']:7.2f} ms, errors {found['errors']:.0f}{more}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
