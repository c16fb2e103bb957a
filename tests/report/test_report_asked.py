"""What a report says of the request, the use, the losing recipes, the best three, the steps and the energy."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from _studies import confirmed, interval, record
from trimtab.core.limits import Limits
from trimtab.core.measurement import Interval
from trimtab.measure.energy import Energy
from trimtab.report import formatting, headline, html, leaders, reliability, request, text, trial_table
from trimtab.study.record import KEPT_SPEEDUP, Record

COMMAND = "trimtab optimize examples/digits.py --max-drop 2% --budget 4m --out runs/digits"


def page(found: Record, folder: Any) -> str:
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", html(found, folder), count=1, flags=re.DOTALL)


def test_the_request_stands_at_the_top_of_the_page_and_of_the_text(tmp_path) -> None:
    found = record(12, command=COMMAND, note="for ticket <7>", limits=Limits(max_drop=0.02, latency_ms=0.3))
    asked = dict(request.asked(found))
    assert asked == {
        "asked for": "the shortest time of a call",
        "limits": "drop of the score 2.00%; latency 0.300 ms",
        "budget": "4m",
        "note": "for ticket <7>",
    }
    fast = record(12, objective="throughput", limits=Limits(throughput=200.0))
    assert dict(request.asked(fast))["limits"].endswith("at least 200 examples/s")
    whole = page(found, tmp_path)
    assert whole.index("for ticket &lt;7&gt;") < whole.index('id="ladder"')
    assert "budget: 4m" in text(found)
    assert "budget" not in dict(request.asked(record(12, command="trimtab.optimize(workload, out='runs/x')  # its")))


def test_two_lines_load_what_ships_and_call_it(tmp_path) -> None:
    found = record(12)
    assert request.use(found, "run") == "model = trimtab.load('runs/digits/artifact')\noutputs = model(images)"
    assert "outputs = model(images)" in page(found, tmp_path)
    several = dataclasses.replace(found.prepared, inputs="ids: int64[1, 8], mask: int64[1, 8]")
    call = request.use(dataclasses.replace(found, prepared=several, command="trimtab.optimize(w)"), "run")
    assert call == "model = trimtab.load('run/artifact')\noutputs = model(...)  # called like the original: ids, mask"
    assert request.use(record(12, status=None), "run") == ""


def test_every_recipe_that_lost_has_a_reason() -> None:
    found = record(24, failed=2, limits=Limits(max_drop=0.02))
    rows = trial_table.rows(found)
    reasons = {row.trial.number: row.reason for row in rows if not row.ships}
    assert all(reasons.values())
    assert reasons[0] == "The original."
    assert any(re.fullmatch(r"0\.\d\dx of the winner.*\.", reason) for reason in reasons.values())
    assert any("beyond the limit" in reason for reason in reasons.values())
    assert "no kernel" in reasons[23]


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.5, "Half as fast as the winner."),
        (0.97, "0.97x of the winner, within the noise of the search."),
        (0.8, "0.80x of the winner."),
        (1.02, "1.02x of the winner in the search, not surely faster."),
        (1.2, "1.20x of the winner in the search, but behind it when timed again."),
    ],
)
def test_a_slower_recipe_is_compared_with_the_winner(share: float, said: str) -> None:
    found = record(12)
    assert found.winner is not None
    assert found.winner.speedup is not None
    other = next(t for t in found.trials if t.recipe.backend.name == "onnxruntime" and t.recipe.exact)
    other = dataclasses.replace(other, speedup=interval(share * found.winner.speedup.value))
    assert trial_table.why_not(other, found) == said
    wide = dataclasses.replace(other, speedup=Interval(5.0, 1.0, 50.0))
    assert trial_table.why_not(wide, found).startswith("Not told apart from the winner in the search, which has ")
    slow = dataclasses.replace(other, speedup=Interval(0.2, 0.1, 0.5))
    assert re.fullmatch(r"At most 0\.1\dx of the winner\.", trial_table.why_not(slow, found))
    refused = dataclasses.replace(confirmed(other, labels=True, limit=0.02), ok=False, reason="no")
    assert trial_table.why_not(other, dataclasses.replace(found, refused=(refused,))).startswith("Refused")
    sized = dataclasses.replace(found, objective="memory")
    assert trial_table.why_not(dataclasses.replace(other, peak_mb=176.0), sized) == "2.00x the memory of the winner."


def test_figures_that_are_compared_have_one_unit() -> None:
    assert formatting.all_milliseconds([0.0638, 1.4, None]) == ["0.0638 ms", "1.40 ms", formatting.UNKNOWN]
    assert formatting.all_milliseconds([2.2, 1200.0]) == ["2.20 ms", "1,200 ms"]
    assert formatting.all_megabytes([0.09, 0.35]) == ["0.0900 MB", "0.350 MB"]
    assert formatting.all_joules([0.002, 0.01]) == ["2.00 mJ", "10.0 mJ"]


def test_the_best_three_stand_beside_the_original(tmp_path) -> None:
    found = record(24, untried=("openvino(precision=int8_static)", "aoti"))
    shown = leaders.leader_table(found)
    assert shown is not None
    assert shown.heads == ("the original", "1, ships", "2", "3")
    rows = dict(shown.rows)
    assert rows["speed-up"][0] == "1.00x"
    assert re.fullmatch(r"0\.\d+ ms, the original 0\.420 ms", rows["latency"][1])
    seen = page(found, tmp_path)
    assert "The best beside the original" in seen
    assert "<summary>2 recipes not tried, because the budget was too short</summary>" in seen
    assert "<li>openvino(precision=int8_static)</li>" in seen
    assert leaders.leader_table(record(1, status=None, failed=0)) is None


def test_the_waterfall_ends_with_what_was_measured_again(tmp_path) -> None:
    found = record(24, failed=2)
    bars = leaders.waterfall(found)
    assert [bar.name for bar in bars] == ["as written", "tuned eager", "runtime", "precision", "knobs", "measured again"]
    assert (bars[-1].value, bars[-1].interval) == ("3.91x", "3.80 to 4.03")
    assert bars[0].interval == "", "the baseline is not timed against itself"
    for bar, step in zip(bars[1:-1], found.steps[1:], strict=True):
        assert bar.interval == formatting.span(step.speedup)
        assert bar.score == "97.80%"
    assert all(bar.start >= 0 and bar.start + bar.width <= 100.01 for bar in bars)
    for before, bar in itertools.pairwise(bars[1:-1]):
        assert bar.start == pytest.approx(before.start + before.width, abs=0.02), "each bar begins where the last ends"
    missing = tuple(
        dataclasses.replace(step, speedup=None, gain=None) if step.name == "runtime" else step for step in found.steps
    )
    bars = leaders.waterfall(dataclasses.replace(found, steps=missing))
    assert (bars[2].value, bars[2].interval, bars[2].score, bars[2].width) == ("no trial of its own", "", "", 0.0)
    shown = page(found, tmp_path)
    assert "What each step brought" in shown
    assert '<th scope="col" class="interval">95% interval</th>' in shown
    assert f'<td data-name="95% interval" class="number">{formatting.span(found.steps[2].speedup)}</td>' in shown
    sized = dataclasses.replace(found, objective="size")
    assert {bar.interval for bar in leaders.waterfall(sized)} == {""}
    assert 'class="interval"' not in page(sized, tmp_path)
    assert leaders.waterfall(record(12, status="kept_original", steps=())) == []


def test_an_original_that_is_kept_reads_so_everywhere(tmp_path) -> None:
    found = record(12, status="kept_original")
    rungs = tuple(
        each | {"speedup": {"value": 1.0, "low": 1.0, "high": 1.0}} if each["rung"] == "best" else each for each in found.ladder
    )
    found = dataclasses.replace(found, ladder=rungs, best=found.trials[0].recipe.hash)  # type: ignore[arg-type]
    assert headline.rungs(found)[-1]["speed-up"] == KEPT_SPEEDUP
    assert next((t.value, t.below) for t in headline.tiles(found)) == ("1.00x", "the original itself")
    assert KEPT_SPEEDUP in text(found)
    assert KEPT_SPEEDUP in page(found, tmp_path)
    assert dict(reliability.confirmation(found))["the form that stands alone, against the model as written"].startswith("3.91x")


def test_energy_is_a_figure_or_a_reason(tmp_path) -> None:
    found = record(12, energy=Energy(subject_j=0.002, rival_j=0.008, scope="whole device, all processes: package-0"))
    tile = next(tile for tile in headline.tiles(found) if tile.name == "energy of a call")
    assert (tile.value, tile.below) == ("2.00 mJ", "8.00 mJ as written")
    unknown = record(12, energy=Energy(reason="Energy cannot be measured here: no counters."))
    assert not any(tile.name == "energy of a call" for tile in headline.tiles(unknown))
    assert page(unknown, tmp_path).count("Energy cannot be measured here: no counters.") == 1


def test_a_refusal_that_the_verdict_tells_is_not_told_again(tmp_path) -> None:
    found = record(12)
    why = "Measured again, it is 1.01x the tuned original, which does not prove that it is faster."
    other = dataclasses.replace(confirmed(found.trials[4], labels=True, limit=0.02), ok=False, reason=why)
    note = f"It won the search but was not confirmed: {other.recipe}: {why}"
    found = dataclasses.replace(
        found, status="kept_original", sentence=f"The original ships: {other.recipe}: {why}", refused=(other,), notes=(note,)
    )
    seen = page(found, tmp_path)
    visible = seen[: seen.index('<script type="application/json"')]
    assert visible.count(why.rstrip(".")) == 1
    assert text(found).replace("\n", " ").count("does not prove") == 1
