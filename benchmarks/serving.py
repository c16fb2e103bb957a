"""`trimtab serve` beside LitServe, Ray Serve and FastAPI by hand, and beside the bare executable.

    python benchmarks/serving.py                                  # about 15 minutes on two cores that nobody else uses
    python benchmarks/serving.py --quick                          # one short round of two models; about 2 minutes
    python benchmarks/serving.py --json benchmarks/results/serving.json

Three interleaved rounds. In each round every server is started alone, answers one request that is compared with the bare model,
and gets the same load: 32 connections of wrk, closed loop, JSON. Client and server share the CPUs. All servers have one copy of
the same ONNX model with one thread, and batches of up to 32 rows; trimtab finds its own batch size. `identity` is a function
without a model for the peers, and an artifact like any other for trimtab.

The peers run in an environment of their own below the cache folder, which is made at the first run; trimtab does not need them.
wrk is a package of Debian: apt-get install wrk.

Targets: 5 times the requests of LitServe and 2.5 times those of the next best on `identity`; MiniLM at 0.9 of what the bare
executable computes in a loop at its best batch; the MLP's compute per request at most 1.1 times the bare one's; a lone client
waits at most 0.5 ms more than for the bare call; the idle server takes less than 1% of a CPU. The exit status is 1 if a target
is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from typing import Any

import psutil

from trimtab._internal.serialization import write_json
from trimtab.hardware.environment import Environment, cache_folder
from trimtab.measure.host import others

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = ("litserve==0.2.19", "ray[serve]==2.60.0", "fastapi", "uvicorn[standard]", "numpy", "onnxruntime")
PEERS = ("litserve", "ray", "fastapi")
MODELS = ("identity", "mlp", "digits", "minilm")
CONNECTIONS, IDLE_S, START_S = 32, 5.0, 60.0
BATCHES = (1, 2, 4, 8, 16, 32, 64)
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


def loops(folder: pathlib.Path, seconds: float) -> dict[int, float]:
    """Rows per second of the executable in a loop with one thread, by rows of a batch."""
    from trimtab.artifact.artifact import load as load_artifact
    from trimtab.artifact.artifact import open_artifact

    executable = load_artifact(folder / "artifact", threads=1)
    example, found = open_artifact(folder / "artifact").golden().cases[0].inputs, dict[int, float]()
    for rows in BATCHES:
        leaves = [leaf[:1].expand(rows, *leaf.shape[1:]).contiguous() for leaf in example]
        executable.run(leaves)
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            executable.run(leaves)
            calls += 1
        found[rows] = rows * calls / (time.perf_counter() - start)
    return found


def bare(folder: pathlib.Path, seconds: float) -> dict[str, float]:
    """What :func:`loops` finds in a new process."""
    words = [sys.executable, __file__, "--bare", str(folder), str(seconds)]
    found: dict[str, float] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found


def environment_of_peers() -> pathlib.Path:
    """The Python of the peers, in an environment that is made at the first run."""
    folder = cache_folder() / "benchmarks" / "serving-peers"
    python, stamp = folder / "bin" / "python", folder / "packages.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != list(PACKAGES):
        print(f"python -m venv {folder} && {python} -m pip install {' '.join(PACKAGES)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *PACKAGES], check=True)
        stamp.write_text(json.dumps(PACKAGES))
    return python


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def serving(words: list[str], url: str, body: pathlib.Path, want: list[float], log: pathlib.Path) -> Iterator[psutil.Process]:
    """A server that answers rightly, until the block ends; all its processes end with it."""
    with log.open("w") as file:
        own = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
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
            process.wait(15)
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
        words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "20s", "-s", script.name, url]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"RESULT (\S+) (\S+) (\S+) (\S+) (\S+)", text)
    assert found is not None, text
    count, duration, p50, p99, errors = map(float, found.groups())
    return {"rps": count / duration * 1e6, "p50_ms": p50 / 1e3, "p99_ms": p99 / 1e3, "errors": errors}


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """CPU time of a process and its children in ``seconds``, as a share of one CPU."""

    def used() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))

    start = used()
    time.sleep(seconds)
    return (used() - start) / seconds


def statistics_of(port: int, name: str) -> dict[str, float]:
    """Batches, their rows and compute seconds so far, from the server's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    names = {"rows": "batch_rows_sum", "batches": "batch_rows_count", "seconds": "batch_seconds_sum"}
    return {key: float(re.search(rf"^trimtab_{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1]) for key, name in names.items()}


def measure(server: str, model: str, folder: pathlib.Path, peers: pathlib.Path, seconds: float) -> dict[str, float]:
    """The figures of one server in one round."""
    port = free_port()
    url, body = f"http://127.0.0.1:{port}/predict", folder / "peer.json"
    if server == "trimtab":
        words = [
            sys.executable,
            "-m",
            "trimtab",
            "serve",
            f"{model}={folder / 'artifact'}",
            "--instances",
            "1",
            "--threads",
            "1",
        ]
        words += ["--port", str(port), "--no-grpc"]
        url, body = f"http://127.0.0.1:{port}/v2/models/{model}/infer", folder / "trimtab.json"
    else:
        onnx = "identity" if model == "identity" else str(folder / "artifact" / "model" / "model.onnx")
        words = [str(peers), str(HERE / "serving_peers.py"), server, onnx, str(port)]
    want = json.loads((folder / "want.json").read_text())
    with serving(words, url, body, want, folder / f"{server}.log") as process:
        load(url, body, CONNECTIONS, min(seconds, 1.0))
        before = statistics_of(port, model) if server == "trimtab" else {}
        found = load(url, body, CONNECTIONS, seconds)
        if server == "trimtab":
            after = statistics_of(port, model)
            rows, batches = after["rows"] - before["rows"], after["batches"] - before["batches"]
            found |= {"compute_ms": 1e3 * (after["seconds"] - before["seconds"]) / rows, "rows": rows / batches}
            found["lone_ms"] = load(url, body, 1, seconds)["p50_ms"]
        found["idle"] = cpu_share(process, min(IDLE_S, seconds * 2))
    return found


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def verdicts(report: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """What was asked for: a sentence, the figure, the limit and whether it is kept."""
    found = list[tuple[str, float, str, bool]]()

    def say(text: str, value: float, limit: float, above: bool) -> None:
        found.append(
            (text, value, f"{'at least' if above else 'at most'} {limit:g}", value >= limit if above else value <= limit)
        )

    for model, servers in report.items():
        ours, loop = servers["trimtab"], servers["bare"]
        if model == "identity":
            peers = {name: servers[name]["rps"] for name in PEERS if name in servers}
            if "litserve" in peers:
                say("identity: requests per second over LitServe's", ours["rps"] / peers["litserve"], 5.0, True)
            if peers:
                say("identity: requests per second over the best peer's", ours["rps"] / max(peers.values()), 2.5, True)
            say("identity: a lone client's latency above the bare call, ms", ours["lone_ms"] - 1e3 / loop["1"], 0.5, False)
            say("identity: share of a CPU of the idle server", ours["idle"], 0.01, False)
        if model == "minilm":
            say("minilm: rows per second over the bare loop's at its best batch", ours["rps"] / max(loop.values()), 0.9, True)
        if model == "mlp":
            near = min(loop, key=lambda rows: abs(int(rows) - ours["rows"]))
            say(
                f"mlp: compute per request over the bare one's at {near} rows",
                ours["compute_ms"] * loop[near] / 1e3,
                1.1,
                False,
            )
    return found


def main() -> int:
    """Run the rounds, print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 2 s on identity and mlp")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--peers", default=",".join(PEERS), help="which peers; empty: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.add_argument("--prepare", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.prepare:
        prepare(given.prepare[0], pathlib.Path(given.prepare[1]))
        return 0
    if given.bare:
        print(json.dumps(loops(pathlib.Path(given.bare[0]), float(given.bare[1]))))
        return 0
    if shutil.which("wrk") is None:
        sys.exit("This benchmark needs wrk: apt-get install wrk")
    models = ["identity", "mlp"] if given.quick else given.models.split(",")
    rounds, seconds = (1, 2.0) if given.quick else (given.rounds, given.seconds)
    peers = [name for name in given.peers.split(",") if name]
    python = environment_of_peers() if peers else pathlib.Path(sys.executable)
    environment, report = Environment.capture(), dict[str, Any]()
    print(
        f"{environment.cpu}, {environment.usable_cores} CPUs; others use {others()}; {rounds} rounds of {seconds:g} s",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            folder = pathlib.Path(scratch) / model
            folder.mkdir()
            subprocess.run([sys.executable, __file__, "--prepare", model, str(folder)], check=True, stdout=subprocess.DEVNULL)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("bare", "trimtab", *peers)}
            for _ in range(rounds):
                runs["bare"].append(bare(folder, seconds / 8))
                for server in ("trimtab", *peers):
                    runs[server].append(measure(server, model, folder, python, seconds))
            report[model] = {name: median(found) for name, found in runs.items()}
            show(model, report[model], runs)
    checks = verdicts(report)
    for text, value, limit, kept in checks:
        print(f"{'met   ' if kept else 'MISSED'} {text}: {value:.3g} ({limit})")
    if given.json:
        conditions = {"cpu": environment.cpu, "cores": environment.usable_cores, "rounds": rounds, "seconds": seconds}
        write_json(given.json, {"conditions": conditions | {"packages": PACKAGES}, "models": report, "verdicts": checks})
    return 0 if all(kept for *_, kept in checks) else 1


def show(model: str, medians: dict[str, dict[str, float]], runs: dict[str, list[dict[str, float]]]) -> None:
    """The table of one model."""
    loop = medians["bare"]
    best = max(loop, key=loop.__getitem__)
    print(f"{model}: bare loop {loop['1']:,.0f} rows/s at 1 row, {loop[best]:,.0f} at {best}")
    for name, found in medians.items():
        if name == "bare":
            continue
        rates = [one["rps"] for one in runs[name]]
        more = ""
        if name == "trimtab":
            more = f", lone {found['lone_ms']:.2f} ms, {found['rows']:.1f} rows a batch, {found['compute_ms']:.3f} ms a row"
        print(
            f"  {name:9} {found['rps']:8,.0f} requests/s ({min(rates):,.0f} to {max(rates):,.0f}), "
            f"p50 {found['p50_ms']:7.2f} ms, p99 {found['p99_ms']:7.2f} ms, idle {found['idle']:.1%}, "
            f"errors {found['errors']:.0f}{more}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
