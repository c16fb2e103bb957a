"""Store trials in an optuna database, which optuna's dashboard can open: SQLite, or any other by URL."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from trimtab._internal.serialization import ESCAPED, from_json, to_json
from trimtab.core.search_space import parameters
from trimtab.core.technique import install_hint
from trimtab.core.trial import State, Trial
from trimtab.errors import StorageError, TrimtabError, UsageError

STATES = {State.COMPLETE: TrialState.COMPLETE, State.STOPPED: TrialState.PRUNED}
TRIAL, MEASURED, KEY = "trial", "measured", "of"
DATABASE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError, OSError, KeyError)
"""Exceptions of an unusable database. Optuna raises KeyError for a study that was deleted meanwhile."""
DAMAGE_ERRORS = (RuntimeError, AssertionError, LookupError, ValueError, TypeError, AttributeError)
"""Exceptions of optuna on reading a database of another version, or a changed or damaged one."""
DAMAGED = "Put back a copy of it, or begin anew with --fresh or another --out (in Python, fresh=True or out=...)."


class Storage:
    """The finished trials of one study, each written in one transaction. The higher the value of a trial, the better.

    With ``fresh``, a study of that name is deleted first.

    Raises:
        StorageError: the database cannot be opened, read or written; its trials are unchanged.
        UsageError: the study of that name has another ``identity``.
    """

    def __init__(self, url: str, name: str, *, identity: Mapping[str, Any], fresh: bool = False) -> None:
        self.url = hide_password(url)
        """The URL without its password."""
        self.notes: list[str] = []
        """Notes on the trials of the last call of :meth:`trials`."""
        if not _is_parsable(url):
            raise StorageError(
                f"The study's storage {self.url} cannot be opened: it cannot be read as a URL. Write signs such as @ : / {{ in "
                "the password as %40 %3A %2F %7B."
            )
        with self.guard("opened"), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            verbosity = optuna.logging.get_verbosity()
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            try:
                # optuna formats braces in the URL; pre-ping replaces connections that were closed while idle
                storage = RDBStorage(re.sub("([{}])", r"\1\1", url), engine_kwargs={"pool_pre_ping": True})
                if fresh and name in optuna.get_all_study_names(storage):
                    optuna.delete_study(study_name=name, storage=storage)
                self.study = optuna.create_study(
                    storage=storage,
                    study_name=name,
                    direction="maximize",
                    load_if_exists=True,
                    sampler=optuna.samplers.RandomSampler(),
                )
            finally:
                optuna.logging.set_verbosity(verbosity)
            self._identify(name, to_json(identity))

    def add(self, trial: Trial, value: float | None) -> Trial:
        """Store a finished trial. Returns it with its number."""
        values, spaces = parameters(trial.recipe)
        with self.guard("written"):
            number = len(self.study.get_trials(deepcopy=False))
            trial = dataclasses.replace(trial, number=number)
            state = STATES.get(trial.state, TrialState.FAIL)
            if state == TrialState.COMPLETE and value is None:
                state = TrialState.FAIL
            facts: dict[str, Any] = {
                "state": state,
                "value": value if state == TrialState.COMPLETE else None,
                "user_attrs": {TRIAL: json.dumps(to_json(trial)), "recipe": str(trial.recipe), "state": trial.state.value},
            }
            try:
                self.study.add_trial(create_trial(**facts, params=values, distributions=dict(spaces)))
            except ValueError:  # techniques were added since the study began, and optuna allows no new choices
                self.study.add_trial(create_trial(**facts))
        return trial

    def finish(self, asked: optuna.Trial, trial: Trial, value: float | None) -> Trial:
        """Store a finished trial that optuna's sampler asked for. Returns it with its number."""
        trial = dataclasses.replace(trial, number=asked.number)
        with self.guard("written"):
            asked.set_user_attr("recipe", str(trial.recipe))
            asked.set_user_attr("state", trial.state.value)
            asked.set_user_attr(TRIAL, json.dumps(to_json(trial)))
            if value is not None and trial.state is State.COMPLETE:
                self.study.tell(asked, value)
            else:  # optuna's sampler avoids pruned trials, and ignores failed ones
                bad = trial.state in (State.COMPLETE, State.STOPPED, State.MISMATCH)
                self.study.tell(asked, state=TrialState.PRUNED if bad else TrialState.FAIL)
        return trial

    def trials(self) -> list[Trial]:
        """All finished trials, by number, without those that were tried again later or whose technique no longer exists."""
        with self.guard("read"):
            every = self.study.get_trials(deepcopy=False)
            kept = [item for item in every if item.state.is_finished() and TRIAL in item.user_attrs]
        found, unread = list[Trial](), list[str]()
        for item in kept:
            try:
                found.append(from_json(Trial, json.loads(item.user_attrs[TRIAL])))
            except (ValueError, TypeError) as error:  # includes UsageError
                unread.append(str(error).rstrip("."))
        count = "One trial is" if len(unread) == 1 else f"{len(unread)} trials are"
        self.notes = [f"{count} left out, because this installation cannot read what was tried: {unread[0]}."] if unread else []
        last = {trial.recipe.hash: trial for trial in found}
        return [trial for trial in found if last[trial.recipe.hash] is trial]

    def add_measured(self, key: str, facts: Any, value: float | None) -> None:
        """Store under ``key`` what was measured of something that is no recipe, such as the settings of a script."""
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        with self.guard("written"):
            self.study.add_trial(create_trial(state=state, value=value, user_attrs={KEY: key, MEASURED: json.dumps(facts)}))

    def measured(self) -> dict[str, Any]:
        """Key -> the facts that :meth:`add_measured` stored last under it."""
        with self.guard("read"):
            kept = [item.user_attrs for item in self.study.get_trials(deepcopy=False) if MEASURED in item.user_attrs]
            return {facts[KEY]: json.loads(facts[MEASURED]) for facts in kept}

    def put(self, key: str, value: Any) -> None:
        """Store a value of the whole study under ``key``."""
        with self.guard("written"):
            self.study.set_user_attr(key, json.dumps(to_json(value)))

    def get(self, key: str) -> Any:
        """The value that :meth:`put` stored under ``key``, or ``None``."""
        with self.guard("read"):
            text = self.study.user_attrs.get(key)
            return None if text is None else json.loads(text)

    def _identify(self, name: str, identity: Mapping[str, Any]) -> None:
        known = json.loads(self.study.user_attrs.get("identity", "null"))
        if known is None:
            self.study.set_user_attr("identity", json.dumps(identity))
            return
        for key, value in identity.items():
            if known.get(key) != value:
                raise UsageError(
                    f"The study {name!r} in {self.url} was made for another {key}: {known.get(key)!r} there, {value!r} now. "
                    "Continue it as it was, or start another with --out FOLDER or --fresh (in Python, out=..., fresh=True)."
                )

    @contextlib.contextmanager
    def guard(self, verb: str) -> Iterator[None]:
        """A block that uses the database, and whose database errors become a ``StorageError``.

        Raises:
            StorageError: the database cannot be used.
        """
        handled = DATABASE_ERRORS + (() if verb == "written" else DAMAGE_ERRORS)
        try:
            yield
        except ImportError as error:
            missing = (error.__cause__ if isinstance(error.__cause__, ImportError) else error).name or str(error)
            raise StorageError(
                f"The study's storage {self.url} needs the database driver {missing}, which is not installed: "
                f"{install_hint(missing)}."
            ) from error
        except TrimtabError:
            raise
        except handled as error:
            cause = error.__cause__ or error
            cause = getattr(cause, "orig", None) or cause  # the driver's error, without SQLAlchemy's advice for developers
            reason = next(iter(str(cause).splitlines()), type(error).__name__)
            fix = "If the disk is full, free space." if verb == "written" else "Mend that, or choose another with --storage."
            fix += " Finished trials are kept, and the same command goes on from them."
            if verb == "read" and not isinstance(error, DATABASE_ERRORS):
                fix = DAMAGED
            raise StorageError(f"The study's storage {self.url} cannot be {verb}: {reason}. {fix}") from error


def sqlite_url(path: pathlib.Path) -> str:
    """The URL of the SQLite file ``path``, with special characters escaped."""
    quoted = re.sub("[%?#{}]", lambda sign: f"%{ord(sign[0]):X}", str(path))
    url = f"sqlite:///{quoted}"
    # SQLAlchemy before 2.1 does not unescape the path, so that SQLite must read it as a URI
    return url if make_url(url).database == str(path) else f"sqlite:///file:{quoted}?uri=true"


def hide_password(url: str) -> str:
    """``url`` without its password, for output and records."""
    try:
        text = make_url(url.encode(errors=ESCAPED).decode()).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # no URL: opening it gives the error
        return re.sub(r"(?s)^(\w*)\b.*@", r"\1://***@", url)
    return re.sub("(?<=[?&]password=)[^&]*", "***", text)


def _is_parsable(url: str) -> bool:
    """Whether ``url`` can be parsed. The error of an unparsable one may repeat its password."""
    try:
        make_url(url)
    except ArgumentError:  # its message says what is wrong
        return True
    except ValueError:  # the text after the last colon is no port
        return False
    return True
