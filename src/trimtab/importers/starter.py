"""Write starter workload files. They run unchanged; their comments say what to replace."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex

import jinja2

from trimtab.errors import UsageError

KINDS = ("model", "image", "text", "tabular", "custom")
FOLDER = "folder"


def write_starter(kind: str, path: str | pathlib.Path | None = None, *, force: bool = False) -> pathlib.Path:
    """Write a commented workload file and return its path.

    Args:
        kind: one of :data:`KINDS`, or a folder with a transformers model.
        path: the file to write; default ``workload.py``, or a file named after the folder.
        force: overwrite an existing file.

    Raises:
        UsageError: the kind or folder does not exist, or the file exists already.
    """
    folder = None if kind in KINDS else _model_folder(kind)
    target = pathlib.Path(path or ("workload.py" if folder is None else f"{_word(folder.name)}.py"))
    if target.suffix != ".py":
        raise UsageError(f"{target} is no name for a Python file; let it end in .py.")
    if os.path.exists(target) and not (force and os.path.isfile(target)):
        raise UsageError(f"{target} is there already. Write to another file with -o, or overwrite it with --force.")
    if not os.path.isdir(target.parent):
        raise UsageError(f"There is no folder {str(target.parent)!r} to write {target.name} into. Make it first.")
    facts = {"file": shlex.quote(str(target)), "name": _word(target.stem)}
    text = render(kind, facts) if folder is None else render(FOLDER, facts | _folder_facts(folder))
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another place with -o.") from error
    return target


def render(kind: str, facts: dict[str, str]) -> str:
    """The text of a starter file."""
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).with_name("templates"))
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(f"{kind}.py.jinja").render(facts)


def _model_folder(kind: str) -> pathlib.Path:
    folder = pathlib.Path(os.path.expanduser(kind.removeprefix("hf:")))
    if not os.path.isdir(folder):  # False for a forbidden folder, where pathlib's is_dir raises
        raise UsageError(
            f"{kind!r} is neither a kind of workload ({', '.join(KINDS)}) nor a folder with a transformers model in it. "
            "For anything else, such as audio or series: trimtab init model"
        )
    if not os.path.isfile(folder / "config.json"):
        raise UsageError(
            f"{folder} has no config.json, so there is no transformers model in it. Name a kind: {', '.join(KINDS)}."
        )
    return pathlib.Path(os.path.realpath(folder))


def _folder_facts(folder: pathlib.Path) -> dict[str, str]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder / 'config.json'} cannot be read: {error}. It must be the JSON that transformers wrote."
        ) from error
    saved = config.get("architectures") if isinstance(config, dict) else None
    what = saved[0] if isinstance(saved, list) and saved else "a model"
    return {"folder": json.dumps(str(folder), ensure_ascii=False), "architecture": re.sub(r"\W+", " ", f"Saved as {what}")}


def _word(text: str) -> str:
    """``text`` as a valid name of a file and workload."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_") or "workload"
