"""A copy of the script in which chosen lines can be left out: to measure the most that a remedy for them can save."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator, Sequence

from trimtab.probe.patch import SITE

FUNCTION = "__trimtab_reuse__"
"""Name of the function in ``builtins`` that a changed line calls. :mod:`trimtab.probe.inside.remedies.ceilings` sets it."""
_FRAME_NODES = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)
_FRAME_NAMES = frozenset({"super", "locals", "vars", "dir", "eval", "exec", "__class__"})
"""What means something else within a function of its own."""


def with_reuse(folder: pathlib.Path, sites: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Path -> new text of the files of the script whose lines ``sites`` compute their value through :data:`FUNCTION`; and those
    of ``sites`` that do.

    ``x = f(y)`` becomes ``x = __trimtab_reuse__('train.py:12', lambda: (f(y)))``; likewise ``return f(y)``, ``x += f(y)`` and a
    call on its own. The numbers of all lines stay. Other statements, such as the head of a loop, are left as they are, and so
    are values that mean something else in a function of their own, as with ``await`` or ``super()``, those in the body of a
    class, and files that are not UTF-8.
    """
    texts, done = dict[str, str](), set[str]()
    for site in sites:
        match = SITE.match(site)
        path = None if match is None else folder / match["file"]
        if match is None or path is None or not path.is_file():
            continue
        try:
            changed = _reusing(texts.get(str(path)) or path.read_text(encoding="utf-8"), site, int(match["line"]))
        except (SyntaxError, ValueError):  # no UTF-8, or no Python with the change
            continue
        if changed is not None:
            texts[str(path)] = changed
            done.add(site)
    return texts, done


def _reusing(text: str, site: str, line: int) -> str | None:
    """``text`` with the statement at ``line`` changed; ``None`` if it cannot be. Raises ``SyntaxError`` and ``ValueError`` as
    ``compile`` does."""
    values = [
        node.value
        for node in _statements(ast.parse(text))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr)
        and node.lineno <= line <= (node.end_lineno or line)
        and node.value is not None
    ]
    if len(values) != 1 or any(map(_is_bound_to_its_frame, ast.walk(values[0]))):
        return None
    rows, value = [f"{row}\n".encode() for row in text.split("\n")], values[0]  # ast counts no other line ends
    first, last = value.lineno - 1, (value.end_lineno or value.lineno) - 1
    rows[last] = rows[last][: value.end_col_offset] + b"))" + rows[last][value.end_col_offset :]
    call = f"{FUNCTION}({site!r}, lambda: (".encode()
    rows[first] = rows[first][: value.col_offset] + call + rows[first][value.col_offset :]
    changed = b"".join(rows).decode()[:-1]
    compile(changed, site, "exec", dont_inherit=True)
    return changed


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements within ``node``, without those that run in the body of a class."""
    for child in ast.iter_child_nodes(node):
        in_class = isinstance(node, ast.ClassDef)
        if isinstance(child, ast.stmt) and not in_class:
            yield child
        if not in_class or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _statements(child)


def _is_bound_to_its_frame(node: ast.AST) -> bool:
    name = isinstance(node, ast.Name) and node.id in _FRAME_NAMES
    return name or isinstance(node, _FRAME_NODES) or (isinstance(node, ast.comprehension) and bool(node.is_async))
