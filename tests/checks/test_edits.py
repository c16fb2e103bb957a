"""New text for a line of a script."""

import dataclasses

import pytest

from trimtab.checks._script import detached, edit_rarely, under_no_grad, with_arguments
from trimtab.testing.records import sound_records


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("loader = DataLoader(data)", "loader = DataLoader(data, num_workers=2)"),
        (
            "    loader = torch.utils.data.DataLoader(data, 8,)  # é",
            "    loader = torch.utils.data.DataLoader(data, 8, num_workers=2)  # é",
        ),
        ("x = DataLoader(größe, num_workers=0, shuffle=True)", "x = DataLoader(größe, num_workers=2, shuffle=True)"),
        ("for x, y in DataLoader(data):", "for x, y in DataLoader(data, num_workers=2):"),
        ("x = DataLoader()", "x = DataLoader(num_workers=2)"),
        ("loader = DataLoader(", None),
        ("x = DataLoader(data, **options)", None),
        ("x, y = DataLoader(a), DataLoader(b)", None),
        ("loader = make(data)", None),
    ],
)
def test_a_keyword_is_set_where_the_line_is_a_whole_statement(text: str, new: str | None) -> None:
    assert with_arguments(text, "DataLoader", {"num_workers": "2"}) == new


def test_the_first_argument_is_set_where_it_is_the_only_one() -> None:
    assert with_arguments("torch.set_num_threads(16)", "set_num_threads", {"": "2"}) == "torch.set_num_threads(2)"
    assert with_arguments("set_num_threads(*a)", "set_num_threads", {"": "2"}) is None
    assert with_arguments("set_num_threads()", "set_num_threads", {"": "2"}) is None


def test_a_simple_statement_is_put_under_no_grad() -> None:
    assert under_no_grad("\tout = model(x)") == "\twith torch.no_grad():\n\t    out = model(x)"
    assert under_no_grad("return model(x)") is None
    assert under_no_grad("for x in data:") is None
    assert under_no_grad("out = model(") is None


def test_what_a_line_keeps_is_detached() -> None:
    assert detached("    total += loss", ["loss"]) == "    total += loss.detach()"
    assert detached("kept.append((loss, i))", ["loss"]) == "kept.append((loss.detach(), i))"
    assert detached("kept.append({'é': loss, 'b': error})", ["loss", "error"]) == (
        "kept.append({'é': loss.detach(), 'b': error.detach()})"
    )
    others = ("total += loss.mean()", "total += criterion(loss)", "loss = loss + 1", "for loss in losses:\n", "kept.append(")
    for text in (*others, "kept.append(loss[0])", "kept.append(self.loss)", "model(loss)", "a += b; total += loss"):
        assert detached(text, ["loss"]) is None, text
    assert detached("total += loss", []) is None


def test_a_logging_call_on_its_own_runs_in_every_fiftieth_round_of_a_loop_that_is_counted() -> None:
    lines = [
        "    print(loss.item())",
        "    error = print(loss)",
        "    scheduler.step()",
        "    print(1); optimizer.step()",
        "print(2)",
    ]
    texts = {f"a.py:{number}": text for number, text in enumerate(lines)}
    counters = {f"a.py:{number}": "step" for number in range(4)}
    record = dataclasses.replace(sound_records()["training"], texts=texts, counters=counters)
    found = edit_rarely(record, "a.py:0", "print", "Log less.")
    assert found is not None
    assert found.replacement == "    if step % 50 == 0:\n        print(loss.item())"
    for site in (*list(texts)[1:], "a.py:10"):
        advice = edit_rarely(record, site, "print", "Log less.")
        assert advice is not None
        assert (advice.replacement, advice.advice) == (None, "Log less."), site
    unknown = edit_rarely(record, "a.py:0", None, "Log less.")
    assert unknown is not None
    assert unknown.replacement is None
    assert edit_rarely(record, None, "print", "Log less.") is None
