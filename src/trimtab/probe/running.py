"""Run a script with the settings of ``trimtab.toml``: this process becomes the script's."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from typing import NoReturn

from trimtab._internal.serialization import to_json
from trimtab.core.script_settings import ScriptSettings
from trimtab.probe import configuration, launch
from trimtab.probe.command import Command

OFF = "off"


def run(command: Command, *, path: pathlib.Path | None = None, anyway: bool = False, watch_s: float | None = None) -> NoReturn:
    """Replace this process by that of ``command``, with the settings that ``trimtab tune`` found.

    Where the script, the files of its own that it imports, the machine or torch differ from what they were, one line on
    standard error says so and the script runs as written, unless ``anyway``. ``TRIMTAB=off`` runs it as written. Nothing is
    printed on standard output; exit code, signals and terminal are the script's. With ``watch_s`` the split of a step is
    measured again every so many seconds, and a line on standard error tells when it shifts.

    Raises:
        UsageError: the file cannot be read.
    """
    path = command.folder / configuration.FILE if path is None else path
    environment = dict(os.environ)
    if os.environ.get("TRIMTAB") != OFF:
        settings = _settings(command, path, anyway)
        if settings is not None or watch_s is not None:
            plan = {"mode": "run", "settings": to_json(settings), "watch": watch_s, "folder": str(command.folder)}
            environment |= launch.environment(plan)
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and a new program must not
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvpe(command.argv[0], list(command.argv), environment)


def _settings(command: Command, path: pathlib.Path, anyway: bool) -> ScriptSettings | None:
    """The settings to apply; ``None`` if the script runs as written."""
    if not path.exists():
        _say(f"there is no {path}: the script runs as written; trimtab tune writes it")
        return None
    found = configuration.Configuration.read(path)
    differences = found.differences(command)
    if differences:
        ending = "applied anyway" if anyway else "the script runs as written; tune again, or give --anyway"
        _say(f"{', '.join(differences)}: {ending}")
    return found.settings if anyway or not differences else None


def _say(words: str) -> None:
    print(f"trimtab: {words}", file=sys.stderr, flush=True)
