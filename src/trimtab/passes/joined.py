"""Run the batches of an update as one batch."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.candidate import Candidate
from trimtab.core.technique import SettingPass


@dataclass(frozen=True, kw_only=True)
class Joined(SettingPass):
    """Run the accumulated batches of an update as one batch, if only their batch size differs and memory suffices.

    Pays off for small batches, whose matrix products do not use the whole processor. BatchNorm then normalizes over the whole
    update, as in training without accumulation. ``data.exact_batchnorm`` enforces this.
    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, on what accumulation does to BatchNorm
    """

    words = "the batches of an update run as one"
    modes = frozenset({"train"})
    sets = frozenset({"data.joined"})

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs gradient accumulation."""
        if candidate.settings.data.accumulate == 1:
            return "joined needs batches that are accumulated, and each of these is an update of its own."
        return None
