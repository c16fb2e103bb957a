"""The options of a server: from flags, from ``serving.toml``, and their defaults."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab._internal.units import fraction, megabytes, seconds
from trimtab.errors import ArtifactError, UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
EXAMPLE = "runs/digits/artifact"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a server. ``None`` for instances, threads or batch: chosen by measurement at the start."""

    models: Mapping[str, pathlib.Path]
    """Name -> folder of the artifact."""
    instances: int | None = None
    batch: int | None = None
    """Most rows of a batch."""
    threads: int | None = None
    """Threads of each instance."""
    max_wait_s: float = 0.0
    """Longest time in seconds that a free instance waits for a fuller batch."""
    queue: int = 256
    """Most requests that wait for one model."""
    deadline_s: float = 30.0
    """Longest time in the queue, unless a request asks for less."""
    objective: str = "throughput"
    """Objective of the measurement at the start: most rows per second (``throughput``), or the fastest answer to one request
    (``latency``)."""
    p99_s: float | None = None
    """p99 latency that the measured layout keeps: the time of two batches must be below it."""
    memory_mb: float | None = None
    """Most memory of the instances of one model."""
    max_body_mb: float = 64.0
    shadow: float = 0.0
    """Share of the requests that are compared with the reference."""
    shadow_from: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    """Name of a model -> folder of the artifact that is its reference; without one, the original that travels with it."""
    canary: float = 0.0
    """Share of the requests that a new version gets before it takes over; 0: it takes over at once."""
    canary_time_s: float = 60.0
    """Duration of a canary in seconds."""
    canary_slowdown: float = 1.1
    """A new version is withdrawn if the 95% interval of its latency ratio, new to old, lies above this."""
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 8001
    """``None``: no gRPC."""
    trust: bool = False
    token: str | None = None
    tls: tuple[pathlib.Path, pathlib.Path] | None = None
    """Files of the certificate and of its key."""
    watch_s: float | None = None
    """Seconds between two checks for new artifacts in the folders of the models; ``None``: no checks."""
    log_requests: bool = False
    """Whether each request is logged, as one line of JSON."""


UNITS = {
    **{"max_wait": ("max_wait_s", seconds), "deadline": ("deadline_s", seconds), "p99": ("p99_s", seconds)},
    **{"canary_time": ("canary_time_s", seconds), "watch": ("watch_s", seconds)},
    **{"max_body": ("max_body_mb", megabytes), "memory": ("memory_mb", megabytes)},
}
COUNTS = {"instances": 1, "batch": 1, "threads": 1, "queue": 1, "port": 0, "grpc_port": 0}
"""Options that are whole numbers, and the smallest of each."""
SHARES = ("shadow", "canary")
RATIOS = ("canary_slowdown",)
CHOICES = {"objective": ("throughput", "latency")}
TEXTS = ("host", "device", "token_file", "tls_cert", "tls_key")
LISTS = ("shadow_from",)
FLAGS = ("trust", "no_grpc", "log_requests")
TABLE = "models"


def read_options(models: Sequence[str], flags: Mapping[str, Any], config: pathlib.Path | None) -> Options:
    """Options from ``models`` (``PATH`` or ``NAME=PATH``), from the file ``config``, and from ``flags``, which win.

    Raises:
        UsageError: an option is unknown or has a wrong value, the file cannot be read, or two models have one name.
        ArtifactError: a folder is no artifact.
    """
    given = {} if config is None else _read_toml(config)
    table = given.pop(TABLE, {})
    if not isinstance(table, dict) or not all(isinstance(path, str) for path in table.values()):
        raise UsageError(f"{config}: [models] holds lines such as digits = {EXAMPLE!r}.")
    known = {*UNITS, *COUNTS, *SHARES, *RATIOS, *CHOICES, *TEXTS, *LISTS, *FLAGS}
    if unknown := sorted(set(given) - known):
        raise UsageError(f"{config}: there is no option {unknown[0]!r}. Known: {', '.join(sorted({*known, TABLE}))}.")
    given |= {name: value for name, value in flags.items() if value is not None and value is not False}
    words = [*models] if models else [f"{name}={path}" for name, path in table.items()]
    if not words:
        raise UsageError(f"There is nothing to serve. Give the folder of an artifact, such as {EXAMPLE}.")
    values: dict[str, Any] = {"models": _models_by_name(words)}
    values |= {name: given.pop(name, False) is True for name in ("trust", "log_requests")}
    files: dict[str, pathlib.Path] = {
        name: _existing_file(name, given.pop(name)) for name in ("token_file", "tls_cert", "tls_key") if name in given
    }
    if given.pop("no_grpc", False) is True:
        values["grpc_port"] = None
        given.pop("grpc_port", None)
    values["shadow_from"] = _references(given.pop("shadow_from", []), values["models"])
    _refuse_device(given.pop("device", "cpu"), values["models"])
    for name, value in given.items():
        values |= _parse_option(name, value)
    if values.get("objective") == "latency" and "p99_s" in values:
        raise UsageError("p99 limits the objective throughput, and objective is latency. Leave one of them out.")
    if values["shadow_from"] and "shadow" not in values:
        raise UsageError("shadow-from names a reference, but no request is compared with it. Give a share: --shadow 1%.")
    return Options(**values, **_secrets(files))


