"""The model computes in float64, or batches come in float64."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import edit, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

DOUBLE = "float64"


@dataclass(frozen=True, kw_only=True)
class Float64(ScriptCheck):
    """The model computes in float64, or batches come in float64.

    A vector register holds half as many float64 values, and memory brings half as many per second. numpy computes in
    float64 by default, so that its arrays come as such into tensors.
    Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html
    """

    least: float = 0.05
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Parameters, inputs and batches in float64."""
        found = []
        time = share(subject, "forward", "backward", "optimizer")
        wide = [module for module in subject.modules if module.dtype == DOUBLE or any(DOUBLE in each for each in module.inputs)]
        loaders = [loader for loader in subject.loaders if loader.batches and DOUBLE in loader.dtypes]
        where = loaders[0].site if loaders else None
        if wide and time >= self.least:
            module = wide[0]
            what = "parameters" if module.dtype == DOUBLE else "inputs"
            message = (
                f"{module.name} has {what} in float64, which takes twice the memory and time of float32: {time:.0%} of a "
                "step is spent there. Convert the model and its data to float32 once."
            )
            found.append(
                self.note(
                    message,
                    evidence={"model_share": time, "parameters": module.dtype, "batches_in_float64": bool(loaders)},
                    where=where,
                    category="precision",
                    settings=ScriptSettings(float32=True),
                    edit=edit(subject, where, "Convert the data once: array.astype(numpy.float32)."),
                    share=time,
                )
            )
        elif loaders and share(subject, "data", "copy", "other") >= self.least:
            loader, time = loaders[0], share(subject, "data", "copy", "other")
            message = (
                f"The batches of {loader.site} are float64, {loader.batch_bytes / 1e6:.1f} MB each, and the model computes "
                f"in float32: {time:.0%} of a step reads, copies and converts them. Convert the data to float32 once."
            )
            found.append(
                self.note(
                    message,
                    evidence={"data_share": time, "batch_mb": loader.batch_bytes / 1e6},
                    where=loader.site,
                    category="precision",
                    edit=edit(subject, loader.site, "Convert the data once: array.astype(numpy.float32)."),
                    ceiling=ScriptSettings(without="data"),
                    share=time,
                )
            )
        return found
