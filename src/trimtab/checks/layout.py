"""Convolutions work in a layout that costs conversions."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import FOUR_DIMS, edit, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ModuleRecord, OperatorRecord, ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")


@dataclass(frozen=True, kw_only=True)
class Layout(ScriptCheck):
    """Convolutions work in a layout that costs conversions.

    oneDNN and cuDNN compute convolutions over channels that lie next to each other. Tensors in the contiguous layout are
    converted before and after. If weights are in ``channels_last`` and a line makes a tensor contiguous again, the layout
    is lost there, and each such line copies the tensor.
    Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """

    least: float = 0.3
    """Share of a step in forward and backward passes, from which on the layout is reported."""
    kept: float = 0.5
    """Share of the convolutions in ``channels_last``, from which on a model counts as converted."""
    copied: float = 0.02
    """Share of a step that copies take, from which on a lost layout is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Convolutions with contiguous weights, and copies of four-dimensional tensors in models in ``channels_last``."""
        found, contiguous = list[Finding](), list[ModuleRecord]()
        time = share(subject, "forward", "backward")
        total = sum(operator.ms for operator in subject.operators)
        copying = [each for each in subject.operators if each.name in COPIES and FOUR_DIMS.search(each.shapes)]
        for module in subject.modules:
            images = any(FOUR_DIMS.search(shape) for shape in module.inputs)
            if not module.convolutions or not images or time < self.least:
                continue
            if module.channels_last < self.kept:
                contiguous.append(module)
            copied = time * sum(each.ms for each in copying) / total if total else 0.0
            if module.channels_last >= self.kept and copied >= self.copied:
                found.append(self.lost(subject, module, copying, copied))
        return [*([self.contiguous(contiguous, time)] if contiguous else []), *found]

    def contiguous(self, modules: list[ModuleRecord], time: float) -> Finding:
        """The finding for models with contiguous weights, which one setting converts."""
        module = max(modules, key=lambda module: module.convolutions)
        more = f" (and {counted(len(modules) - 1, 'further module')})" if len(modules) > 1 else ""
        last = round(module.convolutions * module.channels_last)
        message = (
            f"{module.name}{more} has {counted(module.convolutions, 'convolution')}, {last} of them in channels_last, in "
            f"{time:.0%} of a step. Convert the model and its inputs with .to(memory_format=torch.channels_last)."
        )
        return self.note(
            message,
            evidence={"convolutions": module.convolutions, "in_channels_last": module.channels_last, "model_share": time},
            category="step",
            settings=ScriptSettings(channels_last=True),
        )

    def lost(self, record: ProbeRecord, module: ModuleRecord, copying: list[OperatorRecord], copied: float) -> Finding:
        """The finding for a model in ``channels_last`` whose tensors are copied to another layout."""
        where = next((each.site for each in copying if each.site), None)
        calls = sum(each.calls for each in copying)
        at = f", at {where}" if where else ""
        message = (
            f"The weights of {module.name} are in channels_last, but {calls:.0f} copies of images per step lose the "
            f"layout{at}: {copied:.0%} of a step. Leave .contiguous() out, or give it memory_format=torch.channels_last."
        )
        change = {"contiguous": {"memory_format": "torch.channels_last"}}
        return self.note(
            message,
            evidence={"copies_share": copied, "copies_per_step": calls, "inputs_in_channels_last": module.inputs_channels_last},
            where=where,
            category="step",
            settings=ScriptSettings(channels_last=True),
            edit=edit(record, where, "Keep the layout: no .contiguous() here.", **change),
            share=copied,
        )
