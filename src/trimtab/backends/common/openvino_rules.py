"""Validate the XML of an OpenVINO model before the runtime reads it: nesting depth and constants.

The runtime reads nested bodies recursively, and reads constants from any range of the weights file or from an attribute of any
length.
"""

from __future__ import annotations

import math
import pathlib
import re
from xml.parsers import expat

from trimtab.errors import IntegrityError

MAX_NESTED = 100
"""Most nested XML elements; a loop inside of a loop takes three levels."""
_BITS = {
    **dict.fromkeys(("i64", "u64", "f64"), 64),
    **dict.fromkeys(("i32", "u32", "f32"), 32),
    **dict.fromkeys(("i16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("i8", "u8", "boolean", "f8e4m3", "f8e5m2", "f8e8m0"), 8),
    **dict.fromkeys(("i4", "u4", "nf4", "f4e2m1"), 4),
    "u2": 2,
    "u1": 1,
}
_NUMBER = re.compile(r"[0-9]{1,18}")
_SHAPE = re.compile(r"(?:[0-9]{1,18}(?:, ?[0-9]{1,18}){0,63})?")


def check_model(graph: pathlib.Path, weights: pathlib.Path) -> None:
    """Refuse a ``graph`` that is nested too deep, or has a constant outside of ``weights``.

    Raises:
        IntegrityError: the graph is refused, or is not XML.
    """
    rules = _Rules(weights.stat().st_size)
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = rules.start
    parser.EndElementHandler = rules.end
    parser.StartDoctypeDeclHandler = rules.doctype
    try:
        with graph.open("rb") as file:
            parser.ParseFile(file)
    except (expat.ExpatError, ValueError) as error:
        raise IntegrityError(f"{graph} cannot be loaded: {error}.") from error


class _Rules:
    """XML handlers. They raise :class:`ValueError` to refuse."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open: list[bool] = []
        """For each open element: whether it is a constant."""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self.open) >= MAX_NESTED:
            raise ValueError(f"it nests more than {MAX_NESTED} elements")
        if tag == "data" and self.open and self.open[-1]:
            self.constant(attributes)
        # the runtime accepts both names, case-insensitively
        self.open.append(tag == "layer" and attributes.get("type", "").casefold() in ("const", "constant"))

    def end(self, tag: str) -> None:
        self.open.pop()

    def doctype(self, *_: object) -> None:
        raise ValueError("it declares a document type, which no model has")

    def constant(self, attributes: dict[str, str]) -> None:
        if attributes.keys() != {"element_type", "shape", "offset", "size"}:
            raise ValueError(f"a constant has the attributes {', '.join(sorted(attributes))[:200]}")
        kind, shape = attributes["element_type"], attributes["shape"]
        bits = _BITS.get(kind)
        if (
            bits is None
            or not _SHAPE.fullmatch(shape)
            or not all(_NUMBER.fullmatch(attributes[key]) for key in ("offset", "size"))
        ):
            raise ValueError(f"a constant has the type {kind[:80]!r} and the shape {shape[:80]!r}")
        offset, size = int(attributes["offset"]), int(attributes["size"])
        needed = -(-math.prod(map(int, filter(None, shape.split(",")))) * bits // 8)
        if offset + size > self.size or needed > size:
            raise ValueError(
                f"a constant of {needed} bytes is said to be the {size} bytes at {offset}, and there are {self.size} bytes"
            )
