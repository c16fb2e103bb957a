"""A diagnosis, a tuned script, and a profile, each as one self-contained HTML file."""

from __future__ import annotations

import shlex
from typing import Any

from markupsafe import Markup

from trimtab.core.diagnosis import Diagnosis, standing
from trimtab.report import doctor_text, doctor_trace, doctor_words
from trimtab.report import formatting as words
from trimtab.report.page import PAGES, policy, source

BADGES = {"error": "bad", "warning": "warn", "note": ""}


def html(diagnosis: Diagnosis) -> str:
    """``diagnosis`` as a page that fetches nothing."""
    record = diagnosis.record
    spans, height, span_ms = doctor_trace.boxes(record)
    flame, flame_height = doctor_trace.flame(record)
    longest = max((one.ms for one in record.operators), default=0.0)
    return _rendered(
        "doctor.jinja",
        diagnosis=diagnosis,
        record=record,
        name=shlex.join(diagnosis.words),
        poor=diagnosis.score.total < doctor_text.POOR,
        shares=doctor_words.shares(record),
        colour=doctor_trace.colour,
        rows=[(finding, standing(finding)) for finding in diagnosis.findings],
        badges=BADGES,
        spans=spans,
        span_height=height,
        span_ms=span_ms,
        flame=flame,
        flame_height=flame_height,
        row_height=doctor_trace.ROW,
        memory=doctor_words.memory(record),
        curve="" if record.memory is None else doctor_trace.curve(record.memory.curve),
        steps=doctor_trace.curve(tuple(enumerate(record.times_ms))),
        longest=longest,
    )


def tuned_html(tuned: Any) -> str:
    """A :class:`~trimtab.probe.tuning.TunedScript` as a page that fetches nothing."""
    confirmed = tuned.confirmed
    kept = tuned.configuration is not None and confirmed is not None and confirmed.gain is not None
    return _rendered(
        "tuned.jinja", tuned=tuned, record=tuned.record, confirmed=confirmed, kept=kept, name=shlex.join(tuned.command)
    )


def profile_html(profile: Any) -> str:
    """A :class:`~trimtab.api.profile.Profile` as a page that fetches nothing."""
    return _rendered("profile.jinja", profile=profile)


def _rendered(template: str, **values: Any) -> str:
    theme = source("theme")
    shared = {"doctor_words": doctor_words, "words": words, "style": Markup(source("style")), "theme": Markup(theme)}
    page = PAGES.get_template(template).render(shared, policy=policy([theme]), **values)
    return page.encode("utf-8", "replace").decode("utf-8")
