"""Start the command of a script with a plan for the probe, and end it with all of its processes and files."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal, Self

from trimtab.probe import boot, containment, warden
from trimtab.probe.command import Command

BOOT = os.path.dirname(os.path.abspath(boot.__file__))
LEAST_MEMORY = 0.05
"""Share of the memory of the machine, or of the control group, below which a script is ended."""

DEFAULT_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONFAULTHANDLER": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "offline",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables that are set unless the user sets them: equal hashes in two runs, tracebacks of crashes, no tracking online."""
NO_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Variables of runs that are not timed, of which several run at once: OpenMP's threads do not spin while they wait. On two
cores, three runs of 24 steps of two threads took 12 s with them and 37 s without."""


def environment(plan: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that a process with ``plan`` needs in addition to :data:`os.environ`."""
    path = os.environ.get("PYTHONPATH")
    changed = {"PYTHONPATH": f"{BOOT}{os.pathsep}{path}" if path else BOOT, "TRIMTAB_PLAN": json.dumps(plan)}
    settings = plan.get("settings") or {}
    return changed | dict(settings.get("environment") or {})


class ScriptProcess:
    """A command that runs with a plan, in a session of its own, with all that it starts.

    It is a context manager; leaving it kills what still runs and deletes :attr:`folder`. If this process is killed itself, a
    helper process does both. Nothing is shown on the terminal: the output goes to a log.

    Example:
        with ScriptProcess(command, {"mode": "observe", "steps": 40}) as process:
            process.wait(60)
            print(process.log())
    """

    def __init__(self, command: Command, plan: Mapping[str, Any], *, in_place: bool = False) -> None:
        kept = [] if in_place else containment.overlay_folders(command)
        self.folder = pathlib.Path(containment.scratch_folder(kept))
        """Holds the log, the overlays' upper layers, and ``out``."""
        self.out = self.folder / "out"
        """Folder for the output files of the probe; ``PLAN["out"]``."""
        self.out.mkdir()
        settings = dict(plan.get("settings") or {})
        if files := settings.pop("files", None):  # whole scripts would not fit into an environment variable
            (self.folder / warden.FILES).write_text(json.dumps(files), encoding="utf-8")
        self.plan = {**plan, "settings": settings or None, "out": str(self.out), "folder": str(command.folder)}
        self._log = self.folder / "log.txt"
        instructions = {"argv": command.argv, "scratch": str(self.folder), "contain": kept, "least_memory": LEAST_MEMORY}
        defaults = DEFAULT_ENVIRONMENT | (NO_SPINNING if plan.get("mode") == "losses" else {})
        variables = {name: value for name, value in defaults.items() if name not in os.environ}
        if os.path.basename(command.argv[0]) == "torchrun" or "torch.distributed.run" in command.argv:
            variables["PET_MASTER_PORT"] = str(_free_port())
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(warden.__file__), json.dumps(instructions)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                bufsize=0,
                env={**os.environ, **variables, **environment(self.plan)},
            )

    @property
    def pid(self) -> int:
        """The process that all processes of the command descend from."""
        return self._process.pid

    @property
    def contained(self) -> Literal["overlay", "guarded", "in place"]:
        """How writes are contained; see :mod:`trimtab.probe.containment`."""
        found: Literal["overlay", "guarded", "in place"] = self._containment().get("contained", "in place")
        return found

    def _containment(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            read: dict[str, Any] = json.loads((self.folder / "contained.json").read_text(encoding="utf-8"))
            return read
        return {}

    def notes(self) -> list[str]:
        """Sentences about writes that the overlay does not contain."""
        found = self._containment()
        notes = [f"Writes below {path} are not kept apart: it is a file system of its own." for path in found.get("loose", ())]
        if "why" in found:
            notes.append(
                f"The script runs in place, guarded, because no overlay could be made ({found['why']}): torch.save writes "
                "nothing, and the first write to a file that existed ends the run."
            )
        return notes

    def written(self) -> list[str]:
        """Files that the script wrote or removed below overlaid folders."""
        return containment.written_files(self.folder, self._containment().get("layers", {}))

    def log(self, lines: int = 40) -> str:
        """The end of what the script printed."""
        with contextlib.suppress(OSError):
            return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        return ""

    def refused_write(self) -> str | None:
        """Why a guarded run was ended, up to the site; ``None`` if it was not."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.out / "guarded.json").read_text(encoding="utf-8"))
            return f"was about to write {found['path']} ({found['site']}), which exists"
        return None

    def poll(self) -> int | None:
        """The command's exit code, as from :class:`subprocess.Popen`; ``None`` while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            exit_code: int = json.loads((self.folder / "exit.json").read_text(encoding="utf-8"))
            return exit_code
        return code

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the command, for ``seconds`` at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.poll()

    def stop(self) -> None:
        """Kill the command and all that it started. What it left in :attr:`folder` stays until the context ends."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"s")
            self._process.wait()
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        warden.remove_created(str(self.folder))
        warden.remove(str(self.folder))


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
