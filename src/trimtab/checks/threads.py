"""torch's threads do not fit the cores."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab._internal.text import counted
from trimtab.checks._script import edit, on_gpu, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Threads(ScriptCheck):
    """torch's threads do not fit the cores.

    Threads of an operator wait for each other: with more threads than cores some start only after others end. With fewer,
    cores idle: ``torchrun`` gives each rank one thread.
    Source: https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html
    """

    least: float = 0.1
    """Share of a step in forward, backward and optimizer, from which on it is reported."""
    idle: float = 0.7
    """Share of the CPU time, up to which cores count as idle."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """torch's threads against the cores of the process, divided among the ranks."""
        ranks = subject.distributed.ranks if subject.distributed is not None else 1
        fitting = max(1, subject.cores // ranks)
        time = share(subject, "forward", "backward", "optimizer")
        many = subject.threads > fitting
        few = (
            subject.threads < fitting
            and subject.cpu_share <= self.idle
            and not any(loader.workers for loader in subject.loaders)
        )
        if on_gpu(subject) or time < self.least or not (many or few):
            return []
        where = next((call.site for call in subject.calls if call.name == "torch.set_num_threads"), None)
        among = f" for {ranks} ranks" if ranks > 1 else ""
        effect = "so that they wait for each other" if many else f"and {subject.cpu_share:.0%} of the CPU time was used"
        message = (
            f"torch runs {counted(subject.threads, 'thread')} on {counted(subject.cores, 'core')}{among}, {effect}. Call "
            f"torch.set_num_threads({fitting}), or set OMP_NUM_THREADS={fitting}."
        )
        change = {"set_num_threads": {"": str(fitting)}}
        return [
            self.note(
                message,
                evidence={"threads": subject.threads, "cores": subject.cores, "ranks": ranks, "cpu_share": subject.cpu_share},
                where=where,
                category="step",
                settings=ScriptSettings(threads=fitting),
                edit=edit(subject, where, f"Give torch {counted(fitting, 'thread')} here.", **change),
                share=time if many else time * (1 - subject.cpu_share),
            )
        ]
