"""Find the object of the script that grows with the steps: a container that gets longer, or a graph that gets deeper."""

from __future__ import annotations

import ast
import gc
import linecache
import re
from collections import deque
from types import FrameType
from typing import Any

import torch

from trimtab.probe.inside import clock
from trimtab.probe.inside.sites import place_of, running, site, text_at

found: dict[str, Any] = {}
"""``site``: the line that makes the object grow; ``name``: its variable; ``graphs``: other names in that line that are tensors
with a graph."""
_lengths: dict[int, int] = {}
_depths: dict[str, int] = {}
_first = 0


def check(count: int, last: bool) -> None:
    """Record the lengths of containers early in the measured steps, and compare them after the last one. Both walk over all
    living objects; that time counts for the probe."""
    global _first
    if count == 2:
        _first = count
        _lengths.update(_containers())
        _depths.update({name: _depth(value) for _, name, value in _variables() if _is_graph(value)})
    elif last and _first and count > _first:
        _compare(count - _first)


def _containers() -> dict[int, int]:
    own = {id(clock.tally), id(_lengths)}
    return {
        id(thing): len(thing)
        for thing in gc.get_objects()
        if type(thing) in (list, dict, deque) and len(thing) > 0 and id(thing) not in own
    }


def _variables() -> list[tuple[FrameType, str, Any]]:
    """Variables of the script's frames, and attributes of its objects, by the name in the script's text."""
    result = []
    for frame in running():
        names = dict(frame.f_locals) if frame.f_code.co_name != "<module>" else {}
        for name, value in {**frame.f_globals, **names}.items():
            result.append((frame, name, value))
            state = getattr(value, "__dict__", None) if type(value).__module__ == "__main__" else None
            if isinstance(state, dict):
                result += [(frame, f"{name}.{inner}", held) for inner, held in state.items()]
    return result


def _is_graph(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and value.grad_fn is not None


def _depth(value: Any, most: int = 2000) -> int:
    """Depth of the graph that made ``value``, along the first inputs."""
    node, depth = value.grad_fn, 0
    while node is not None and depth < most:
        inputs = node.next_functions
        node = inputs[0][0] if inputs else None
        depth += 1
    return depth


def _compare(steps: int) -> None:
    lengths = _containers()
    grown = {key for key, length in lengths.items() if key in _lengths and length - _lengths[key] >= 0.8 * steps}
    for frame, name, value in _variables():
        deeper = _is_graph(value) and name in _depths and _depth(value) - _depths[name] >= 0.8 * steps
        held = id(value) in grown and _holds_memory(value)
        if deeper or held:
            line = _changing_line(frame, name)
            found.update(name=name, site="", graphs=[])
            if line:
                place = place_of(frame.f_code, line)
                found.update(site=site(place), graphs=_graphs(text_at(place), frame, name))
            return


def _graphs(text: str, frame: FrameType, name: str) -> list[str]:
    """The names in the line ``text`` other than ``name`` that are tensors with a graph."""
    known = {**frame.f_globals, **frame.f_locals}
    names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text))
    return [each for each in names if each != name and _is_graph(known.get(each))]


def _holds_memory(value: Any) -> bool:
    last = list(value.values() if isinstance(value, dict) else value)[-1]
    inner = list(last.values()) if isinstance(last, dict) else list(last) if isinstance(last, list | tuple) else [last]
    return any(issubclass(type(thing), torch.Tensor) or type(thing).__module__ == "numpy" for thing in inner[:8])


def _changing_line(frame: FrameType, name: str) -> int | None:
    """The line in the file of ``frame`` that appends or adds to the variable ``name``."""
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    last = name.rpartition(".")[2]
    for node in ast.walk(tree):
        target: ast.AST | None = None
        if isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in ("append", "extend", "appendleft", "update") else None
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0].value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            target = node.targets[0] if ast.unparse(node.targets[0]) in ast.unparse(node.value) else None
        if target is not None and (ast.unparse(target) == name or ast.unparse(target).endswith("." + last)):
            return int(getattr(node, "lineno", 0)) or None
    return None
