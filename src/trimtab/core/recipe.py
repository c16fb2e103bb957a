"""A recipe: ordered passes and one backend."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab._internal.serialization import dumps
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.candidate import Candidate
from trimtab.core.technique import PASSES, Pass, technique_from_json
from trimtab.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The steps to apply to a candidate. Recipes with equal steps are equal and have equal :attr:`hash`."""

    passes: tuple[Pass, ...] = ()
    backend: Backend

    def __post_init__(self) -> None:
        if isinstance(self.passes, list):
            object.__setattr__(self, "passes", tuple(self.passes))
        if not isinstance(self.passes, tuple) or not all(isinstance(step, Pass) for step in self.passes):
            raise UsageError(f"Recipe passes is {self.passes!r}; give a tuple of passes, such as (PASSES['fold_bn'](),).")
        if not isinstance(self.backend, Backend):
            raise UsageError(f"Recipe backend is {self.backend!r}; give a backend, such as BACKENDS['onnxruntime']().")
        names = [step.name for step in self.passes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"The recipe has the pass {twice!r} twice; a pass is applied once.")

    @property
    def exact(self) -> bool:
        """Whether every step keeps the outputs equal up to floating-point rounding."""
        return all(step.exact for step in (*self.passes, self.backend))

    @property
    def quantizes(self) -> bool:
        """Whether a pass or the backend gives weights or activations 8 bits."""
        return any(step.quantizes for step in (*self.passes, self.backend))

    @property
    def compresses(self) -> bool:
        """Whether a pass makes another network of the model."""
        return any(step.compresses for step in self.passes)

    @property
    def parts(self) -> tuple[Pass, ...]:
        """The passes that make another network, without those that train it."""
        return tuple(step for step in self.passes if step.compresses and "training" not in step.needs)

    @property
    def training(self) -> Recipe | None:
        """The passes up to the last one that trains, which recipes share; ``None`` if none does."""
        last = max((i for i, step in enumerate(self.passes) if "training" in step.needs), default=None)
        if last is None:
            return None
        return Recipe(passes=self.passes[: last + 1], backend=BACKENDS["eager"]())

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that identify this recipe."""
        return hashlib.sha256(dumps(self, indent=None).encode()).hexdigest()[:12]

    def why_not(self, candidate: Candidate) -> str | None:
        """Why this recipe cannot be applied to ``candidate``, as a sentence; ``None`` if it can."""
        for step in self.passes:
            if ignored := sorted(step.sets - self.backend.honours):
                return f"{self.backend.name} does not carry out {ignored[0]}, which {step.name} sets."
        if len(twice := [step.name for step in (*self.passes, self.backend) if step.quantizes]) > 1:
            return f"{twice[0]} and {twice[1]} both quantize, and what is quantized once is not quantized again. Leave one out."
        for place, step in enumerate(self.passes):
            if step.trained_only and not any("training" in later.needs for later in self.passes[place + 1 :]):
                return f"What {step.name} makes answers wrong until it is trained: put recover after it."
        return next((reason for step in (*self.passes, self.backend) if (reason := step.blocked(candidate))), None)

    def describe(self) -> str:
        """The recipe as text for people: the runtime first, then the passes."""
        return ", ".join(step.describe() for step in (self.backend, *self.passes))

    def to_json(self) -> dict[str, Any]:
        """``{"passes": [...], "backend": {...}}``."""
        return {"passes": [step.to_json() for step in self.passes], "backend": self.backend.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Recipe:
        """The inverse of :meth:`to_json`.

        Raises:
            UsageError: an unknown name or field.
        """
        if not isinstance(data, Mapping) or set(data) != {"passes", "backend"} or not isinstance(data["passes"], Sequence):
            raise UsageError(f"A recipe is an object with a list of 'passes' and a 'backend', got {data!r}.")
        passes = tuple(technique_from_json(PASSES, item) for item in data["passes"])
        return cls(passes=passes, backend=technique_from_json(BACKENDS, data["backend"]))

    def __str__(self) -> str:
        return " + ".join([*map(str, self.passes), str(self.backend)])
