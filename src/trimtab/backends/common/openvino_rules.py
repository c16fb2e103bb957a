"""What the XML of an OpenVINO model may say of its weights, and how deep it may nest.

The runtime reads bodies within bodies by recursion, and takes a constant's values from an attribute of any length, or from a
place in the file of weights.
"""

from __future__ import annotations

import math
import pathlib
import re
from xml.parsers import expat

from trimtab.errors import IntegrityError

MAX_NESTED = 100
"""Elements within each other; a loop's body in a loop's body takes three."""
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
    """Refuse a ``graph`` that nests too deep, or has a constant that does not lie in ``weights``.

    Raises:
        IntegrityError: it does, or is no XML.
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
    """Handlers; each raises :class:`ValueError` on what is refused."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open: list[bool] = []
        """Of every element that is open, whether it is a constant."""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self.open) >= MAX_NESTED:
            raise ValueError(f"it nests more than {MAX_NESTED} elements")
        if tag == "data" and self.open and self.open[-1]:
            self.constant(attributes)
        # the runtime knows both names, in any case of letters
        self.open.append(tag == "layer" and attributes.get("type", "").casefold() in ("const", "constant"))

    def end(self, tag: str) -> None:
        self.open.pop()

    def doctype(self, *_: object) -> None:
        raise ValueError("it declares a document type, which no model has")

    def constant(self, told: dict[str, str]) -> None:
        if told.keys() != {"element_type", "shape", "offset", "size"}:
            raise ValueError(f"a constant has the attributes {', '.join(sorted(told))[:200]}")
        bits, shape = _BITS.get(told["element_type"]), told["shape"]
        if bits is None or not _SHAPE.fullmatch(shape) or not all(_NUMBER.fullmatch(told[key]) for key in ("offset", "size")):
            raise ValueError(f"a constant has the type {told['element_type'][:80]!r} and the shape {shape[:80]!r}")
        offset, size = int(told["offset"]), int(told["size"])
        needed = -(-math.prod(map(int, filter(None, shape.split(",")))) * bits // 8)
        if offset + size > self.size or needed > size:
            raise ValueError(
                f"a constant of {needed} bytes is said to be the {size} bytes at {offset}, and there are {self.size} bytes"
            )
