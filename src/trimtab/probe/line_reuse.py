"""A copy of the script in which chosen lines can be left out: to measure the most that a remedy for them can save."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Sequence

from trimtab.probe.patch import SITE

FUNCTION = "__trimtab_reuse__"
"""Name of the function in ``builtins`` that a changed line calls. :mod:`trimtab.probe.inside.remedies.ceilings` sets it."""
_BOUND_TO_THEIR_FRAME = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)


def with_reuse(folder: pathlib.Path, sites: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Path -> new text of the files of the script whose lines ``sites`` compute their value through :data:`FUNCTION`; and those
    of ``sites`` that do.

    ``x = f(y)`` becomes ``x = __trimtab_reuse__('train.py:12', lambda: (f(y)))``; likewise ``return f(y)``, ``x += f(y)`` and a
    call on its own. The numbers of all lines stay. Other statements, such as the head of a loop, are left as they are, and so
    are values with ``await``, ``yield`` or ``:=``.
    """
    texts, done = dict[str, str](), set[str]()
    for site in sites:
        match = SITE.match(site)
        path = None if match is None else folder / match["file"]
        if match is None or path is None or not path.is_file():
            continue
        text = texts.get(str(path)) or path.read_text(encoding="utf-8")
        changed = _reusing(text, site, int(match["line"]))
        if changed is not None:
            texts[str(path)] = changed
            done.add(site)
    return texts, done


def _reusing(text: str, site: str, line: int) -> str | None:
    """``text`` with the statement at ``line`` changed; ``None`` if it cannot be."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    classes = {statement for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body}
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr) and node not in classes
    ]
    values = [node.value for node in statements if node.lineno <= line <= (node.end_lineno or line) and node.value is not None]
    if len(values) != 1 or any(isinstance(part, _BOUND_TO_THEIR_FRAME) for part in ast.walk(values[0])):
        return None
    rows, value = [row.encode() for row in text.splitlines(keepends=True)], values[0]
    first, last = value.lineno - 1, (value.end_lineno or value.lineno) - 1
    rows[last] = rows[last][: value.end_col_offset] + b"))" + rows[last][value.end_col_offset :]
    call = f"{FUNCTION}({site!r}, lambda: (".encode()
    rows[first] = rows[first][: value.col_offset] + call + rows[first][value.col_offset :]
    return b"".join(rows).decode()
