"""The score of a script."""

from __future__ import annotations

import dataclasses

from _diagnoses import diagnosis, findings, record
from trimtab.core.diagnosis import Score, Together, saving, standing
from trimtab.core.finding import Finding
from trimtab.core.measurement import Interval
from trimtab.core.script_settings import ScriptSettings
from trimtab.probe.score import score


def test_the_standing_of_a_remedy_follows_from_its_interval_and_the_losses() -> None:
    workers, fused, logging, _, threads = findings()
    assert [standing(each) for each in (workers, fused, logging, threads)] == ["pays", "pays", "advice", "not measured"]
    assert standing(dataclasses.replace(workers, losses="different")) == "other losses"
    assert standing(dataclasses.replace(workers, losses="not compared")) == "not measured"
    assert standing(dataclasses.replace(workers, gain=Interval(1.3, 0.9, 1.7))) == "no gain"
    assert standing(dataclasses.replace(workers, gain=Interval(1.3, 0.3, 9.0))) == "not measured"
    assert standing(dataclasses.replace(workers, gain=Interval(2.2, 1.4, 3.5))) == "pays"


def test_what_a_remedy_saves_is_its_gain_and_of_advice_the_ceiling() -> None:
    workers, fused, logging, growth, threads = findings()
    assert saving(workers) == 1 - 1 / 1.6
    assert saving(logging) == 1 - 1 / 1.06
    assert saving(dataclasses.replace(workers, gain=Interval(2.2, 1.25, 3.5))) == 1 - 1 / 1.25, (
        "the lower bound of a vague gain"
    )
    assert [saving(each) for each in (growth, threads)] == [0.0, 0.0]
    assert saving(dataclasses.replace(workers, gain=Interval(0.98, 0.96, 1.01))) == 0.0, "the ceiling was not reached"
    assert saving(dataclasses.replace(fused, losses="different")) == 0.0


def test_the_total_is_what_is_left_with_all_that_pays_and_all_advice() -> None:
    found = diagnosis().score
    assert found.total == round(100 / 1.66 / 1.06)
    assert found.saved == round(1 - 1 / 1.66 / 1.06, 4)
    assert found.categories == {"data": 63, "step": 97, "precision": 100, "memory": 60, "run": 94}
    assert found.first == "train.py:42: append loss.item() instead of loss", "errors come first"


def test_without_a_measurement_together_gains_multiply() -> None:
    assert score(record(), findings()).total == round(100 / 1.6 / 1.03 / 1.06)


def test_remedies_that_bring_nothing_together_count_with_the_best_alone() -> None:
    together = Together(settings=ScriptSettings(), gain=Interval(1.0, 0.9, 1.1))
    assert score(record(), findings()[:2], together).saved == round(1 - 1 / 1.6, 4)


def test_a_script_with_nothing_to_gain_has_full_marks() -> None:
    found = score(record(), findings(measured=False)[:3])
    assert (found.total, found.first) == (100, None)
    assert found.sentence == "100 of 100: nothing that was measured is left to gain; 3 findings could not be measured"


def test_findings_that_leave_out_the_same_lines_count_once() -> None:
    advice = dataclasses.replace(findings()[0], settings=None, gain=None, most=Interval(2.0, 1.9, 2.1))

    def leaving_out(most: float, *lines: str) -> Finding:
        ceiling = ScriptSettings(without="lines", lines=lines)
        return dataclasses.replace(advice, ceiling=ceiling, most=Interval(most, most, most))

    overlapping = [leaving_out(1.25, "train.py:2"), leaving_out(2.0, "train.py:1", "train.py:2")]
    assert score(record(), overlapping).saved == 0.5
    assert score(record(), [*overlapping, leaving_out(2.0, "train.py:3")]).saved == 0.75


def test_advice_without_a_ceiling_counts_as_not_measured_if_it_takes_time() -> None:
    advice = dataclasses.replace(findings()[0], settings=None, ceiling=None, gain=None, most=None)
    assert score(record(), [advice]).sentence.endswith("; 1 finding could not be measured")
    assert score(record(), [dataclasses.replace(advice, share=0.0)]).unmeasured == 0


def test_the_sentence_names_what_to_do_first_below_90_only() -> None:
    high = Score(total=91, categories={}, saved=0.09, first="fused optimizer")
    assert high.sentence == "91 of 100: 9% of the step could be saved"
    low = dataclasses.replace(high, total=61, saved=0.39)
    assert low.sentence == "61 of 100: 39% of the step could be saved. First: fused optimizer"
