"""Files that deploy artifacts elsewhere: ``trimtab serve ARTIFACT --write docker --out FOLDER``.

Nothing is built or run here. Every file is rendered from a template, from the artifacts' manifests and the server's options.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import math
import pathlib
import re
import sys
import zipfile
from collections.abc import Mapping
from typing import Any

import jinja2
import psutil

import trimtab
from trimtab.artifact.artifact import Artifact, open_artifact
from trimtab.errors import UsageError
from trimtab.serve import triton
from trimtab.serve.instance.load import refuse_signature
from trimtab.serve.options import SHARES, Options

KINDS = ("docker", "systemd", "kubernetes", "kserve", "triton", "ray")
SERVER_PACKAGES = {
    **{"uvicorn": "uvicorn", "uvloop": "uvloop", "httptools": "httptools", "orjson": "orjson", "grpc": "grpcio"},
    **{"prometheus_client": "prometheus-client", "google.protobuf": "protobuf"},
}
"""Module that only the server needs -> its distribution."""
BASE_PACKAGES = ("numpy", "safetensors", "psutil", "jinja2", "typer", "rich")
"""Distributions that the front process and the instances always import."""
TEMPLATES = {
    "docker": ("Dockerfile", "requirements.txt", ".dockerignore"),
    "systemd": ("trimtab.service",),
    "kubernetes": ("kubernetes.yaml",),
    "kserve": ("kserve.yaml",),
    "triton": (),
    "ray": ("application.py", "serve.yaml"),
}
FLAGS = (
    *("instances", "threads", "batch", "queue", "max_wait_s", "deadline_s", "objective", "p99_s", "memory_mb", "max_body_mb"),
    *("watch_s", "shadow", "canary", "canary_time_s", "canary_slowdown"),
)
"""Options that are written if they differ from the default."""
RUNTIMES = {"onnxruntime": ("onnxruntime", "onnx"), "openvino": ("openvino",)}
"""Backend that runs without torch -> distributions that load its artifacts."""
DRAIN_S = 15
"""Seconds that a server has to end after the longest deadline of a request."""
SOURCES = (".py", ".jinja", ".binpb", ".proto", ".typed")


def write(options: Options, kind: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write what deploys ``options.models`` with ``kind``, one of :data:`KINDS`, into ``folder``. Returns the files.

    Raises:
        UsageError: ``folder`` is not empty, an option cannot be written, or ``kind`` cannot serve a model.
        ArtifactError: a folder is no artifact.
        IntegrityError: an artifact was changed.
    """
    if kind not in KINDS:
        raise UsageError(f"--write {kind} is not known. Choose one of {', '.join(KINDS)}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder. Give another one with --out.")
    _check_options(options)
    artifacts = {name: open_artifact(path) for name, path in options.models.items()}
    for artifact in artifacts.values():
        artifact.check()
        refuse_signature(artifact.manifest.signature)
        if artifact.manifest.native_code and not options.trust:
            raise UsageError(f"{artifact.path} holds machine code, which a server loads with --trust only. Add --trust.")
    files: dict[str, str | bytes] = {}
    if kind == "triton":
        for name, artifact in artifacts.items():
            files |= {f"{name}/{file}": text for file, text in triton.model(name, artifact, options).items()}
    else:
        values = _template_values(options, artifacts, kind)
        files |= {name: _render(name, values) for name in TEMPLATES[kind]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    if kind == "docker":
        write_wheel(folder)
        for name, artifact in artifacts.items():
            artifact.save(folder / "models" / name)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _check_options(options: Options) -> None:
    """Refuse options that cannot be written to a file, such as secrets."""
    if options.token is not None or options.tls is not None:
        raise UsageError(
            "--write does not take --token-file and TLS files: a secret has no place in a written file. Write without them, "
            "mount the files, and add the options to the command in the written file."
        )
    if options.shadow_from:
        raise UsageError(
            "--write does not take --shadow-from, as it does not copy the reference. Write without it, and add it to the "
            "command in the written file."
        )
    if options.port == 0 or options.grpc_port == 0:
        raise UsageError("--write needs fixed ports; port 0 is a free one of this machine. Give --port and --grpc-port.")


def arguments(options: Options) -> list[str]:
    """The flags of ``trimtab serve`` for the options that differ from the default, without models, host and ports."""
    default, found = Options(models={}), list[str]()
    for name in FLAGS:
        if (value := getattr(options, name)) == getattr(default, name):
            continue
        if name.endswith("_s"):
            text = f"{value * 1000:g}ms"
        elif isinstance(value, str):
            text = value
        else:
            unit = "MB" if name.endswith("_mb") else "%" if name in SHARES else ""
            text = f"{100 * value if name in SHARES else value:.12g}{unit}"
        found += [f"--{re.sub('_(s|mb)$', '', name).replace('_', '-')}", "0" if text == "0ms" else text]
    return [*found, *(["--trust"] if options.trust else []), *(["--log-requests"] if options.log_requests else [])]


def _template_values(options: Options, artifacts: Mapping[str, Artifact], kind: str) -> dict[str, Any]:
    """The variables of the templates."""
    name = next(iter(artifacts)) if len(artifacts) == 1 else "trimtab"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-") or "model"
    digests = "".join(json.loads((artifact.path / "manifest.json").read_bytes())["digest"] for artifact in artifacts.values())
    ports = ["--port", str(options.port)]
    ports += ["--no-grpc"] if options.grpc_port is None else ["--grpc-port", str(options.grpc_port)]
    instances = options.instances or 1
    manifests = [artifact.manifest for artifact in artifacts.values()]
    threads = options.threads or max(manifest.settings.threads or 1 for manifest in manifests)
    layout = [] if options.instances else ["--instances", str(instances)]
    layout += [] if options.threads else ["--threads", str(threads)]
    return {
        "name": slug,
        "image": f"trimtab/{slug}:{hashlib.sha256(digests.encode()).hexdigest()[:12]}",
        "models": {name: artifact.path.resolve() for name, artifact in artifacts.items()},
        "backends": {name: artifact.manifest.recipe_text for name, artifact in artifacts.items()},
        "options": options,
        "arguments": arguments(options),
        "layout": layout,
        "ports": ports,
        "instances": instances,
        "threads": threads,
        "cores": instances * threads * len(artifacts),
        "grace_s": math.ceil(options.deadline_s) + DRAIN_S,
        "version": importlib.metadata.version("trimtab"),
        **(_memory_values(options, artifacts, instances) if kind in ("kubernetes", "kserve") else {}),
        **(_image_values(artifacts) if kind == "docker" else {}),
        "interpreter": sys.executable,
    }


def _memory_values(options: Options, artifacts: Mapping[str, Artifact], instances: int) -> dict[str, int]:
    """Memory in MiB: the request is what runs, the limit lets a new version run beside the old one.

    A process has the memory that this one has, with all that a server imports; an instance needs the measured peak of its
    model besides.
    """
    process, models = psutil.Process().memory_info().rss / 1e6, 0.0
    for name, artifact in artifacts.items():
        peak = artifact.manifest.evidence.get("peak_mb")
        if options.memory_mb is not None:
            models += options.memory_mb
        elif isinstance(peak, (int, float)):
            models += instances * (process + peak)
        else:
            raise UsageError(f"The artifact of {name} does not state its peak memory. Give --memory 1GB.")
    mib = 1e6 / 2**20
    return {"request_mib": math.ceil((process + models) * mib), "limit_mib": math.ceil((process + 2 * models) * mib)}


def _image_values(artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    """Python, torch and the pinned distributions of an image.

    Runtimes have the versions with which the artifacts were proven; what the server needs has the versions installed here.
    """
    found = {name: importlib.metadata.version(name) for name in (*BASE_PACKAGES, *SERVER_PACKAGES.values())}
    proven = dict[str, str]()
    for name, artifact in artifacts.items():
        manifest = artifact.manifest
        backend = manifest.backend
        runtime = {*RUNTIMES.get(backend.name, (*manifest.packages, *backend.requires, "torch")), "numpy", "safetensors"}
        versions = {package: manifest.environment.versions.get(package) for package in sorted(runtime)}
        for package, version in ({"python": manifest.environment.python} | versions).items():
            if version is None:
                raise UsageError(f"The manifest of {name} does not state the version of {package}. Optimize again.")
            if proven.setdefault(package, version) != version:
                raise UsageError(
                    f"{name} was proven with {package} {version}, another model with {proven[package]}. Write an image for "
                    "each."
                )
    python, torch = proven.pop("python"), proven.pop("torch", None)
    wheel = f"trimtab-{importlib.metadata.version('trimtab')}-py3-none-any.whl"
    return {
        "python": python,
        "torch": None if torch is None else torch.partition("+")[0] + "+cpu",
        "pins": dict(sorted((found | proven).items())),
        "wheel": wheel,
    }


def _render(name: str, values: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # no HTML
    )
    environment.filters |= {"json": json.dumps, "unit": _unit_word}
    return environment.get_template(f"{name.lstrip('.')}.jinja").render(values)


def _unit_word(word: object) -> str:
    """A word of a command in a systemd unit."""
    text = str(word).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return text if re.fullmatch(r"[\w./=:+@,-]+", text) else f'"{text}"'


def write_wheel(folder: pathlib.Path) -> pathlib.Path:
    """Write the installed trimtab as a wheel into ``folder``. The same sources give the same bytes."""
    distribution = importlib.metadata.distribution("trimtab")
    base = f"trimtab-{distribution.version}"
    source = pathlib.Path(trimtab.__file__).parent
    files = {
        f"trimtab/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.suffix in SOURCES and path.is_file()
    }
    info = f"{base}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        files[f"{info}/{name}"] = (distribution.read_text(name) or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: trimtab\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
