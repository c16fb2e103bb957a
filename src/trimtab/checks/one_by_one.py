"""A loader reads examples one at a time, though its data set can read a batch at once."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit, slow_loaders, wait_share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import LoaderSettings, ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class OneByOne(ScriptCheck):
    """A loader reads examples one at a time, though its data set can read a batch at once.

    ``DataLoader`` calls ``dataset[i]`` for each example and stacks the results. A data set of tensors answers one call
    with the places of a whole batch, and copies the rows in one operator.
    Source: https://docs.pytorch.org/docs/stable/data.html#disable-automatic-batching
    """

    least: float = 0.02
    """Share of a step that waits for the loader, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Loaders that wait for a data set that answers ``dataset[places]``."""
        found = []
        for loader in slow_loaders(subject, self.least):
            size = loader.batch_size or 1
            if loader.iterable or not (loader.tensors or loader.batch_fetch) or size < 2:
                continue
            waits = wait_share(subject, loader)
            each = 1e3 * (loader.wait_ms if loader.read_ms is None else loader.read_ms) / size
            message = (
                f"The loader at {loader.site} reads {loader.dataset} one example at a time, {each:.0f} us for each of "
                f"{size}, and a step waits {waits:.0%} of its time. Read a batch with one index per tensor."
            )
            advice = (
                f"Index the tensors with the places of a batch, as in `for places in torch.randperm(n).split({size})`, or "
                "give the loader sampler=BatchSampler(...) and batch_size=None."
            )
            settings = LoaderSettings(batch_fetch=True, workers=0 if loader.workers else None)
            found.append(
                self.note(
                    message,
                    evidence={"wait_share": waits, "us_per_example": each, "batch_size": size},
                    where=loader.site,
                    category="data",
                    settings=ScriptSettings(loaders={loader.site: settings}),
                    edit=edit(subject, loader.site, advice),
                    ceiling=ScriptSettings(without="data"),
                    share=waits,
                )
            )
        return found
