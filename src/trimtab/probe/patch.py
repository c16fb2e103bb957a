"""The edits of findings as a unified diff of the script."""

from __future__ import annotations

import ast
import difflib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from trimtab.core.diagnosis import Patch
from trimtab.core.finding import Finding
from trimtab.core.script_settings import CodeEdit

SITE = re.compile(r"^(?P<file>.+):(?P<line>\d+)$")


def make_patch(folder: pathlib.Path, findings: Sequence[Finding]) -> tuple[Patch | None, Mapping[pathlib.Path, str]]:
    """The complete edits of ``findings`` as a patch of the files in ``folder``, and the new text of each file.

    An edit replaces the statement that begins at its line. Of two edits of a line the first wins. An edit after which its file
    is no Python any more is left out. The patch is ``None`` if no edit is complete.
    """
    by_file: dict[pathlib.Path, list[tuple[Finding, CodeEdit, int]]] = {}
    for finding in findings:
        edit = finding.edit
        match = None if edit is None else SITE.match(edit.site)
        if edit is None or match is None or edit.replacement is None:
            continue
        by_file.setdefault(pathlib.Path(match["file"]), []).append((finding, edit, int(match["line"])))
    texts, diffs, rules, left_out = dict[pathlib.Path, str](), list[str](), list[str](), list[str]()
    for name, edits in by_file.items():
        path = name if name.is_absolute() else folder / name
        if not path.is_file():
            left_out.append(f"{name} is not a file of the script's folder")
            continue
        before = path.read_text(encoding="utf-8")
        after, done, refused = _apply_edits(before, edits)
        left_out += refused
        if after == before:
            continue
        rules += done
        texts[path] = after
        lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
        diffs.append("".join(_terminated(difflib.unified_diff(*lines, f"a/{name.as_posix()}", f"b/{name.as_posix()}"))))
    if not texts:
        return None, {}
    return Patch(text="".join(diffs), rules=tuple(dict.fromkeys(rules)), left_out=tuple(left_out)), texts


def moved_site(site: str, folder: pathlib.Path, texts: Mapping[str, str]) -> str:
    """The new site of a line after files were changed to ``texts``; for a replaced line, the first of its new lines."""
    match = SITE.match(site)
    path = None if match is None else os.path.join(folder, match["file"])
    if match is None or path is None or path not in texts:
        return site
    before = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    line = int(match["line"]) - 1
    for kind, low, high, new, _ in difflib.SequenceMatcher(
        None, before, texts[path].splitlines(), autojunk=False
    ).get_opcodes():
        if low <= line < high:
            return f"{match['file']}:{new + (line - low if kind == 'equal' else 0) + 1}"
    return site


def _terminated(lines: object) -> list[str]:
    """Lines of a diff, each with its newline, as ``patch`` needs them."""
    found = []
    for line in lines:  # type: ignore[attr-defined]
        found.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return found


def _apply_edits(text: str, edits: Sequence[tuple[Finding, CodeEdit, int]]) -> tuple[str, list[str], list[str]]:
    """Apply edits. Returns the new text, the rules of the applied edits, and a reason for each refused one."""
    rules, refused, taken = list[str](), list[str](), set[int]()
    for finding, edit, number in sorted(edits, key=lambda each: -each[2]):  # from the last line up: numbers stay valid
        lines = text.splitlines(keepends=True)
        if number in taken:
            if finding.rule not in rules:
                refused.append(f"{finding.rule} edits {edit.site}, which another edit replaces")
            continue
        if not 1 <= number <= len(lines):
            refused.append(f"{finding.rule} edits {edit.site}, a line that the file does not have")
            continue
        new = _indented(edit.replacement or "", lines[number - 1])
        tried = "".join([*lines[: number - 1], *new, *lines[_end(text, number) :]])
        if not _parses(tried):
            tried = "".join([*lines[: number - 1], *new, *lines[number:]])
        if not _parses(tried):
            refused.append(f"{finding.rule} edits {edit.site}, after which the file is no Python any more")
            continue
        text = tried
        taken.add(number)
        rules.append(finding.rule)
    return text, rules, refused


def _indented(replacement: str, line: str) -> list[str]:
    """The lines of ``replacement``, indented like ``line`` unless they are already."""
    indent = line[: len(line) - len(line.lstrip())]
    new = replacement.rstrip("\n").split("\n")
    if indent and not new[0].startswith(indent):
        new = [f"{indent}{each}" if each.strip() else each for each in new]
    return [f"{each}\n" for each in new] if replacement.strip() else []


def _end(text: str, number: int) -> int:
    """The last line of the simple statement that begins at line ``number``; that line itself for a compound statement."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return number
    ends = [
        node.end_lineno or number
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno == number and not hasattr(node, "body")
    ]
    return max(ends, default=number)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
