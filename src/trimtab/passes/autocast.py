"""Mixed precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trimtab._internal.text import message_line
from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.technique import SettingPass


@dataclass(frozen=True, kw_only=True)
class Autocast(SettingPass):
    """Run matrix products and convolutions in 16 bits and the rest in 32 bits.

    Pays off if the processor has 16-bit instructions (AVX512-BF16, AMX, tensor cores). Without them it is slow: on one such CPU
    BERT ran at 0.4 of its speed. The measurement decides.
    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740; https://docs.pytorch.org/docs/stable/amp.html
    """

    words = "matrix products in {dtype}"
    exact = False  # 16-bit rounding changes the outputs
    modes = frozenset({"infer", "train"})
    sets = frozenset({"precision.autocast"})
    tries = True

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """``bfloat16`` has the range of float32; ``float16`` has three more bits of precision and overflows at 65504."""

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs float32 weights and 16-bit kernels for every operator: some CPUs have none for a float16 LSTM."""
        if candidate.settings.precision.autocast is not None:
            return f"The candidate runs under autocast to {candidate.settings.precision.autocast} already."
        if not torch.amp.is_autocast_available(candidate.settings.device):
            return f"PyTorch has no autocast for the device {candidate.settings.device!r}."
        if not any(p.dtype is torch.float32 for p in candidate.model.parameters()):
            return "autocast needs float32 weights, and the model has none."
        return self._failure(candidate)

    def _failure(self, candidate: Candidate) -> str | None:
        """The error of a run under autocast, or ``None``. Only a run shows which operators have 16-bit kernels."""
        try:
            with torch.no_grad():
                self.apply(candidate).flat(copied=False)(*candidate.own_leaves())
        except MODEL_ERRORS as error:
            first = message_line(error)
            return f"The model fails under autocast to {self.dtype}: {first.rstrip('.')}."
        return None
