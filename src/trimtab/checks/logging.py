"""Every step writes a log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.checks._script import EVERY, LOGGING, edit_rarely, lines, matches, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment

LOGGERS = re.compile(r"Writer|print|tqdm|log|wandb|mlflow", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Logging(ScriptCheck):
    """Every step writes a log.

    Histograms read every parameter, a bar is drawn on a terminal, and files are flushed. Once in many steps tells people
    as much.
    Source: https://docs.pytorch.org/docs/stable/tensorboard.html
    """

    least: float = 0.02
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The share of logging in a step, with its slowest line."""
        logging = [line for line in lines(subject, "logging", "other") if line.phase == "logging" or matches(line, LOGGING)]
        taken = max(share(subject, "logging"), sum(line.share for line in logging))
        if taken < self.least:
            return []
        calls = sorted((call for call in subject.calls if call.ms > 0 and LOGGERS.search(call.name)), key=lambda call: -call.ms)
        where = calls[0].site if calls else logging[0].site if logging else None
        what = f"{calls[0].name} at {where}" if calls else f"the line {where}" if where else "the script"
        message = f"Writing logs takes {taken:.0%} of every step, most of it {what}. Log every n-th step instead."
        logger = calls[0].name.rpartition(".")[2] if calls and calls[0].name != "tqdm.update" else None
        often = sum(call.calls for call in calls)
        return [
            self.note(
                message,
                evidence={"logging_share": taken, "calls_per_step": often},
                where=where,
                category="run",
                edit=edit_rarely(subject, where, logger, f"Log every n-th step: `if step % {EVERY} == 0:`."),
                ceiling=ScriptSettings(without="logging"),
                share=taken,
            )
        ]
