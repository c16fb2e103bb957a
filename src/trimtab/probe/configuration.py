"""``trimtab.toml``: the settings that pay for a script, the conditions under which they were found, and the evidence."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trimtab._internal.serialization import from_json, to_json, write_text
from trimtab.core.measurement import Interval
from trimtab.core.script_settings import ScriptSettings
from trimtab.errors import UsageError
from trimtab.hardware import system
from trimtab.probe.command import Command

FILE = "trimtab.toml"
TUNED = "tuned.json"
"""File of the run folder of a tune."""
HEAD = "# written by trimtab tune; applied by trimtab run\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """The machine and the software that settings were measured with."""

    cpu: str
    cores: int
    gpu: str
    """Name of the first GPU; empty without one."""
    torch: str
    python: str

    @classmethod
    def here(cls) -> Conditions:
        """The conditions of this machine and this interpreter."""
        return cls(
            cpu=system.cpu_name(),
            cores=system.usable_cores(),
            gpu=_gpu(),
            torch=importlib.metadata.version("torch"),
            python=platform.python_version(),
        )


def _gpu() -> str:
    """Name of the first NVIDIA GPU, read from the driver's files without initializing CUDA."""
    for path in sorted(pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """The measurements by which settings were chosen."""

    speedup: tuple[float, float, float]
    """Speed-up of a step: value, and bounds of the 95% interval."""
    losses: str
    """``equal`` to the bit or ``within rounding``."""
    steps: int
    """Steps whose losses were compared."""
    step_ms: float
    """Milliseconds of a step as written."""
    one_thread: bool = False
    """Whether both sides were timed with one thread, because the machine was busy."""

    @property
    def interval(self) -> Interval:
        """The speed-up."""
        return Interval(*self.speedup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """The contents of ``trimtab.toml``.

    Example::

        configuration = Configuration.read(pathlib.Path("trimtab.toml"))
        print(configuration.settings.changes())
    """

    name: str
    """Name of the script, such as ``train.py``, or of the module."""
    command: tuple[str, ...]
    """The command line, without the path of the interpreter."""
    files: Mapping[str, str]
    """Path, relative to the script's folder -> sha256: the script, and its own files that it imports."""
    settings: ScriptSettings
    conditions: Conditions
    evidence: Evidence

    @classmethod
    def read(cls, path: pathlib.Path) -> Configuration:
        """Read a file that :meth:`write` wrote.

        Raises:
            UsageError: the file cannot be read, or has another format.
        """
        try:
            with path.open("rb") as file:
                found = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}. Write it anew with trimtab tune --overwrite.") from error
        script = found.pop("script", {})
        known = {"name": script.get("name"), "command": script.get("command"), "files": script.get("sha256")}
        return from_json(cls, {**found, **known})

    def write(self, path: pathlib.Path, *, overwrite: bool = False) -> None:
        """Write the file atomically.

        Raises:
            UsageError: there is a file, and ``overwrite`` is false.
        """
        refuse_existing(path, overwrite)
        changes = to_json(self.settings.changes())
        if "loaders" in changes:  # TOML has no null
            loaders = changes["loaders"].items()
            changes["loaders"] = {site: {k: v for k, v in each.items() if v is not None} for site, each in loaders}
        tables = {
            "script": {"name": self.name, "command": list(self.command), "sha256": dict(self.files)},
            "settings": changes,
            "conditions": to_json(self.conditions),
            "evidence": to_json(self.evidence),
        }
        write_text(path, HEAD + "".join(_toml(tables, ())))

    def differences(self, command: Command) -> list[str]:
        """Changes since the settings were measured, as sentences: the script, its files, machine, versions."""
        if command.name != self.name:  # one file lies beside all scripts of a folder
            return [f"the settings are those of {self.name} and not of {command.name}"]
        found = changed_files(command, self.files)
        here = Conditions.here()
        for field in dataclasses.fields(here):
            before, now_ = getattr(self.conditions, field.name), getattr(here, field.name)
            if before != now_:
                found.append(f"{field.name} was {before or 'none'} and is {now_ or 'none'}")
        return found


def refuse_existing(path: pathlib.Path, overwrite: bool) -> None:
    """Refuse a path where there is a file.

    Raises:
        UsageError: there is one, and ``overwrite`` is false.
    """
    if path.exists() and not overwrite:
        raise UsageError(f"There is a {path} already. Give --overwrite to replace it, or another path with --out.")


def command_words(command: Command) -> tuple[str, ...]:
    """The words of the command line, without the path of the interpreter."""
    words = command.argv
    return ("python", *words[1:]) if words[0] == sys.executable else (os.path.basename(words[0]), *words[1:])


def fingerprints(command: Command, sources: Iterable[str] = ()) -> dict[str, str]:
    """File -> sha256 of the script and of ``sources``, relative to the script's folder."""
    names = set(sources)
    if command.script is not None:
        names.add(os.path.relpath(command.script, command.folder))
    found = {name: _sha256(command.folder / name) for name in sorted(names)}
    return {name: value for name, value in found.items() if value is not None}


def changed_files(command: Command, known: Mapping[str, str]) -> list[str]:
    """What has happened to the files whose :func:`fingerprints` are ``known``, such as ``data.py has changed``."""
    now = {name: _sha256(command.folder / name) for name in known}
    return [f"{name} {'is gone' if now[name] is None else 'has changed'}" for name in known if now[name] != known[name]]


def _sha256(path: pathlib.Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """``table`` in TOML: its values, then its tables."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (values or not table):
        yield f"\n[{'.'.join(map(_key, path))}]\n"
    for key, value in values.items():
        yield f"{_key(key)} = {json.dumps(value, ensure_ascii=False)}\n"  # strings, numbers and lists are written as in JSON
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml(value, (*path, key))


def _key(text: str) -> str:
    return text if text.replace("_", "").isalnum() and text.isascii() else json.dumps(text, ensure_ascii=False)
