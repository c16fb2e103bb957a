"""Batches are mostly padding."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Padding(ScriptCheck):
    """Batches are mostly padding.

    The model computes every position of a batch, those too that the attention mask leaves out. Padding to the longest
    sequence of the batch instead of a fixed length, and batches of similar lengths, leave less to compute.
    Source: https://huggingface.co/docs/transformers/pad_truncation
    """

    least: float = 0.2
    """Share of padding, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Loaders by the share of positions that are padding."""
        found = []
        for loader in subject.loaders:
            if not loader.batches or loader.padding is None or loader.padding < self.least:
                continue
            message = (
                f"{loader.padding:.0%} of the positions in the batches of {loader.site} are padding, which the model "
                "computes too. Pad each batch to its own longest sequence, and batch sequences of similar length."
            )
            advice = "Pad in the collate function to the longest sequence of the batch instead of a fixed length."
            found.append(
                self.note(
                    message,
                    evidence={"padding": loader.padding, "batch_size": loader.batch_size},
                    where=loader.site,
                    category="data",
                    settings=ScriptSettings(trim_padding=True),
                    edit=edit(subject, loader.site, advice),
                    share=loader.padding * share(subject, "forward", "backward"),
                )
            )
        return found
