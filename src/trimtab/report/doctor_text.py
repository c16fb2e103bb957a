"""A diagnosis for a terminal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator

from trimtab._internal.text import listed, plain
from trimtab.core.diagnosis import Diagnosis, standing
from trimtab.core.finding import Finding
from trimtab.core.measurement import Interval
from trimtab.report import doctor_words
from trimtab.report import formatting as words

POOR = 70
"""A total below this is the first line."""
LINES, OPERATORS, WRITES = 5, 4, 6
"""Most lines of code, operators and written files that are listed."""
NO_BREAK = "\N{NO-BREAK SPACE}"
_GAIN = 23
"""Columns of a gain."""


def text(diagnosis: Diagnosis, columns: int | None = None) -> str:
    """``diagnosis`` for a terminal of ``columns``, of which at most 100 are used."""
    width = words.columns(columns)
    sections = (_verdict, _step, _remedies, _advice, _declined, _unmeasured, _side_effects, _score)
    blocks = [list(section(diagnosis)) for section in sections]
    lines = [line for block in blocks if block for line in block]
    return "\n".join(part for line in lines for part in _wrapped(line, width)).replace(NO_BREAK, " ")


def _wrapped(line: str, width: int) -> list[str]:
    indent = len(line) - len(line.lstrip())
    hang = " " * (indent + 2)
    return textwrap.wrap(plain(line), width, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False) or [""]


def _name(diagnosis: Diagnosis) -> str:
    return shlex.join(diagnosis.words)


def _verdict(diagnosis: Diagnosis) -> Iterator[str]:
    score = diagnosis.score
    if score.total < POOR:
        yield f"{_name(diagnosis)} is slow: {score.sentence}"
    for finding in diagnosis.findings:
        if finding.level == "error":
            where = f"{finding.where}: " if finding.where else ""
            yield f"error: {where}{finding.message}"


def _step(diagnosis: Diagnosis) -> Iterator[str]:
    record = diagnosis.record
    yield f"{doctor_words.step(record)}, {doctor_words.CONTAINED[record.contained]}."
    split = doctor_words.shares(record)
    if split:
        yield (
            "  "
            + "  ".join(f"{name} {share:.1%}" for name, _, share in split)
            + f"  ={NO_BREAK}{sum(s for *_, s in split):.1%}"
        )
    if parts := doctor_words.run_parts(record):
        yield "  of the run: " + ", ".join(f"{name} {words.duration(seconds)}" for name, seconds in parts)
    for line in record.lines[:LINES]:
        yield f"  {line.share:>6.1%}  {line.phase:<9} {line.site}  {words.clipped(line.text, 56)}"
    if record.operators:
        total = sum(one.ms for one in record.operators)
        slowest = record.operators[:OPERATORS]
        yield "  operators: " + ", ".join(f"{one.name} {one.ms / total:.0%}" for one in slowest if total)
    yield f"  bound by {diagnosis.bound.kind}: {diagnosis.bound.sentence}"
    yield f"  used: {doctor_words.used(record)}"
    if memory := doctor_words.memory(record):
        yield f"  memory: {memory}"


def _row(gain: Interval | None, what: str) -> str:
    return f"  {doctor_words.gain(gain):<{_GAIN}} {what}"


def _remedies(diagnosis: Diagnosis) -> Iterator[str]:
    pays = [finding for finding in diagnosis.findings if standing(finding) == "pays"]
    if not pays:
        measured = any(finding.gain is not None or finding.most is not None for finding in diagnosis.findings)
        yield "No remedy that can be applied from outside was surely faster." if measured else "No remedy was measured."
        return
    yield "remedies, measured on this script in turns with it as written"
    for finding in pays:
        yield _row(finding.gain, f"{doctor_words.remedy(finding)}; {doctor_words.losses(finding)}. {_message(finding)}")
    if (together := diagnosis.together) is not None and together.gain is not None:
        yield f"all that pays together: {together.gain.times()}, in fresh processes; losses {together.losses}"


def _message(finding: Finding) -> str:
    return finding.message.rstrip(".") + "."


def _advice(diagnosis: Diagnosis) -> Iterator[str]:
    advice = [f for f in diagnosis.findings if standing(f) == "advice" and f.level != "error"]
    patch = diagnosis.patch
    if advice:
        yield "advice, with the most that it can bring"
    for finding in advice:
        yield f"  {_ceiling(finding):<{_GAIN}} {_located_message(finding)}"
    if patch is not None:
        gain = f"measured {patch.gain.times()}; losses {patch.losses}" if patch.gain is not None else f"{patch.reason}"
        yield f"patch for {', '.join(patch.rules)}: {gain}"
        yield from (f"  not in the patch: {reason}" for reason in patch.left_out)


def _ceiling(finding: Finding) -> str:
    """The measured ceiling of advice, or the share of a step that its evidence shows."""
    if finding.most is not None and not finding.most.vague:
        return f"at most {max(finding.most.value, 1.0):.2f}x"
    if finding.most is not None and not finding.most.unclear:
        return f"at most {finding.most.bounds()}x"
    return "" if not finding.share else f"{finding.share:.0%} of a step"


def _located_message(finding: Finding) -> str:
    """The message, which says what to do, behind its line."""
    known = finding.where is None or finding.where in finding.message
    return _message(finding) if known else f"{finding.where}: {_message(finding)}"


def _declined(diagnosis: Diagnosis) -> Iterator[str]:
    lost = [finding for finding in diagnosis.findings if standing(finding) in ("no gain", "other losses")]
    if lost:
        yield "declined, because they are not surely faster here, or change the losses"
    rows = list[str]()
    for finding in lost:
        other = ": the losses differ, so it is another training" if standing(finding) == "other losses" else ""
        rows.append(_row(finding.gain, f"{doctor_words.remedy(finding)}{other}"))
    yield from dict.fromkeys(rows)


def _unmeasured(diagnosis: Diagnosis) -> Iterator[str]:
    left = [finding for finding in diagnosis.findings if standing(finding) == "not measured"]
    notes = list(dict.fromkeys([*diagnosis.notes, *diagnosis.record.notes]))
    if left or notes:
        yield "not measured"
    for finding in left:
        yield f"  {doctor_words.remedy(finding)}: {doctor_words.unmeasured(finding)}. {_message(finding)}"
    yield from (f"  {note}" for note in notes)


def _side_effects(diagnosis: Diagnosis) -> Iterator[str]:
    record = diagnosis.record
    verb = "wrote" if record.contained == "in place" else "would have written"
    if record.writes:
        yield f"it {verb}: {_listed(record.writes)}"
    if record.network:
        yield f"it connected to: {_listed(record.network)}"
    if record.children:
        yield f"it started: {_listed(record.children)}"


def _listed(items: tuple[str, ...]) -> str:
    return listed([words.clipped(item, 80) for item in items], WRITES)


def _score(diagnosis: Diagnosis) -> Iterator[str]:
    found = diagnosis.score
    yield "score  " + "   ".join(f"{name} {points}" for name, points in found.categories.items())
    yield f"  total {found.sentence}"
    if diagnosis.files:
        yield f"written: {', '.join(diagnosis.files)}"
    if any(standing(finding) == "pays" for finding in diagnosis.findings):
        yield f"next:  trimtab tune {_name(diagnosis)}"
        yield f"       writes trimtab.toml; then: trimtab run {_name(diagnosis)}"
