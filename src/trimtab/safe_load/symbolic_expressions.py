"""Validate the size expressions of an archive. torch passes these texts to sympy, which evaluates them as Python."""

from __future__ import annotations

import ast
import re

from trimtab.errors import IntegrityError

MAX_TEXT = 20_000
MAX_DEPTH = 60
SYMBOL = re.compile(r"(?:s|u|f|zf|z|i)[0-9]{1,6}")
_CHARACTERS = re.compile(r"[A-Za-z0-9_ '.,=()*/+<>-]*")
_ASSUMPTIONS = frozenset({"integer", "positive", "nonnegative", "real", "finite", "commutative", "zero", "nonzero", "negative"})
_POWERS = frozenset({"Pow", "PowByNatural", "LShift"})
_FUNCTIONS = _POWERS | {
    *("Add", "Mul", "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "ModularIndexing", "Where", "RShift"),
    *(
        "CeilToInt",
        "FloorToInt",
        "TruncToInt",
        "RoundToInt",
        "TruncToFloat",
        "ToFloat",
        "FloatTrueDiv",
        "IntTrueDiv",
        "Identity",
    ),
    *("Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan", "Eq", "Ne", "Le", "Lt", "Ge"),
    *("Gt", "And", "Or", "Not", "Abs", "Piecewise", "ExprCondPair"),
}
_NUMBERS = frozenset({"Integer", "Float", "Rational"})
_CONSTANTS = frozenset({"true", "false", "True", "False"})


def clean_expression(text: str) -> str:
    """Return ``text`` if it only combines numbers and symbols such as ``s0`` with the arithmetic that torch writes.

    Raises:
        IntegrityError: ``text`` contains anything else. Nothing is evaluated.
    """
    if len(text) > MAX_TEXT or not _CHARACTERS.fullmatch(text) or text.count("(") > MAX_TEXT // 20:
        raise _refused(text)
    try:
        tree = ast.parse(text, mode="eval")
        powers = _walk(tree.body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        raise _refused(text) from error
    # nested powers grow so fast that a short text could keep sympy busy without end
    if powers > 8:
        raise _refused(text)
    return ast.unparse(tree)


def _walk(node: ast.expr, depth: int) -> int:
    """Check ``node`` and return the number of powers in it; raise ValueError to refuse it."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, ast.Name) and (node.id in _CONSTANTS or SYMBOL.fullmatch(node.id)):
        return 0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _walk(node.operand, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div)):
        return _walk(node.left, depth + 1) + _walk(node.right, depth + 1)
    if isinstance(node, ast.Tuple):
        return sum(_walk(item, depth + 1) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node.func.id, node, depth)
    raise ValueError("not arithmetic")


def _call(name: str, node: ast.Call, depth: int) -> int:
    if name == "Symbol":
        return _symbol(node)
    if name in _NUMBERS:
        return _literal(name, node)
    if name not in _FUNCTIONS or any(word.arg not in ("evaluate",) for word in node.keywords):
        raise ValueError("unknown function")
    for word in node.keywords:
        _check_bool(word)
    if name in _POWERS and (len(node.args) != 2 or abs(_int_literal(node.args[1])) > (62 if name == "LShift" else 4)):
        raise ValueError("unbounded power")
    return (name in _POWERS) + sum(_walk(item, depth + 1) for item in node.args)


def _symbol(node: ast.Call) -> int:
    named = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    if not named or not SYMBOL.fullmatch(node.args[0].value):  # type: ignore[attr-defined]
        raise ValueError("not a symbol that torch makes")
    for word in node.keywords:
        if word.arg not in _ASSUMPTIONS:
            raise ValueError("unknown assumption")
        _check_bool(word)
    return 0


def _literal(name: str, node: ast.Call) -> int:
    """``Integer(3)``, ``Rational(1, 3)`` or ``Float('0.5', precision=53)``."""
    for word in node.keywords:
        if name != "Float" or word.arg != "precision" or not 1 <= _int_literal(word.value) <= 64:
            raise ValueError("unknown option of a number")
    for item in node.args:
        if name == "Float" and isinstance(item, ast.Constant) and isinstance(item.value, str):
            float(item.value if len(item.value) <= 40 else "too long")
        else:
            _walk(item, MAX_DEPTH - 1)
    return 0


def _int_literal(node: ast.expr) -> int:
    """The integer literal that ``node`` is, such as ``2``, ``-1`` or ``Integer(2)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer" and len(node.args) == 1:
        return _int_literal(node.args[0])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_int_literal(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("not a plain integer")


def _check_bool(word: ast.keyword) -> None:
    if not (isinstance(word.value, ast.Constant) and isinstance(word.value.value, bool)):
        raise ValueError("not true or false")


def _number(value: object) -> int:
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):
        return 0
    raise ValueError("not a number")


def _refused(text: str) -> IntegrityError:
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return IntegrityError(
        f"The program holds the size expression {shown!r}, which is more than arithmetic on symbols; it is not read."
    )
