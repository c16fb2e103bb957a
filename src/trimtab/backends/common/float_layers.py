"""The most sensitive layers, which stay float in an int8 model, and their nodes in the exported graph."""

from __future__ import annotations

import ast
import contextlib
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from trimtab.core.candidate import Candidate
from trimtab.core.technique import require
from trimtab.errors import CompileError
from trimtab.passes.common.sensitivity import most_sensitive
from trimtab.passes.fold_bn import folded

SCOPES = "pkg.torch.onnx.name_scopes"
"""Key of the metadata with which torch's exporter names the modules around a node."""


def choose(candidate: Candidate, count: int) -> tuple[Candidate, tuple[str, ...]]:
    """Choose the ``count`` layers whose rounding changes the outputs most. Returns ``candidate`` with folded batch norms, which
    lets nodes keep the names of their layers, and the names of the chosen layers.

    Raises:
        CompileError: no layer would be left.
    """
    if not count:
        return candidate, ()
    candidate = folded(candidate)
    return candidate, most_sensitive(candidate, count, every=True)


def note(layers: Sequence[str], precision: str = "float") -> list[str]:
    """A sentence about the layers that keep a higher ``precision``, if there are any."""
    return [f"Layers in {precision}, which rounding harms most: {', '.join(layers)}."] if layers else []


def onnx_nodes(exported: pathlib.Path, layers: Iterable[str], candidate: Candidate) -> list[str]:
    """Names of the nodes of an exported ONNX file that compute ``layers``.

    Raises:
        CompileError: the file does not name the nodes.
    """
    graph = require("onnx").load(exported, load_external_data=False).graph
    around = {node.name: _scopes(node) for node in graph.node}
    return _merged({layer: [n for n, scopes in around.items() if _path(layer, candidate) in scopes] for layer in layers})


def openvino_nodes(model: Any, layers: Iterable[str], candidate: Candidate) -> list[str]:
    """Names of the operations of an OpenVINO model that compute ``layers``.

    Raises:
        CompileError: the model does not name the operations.
    """
    names = [node.get_friendly_name() for node in model.get_ordered_ops() if node.get_type_name() != "Constant"]
    return _merged({layer: [n for n in names if n.startswith(f"__module.{_path(layer, candidate)}/")] for layer in layers})


def _path(layer: str, candidate: Candidate) -> str:
    """The name of ``layer`` in the exported module, which wraps the model once, and once more if it writes to its inputs."""
    return f"model.model.{layer}" if candidate.signature.writes else f"model.{layer}"


def _scopes(node: Any) -> list[str]:
    texts = [item.value for item in node.metadata_props if item.key == SCOPES]
    with contextlib.suppress(ValueError, SyntaxError):
        return [str(scope) for text in texts for scope in ast.literal_eval(text)]
    return []


def _merged(nodes: dict[str, list[str]]) -> list[str]:
    if lost := [layer for layer, names in nodes.items() if not names]:
        raise CompileError(
            f"The converted graph does not name the nodes of {', '.join(map(repr, lost[:3]))}, so they cannot stay float. "
            "Use float_layers=0, or the pass fake_quant, which needs no names."
        )
    return [name for names in nodes.values() for name in names]
