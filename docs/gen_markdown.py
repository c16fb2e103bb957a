"""Docstrings and tables as Markdown."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from typing import Any

SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:")


def markdown(text: str, *, flat: bool = False) -> str:
    """A docstring as Markdown: roles and double backticks become code, sections become lists, ``::`` blocks become fences."""
    text = re.sub(r":[a-z]+:`~?([^`<]+)`", lambda m: f"`{m[1].removeprefix('trimtab.')}`", text)
    text = re.sub(r"``(.+?)``", lambda m: f"`{' '.join(m[1].split())}`", text, flags=re.DOTALL)
    text = re.sub(r"(?<![(<])(https://[^\s;,)]+[^\s;,.)])", r"<\1>", text)
    if flat:
        return " ".join(text.split()).replace("|", "\\|")
    return "\n\n".join(block(part) for part in re.split(r"\n\s*\n", text))


def block(part: str) -> str:
    """One paragraph of a docstring."""
    lines = part.splitlines()
    if lines and lines[0].strip() in SECTIONS:
        entries: list[str] = []
        for line in textwrap.dedent("\n".join(lines[1:])).splitlines():
            entries += [line] if not line.startswith(" ") else []
            if line.startswith(" "):
                entries[-1] += f" {line.strip()}"
        shown = [re.sub(r"^([\w*]+(?:, [\w*]+)*):", r"`\1`:", entry) for entry in entries]
        return f"{lines[0].strip()}\n\n{bullets(shown)}"
    if all(line.startswith("    ") for line in lines if line):
        return f"```text\n{textwrap.dedent(part)}\n```"
    return part.removesuffix(":") if part.endswith("::") else part


def bullets(items: list[str]) -> str:
    """A list."""
    return "\n".join(f"- {item}" for item in items)


def indented(text: str) -> str:
    """``text`` as it is; kept apart so that what belongs to a member reads as a quotation."""
    return "\n".join(f"> {line}" if line else ">" for line in text.splitlines())


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def names(values: frozenset[str]) -> str:
    """Names as code, sorted."""
    return ", ".join(f"`{value}`" for value in sorted(values))


def yes(value: bool) -> str:
    """``yes`` or ``no``."""
    return "yes" if value else "no"


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default of a field, or that it has none."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "empty" if field.default_factory is not dataclasses.MISSING else "*required*"


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The strings that stand under the fields in the source of ``cls`` and its bases."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if base.__module__.startswith("trimtab")]):
        body = typing.cast(ast.ClassDef, tree(base)).body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found


def tree(thing: Any) -> ast.AST:
    """The syntax tree of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
