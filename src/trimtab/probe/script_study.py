"""Storage of the measurements of ``trimtab tune``, so that the same command resumes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from trimtab._internal.serialization import from_json, to_json
from trimtab.core.evidence import ProbeRecord
from trimtab.core.script_settings import ScriptSettings
from trimtab.errors import UsageError
from trimtab.probe import configuration
from trimtab.probe.command import Command
from trimtab.probe.configuration import Conditions
from trimtab.probe.counterfactuals import OUT_OF_TIME, Outcome
from trimtab.study.run_folder import exclusive, run_folder
from trimtab.study.storage import Storage, sqlite_url

DATABASE, RECORD, FILES, CONFIRMED = "study.db", "record", "files", "confirmed "


class ScriptStudy:
    """The measurements of one script, each stored as soon as it is finished.

    Raises:
        UsageError: the folder has the study of another script, command line, machine or torch, or a file of the script has
            changed.
        StorageError: the storage cannot be opened, read or written.
    """

    def __init__(self, folder: pathlib.Path, command: Command, fresh: bool) -> None:
        self.folder = folder
        identity = {
            "command": list(configuration.command_words(command)),
            "text of the script": configuration.fingerprints(command),
            "machine": to_json(Conditions.here()),
        }
        where = sqlite_url(folder / DATABASE)
        self._command, self._storage = command, Storage(where, f"{command.name}-tune", identity=identity, fresh=fresh)
        changed = configuration.changed_files(command, self._storage.get(FILES) or {})
        if changed:
            raise UsageError(
                f"{', '.join(changed)} since {folder} was begun, whose measurements are of the text before. Give --fresh to "
                "measure anew."
            )

    @classmethod
    @contextlib.contextmanager
    def opened(cls, command: Command, folder: pathlib.Path | None, fresh: bool) -> Iterator[ScriptStudy]:
        """The study in ``folder``, default ``runs/NAME-tune``, which no other process may use meanwhile."""
        where = run_folder(str(command.script or command.name), folder, "-tune")
        with exclusive(where):
            yield cls(where, command, fresh)

    @property
    def record(self) -> ProbeRecord | None:
        """The record of the watched script; ``None`` before it was watched."""
        known = self._storage.get(RECORD)
        return None if known is None else from_json(ProbeRecord, known)

    @record.setter
    def record(self, record: ProbeRecord) -> None:
        self._storage.put(FILES, configuration.fingerprints(self._command, record.sources))
        self._storage.put(RECORD, record)

    @property
    def outcomes(self) -> list[Outcome]:
        """The latest outcome of each measured setting."""
        return [from_json(Outcome, facts) for facts in self._storage.measured().values()]

    def keep(self, outcome: Outcome) -> None:
        """Store a finished measurement. Settings that there was no time for stay open for the next run."""
        if outcome.failed != OUT_OF_TIME:
            gain = outcome.gain.value if outcome.gain is not None else None
            self._storage.add_measured(_key(outcome.settings), to_json(outcome), gain)

    def confirmed(self, choice: ScriptSettings) -> Outcome | None:
        """The confirmation of ``choice``, if it was finished."""
        known = self._storage.get(CONFIRMED + _key(choice))
        return None if known is None else from_json(Outcome, known)

    def keep_confirmed(self, choice: ScriptSettings, outcome: Outcome) -> None:
        """Store a confirmation, unless it failed."""
        if outcome.gain is not None and outcome.losses != "not compared":
            self._storage.put(CONFIRMED + _key(choice), outcome)


def _key(settings: ScriptSettings) -> str:
    text: Any = json.dumps(to_json(settings.changes()), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
