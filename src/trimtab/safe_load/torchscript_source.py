"""Validate the layout of the source in a TorchScript archive, and read the declarations of its classes.

torch parses, compiles and walks that source recursively, and gives attributes the declared types without checking the values.
So deep nesting is refused, and declarations must be written exactly as torch writes them.
:mod:`trimtab.safe_load.torchscript_pickle` checks the pickled objects against these declarations.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from trimtab.errors import IntegrityError

MAX_BRACKETS = 200
MAX_INDENT = 200
MAX_TOKENS = 1000
"""Most words and signs between two commas: each can nest the expression before it once more."""
MAX_TYPE = 50
_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comma>,)|(?P<line>\n\ *)"""
    r"""|(?P<blank>\ +)|(?P<other>\w+|[^\w\s"'\\\#])"""
)
_CLASS = re.compile(r"class (\w+)(?:\((\w+)\))?:")
_METHOD = re.compile(r"def (\w+)\(\w+(?:: [\w.]+)?(?:, )?(.*)\) -> (.*):")
_ATTRIBUTE = re.compile(r'(?:([A-Za-z_]\w*) :|__annotations__\[("(?:[^"\\]|\\.)+")\] =) ([\w\[\], .()]+)')
_CONSTANT = re.compile(r"[A-Za-z_]\w* : Final\[.*\] = .*|__\w+__ = \[.*\]|pass", re.DOTALL)
_CAST = re.compile(r"\bunchecked_cast\b")
_TYPE_TOKEN = re.compile(r"\s*([A-Za-z_][\w.]*|\[|\]|,|\(\))")


@dataclasses.dataclass(frozen=True)
class Type:
    """A type: its name, such as ``List`` or ``__torch__.Net``, and the types in brackets."""

    name: str
    items: tuple[Type, ...] = ()


@dataclasses.dataclass(frozen=True)
class ClassDeclaration:
    """A class declaration: base class, types of the attributes, and the parameters and result of each method as text."""

    base: str
    attributes: dict[str, Type]
    methods: dict[str, tuple[str, str]]


def read_type(text: str) -> Type:
    """Parse the type ``text``.

    Raises:
        ValueError: ``text`` is not a type, or is nested too deep.
    """
    tokens = _TYPE_TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        raise ValueError(f"the odd type {text[:80]!r}")
    found = _read_type(tokens, 0)
    if tokens:
        raise ValueError(f"the odd type {text[:80]!r}")
    return found


def _read_type(tokens: list[str], depth: int) -> Type:
    """Parse one type and remove its tokens from the front of ``tokens``."""
    if depth > MAX_TYPE or not tokens or not tokens[0][0].isidentifier():
        raise ValueError("a type that is odd or nested too deep")
    name = tokens.pop(0)
    items: list[Type] = []
    if tokens and tokens[0] == "[":
        tokens.pop(0)
        while tokens and tokens[0] != "]":
            if tokens[0] == "()":
                tokens.pop(0)
            else:
                items.append(_read_type(tokens, depth + 1))
            if tokens and tokens[0] == ",":
                tokens.pop(0)
        if not tokens:
            raise ValueError("a type without its end")
        tokens.pop(0)
    return Type(name, tuple(items))


def declarations(source: str, name: str) -> dict[str, ClassDeclaration]:
    """The classes that the source in record ``name`` declares, by full name.

    Raises:
        IntegrityError: the source is nested too deep, casts an object to another class, or is not formatted as torch formats
            it.
    """
    lines = list(_lines(source, name))
    if odd := next((line for line in lines if not _has_safe_casts(line)), None):
        raise IntegrityError(f"The source {name!r} takes a value for an object of a class unchecked, in {odd.strip()[:80]!r}.")
    place = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
    found: dict[str, ClassDeclaration] = {}
    current: ClassDeclaration | None = None
    inside = False  # a method
    for line in lines:
        if not line.strip():
            continue
        if head := _CLASS.fullmatch(line):
            if f"{place}.{head[1]}" in found:
                raise _unexpected(name, line)
            current, inside = ClassDeclaration(head[2] or "", {}, {}), False
            found[f"{place}.{head[1]}"] = current
        elif not line.startswith(" "):
            if re.match(r"class\b", line):
                raise _unexpected(name, line)
            current = None
        elif current is not None:
            deep = line.startswith("   ")
            if not line.startswith("  ") or (deep and not inside):
                raise _unexpected(name, line)
            inside = deep or _declare(current, line[2:], name)
    return found


def _declare(current: ClassDeclaration, line: str, name: str) -> bool:
    """Add the declaration in ``line`` to ``current``. Returns whether the line starts a method."""
    if line.startswith("def "):
        if head := _METHOD.fullmatch(re.sub(r"\s+", " ", line)):
            current.methods[head[1]] = head[2], head[3]
        return True
    field = line.partition("=")[0].rstrip() if current.base == "NamedTuple" else line  # without its default
    if match := _ATTRIBUTE.fullmatch(field):
        try:
            attribute = match[1] or ast.literal_eval(match[2]).encode("latin-1").decode("utf-8")
            kind = read_type(match[3])
        except (ValueError, SyntaxError) as error:
            raise _unexpected(name, line) from error
        if attribute in current.attributes:
            raise _unexpected(name, line)
        current.attributes[attribute] = kind
    elif not _CONSTANT.fullmatch(line) and current.base not in ("Enum", "NamedTuple"):
        raise _unexpected(name, line)
    return False


def _unexpected(name: str, line: str) -> IntegrityError:
    return IntegrityError(f"The source {name!r} holds {line.strip()[:80]!r} where torch writes no such line; it is not read.")


def _lines(source: str, name: str) -> Iterator[str]:
    """The logical lines of ``source``: lines inside of brackets are joined."""
    counts, start, at, last = [0], 0, 0, ""
    for match in _TOKEN.finditer(source):
        kind, token = str(match.lastgroup), match[0]
        if match.start() != at or token == "elif" or (kind == last == "text"):
            # torch writes no tab, comment, elif or adjacent strings, and its parser reads some of them differently
            raise IntegrityError(f"The source {name!r} holds {source[at : at + 20]!r}, which torch does not write.")
        at, last = match.end(), kind
        if kind == "line":
            if len(token) - 1 > MAX_INDENT:
                raise IntegrityError(
                    f"The source {name!r} is indented by {len(token) - 1} columns; at most {MAX_INDENT} are read."
                )
            if len(counts) == 1:
                yield source[start : match.start()]
                counts, start = [0], match.start() + 1
        elif kind == "comma":
            counts[-1] = 0
        elif kind != "blank":
            if kind == "close" and len(counts) > 1:
                counts.pop()
            counts[-1] += 1
            if kind == "open":
                counts.append(0)
            if len(counts) > MAX_BRACKETS or counts[-1] > MAX_TOKENS:
                raise IntegrityError(f"The source {name!r} holds an expression that is nested too deep; it is not read.")
    if at != len(source):
        raise IntegrityError(f"The source {name!r} holds {source[at : at + 20]!r}, which torch does not write.")
    yield source[start:]


def _has_safe_casts(line: str) -> bool:
    """Whether every ``unchecked_cast`` in ``line`` is to a type without classes, as torch writes it for optional values."""
    kinds = [_first_argument(line[match.end() :]) for match in _CAST.finditer(line)]
    return all(re.fullmatch(r"\([A-Za-z][\w\[\], ]*", kind) for kind in kinds)


def _first_argument(text: str) -> str:
    """``text`` up to its first comma outside of square brackets."""
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            return text[:at]
    return text
