"""Mixed precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.technique import Pass


@dataclass(frozen=True, kw_only=True)
class Autocast(Pass):
    """Run matrix multiplications and convolutions in 16 bits, the rest in 32.

    Pays where the processor multiplies 16-bit numbers itself (AVX512-BF16, AMX, tensor cores). Elsewhere they are emulated: on
    one CPU without them BERT ran at 0.4 of its speed, which a measurement finds out.
    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740; https://docs.pytorch.org/docs/stable/amp.html
    """

    name = "autocast"
    modes = frozenset({"infer", "train"})
    sets = frozenset({"precision.autocast"})
    tries = True

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """``bfloat16`` keeps the range of float32; ``float16`` keeps three more bits and overflows at 65504."""

    @property
    def exact(self) -> bool:
        """16 bits are not 32."""
        return False

    def describe(self) -> str:
        """Says the type."""
        return f"matrix products in {self.dtype}"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs float32 weights, and kernels for every operator of the model: some CPUs have none for a float16 LSTM."""
        if candidate.settings.precision.autocast is not None:
            return f"The candidate runs under autocast to {candidate.settings.precision.autocast} already."
        if not torch.amp.is_autocast_available(candidate.settings.device):
            return f"PyTorch has no autocast for the device {candidate.settings.device!r}."
        if not any(p.dtype is torch.float32 for p in candidate.model.parameters()):
            return "autocast needs float32 weights, and the model has none."
        return self._failure(candidate)

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; the settings tell backends to run it under autocast."""
        return candidate.with_settings({"precision.autocast": self.dtype})

    def _failure(self, candidate: Candidate) -> str | None:
        """Why one run on the example fails; there is no list of what a processor can do in 16 bits but trying."""
        try:
            with torch.no_grad():
                self.apply(candidate).flat(copied=False)(*candidate.own_leaves())
        except MODEL_ERRORS as error:
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            return f"The model fails under autocast to {self.dtype}: {first.rstrip('.')}."
        return None
