"""``trimtab serve``."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Annotated, Any

import typer

from trimtab._internal.files import typed
from trimtab.cli._lazy import lazy_import
from trimtab.errors import MissingPackageError, UsageError

PACKAGES = ("uvicorn", "uvloop", "httptools", "orjson", "prometheus_client", "grpc", "google.protobuf")
File = typed("serving.toml")


def serve_command(
    artifacts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=]ARTIFACT...", help="Folders of artifacts, such as runs/digits/artifact."),
    ] = None,
    instances: Annotated[int | None, typer.Option(help="Processes for each model [measured].")] = None,
    batch: Annotated[int | None, typer.Option(help="Most rows computed at once [measured].")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each instance [measured].")] = None,
    max_wait: Annotated[str | None, typer.Option(help="How long a free instance waits for a fuller batch [0].")] = None,
    queue: Annotated[int | None, typer.Option(help="Most requests that wait for one model; others get 503 [256].")] = None,
    deadline: Annotated[str | None, typer.Option(help="Longest time in the queue; then 504 [30s].")] = None,
    objective: Annotated[str | None, typer.Option(help="What is measured for: throughput, or latency [throughput].")] = None,
    p99: Annotated[str | None, typer.Option(help="Limit on throughput that the measurement at the start keeps.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory of the instances of one model.")] = None,
    max_body: Annotated[str | None, typer.Option(help="Largest body of a request; larger ones get 413 [64MB].")] = None,
    shadow: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Compare this share of answers with the original model, out of band.")
    ] = None,
    shadow_from: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]ARTIFACT", help="Artifact to compare with, instead of the original that travels along."),
    ] = None,
    canary: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Requests that a new version gets before it takes over [none].")
    ] = None,
    canary_time: Annotated[str | None, typer.Option(help="How long versions are compared [60s].")] = None,
    canary_slowdown: Annotated[float | None, typer.Option(help="Largest ratio of latency, new to old [1.1].")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port for HTTP; 0 takes a free one [8000].")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC; 0 takes a free one [8001].")] = None,
    no_grpc: Annotated[bool, typer.Option("--no-grpc", help="Serve HTTP only.")] = False,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="File with a token that clients must send.")] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate for TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Key of the certificate.")] = None,
    watch: Annotated[
        str | None, typer.Option(metavar="TIME", help="Look this often for a new artifact in each folder, and load it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the models run [cpu].")] = None,
    config: Annotated[
        pathlib.Path | None, typer.Option(parser=File, metavar="FILE", help="The same options in a TOML file; flags win.")
    ] = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log each request as a line of JSON.")] = False,
    write: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Only write files: docker, systemd, kubernetes, kserve, triton or ray.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder for the files of --write.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Allow artifacts that carry native code.")] = False,
) -> int:
    """Serve artifacts over HTTP with the Open Inference Protocol v2.

    \b
    Examples:
      trimtab serve runs/digits/artifact
      trimtab serve a=runs/a/artifact b=runs/b/artifact --instances 2 --batch 16
      trimtab serve --config serving.toml
      trimtab serve runs/digits/artifact --write docker --out image
    """
    flags: dict[str, Any] = {
        **{"instances": instances, "batch": batch, "threads": threads, "max_wait": max_wait, "queue": queue, "watch": watch},
        **{"deadline": deadline, "max_body": max_body, "objective": objective, "p99": p99, "memory": memory, "device": device},
        **{"shadow": shadow, "shadow_from": shadow_from or None, "canary": canary},
        **{"canary_time": canary_time, "canary_slowdown": canary_slowdown},
        **{"host": host, "port": port, "grpc_port": grpc_port, "no_grpc": no_grpc, "token_file": token_file},
        **{"tls_cert": tls_cert, "tls_key": tls_key, "trust": trust, "log_requests": log_requests},
    }
    options = lazy_import("serve.options").read_options(artifacts or [], flags, config)
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"trimtab serve needs the package {package}. pip install 'trimtab[serve]'")
    if write is not None:
        if out is None:
            raise UsageError(f"--write {write} needs a folder. Give --out FOLDER.")
        print("\n".join(map(str, lazy_import("serve.deploy").write(options, write, pathlib.Path(out)))))
        return 0
    if out is not None:
        raise UsageError("--out is the folder of --write. Give --write docker, or leave it out.")
    lazy_import("serve.front").run(options)
    return 0
