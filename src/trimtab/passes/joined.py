"""The batches of an update as one."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass


@dataclass(frozen=True, kw_only=True)
class Joined(Pass):
    """Run the batches that are accumulated for an update as one, where they differ in their examples alone and fit into memory.

    Pays on small batches, whose matrix products do not use the whole processor. BatchNorm then sees the whole update, as in
    training without accumulation; ``data.exact_batchnorm`` sees to it that it always does.
    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, on what accumulation does to BatchNorm
    """

    name = "joined"
    modes = frozenset({"train"})
    sets = frozenset({"data.joined"})

    def describe(self) -> str:
        """What it is."""
        return "the batches of an update run as one"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs an accumulation."""
        if candidate.settings.data.accumulate == 1:
            return "joined needs batches that are accumulated, and each of these is an update of its own."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; the Trainer joins the batches."""
        return candidate.with_settings({"data.joined": True})
