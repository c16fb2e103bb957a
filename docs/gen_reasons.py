"""The sentences that a technique's ``why_not_here`` and ``why_not`` can answer, read off its source."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gen_markdown import tree


def sentences(function: Callable[..., Any], cls: type[Any], known: Mapping[str, str] | None = None) -> list[str]:
    """The texts that ``function`` may return; functions of ours that it returns the answer of are followed.

    ``known`` gives the parameters of ``function`` whose value is a text that the caller wrote down.
    """
    if not function.__module__.startswith("trimtab"):
        return []
    scope = Scope(function, cls, known or {})
    returned = [node.value for node in ast.walk(tree(function)) if isinstance(node, ast.Return) and node.value is not None]
    return list(dict.fromkeys(text for node in returned for text in scope.answers(node)))


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where an expression stands: names mean what they mean there."""

    function: Callable[..., Any]
    cls: type[Any]
    known: Mapping[str, str]

    def answers(self, node: ast.expr) -> list[str]:
        """The texts that an expression may be."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return ["".join(self.piece(part) for part in node.values)]
        if isinstance(node, ast.Name):
            return [text for value in self.assigned(node.id) for text in self.answers(value)]
        if isinstance(node, ast.Call):
            return self.called(node)
        inner = (node.body, node.orelse) if isinstance(node, ast.IfExp) else node.values if isinstance(node, ast.BoolOp) else ()
        return [text for value in inner for text in self.answers(value)]

    def piece(self, node: ast.expr) -> str:
        """One part of an f-string: text as it is, a constant's value, or what the value is called."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.FormattedValue)
        value = self.known.get(ast.unparse(node.value), self.function.__globals__.get(ast.unparse(node.value)))
        if isinstance(value, (int, float, str)):
            return str(value)
        said = self.called(node.value) if isinstance(node.value, ast.Call) else []
        return max(said, key=len) if said else f"*{plain(node.value)}*"

    def called(self, node: ast.Call) -> list[str]:
        """What a call of a function of ours may answer: a method of the class, or a name of the module."""
        found: Any = None
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
            found = getattr(self.cls, node.func.attr, None)
        elif isinstance(node.func, ast.Name):
            found = self.function.__globals__.get(node.func.id)
        if not inspect.isfunction(found) or found is self.function:
            return []
        given = zip(inspect.signature(found).parameters, node.args, strict=False)
        texts = {name: str(value.value) for name, value in given if isinstance(value, ast.Constant)}
        return sentences(found, self.cls, texts)

    def assigned(self, name: str) -> list[ast.expr]:
        """What a local name is set to."""
        nodes = list(ast.walk(tree(self.function)))
        walrus = [node.value for node in nodes if isinstance(node, ast.NamedExpr) and node.target.id == name]
        return walrus + [node.value for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]


def plain(node: ast.expr) -> str:
    """An expression in as few words as name it: ``self.count`` is the count, ``first.rstrip(".")`` the first."""
    if isinstance(node, ast.Call):
        node = (
            node.func.value
            if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Constant)
            else node.func
        )
    words = ast.unparse(node).removeprefix("self.").strip("_").split(".")[-1]
    return words.replace("_", " ") if words.replace("_", "").isalnum() else "..."
