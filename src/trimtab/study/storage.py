"""Where trials are kept: optuna's storage, so that its dashboard opens our studies and PostgreSQL works by URL."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from trimtab._internal.serialization import ESCAPED, from_json, to_json
from trimtab.core.search_space import parameters
from trimtab.core.technique import install_hint
from trimtab.core.trial import State, Trial
from trimtab.errors import StorageError, TrimtabError, UsageError

STATES = {State.COMPLETE: TrialState.COMPLETE, State.STOPPED: TrialState.PRUNED}
TRIAL = "trial"
COMPLAINTS = (SQLAlchemyError, optuna.exceptions.StorageInternalError, OSError, KeyError)
"""What is raised where a database cannot be used; a KeyError is all that optuna says of what somebody deleted meanwhile."""
ODD = (RuntimeError, AssertionError, LookupError, ValueError, TypeError, AttributeError)
"""What else optuna raises on reading a database that another version of it made, somebody changed, or a disk damaged."""
DAMAGED = "Put back a copy of it, or begin anew with --fresh or another --out (in Python, fresh=True or out=...)."


class Storage:
    """The finished trials of one study. Each is written in one transaction: it is there whole, or not at all.

    With ``fresh``, a study of that name is deleted first.

    Raises:
        StorageError: the database cannot be opened, read or written; finished trials in it stay.
        UsageError: it holds a study of something else, as told by ``identity``.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        direction: Literal["minimize", "maximize"],
        identity: Mapping[str, Any],
        fresh: bool = False,
    ) -> None:
        self.url = shown(url)
        """As it may be shown: without its password."""
        self.notes: list[str] = []
        """What there is to say about the trials that :meth:`trials` gave."""
        if not _is_read(url):
            raise StorageError(
                f"The study's storage {self.url} cannot be opened: it cannot be read as a URL. Write signs such as @ : / {{ in "
                "the password as %40 %3A %2F %7B."
            )
        with self.guard("opened"), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            verbosity = optuna.logging.get_verbosity()
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            try:
                # which fills in what stands between braces; a connection that lay idle may have been cut by then
                storage = RDBStorage(re.sub("([{}])", r"\1\1", url), engine_kwargs={"pool_pre_ping": True})
                if fresh and name in optuna.get_all_study_names(storage):
                    optuna.delete_study(study_name=name, storage=storage)
                self.study = optuna.create_study(
                    storage=storage,
                    study_name=name,
                    direction=direction,
                    load_if_exists=True,
                    sampler=optuna.samplers.RandomSampler(),
                )
            finally:
                optuna.logging.set_verbosity(verbosity)
            self._identify(name, to_json(identity))

    def add(self, trial: Trial, value: float | None) -> Trial:
        """Keep a finished trial; gives it back with its number."""
        values, spaces = parameters(trial.recipe)
        with self.guard("written"):
            number = len(self.study.get_trials(deepcopy=False))
            trial = _numbered(trial, number)
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
            except ValueError:  # there are other techniques than when the study began, and optuna takes no other choices
                self.study.add_trial(create_trial(**facts))
        return trial

    def finish(self, asked: optuna.Trial, trial: Trial, value: float | None) -> Trial:
        """Keep a finished trial that optuna's own sampler asked for."""
        trial = _numbered(trial, asked.number)
        with self.guard("written"):
            asked.set_user_attr("recipe", str(trial.recipe))
            asked.set_user_attr("state", trial.state.value)
            asked.set_user_attr(TRIAL, json.dumps(to_json(trial)))
            if value is not None and trial.state is State.COMPLETE:
                self.study.tell(asked, value)
            else:  # optuna's sampler takes a pruned trial for a bad one, and a failed one for none at all
                bad = trial.state in (State.COMPLETE, State.STOPPED, State.MISMATCH)
                self.study.tell(asked, state=TrialState.PRUNED if bad else TrialState.FAIL)
        return trial

    def trials(self) -> list[Trial]:
        """All finished trials, in the order of their numbers. One that was running when its study was killed is none, nor is
        one whose recipe was tried again later, nor one of a technique that is gone."""
        with self.guard("read"):
            kept = [item for item in self.study.get_trials(deepcopy=False) if _is_finished(item)]
        found, unread = list[Trial](), list[str]()
        for item in kept:
            try:
                found.append(from_json(Trial, json.loads(item.user_attrs[TRIAL])))
            except (ValueError, TypeError) as error:  # a UsageError is one
                unread.append(str(error).rstrip("."))
        count = "One trial is" if len(unread) == 1 else f"{len(unread)} trials are"
        self.notes = [f"{count} left out, because this installation cannot read what was tried: {unread[0]}."] if unread else []
        last = {trial.recipe.hash: trial for trial in found}
        return [trial for trial in found if last[trial.recipe.hash] is trial]

    def note(self, key: str, value: Any) -> None:
        """Keep a fact about the whole study."""
        with self.guard("written"):
            self.study.set_user_attr(key, json.dumps(to_json(value)))

    def noted(self, key: str) -> Any:
        """A fact that :meth:`note` kept, or ``None``."""
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
        """A block that uses the database, whose complaints become a sentence.

        Raises:
            StorageError: it cannot be used.
        """
        met = COMPLAINTS + (() if verb == "written" else ODD)
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
        except met as error:
            cause = error.__cause__ or error
            cause = getattr(cause, "orig", None) or cause  # the driver's own, without SQLAlchemy's advice to who writes code
            reason = next(iter(str(cause).splitlines()), type(error).__name__)
            fix = "If the disk is full, free space." if verb == "written" else "Mend that, or choose another with --storage."
            fix += " Finished trials are kept, and the same command goes on from them."
            if verb == "read" and not isinstance(error, COMPLAINTS):
                fix = DAMAGED
            raise StorageError(f"The study's storage {self.url} cannot be {verb}: {reason}. {fix}") from error


def in_file(path: pathlib.Path) -> str:
    """The URL of the SQLite file ``path``, whose name may hold what means something in a URL."""
    quoted = re.sub("[%?#{}]", lambda sign: f"%{ord(sign[0]):X}", str(path))
    url = f"sqlite:///{quoted}"
    # before its version 2.1 SQLAlchemy takes such a name as it stands, and SQLite itself has to read it
    return url if make_url(url).database == str(path) else f"sqlite:///file:{quoted}?uri=true"


def shown(url: str) -> str:
    """``url`` as it may be shown and kept: without its password."""
    try:
        text = make_url(url.encode(errors=ESCAPED).decode()).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # not a URL at all, which opening it will say
        return re.sub(r"(?s)^(\w*)\b.*@", r"\1://***@", url)
    return re.sub("(?<=[?&]password=)[^&]*", "***", text)


def _is_read(url: str) -> bool:
    """Whether the parts of ``url`` can be told apart. What cannot be has a password in it, which the error repeats."""
    try:
        make_url(url)
    except ArgumentError:  # which says of itself what is wrong
        return True
    except ValueError:  # what follows the last colon is no port
        return False
    return True


def _numbered(trial: Trial, number: int) -> Trial:
    return dataclasses.replace(trial, number=number)


def _is_finished(item: FrozenTrial) -> bool:
    return item.state.is_finished() and TRIAL in item.user_attrs