def _refuse_device(device: Any, models: Mapping[str, pathlib.Path]) -> None:
    """Refuse a device that no artifact runs on: artifacts are built and proven for the CPU."""
    if device == "cpu":
        return
    if not isinstance(device, str) or not re.fullmatch(r"cuda(:[0-9]+)?", device):
        raise UsageError(f"device is {device!r}; it is cpu, or a GPU such as cuda:0.")
    name, path = next(iter(models.items()))
    form = _manifest_value(path, "recipe", "backend", "name")
    there = "" if pathlib.Path("/dev/nvidiactl").exists() else " There is no NVIDIA GPU on this machine either."
    raise UsageError(
        f"--device {device}: the artifact of {name} is a model of {form} that was built and proven for the CPU, and does not "
        f"run on a GPU.{there} Leave --device out."
    )


def _references(words: Any, models: Mapping[str, pathlib.Path]) -> dict[str, pathlib.Path]:
    """Name of a model -> its reference, from ``ARTIFACT`` (of the only model) or ``NAME=ARTIFACT``."""
    found = dict[str, pathlib.Path]()
    for word in [words] if isinstance(words, str) else words:
        name, equals, path = str(word).partition("=")
        if not equals and len(models) > 1:
            raise UsageError(f"shadow-from is {word!r}; several models are served. Name one: {next(iter(models))}={word}.")
        if equals and name not in models:
            raise UsageError(f"shadow-from names the model {name!r}, which is not served. Served: {', '.join(models)}.")
        found[name if equals else next(iter(models))] = pathlib.Path(path if equals else word)
    return found


def _read_toml(config: pathlib.Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{config} cannot be read as TOML: {error}. Write lines such as port = 8000.") from error
    return {name.replace("-", "_"): value for name, value in found.items()}


def _parse_option(name: str, value: Any) -> dict[str, Any]:
    shown = name.replace("_", "-")
    if name in UNITS:
        field, read = UNITS[name]
        if name == "max_wait" and value in ("0", 0):
            return {field: 0.0}
        if not isinstance(value, str):
            raise UsageError(f"{shown} is {value!r}; give it with a unit, as text.")
        return {field: read(value, shown)}
    if name in COUNTS:
        if type(value) is not int or value < COUNTS[name]:
            raise UsageError(f"{shown} is {value!r}; it is a whole number from {COUNTS[name]} up.")
        return {name: value}
    if name in SHARES:
        share = fraction(value, shown) if isinstance(value, str) else math.nan
        if not 0 < share <= 1:
            raise UsageError(f"{shown} is {value!r}; it is a share of the requests, as text, such as '1%'.")
        return {name: share}
    if name in RATIOS:
        if type(value) not in (int, float) or not 1 <= value < math.inf:
            raise UsageError(f"{shown} is {value!r}; it is a number from 1 up, such as 1.1.")
        return {name: float(value)}
    if name in CHOICES and value not in CHOICES[name]:
        raise UsageError(f"{shown} is {value!r}; it is {' or '.join(CHOICES[name])}.")
    if not isinstance(value, str) or not value:
        raise UsageError(f"{shown} is {value!r}; it is a text.")
    return {name: value}


def _existing_file(name: str, value: Any) -> pathlib.Path:
    path = pathlib.Path(str(value))
    if not path.is_file():
        raise UsageError(f"{name.replace('_', '-')}: there is no file {str(value)!r}.")
    return path


def read_token(file: pathlib.Path) -> str:
    """The token in a file."""
    if not (token := file.read_text(encoding="utf-8").strip()):
        raise UsageError(f"{file} is empty. Write the token into it.")
    return token


def _secrets(files: Mapping[str, pathlib.Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "token_file" in files:
        found["token"] = read_token(files["token_file"])
    if ("tls_cert" in files) != ("tls_key" in files):
        raise UsageError("TLS takes two files. Give --tls-cert and --tls-key.")
    if "tls_cert" in files:
        found["tls"] = (files["tls_cert"], files["tls_key"])
    return found


def _models_by_name(words: Sequence[str]) -> dict[str, pathlib.Path]:
    """Name -> folder. The default name is that of the workload."""
    found = dict[str, pathlib.Path]()
    for word in words:
        name, equals, path = word.partition("=")
        folder = pathlib.Path(path if equals else word)
        name = name if equals else _default_name(folder)
        if not NAME.fullmatch(name):
            raise UsageError(f"A model cannot be called {name!r}. Use letters, digits, '.', '_' and '-': digits={EXAMPLE}.")
        if name in found:
            raise UsageError(f"Two models are called {name!r}. Give one of them another name: other={folder}.")
        found[name] = folder
    return found


def _default_name(folder: pathlib.Path) -> str:
    """The name of the workload, with characters replaced that :data:`NAME` does not allow."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(_manifest_value(folder, "workload"))).strip("-._") or "model"


def _manifest_value(folder: pathlib.Path, *keys: str) -> Any:
    """A value of the manifest. The manifest is not checked here; the instances do that."""
    try:
        found = json.loads((folder / "manifest.json").read_bytes())
        for key in keys:
            found = found[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{str(folder)!r} is no artifact: it has no readable manifest.json. Give the folder that optimize wrote, such as "
            f"{EXAMPLE}."
        ) from error
    return found
